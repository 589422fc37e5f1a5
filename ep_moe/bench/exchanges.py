"""Exchanges that `ep-moe bench transport` times: a transport's and two of NCCL alone, and how a pair is timed.

A pair is a dispatch and the combine that follows it. Letters: T tokens per rank, R ranks, H hidden.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ep_moe.bench.timing import Captured, PhaseTimes, capture, time_calls
from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.quant import QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport import Dispatched, Transport

HALVES = ("dispatch", "combine")


class Exchange(Protocol):
    """A dispatch and combine that can be repeated on the same input, with buffers allocated beforehand."""

    def dispatch(self) -> object:
        """Send the tokens to their experts' ranks. Collective, on the current stream."""
        ...

    def combine(self) -> torch.Tensor:
        """Return the results to the source ranks, in the same tensor each time. Collective, on the current stream."""
        ...


class TransportExchange:
    """An `Exchange` by a transport.

    Args:
        transport: with slot 0 idle. x, routing, layout, scheme: of each dispatch.
        y: the experts' output for its batch. out: [T, H], the combined output.
    """

    def __init__(
        self,
        transport: Transport,
        x: torch.Tensor,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        y: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._transport, self._x, self._routing, self._y, self._out = transport, x, routing, y, out
        self._layout, self._scheme = layout, scheme
        self._dispatched: Dispatched | None = None

    def dispatch(self) -> None:
        """See `Exchange.dispatch`."""
        self._dispatched = self._transport.dispatch(self._x, self._routing, layout=self._layout, scheme=self._scheme)

    def combine(self) -> torch.Tensor:
        """See `Exchange.combine`. Frees the batch first, so that a graph of many pairs needs memory for one only."""
        dispatched, self._dispatched = self._dispatched, None
        assert dispatched is not None
        return self._transport.combine(self._y, dispatched, out=self._out)


class GatherScatter:
    """An `Exchange` by all-gather of the payload and reduce-scatter of the outputs: every token goes to every rank.

    Args:
        group: with a process group. payload: [T, row bytes] uint8, T the same on all ranks.
        y: [R * T, H] in the model's dtype.
    """

    def __init__(self, group: EPGroup, payload: torch.Tensor, y: torch.Tensor) -> None:
        # torch 2.13 renamed both collectives and warns about the old names
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._process_group = group.process_group
        self._payload, self._y = payload, y
        self._gathered = payload.new_empty(y.shape[0], payload.shape[1])
        self._out = y.new_empty(payload.shape[0], y.shape[1])

    def dispatch(self) -> torch.Tensor:
        """See `Exchange.dispatch`. Returns the rows of all ranks, [R * T, row bytes], in rank order."""
        self._all_gather(self._gathered, self._payload, group=self._process_group)
        return self._gathered

    def combine(self) -> torch.Tensor:
        """See `Exchange.combine`. Returns [T, H]: this rank's part of the sum of all ranks' y."""
        self._reduce_scatter(self._out, self._y, group=self._process_group)
        return self._out


class AllToAll:
    """An `Exchange` by all_to_all_single with row counts known beforehand, including a rank's rows for itself.

    Args:
        group: with a process group. payload: [rows sent, row bytes] uint8, ordered by rank.
        y: [rows received, H] in the model's dtype, ordered by rank.
        send_counts, recv_counts: rows to and from each rank.
    """

    def __init__(
        self,
        group: EPGroup,
        payload: torch.Tensor,
        y: torch.Tensor,
        *,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> None:
        self._process_group = group.process_group
        self._payload, self._y = payload, y
        self._sent, self._received = list(send_counts), list(recv_counts)
        self._rows = payload.new_empty(y.shape[0], payload.shape[1])
        self._out = y.new_empty(payload.shape[0], y.shape[1])

    def dispatch(self) -> torch.Tensor:
        """See `Exchange.dispatch`. Returns the received rows, [rows received, row bytes]."""
        dist.all_to_all_single(self._rows, self._payload, self._received, self._sent, group=self._process_group)
        return self._rows

    def combine(self) -> torch.Tensor:
        """See `Exchange.combine`. Returns the returned rows, [rows sent, H]."""
        dist.all_to_all_single(self._out, self._y, self._sent, self._received, group=self._process_group)
        return self._out


Baseline = GatherScatter | AllToAll


def pair(exchange: Exchange) -> torch.Tensor:
    """One dispatch and its combine; returns the combined output. Collective, on the current stream."""
    exchange.dispatch()
    return exchange.combine()


def capture_many(call: Callable[[], torch.Tensor], device: torch.device, *, count: int) -> Captured:
    """Capture `count` calls, one after another, into one CUDA graph. Errors and notes: as `capture`."""
    return capture(functools.partial(_repeat, call, count), device)


def _repeat(call: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
    for _ in range(count - 1):
        call()
    return call()


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
    for _ in range(warmup):
        pair(exchange)
    samples: dict[str, list[float]] = {"sum": [], "host_dispatch": [], "host_combine": []}
    for _ in range(repeats):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            exchange.dispatch()
            between = time.perf_counter()
            exchange.combine()
            end = time.perf_counter()
            samples["host_dispatch"].append((between - start) * 1e6)
            samples["host_combine"].append((end - between) * 1e6)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        samples["sum"].append((time.perf_counter() - begin) / count * 1e6)
    return samples | time_halves(exchange, group, repeats=repeats)


def time_halves(exchange: Exchange, group: EPGroup, *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of "dispatch" and "combine" of pairs that are called one by one, as of `time_eager`.

    Collective, host sync.
    """
    times = PhaseTimes(group.device)
    times.start_call()

    def timed_pair() -> None:
        with times.phase("dispatch"):
            exchange.dispatch()
        with times.phase("combine"):
            exchange.combine()

    time_calls(timed_pair, group, warmup=1, repeats=repeats, on_call=times.start_call, cold=False)
    return {name: us[1:] for name, us in times.samples_us().items()}  # without the warm-up
