"""One trace of the calls of all ranks, host and device, for https://ui.perfetto.dev or chrome://tracing."""

import contextlib
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ep_moe.group import EPGroup

CLOCK = "clock"  # the range that tells what time of the machine a time of the profiler is
CLOCK_READINGS = 9
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
DEVICE_RANGES = "gpu_user_annotation"  # the host's ranges, from the first to the last of their kernels
FLOWS = "ac2g"  # from a launch to its kernel
DEVICE_LANES = 1000  # the first; lanes of host threads are before it

Event = dict[str, Any]


class PhaseRanges:
    """A `Phases` that makes each phase a named range of a running profiler."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """The range, to be entered. Local, no host sync."""
        return record_function(name)


class Trace:
    """A Chrome trace (JSON with `traceEvents`) in which each rank is a process with lanes for host and device.

    A host thread is a lane, that of the calls is "host"; a CUDA stream has one for its kernels and one for the named
    ranges that launched them. Times are microseconds since the trace was made, of rank 0's clock: ranks on one machine
    share its clock, which the others' clocks are compared with once, at a barrier. Making one is collective.

    Args:
        group: the ranks. path: the file that rank 0 writes.
    """

    def __init__(self, group: EPGroup, path: Path) -> None:
        self._group, self._path, self._events = group, path, list[Event]()
        self._lanes: dict[tuple[Any, Any, bool], int] = {(os.getpid(), threading.get_native_id(), False): 1}
        stamps = []
        for _ in range(CLOCK_READINGS):
            group.barrier()
            stamps.append(time.time_ns())
        ranks = group.all_gather_object((group.node, stamps))
        here = next(theirs for node, theirs in ranks if node == group.node)
        ahead = statistics.median(ours - first for ours, first in zip(here, ranks[0][1], strict=True))
        self._begin_ns = ranks[0][1][0] + int(ahead)  # by this machine's clock

    def record(self, name: str, call: Callable[[], object], *, calls: int) -> None:
        """Profile `calls` calls, one directly after another, each a range "<name>, call <number>", after a warm-up.

        Profiling adds to the host's times, of short operations most. Collective, host sync.
        """
        group, activities = self._group, [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if group.device.type == "cuda" else []
        with profile(activities=activities, acc_events=True) as profiled:
            group.wait_for_all("profile")  # the profiler may take seconds to start
            for _ in range(2):  # the first range is slow to enter
                call()
                group.barrier()
                now_ns = time.time_ns()
                with record_function(CLOCK):
                    pass
            for number in range(1, calls + 1):
                with record_function(f"{name}, call {number}"):
                    call()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
        group.wait_for_all("profile")  # and to stop
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(file))
            found = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        clock_us = max(event["ts"] for event in found if event["ph"] == "X" and event["name"] == CLOCK)
        found = [event for event in found if event.get("ts", 0) > clock_us]
        # whole nanoseconds first, as a float has 53 bits
        shift_us = (now_ns - self._begin_ns) / 1e3 - clock_us
        flow = f"{group.rank}.{len(self._events)}."
        self._events += _moved(found, group.rank, self._lanes, shift_us=shift_us, flow=flow)

    def write(self) -> None:
        """Merge the events of all ranks into the file. Errors: OSError on rank 0. Collective."""
        group = self._group
        device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
        named = _names(self._lanes, group.rank, f"rank {group.rank} on {socket.gethostname()}, {device}")
        everyones = group.all_gather_object(named + self._events)
        if group.rank == 0:
            merged = [event for events in everyones for event in events]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"traceEvents": merged, "displayTimeUnit": "ns"}), encoding="utf-8")


def _moved(
    events: Sequence[Event], rank: int, lanes: dict[tuple[Any, Any, bool], int], *, shift_us: float, flow: str
) -> list[Event]:
    """A profiler's events on a rank's lanes and on the trace's clock; those of the profiler itself are left out.

    Args:
        lanes: (process, thread, is a lane of ranges) of the profiler -> lane; gets those that are new.
        shift_us: added to every time. flow: precedes the numbers of arrows, which are those of one process.
    """
    moved = []
    for event in events:
        category, on_device = event.get("cat"), "stream" in event.get("args", {})
        known = event["ph"] == "X" and (on_device or isinstance(event["pid"], int))
        arrow = event["ph"] in ("s", "f") and category == FLOWS
        if not known and not arrow:
            continue
        key = event["pid"], event["tid"], category == DEVICE_RANGES
        if known and key not in lanes:
            first = DEVICE_LANES if on_device or category in (*DEVICE_WORK, DEVICE_RANGES) else 1
            lanes[key] = first + sum((lane < DEVICE_LANES) == (first < DEVICE_LANES) for lane in lanes.values())
        if key in lanes:
            own = {"pid": rank, "tid": lanes[key], "ts": event["ts"] + shift_us}
            moved.append({**event, **own, **({"id": f"{flow}{event['id']}"} if arrow else {})})
    return moved


def _names(lanes: Mapping[tuple[Any, Any, bool], int], rank: int, process: str) -> list[Event]:
    """The events that name a rank and its lanes, and put them in order."""
    named: list[Event] = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for (_, thread, ranges), lane in lanes.items():
        host = "host" if lane == 1 else f"host, thread {lane}"
        name = host if lane < DEVICE_LANES else f"device, stream {thread}{': ranges' if ranges else ''}"
        named.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}})
        named.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
    return named
