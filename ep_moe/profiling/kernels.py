"""The kernels of repeated calls, as the profiler sees them, and to which part of a call each belongs."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ep_moe.group import EPGroup


def profile_kernels(call: Callable[[], object], group: EPGroup, *, repeats: int) -> list[tuple[str, float]]:
    """Name and microseconds of each GPU operation of `repeats` calls on this rank, in order of their start.

    Collective, host sync.
    """
    group.barrier()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
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
