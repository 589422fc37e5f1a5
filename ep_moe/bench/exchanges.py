"""Exchanges that `ep-moe bench transport` times: a transport's and two of NCCL alone, and how a pair is timed.

A pair is a dispatch and the combine that follows it. Letters: T tokens per rank, R ranks, H hidden.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ep_moe.bench.harness import tell
from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.group.collectives import all_gather_single, reduce_scatter_single
from ep_moe.profiling.kernels import part_times, profile_kernels
from ep_moe.profiling.timing import Captured, PhaseTimes, capture, time_calls, time_phases
from ep_moe.quant import QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport import Dispatched, Transport

HALVES = ("dispatch", "combine")
PROFILED_REPLAYS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A dispatch and combine that can be repeated on the same input; collective, on the current stream.

    Args:
        dispatch, combine: the halves; `combine` returns the results to the source ranks, in the same tensor each time,
            allocated beforehand. separable: True if each half can be called without the other.
    """

    dispatch: Callable[[], torch.Tensor | None]
    combine: Callable[[], torch.Tensor]
    separable: bool = False

    def pair(self, times: PhaseTimes | None = None) -> torch.Tensor:
        """One dispatch and its combine, both timed by `times`; returns the combined output. Collective."""
        if times is None:
            self.dispatch()
            return self.combine()
        with times.phase("dispatch"):
            self.dispatch()
        with times.phase("combine"):
            return self.combine()


def by_transport(
    transport: Transport, x: torch.Tensor, routing: Routing, y: torch.Tensor, *, layout: Layout, scheme: QuantScheme
) -> Exchange:
    """An exchange by a transport, whose slot 0 is idle; y is the experts' output for its batch."""
    out = torch.full_like(x, float("nan"))
    open_rounds: list[Dispatched] = []

    def dispatch() -> None:
        open_rounds.append(transport.dispatch(x, routing, layout=layout, scheme=scheme))

    def combine() -> torch.Tensor:  # frees the batch first, so that a graph of many pairs needs memory for one only
        return transport.combine(y, open_rounds.pop(), out=out)

    return Exchange(dispatch=dispatch, combine=combine)


def by_collectives(
    group: EPGroup, payload: torch.Tensor, y: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]] | None = None
) -> Exchange:
    """An exchange by collectives of a process group. Its dispatch returns the received rows, its combine the results.

    Args:
        payload: [rows sent, row bytes] uint8. y: [rows received, H] in the model's dtype. Both ordered by rank.
        counts: rows to and from each rank, this one included, for all_to_all_single. Without them an all-gather of the
            payload [T, row bytes] and a reduce-scatter of y [R * T, H]: every token goes to every rank.
    """
    rows = payload.new_empty(y.shape[0], payload.shape[1])
    out = y.new_empty(payload.shape[0], y.shape[1])
    sent, received = map(list, counts or ([], []))

    def dispatch() -> torch.Tensor:
        if counts is None:
            all_gather_single(rows, payload, group=group.process_group)
        else:
            dist.all_to_all_single(rows, payload, received, sent, group=group.process_group)
        return rows

    def combine() -> torch.Tensor:
        if counts is None:
            reduce_scatter_single(out, y, group=group.process_group)
        else:
            dist.all_to_all_single(out, y, sent, received, group=group.process_group)
        return out

    return Exchange(dispatch=dispatch, combine=combine, separable=True)


def time_exchange(
    exchange: Exchange, graph: Captured | None, group: EPGroup, *, count: int, warmup: int, repeats: int
) -> dict[str, list[float]]:
    """Microseconds of pairs on this rank: "sum", of a pair, and "dispatch" and "combine", its halves.

    With a graph, of `count` pairs, with a warm L2: of replays; of the halves' own graphs if they are separable,
    else of their kernels in replays, or, if kernels cannot be assigned, by events of eager calls.
    Without: "sum", wall-clock time per pair of `count` pairs and a device sync; the halves between events on the stream
    (wall-clock on a CPU), including the call's waits on the host; "host_dispatch" and "host_combine", the host time.
    Collective, host sync.
    """
    if graph is None:
        host = PhaseTimes(torch.device("cpu"))  # its clock

        def pairs() -> None:
            for _ in range(count):
                host.start_call()
                exchange.pair(host)

        for _ in range(warmup):
            exchange.pair()
        sums = time_calls(pairs, group, warmup=0, repeats=repeats, by="wall")
        samples = {"sum": [us / count for us in sums]}
        samples |= {f"host_{name}": times for name, times in host.samples_us().items()}
        return samples | time_phases(exchange.pair, group, repeats=repeats, cold=False)
    run = {"warmup": warmup, "repeats": repeats}
    samples = {"sum": graph.times(group, cold=False, **run)}
    if not exchange.separable:
        return samples | _time_kernels(exchange, graph, group, count=count, repeats=repeats)
    for name in HALVES:
        samples[name] = capture(getattr(exchange, name), group.device, count).times(group, cold=False, **run)
    return samples


def _time_kernels(
    exchange: Exchange, graph: Captured, group: EPGroup, *, count: int, repeats: int
) -> dict[str, list[float]]:
    """Times of each half's kernels in the graph; of eager calls by events if kernels cannot be assigned on a rank."""
    kernels = profile_kernels(graph.replay, group, repeats=PROFILED_REPLAYS)
    halves, problem = {}, ""
    try:
        halves = part_times(kernels, HALVES, repeats=PROFILED_REPLAYS)
    except ValueError as error:
        problem = str(error)
    problems = [text for text in group.all_gather_object(problem) if text]
    if problems:
        tell(group, f"dispatch and combine are timed by events of eager calls: {problems[0]}")
        return time_phases(exchange.pair, group, repeats=repeats, cold=False)
    return {name: [us / count for us in times] for name, times in halves.items()}
