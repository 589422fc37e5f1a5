"""Entry points of the processes of `ep-moe serve`: a rank, and the front end with HTTP, the queue and the tokenizer.

The front end is no rank: it makes plans and sends them to all ranks alike, over the launcher's store.
"""

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
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
from ep_moe.group import EPGroup, StorePlace
from ep_moe.serving.channel import RankChannel, Ready
from ep_moe.serving.core import Leader
from ep_moe.serving.rank import follow
from ep_moe.serving.ranks import ServerEndedError, StoreRanks
from ep_moe.serving.scheduler import Limits

_log = logging.getLogger(__name__)
MOST_POSITIONS = 4096  # by default: their keys and values are reserved for every row


def serve_rank_main(
    group: EPGroup, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig, has_front: bool = False
) -> dict[str, Any]:
    """One rank's part of the server; returns only if the front end closes it. Collective.

    Args:
        has_front: whether the launcher has started the front end; else rank 0 starts it.
    """
    with contextlib.ExitStack() as ends:
        check: Callable[[], None] = lambda: None  # noqa: E731
        if group.rank == 0:
            sys.stderr.write(f"loading {model_dir(engine)}\n")
        if group.rank == 0 and not has_front:
            listener = bind(config.host, config.port)
            front, process = ends.enter_context(front_end(listener, engine, config, "spawn"))
            front.send((StorePlace.from_env(), group.num_ranks))

            def check() -> None:
                if not process.is_alive():
                    raise RuntimeError("the process that speaks HTTP has ended, its error is on stderr")

        _serve(group, engine, config, rebalance, check)
    return {}


def _serve(
    group: EPGroup, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig, check: Callable[[], None]
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
    channel = RankChannel(StorePlace.from_env(), group.rank)
    channel.answer(0, Ready(limits=limits))
    follow(channel, group, rows, check=check)
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


def serve_front_main(listener: socket.socket, starter: Connection, engine: EngineConfig, config: ServeConfig) -> None:
    """The front end: serve once all ranks are ready, until the process that has started it ends or sends an error.

    Args:
        listener: bound. starter: a connection to that process, which says first where the ranks' store is.
    Local.
    """
    from transformers import AutoConfig

    from ep_moe.serving.answers import response_template  # ranks do without these packages
    from ep_moe.serving.http import Service, run_beside
    from ep_moe.serving.metrics import Metrics

    tokenizer = load_tokenizer(engine)
    try:
        first = starter.recv()
        if isinstance(first, str):  # the error that has ended the ranks
            return
        ranks = StoreRanks(*first, starter=starter, timeout_secs=engine.group.timeout_secs)
        limits = ranks.wait_until_ready()
    except (EOFError, ServerEndedError):
        return
    leader, name = Leader(ranks, limits), config.name_of(engine)
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
