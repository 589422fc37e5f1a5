"""Timing of calls and their phases: after a warm-up, cold L2, ranks aligned; the median, on the slowest rank."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ep_moe.group import EPGroup

By = Literal["events", "wall", "host"]  # a clock, as `time_calls` explains
GRAPH_WARMUP = 3  # calls before a capture, which compile kernels and fill memory pools


class Span:
    """A context manager that times its block: between two CUDA events on the current stream, or by the clock."""

    def __init__(self, *, by_events: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if by_events else []
        self._secs = 0.0

    def __enter__(self) -> None:
        if self._events:
            self._events[0].record()
        self._secs -= time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._secs += time.perf_counter()
        if self._events:
            self._events[1].record()

    @property
    def us(self) -> float:
        """Microseconds of the block; of events once the device has reached the second."""
        return float(self._events[0].elapsed_time(self._events[1])) * 1e3 if self._events else self._secs * 1e6


class PhaseTimes:
    """A `Phases` that times each phase of each call: by CUDA events without host sync, by a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._calls: list[dict[str, list[Span]]] = []

    def start_call(self) -> None:
        """Begin a new call: later phases belong to it. Local, no host sync."""
        self._calls.append({})

    def phase(self, name: str) -> Span:
        """Time the block; repeated phases of a call are summed. Local, no host sync."""
        spans = self._calls[-1].setdefault(name, [])
        spans.append(Span(by_events=self._on_cuda))
        return spans[-1]

    def samples_us(self) -> dict[str, list[float]]:
        """Microseconds of each phase, call by call. Local, host sync."""
        if self._on_cuda:
            torch.cuda.synchronize()
        names = dict.fromkeys(name for call in self._calls for name in call)
        return {name: [sum(span.us for span in call.get(name, [])) for call in self._calls] for name in names}


def slowest(group: EPGroup, samples: Mapping[str, Sequence[float]], *, whole: str) -> dict[str, list[float]]:
    """All samples of the rank with the largest median of `whole`; parts from different ranks would not sum to a call.

    Args:
        samples: this rank's, in microseconds by name. whole: the name by which ranks are compared.
    Collective.
    """
    ranks = group.all_gather_object({name: list(values) for name, values in samples.items()})
    return max(ranks, key=lambda rank: statistics.median(rank[whole]))


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each of the samples as a figure of a row, `<name>_us`. Local."""
    return {f"{name}_us": statistics.median(values) for name, values in samples.items()}


def spread(name: str, samples: Sequence[float]) -> dict[str, float]:
    """Figures of a row: `<name>_us`, the median, `<name>_min_us` and `<name>_max_us`. Local."""
    return {**medians({name: samples}), f"{name}_min_us": min(samples), f"{name}_max_us": max(samples)}


def time_calls(
    call: Callable[[], object],
    group: EPGroup,
    *,
    warmup: int,
    repeats: int,
    on_call: Callable[[], None] | None = None,
    cold: bool = True,
    by: By = "events",
) -> list[float]:
    """Microseconds of each of `repeats` calls on this rank, which all ranks start together, after `warmup` others.

    On CUDA between two events on the current stream, after a write of twice the L2 size and a tiny all-reduce; the
    call's waits on the host count. On the CPU by the wall clock, after a barrier.

    Args:
        call: collective or not, equally often on every rank. on_call: called before each timed call, untimed.
        cold: False leaves the L2 as the previous call left it. by: "wall" times on CUDA too by the wall clock, after a
            barrier and until the device has finished, "host" by the clock until the call returns, on an idle device.
    Collective, host sync.
    """
    for _ in range(warmup):
        call()
    on_cuda = group.device.type == "cuda"
    by_events = on_cuda and by == "events"
    align = _aligned_by_kernels(group, cold=cold) if by_events else group.barrier
    spans = [Span(by_events=by_events) for _ in range(repeats)]
    group.barrier()
    for span in spans:
        if on_call is not None:
            on_call()
        align()
        with span:
            call()
            if on_cuda and by == "wall":
                torch.cuda.synchronize(group.device)
        if on_cuda and by == "host":
            torch.cuda.synchronize(group.device)
    if on_cuda:
        torch.cuda.synchronize(group.device)
    return [span.us for span in spans]


def _aligned_by_kernels(group: EPGroup, *, cold: bool) -> Callable[[], None]:
    """A function that flushes the L2 if `cold`, and starts the ranks together on the device, without host sync."""
    size = torch.cuda.get_device_properties(group.device).L2_cache_size
    flushed = torch.empty(2 * size if cold else 0, dtype=torch.uint8, device=group.device)
    token = torch.zeros(1, device=group.device)

    def align() -> None:
        flushed.zero_()
        if group.process_group is not None:
            dist.all_reduce(token, group=group.process_group)

    return align


def time_phases(
    call: Callable[[PhaseTimes], object], group: EPGroup, *, repeats: int, cold: bool = True, by: By = "events"
) -> dict[str, list[float]]:
    """Microseconds of each phase of calls that enter the phases of their argument, timed as `time_calls` does.

    After one warm-up. Collective, host sync.
    """
    times = PhaseTimes(group.device if by == "events" else torch.device("cpu"))
    times.start_call()
    watched = functools.partial(call, times)
    time_calls(watched, group, warmup=1, repeats=repeats, on_call=times.start_call, cold=cold, by=by)
    return {name: us[1:] for name, us in times.samples_us().items()}  # without the warm-up


class Captured:
    """`count` calls in a CUDA graph: `replay` replays them, each replay writes `output`."""

    def __init__(self, replay: Callable[[], None], output: torch.Tensor, count: int = 1) -> None:
        self.replay, self.output, self._count = replay, output, count

    def replayed(self) -> torch.Tensor:
        """Replay once over NaN, so that unwritten output is detected. Collective if the call is; no host sync."""
        self.output.fill_(float("nan"))
        self.replay()
        return self.output

    def times(self, group: EPGroup, *, warmup: int, repeats: int, cold: bool = True) -> list[float]:
        """Microseconds per call of each of `repeats` replays, as `time_calls`. Collective, host sync."""
        replays = time_calls(self.replay, group, warmup=warmup, repeats=repeats, cold=cold)
        return [us / self._count for us in replays]


def capture(call: Callable[[], torch.Tensor], device: torch.device, count: int = 1) -> Captured:
    """Capture `count` calls, one after another, into a CUDA graph, which reads and writes the captured calls' buffers.

    Errors: RuntimeError for a call that cannot be captured, for example one that waits on the host, and without CUDA.
    Every rank captures the same call. Host sync.
    """
    if device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a GPU, this rank computes on {device}")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(GRAPH_WARMUP * count):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's thread queries events meanwhile, which would invalidate a global capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(count):
                output = call()
    except RuntimeError as error:
        raise RuntimeError(f"the call cannot be captured into a CUDA graph: {error}") from error
    return Captured(graph.replay, output, count)
