"""Timing of calls: after a warm-up, with a cold L2, ranks aligned; the median of many calls, on the slowest rank."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ep_moe.group import EPGroup

GRAPH_WARMUP = 3  # calls before a capture, which compile kernels and fill memory pools


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
    """All timings of the rank with the largest median of `whole`; parts from different ranks would not sum to a call.

    Args:
        samples: this rank's, in microseconds by name. whole: the name by which ranks are compared.
    Collective.
    """
    ranks = group.all_gather_object({name: list(values) for name, values in samples.items()})
    chosen = max(ranks, key=lambda rank: statistics.median(rank[whole]))
    return {
        name: Timing(median_us=statistics.median(values), min_us=min(values), max_us=max(values))
        for name, values in chosen.items()
    }


class PhaseTimes:
    """A `Phases` that times each phase of each call: by CUDA events without host sync, by a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._calls: list[dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event] | float]]] = []

    def start_call(self) -> None:
        """Begin a new call: later phases belong to it. Local, no host sync."""
        self._calls.append({})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; repeated phases of a call are summed. Local, no host sync."""
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
    wall: bool = False,
) -> list[float]:
    """Microseconds of each of `repeats` calls on this rank, which all ranks start together, after `warmup` others.

    On CUDA between two events on the current stream, after a write of twice the L2 size and a tiny all-reduce; the
    call's waits on the host count. On the CPU by the wall clock, after a barrier.

    Args:
        call: collective or not, equally often on every rank. on_call: called before each timed call, untimed.
        cold: False leaves the L2 as the previous call left it. wall: on CUDA too by the wall clock, after a barrier and
            until the device has finished.
    Collective, host sync.
    """
    for _ in range(warmup):
        call()
    prepare = on_call or (lambda: None)
    on_cuda, samples = group.device.type == "cuda", []
    if wall or not on_cuda:
        for _ in range(repeats):
            group.barrier()
            prepare()
            begin = time.perf_counter()
            call()
            if on_cuda:
                torch.cuda.synchronize(group.device)
            samples.append((time.perf_counter() - begin) * 1e6)
        return samples
    properties = torch.cuda.get_device_properties(group.device)
    flushed = torch.empty(2 * properties.L2_cache_size if cold else 0, dtype=torch.uint8, device=group.device)
    token = torch.zeros(1, device=group.device)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    group.barrier()
    for start, end in zip(starts, ends, strict=True):
        prepare()
        flushed.zero_()
        if group.process_group is not None:
            dist.all_reduce(token, group=group.process_group)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(group.device)
    return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]


def time_phases(
    call: Callable[[PhaseTimes], object], group: EPGroup, *, repeats: int, cold: bool = True
) -> dict[str, list[float]]:
    """Microseconds of each phase of calls that enter the phases of their argument, timed as `time_calls` does.

    After one warm-up. Collective, host sync.
    """
    times = PhaseTimes(group.device)
    times.start_call()
    watched = functools.partial(call, times)
    time_calls(watched, group, warmup=1, repeats=repeats, on_call=times.start_call, cold=cold)
    return {name: us[1:] for name, us in times.samples_us().items()}  # without the warm-up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A call in a CUDA graph: `replay` replays it, each replay writes `output`."""

    replay: Callable[[], None]
    output: torch.Tensor

    def replayed(self) -> torch.Tensor:
        """Replay once over NaN, so that unwritten output is detected. Collective if the call is; no host sync."""
        self.output.fill_(float("nan"))
        self.replay()
        return self.output


def capture(call: Callable[[], torch.Tensor], device: torch.device) -> Captured:
    """Capture a call into a CUDA graph, which reads and writes the captured call's buffers.

    Errors: RuntimeError for a call that cannot be captured, for example one that waits on the host, and without CUDA.
    Every rank captures the same call. Host sync.
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
        # thread_local: NCCL's thread queries events meanwhile, which would invalidate a global capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = call()
    except RuntimeError as error:
        raise RuntimeError(f"the call cannot be captured into a CUDA graph: {error}") from error
    return Captured(replay=graph.replay, output=output)


def profile_kernels(call: Callable[[], object], group: EPGroup, *, repeats: int) -> list[tuple[str, float]]:
    """Name and microseconds of each GPU operation of `repeats` calls on this rank, in order of their start.

    Collective, host sync.
    """
    group.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        group.wait_for_all("profile")  # the profiler may take seconds to start; a barrier would run kernels
        for _ in range(repeats):
            call()
        torch.cuda.synchronize(group.device)
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def part_times(kernels: Sequence[tuple[str, float]], parts: Sequence[str], *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each part in each call: the sum of the kernels whose names contain the part's name.

    A call begins with the first part; unnamed kernels directly before a kernel of that part count as part of it.

    Example: parts a and b, 2 repeats, kernels fill 1, _a 3, _b 1, _b 2, fill 1, _a 4, _b 1, _b 1 give a [4, 5] and b
    [3, 2].

    Args:
        kernels: of `repeats` equal calls, as `profile_kernels` returns them.
    Errors: ValueError if a kernel belongs to no part or to two, a part has none, or calls differ. Local.
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
