"""Entry points of the processes of `ep-moe serve`: a rank, and the front end with HTTP, the queue and the tokenizer.

The front end makes plans and sends them to rank 0, which sends them on to the other ranks.
"""

import contextlib
import logging
import signal
import socket
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ep_moe.app.placements import model_sizes
from ep_moe.app.rebalancing import RebalanceConfig, start_rebalancing
from ep_moe.app.serve import DRAINED, ServeConfig, bind, front_end
from ep_moe.app.session import Model, load_expert_parallel, load_tokenizer, progress_bar
from ep_moe.app.start import model_dir
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers.decoding import RowDecoder, end_ids_of, uses_graphs, why_not_fixed
from ep_moe.engines.transformers.decoding.grammars import RowGrammars
from ep_moe.grammar import is_installed
from ep_moe.group import EPGroup
from ep_moe.serving.core import Leader, LeadRank, RemoteRanks, ServerEndedError, follow, relay
from ep_moe.serving.scheduler import Limits

_log = logging.getLogger(__name__)
MOST_POSITIONS = 4096  # by default: their keys and values are reserved for every row


def serve_rank_main(
    group: EPGroup,
    engine: EngineConfig,
    config: ServeConfig,
    rebalance: RebalanceConfig,
    connection: bytes | None = None,
) -> dict[str, Any]:
    """One rank's part of the server; returns only if the process with the queue closes it. Collective.

    Args:
        connection: rank 0's, pickled by the launcher, to the process that speaks HTTP; None if rank 0 starts it.
    """
    with contextlib.ExitStack() as ends:
        front: Connection | None = None
        if group.rank == 0:
            sys.stderr.write(f"loading {model_dir(engine)}\n")
            if connection is None:
                listener = bind(config.host, config.port)
                front, _ = ends.enter_context(front_end(listener, engine, config, "spawn"))
            else:
                front = ForkingPickler.loads(connection)
        _serve(group, engine, config, rebalance, front)
    return {}


def _serve(
    group: EPGroup, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig, front: Connection | None
) -> None:
    tokenizer = load_tokenizer(engine)
    with progress_bar(group), group.guard("load"):
        model, session = load_expert_parallel(group, engine)
    reason = why_not_fixed(model)
    if reason:
        raise ValueError(f"{model_dir(engine)} cannot be served: {reason}")
    num_rows, num_positions = config.max_rows, _num_positions(model, config)
    end_ids, vocab_size = end_ids_of(model, tokenizer), model.get_input_embeddings().weight.shape[0]
    with progress_bar(group), group.guard("warm up"):
        grammars, reason = _grammars(tokenizer, vocab_size, end_ids)
        no_grammars = next(filter(None, group.all_gather_object(reason)), "")
        rows = RowDecoder(
            model,
            num_rows=num_rows,
            num_positions=num_positions,
            end_ids=end_ids,
            graphs=uses_graphs(model, config.decode_graphs),
            grammars=grammars,
            prefix_rows=config.prefix_rows,
        )
        rows.warmup()
        start_rebalancing(session, rebalance)  # behind passes that warm up, which are no load
    if config.prefix_rows and not rows.prefix_blocks and group.rank == 0:
        _log.warning("prefixes are not kept: layers with a sliding window forget keys and values")
    limits = Limits(
        num_ranks=group.num_ranks,
        num_rows=num_rows,
        num_positions=num_positions,
        max_prefill_tokens=session.transport.config.max_tokens_per_rank,
        max_waiting=config.max_waiting,
        passes_per_plan=config.passes_per_plan,
        vocab_size=vocab_size,
        end_ids=end_ids,
        placements=session.placements,
        sizes=model_sizes(engine),
        no_grammars=no_grammars,
        prefix_blocks=rows.prefix_blocks,
    )
    if front is None:
        follow(group, rows)
    else:
        ranks = LeadRank(group, rows)
        with contextlib.suppress(BrokenPipeError):  # `relay` raises the error
            front.send(limits)
        relay(ranks, front)
    session.destroy()


def _grammars(tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...]) -> tuple[RowGrammars | None, str]:
    """The grammars of a rank's rows; None with the reason why there are none."""
    if not is_installed():
        return None, "llguidance is not installed beside all ranks; install: pip install 'ep-moe[json]'"
    try:
        return RowGrammars(tokenizer, vocab_size, end_ids), ""
    except ValueError as error:
        return None, str(error)


def _num_positions(model: Model, config: ServeConfig) -> int:
    """The most positions of a sequence. Errors: ValueError for more than the model has."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    wanted = config.max_positions
    if wanted is None:
        return min(limit or MOST_POSITIONS, MOST_POSITIONS)
    if limit is not None and wanted > limit:
        raise ValueError(f"max_positions ({wanted}) exceeds the model's max_position_embeddings ({limit})")
    return wanted


def serve_front_main(listener: socket.socket, ranks: Connection, engine: EngineConfig, config: ServeConfig) -> None:
    """The front end: serve once rank 0 has sent the limits, until it closes its end or sends an error. Local."""
    from transformers import AutoConfig

    from ep_moe.serving.answers import response_template  # ranks do without these packages
    from ep_moe.serving.http import Service, run_beside
    from ep_moe.serving.metrics import Metrics

    tokenizer = load_tokenizer(engine)
    try:
        limits = ranks.recv()
    except EOFError:
        return
    if not isinstance(limits, Limits):  # the error that has ended the ranks
        return
    leader, name = Leader(RemoteRanks(ranks), limits), config.name_of(engine)
    service = Service(
        leader=leader,
        tokenizer=tokenizer,
        name=name,
        metrics=Metrics(leader),
        keys=config.read_keys(),
        origins=config.origins,
        response_template=response_template(tokenizer, AutoConfig.from_pretrained(model_dir(engine))),
    )
    signal.signal(signal.SIGTERM, lambda number, frame: leader.drain(config.drain_secs))
    with contextlib.suppress(ServerEndedError), run_beside(service, listener, leader.close):
        host, port = listener.getsockname()[:2]
        sys.stderr.write(
            f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: "
            f"{limits.num_ranks} ranks of {limits.num_rows} rows, {limits.num_positions} positions\n"
        )
        leader.run()
    if leader.draining:
        sys.exit(DRAINED)
