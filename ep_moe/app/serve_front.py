"""The process of `ep-moe serve` that speaks HTTP: tokens, the queue and all answers; ranks carry out its plans."""

import contextlib
import socket
import sys
from multiprocessing.connection import Connection

from ep_moe.app.serve import ServeConfig
from ep_moe.app.session import load_tokenizer
from ep_moe.config import EngineConfig
from ep_moe.serving.core import Leader, RemoteRanks, ServerEndedError
from ep_moe.serving.http import Service, run_beside
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.scheduler import Limits


def serve_front_main(listener: socket.socket, ranks: Connection, engine: EngineConfig, config: ServeConfig) -> None:
    """Serve once rank 0 has sent the limits, until it closes its end or sends an error. Local."""
    tokenizer = load_tokenizer(engine)
    try:
        limits = ranks.recv()
    except EOFError:
        return
    if not isinstance(limits, Limits):  # the error that has ended the ranks
        return
    leader, name = Leader(RemoteRanks(ranks), limits), config.name_of(engine)
    service = Service(leader=leader, tokenizer=tokenizer, name=name, metrics=Metrics(leader))
    with contextlib.suppress(ServerEndedError), run_beside(service, listener, leader.close):
        host, port = listener.getsockname()[:2]
        sys.stderr.write(
            f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: "
            f"{limits.num_ranks} ranks of {limits.num_rows} rows, {limits.num_positions} positions\n"
        )
        leader.run()
