"""Exchanges that `ep-moe bench transport` times: a transport's and two of NCCL alone, and how a pair is timed.

A pair is a dispatch and the combine that follows it. Letters: T tokens per rank, R ranks, H hidden.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ep_moe.bench.gathered import all_gather, reduce_scatter
from ep_moe.bench.timing import Captured, PhaseTimes, capture, time_calls, time_phases
from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.quant import QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport import Dispatched, Transport

HALVES = ("dispatch", "combine")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A dispatch and combine that can be repeated on the same input; collective, on the current stream.

    `combine` returns the results to the source ranks, in the same tensor each time, allocated beforehand.
    """

    dispatch: Callable[[], torch.Tensor | None]
    combine: Callable[[], torch.Tensor]

    def pair(self) -> torch.Tensor:
        """One dispatch and its combine; returns the combined output. Collective, on the current stream."""
        self.dispatch()
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


def gather_scatter(group: EPGroup, payload: torch.Tensor, y: torch.Tensor) -> Exchange:
    """An exchange by all-gather of the payload and reduce-scatter of the outputs: every token goes to every rank.

    Args:
        group: with a process group. payload: [T, row bytes] uint8, T the same on all ranks.
        y: [R * T, H] in the model's dtype.
    Its dispatch returns the rows of all ranks, [R * T, row bytes], its combine [T, H], in rank order.
    """
    gathered = payload.new_empty(y.shape[0], payload.shape[1])
    out = y.new_empty(payload.shape[0], y.shape[1])

    def dispatch() -> torch.Tensor:
        all_gather(gathered, payload, group=group.process_group)
        return gathered

    def combine() -> torch.Tensor:
        reduce_scatter(out, y, group=group.process_group)
        return out

    return Exchange(dispatch=dispatch, combine=combine)


def all_to_all(
    group: EPGroup, payload: torch.Tensor, y: torch.Tensor, *, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> Exchange:
    """An exchange by all_to_all_single with row counts known beforehand, including a rank's rows for itself.

    Args:
        group: with a process group. payload: [rows sent, row bytes] uint8, ordered by rank.
        y: [rows received, H] in the model's dtype, ordered by rank.
        send_counts, recv_counts: rows to and from each rank.
    Its dispatch returns the received rows, its combine the returned rows [rows sent, H].
    """
    sent, received = list(send_counts), list(recv_counts)
    rows = payload.new_empty(y.shape[0], payload.shape[1])
    out = y.new_empty(payload.shape[0], y.shape[1])

    def dispatch() -> torch.Tensor:
        dist.all_to_all_single(rows, payload, received, sent, group=group.process_group)
        return rows

    def combine() -> torch.Tensor:
        dist.all_to_all_single(out, y, sent, received, group=group.process_group)
        return out

    return Exchange(dispatch=dispatch, combine=combine)


def capture_many(call: Callable[[], torch.Tensor], device: torch.device, *, count: int) -> Captured:
    """Capture `count` calls, one after another, into one CUDA graph. Errors and notes: as `capture`."""

    def calls() -> torch.Tensor:
        for _ in range(count - 1):
            call()
        return call()

    return capture(calls, device)


def time_replays(graph: Captured, group: EPGroup, *, count: int, warmup: int, repeats: int) -> list[float]:
    """Microseconds per call of each replay of a graph of `count` calls, with a warm L2. Collective, host sync."""
    times = time_calls(graph.replay, group, warmup=warmup, repeats=repeats, cold=False)
    return [us / count for us in times]


def time_eager(exchange: Exchange, group: EPGroup, *, count: int, warmup: int, repeats: int) -> dict[str, list[float]]:
    """Times of pairs that are called one by one, in microseconds, on this rank.

    Returns: "sum", wall-clock time per pair of `count` pairs and a device sync; "host_dispatch" and "host_combine", the
    host time of a call; "dispatch" and "combine", between events on the stream (wall-clock on a CPU), including the
    call's waits on the host.
    Collective, host sync.
    """
    host: dict[str, list[float]] = {"host_dispatch": [], "host_combine": []}

    def pairs() -> None:
        for _ in range(count):
            start = time.perf_counter()
            exchange.dispatch()
            between = time.perf_counter()
            exchange.combine()
            end = time.perf_counter()
            host["host_dispatch"].append((between - start) * 1e6)
            host["host_combine"].append((end - between) * 1e6)

    for _ in range(warmup):
        exchange.pair()
    sums = time_calls(pairs, group, warmup=0, repeats=repeats, wall=True)
    return {"sum": [us / count for us in sums], **host, **time_halves(exchange, group, repeats=repeats)}


def time_halves(exchange: Exchange, group: EPGroup, *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of "dispatch" and "combine" of pairs that are called one by one, as of `time_eager`.

    Collective, host sync.
    """

    def timed_pair(times: PhaseTimes) -> None:
        with times.phase("dispatch"):
            exchange.dispatch()
        with times.phase("combine"):
            exchange.combine()

    return time_phases(timed_pair, group, repeats=repeats, cold=False)
