"""Entry points of the processes of `ep-moe serve`: a rank, and the front end with HTTP, the queue and the tokenizer.

The front end is no rank: it makes plans and sends them to all ranks alike, over the launcher's store.
"""

import contextlib
import itertools
import logging
import signal
import socket
import sys
import time
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
from ep_moe.engines.transformers.regrouping import Rehearsal
from ep_moe.environment import LaunchEnv
from ep_moe.grammar import is_installed
from ep_moe.group import EPGroup, StorePlace
from ep_moe.serving.channel import Joined, RankChannel, Ready
from ep_moe.serving.core import Leader
from ep_moe.serving.rank import Member, follow
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
        if group.rank == 0 and not group.standby:
            sys.stderr.write(f"loading {model_dir(engine)}\n")
        if group.rank == 0 and not has_front:
            listener = bind(config.host, config.port)
            front, process = ends.enter_context(front_end(listener, engine, config, "spawn"))
            front.send((StorePlace.from_env(), group.num_ranks, False))

            def check() -> None:
                if not process.is_alive():
                    raise RuntimeError("the process that speaks HTTP has ended, its error is on stderr")

        _serve(group, engine, config, rebalance, check, has_front)
    return {}


class _Member(Member):
    """A rank with a model.

    Args:
        regroups: as of `Member`.
    """

    def __init__(
        self, group: EPGroup, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig, regroups: bool
    ) -> None:
        super().__init__(group, None)
        self._engine, self._config, self._rebalance, self.regroups = engine, config, rebalance, regroups
        self._tokenizer = load_tokenizer(engine)
        with progress_bar(group), group.guard("load"):
            self.model, self.session = load_expert_parallel(group, engine)
        reason = why_not_fixed(self.model)
        if reason:
            raise ValueError(f"{model_dir(engine)} cannot be served: {reason}")
        self.end_ids = end_ids_of(self.model, self._tokenizer)
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self.num_positions = _num_positions(self.model, config)
        self.grammars, self.no_grammars = _grammars(self._tokenizer, self.vocab_size, self.end_ids)

    def make_rows(self) -> RowDecoder:
        """The rows of this rank, for `regroup` if it has yet to join others. Collective, but for such a rank."""
        self._rows = RowDecoder(
            self.model,
            num_rows=self._config.max_rows,
            num_positions=self.num_positions,
            end_ids=self.end_ids,
            graphs=lambda: uses_graphs(self.model, self._config.decode_graphs),
            grammars=self.grammars,
            prefix_rows=self._config.prefix_rows,
            rehearsals=self._rehearsals(),
        )
        if not self.group.standby:
            self.rows = self._rows
        return self._rows

    def _rehearsals(self) -> list[Rehearsal]:
        """Of a rank on standby, the whole launch; on GPUs, for which kernels are compiled, one rank fewer."""
        rank, num_ranks = self.group.rank, self.group.num_ranks
        if self.group.standby:
            num_experts = model_sizes(self._engine).num_experts + self._engine.redundant_experts
            seat, launched = self.group.seat, LaunchEnv.from_environ()
            others = 0 if launched is None else launched.world_size
            return [Rehearsal(seat, max(others, seat + 1), num_experts)]
        if not self.regroups or self.group.device.type != "cuda":
            return []
        return [Rehearsal(now, num_ranks - 1) for now in (rank - 1, rank) if 0 <= now < num_ranks - 1]

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """See `Member`."""
        self.session.hand_over([self.group.seats.index(seat) for seat in leaving])

    def regroup(self, epoch: int, seats: tuple[int, ...], deaths: tuple[int, ...]) -> Joined:
        """See `Member`."""
        times = [time.perf_counter()]
        self.session.leave()  # its graphs, which NCCL would wait for
        self.group = self.group.latest.regroup(epoch, seats, deaths)
        times.append(time.perf_counter())
        self.session.regroup(self.group)
        times.append(time.perf_counter())
        forgotten = self._rows.regroup()
        self.rows = self._rows
        start_rebalancing(self.session, self._rebalance)
        times.append(time.perf_counter())
        if self.group.rank == 0:
            names = "group", "experts", "rows"
            secs = ", ".join(
                f"{name} {end - start:.3f} s"
                for name, (start, end) in zip(names, itertools.pairwise(times), strict=True)
            )
            _log.info("epoch %d begins after %.3f s: %s", epoch, times[-1] - times[0], secs)
        return Joined(forgotten=forgotten, placements=self.session.placements)


def _serve(
    group: EPGroup,
    engine: EngineConfig,
    config: ServeConfig,
    rebalance: RebalanceConfig,
    check: Callable[[], None],
    regroups: bool,
) -> None:
    member = _Member(group, engine, config, rebalance, regroups)
    channel, limits = RankChannel(StorePlace.from_env(), group.seat, group.config.heartbeat_secs), None
    if not group.standby:
        with progress_bar(group), group.guard("warm up"):
            no_grammars = next(filter(None, group.all_gather_object(member.no_grammars)), "")
            rows = member.make_rows()
            rows.warmup()
            start_rebalancing(member.session, rebalance)  # behind passes that warm up, which are no load
        if config.prefix_rows and not rows.prefix_blocks and group.rank == 0:
            _log.warning("prefixes are not kept: layers with a sliding window forget keys and values")
        limits = Limits(
            num_ranks=group.num_ranks,
            num_rows=config.max_rows,
            num_positions=member.num_positions,
            max_prefill_tokens=member.session.transport.config.max_tokens_per_rank,
            max_waiting=config.max_waiting,
            passes_per_plan=config.passes_per_plan,
            vocab_size=member.vocab_size,
            end_ids=member.end_ids,
            placements=member.session.placements,
            sizes=model_sizes(engine),
            no_grammars=no_grammars,
            prefix_blocks=rows.prefix_blocks,
        )
    else:
        member.make_rows()
    channel.answer(0, Ready(limits=limits))
    follow(channel, member, check=check)
    member.session.destroy()


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
        admin_keys=config.read_admin_keys(),
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
