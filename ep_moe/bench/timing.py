"""Honest times: after a warm-up, from a cold L2, ranks aligned, the median of many calls, of the slowest rank."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ep_moe.group import EPGroup

GRAPH_WARMUP = 3  # calls before a capture: kernels are compiled and memory pools filled by then


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Microseconds of the repeats on one rank."""

    median_us: float
    min_us: float
    max_us: float

    def figures(self, name: str) -> dict[str, float]:
        """As figures of a row: `<name>_us`, `<name>_min_us`, `<name>_max_us`."""
        return {f"{name}_us": self.median_us, f"{name}_min_us": self.min_us, f"{name}_max_us": self.max_us}


def slowest(group: EPGroup, samples: Mapping[str, Sequence[float]], *, whole: str) -> dict[str, Timing]:
    """All timings of one rank, the one with the largest median of `whole`: parts of several ranks add up to no call.

    Args:
        samples: this rank's, in microseconds by name. whole: the name that ranks are compared by.
    Collective.
    """
    ranks = group.all_gather_object({name: list(values) for name, values in samples.items()})
    chosen = max(ranks, key=lambda rank: statistics.median(rank[whole]))
    return {
        name: Timing(median_us=statistics.median(values), min_us=min(values), max_us=max(values))
        for name, values in chosen.items()
    }


class PhaseTimes:
    """A `Phases` that takes the time of each phase of each call: CUDA events, no host sync; a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._calls: list[dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event] | float]]] = []

    def start_call(self) -> None:
        """What follows belongs to another call. Local, no host sync."""
        self._calls.append({})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside; a phase that comes twice in a call counts together. Local, no host sync."""
        spans = self._calls[-1].setdefault(name, [])
        if self._on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            spans.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            spans.append((time.perf_counter() - begin) * 1e6)

    def samples_us(self) -> dict[str, list[float]]:
        """Microseconds of each phase, call by call. Local, host sync."""
        if self._on_cuda:
            torch.cuda.synchronize()
        names = list(dict.fromkeys(name for call in self._calls for name in call))
        return {
            name: [
                sum(s if isinstance(s, float) else s[0].elapsed_time(s[1]) * 1e3 for s in call.get(name, []))
                for call in self._calls
            ]
            for name in names
        }


def time_calls(
    call: Callable[[], object],
    group: EPGroup,
    *,
    warmup: int,
    repeats: int,
    on_call: Callable[[], None] | None = None,
    cold: bool = True,
) -> list[float]:
    """Microseconds of each of `repeats` calls on this rank, which all ranks begin together, after `warmup` others.

    On CUDA between two events on the current stream, behind a write of twice the L2 and a tiny all-reduce; what the
    call waits for on the host counts. On the CPU by the clock, behind a barrier.

    Args:
        call: collective or not, as often on every rank. on_call: called before each timed call, outside its time.
        cold: False leaves the L2 as the call before left it.
    Collective, host sync.
    """
    for _ in range(warmup):
        call()
    if group.device.type != "cuda":
        samples = []
        for _ in range(repeats):
            group.barrier()
            if on_call is not None:
                on_call()
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1e6)
        return samples
    properties = torch.cuda.get_device_properties(group.device)
    flushed = torch.empty(2 * properties.L2_cache_size if cold else 0, dtype=torch.uint8, device=group.device)
    token = torch.zeros(1, device=group.device)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    group.barrier()
    for start, end in zip(starts, ends, strict=True):
        if on_call is not None:
            on_call()
        flushed.zero_()
        if group.process_group is not None:
            dist.all_reduce(token, group=group.process_group)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(group.device)
    return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A call in a CUDA graph: what replays it, and where each replay writes its output."""

    replay: Callable[[], None]
    output: torch.Tensor

    def replayed(self) -> torch.Tensor:
        """Replay once over NaN, so that what the graph does not write is seen. Collective as the call, no host sync."""
        self.output.fill_(float("nan"))
        self.replay()
        return self.output


def capture(call: Callable[[], torch.Tensor], device: torch.device) -> Captured:
    """Capture a call into a CUDA graph, on the buffers that the capture saw.

    Errors: RuntimeError for a call that cannot be captured, one that waits on the host for example, and without CUDA.
    Every rank captures the same. Host sync.
    """
    if device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a GPU, this rank computes on {device}")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(GRAPH_WARMUP):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # of this thread alone: that of NCCL asks for events meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = call()
    except RuntimeError as error:
        raise RuntimeError(f"the call cannot be captured into a CUDA graph: {error}") from error
    return Captured(replay=graph.replay, output=output)


def profile_kernels(call: Callable[[], object], group: EPGroup, *, repeats: int) -> list[tuple[str, float]]:
    """Name and microseconds of all that `repeats` calls run on this rank's GPU, in the order in which they begin.

    Collective, host sync.
    """
    group.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        group.wait_for_all("profile")  # on the host: a profiler may take seconds to start, and a barrier runs kernels
        for _ in range(repeats):
            call()
        torch.cuda.synchronize(group.device)
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def part_times(kernels: Sequence[tuple[str, float]], parts: Sequence[str], *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each part in each call: the sum of its kernels, whose names contain its own.

    A call begins with the first part: kernels of other names that run before one of it are its preparation.

    Example: parts a and b, 2 repeats, kernels fill 1, _a 3, _b 1, _b 2, fill 1, _a 4, _b 1, _b 1 give a [4, 5] and b
    [3, 2].

    Args:
        kernels: of `repeats` like calls, as `profile_kernels` returns them.
    Errors: ValueError where a kernel belongs to no part or to two, a part has none, or calls are not alike. Local.
    """
    owners: list[tuple[str, ...]] = []
    for name, _ in reversed(kernels):
        named = tuple(part for part in parts if part in name)
        is_preparation = not named and owners and owners[-1] == (parts[0],)
        owners.append((parts[0],) if is_preparation else named)
    owners.reverse()
    unclear = [name for (name, _), found in zip(kernels, owners, strict=True) if len(found) != 1]
    if unclear:
        raise ValueError(f"kernels are not of one of {', '.join(parts)}: {', '.join(dict.fromkeys(unclear))}")
    times: dict[str, list[float]] = {}
    for part in parts:
        own = [us for (_, us), found in zip(kernels, owners, strict=True) if found == (part,)]
        if not own or len(own) % repeats:
            raise ValueError(f"{len(own)} kernels of {part} in {repeats} calls")
        each = len(own) // repeats
        times[part] = [sum(own[start : start + each]) for start in range(0, len(own), each)]
    return times
