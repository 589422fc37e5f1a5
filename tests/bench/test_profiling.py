"""Times of calls, phases and kernels, and traces of all ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.profiling import trace
from ep_moe.profiling.kernels import part_times, profile_kernels
from ep_moe.profiling.timing import PhaseTimes, capture, slowest, spread, time_calls


def test_times_of_calls_and_of_their_phases() -> None:
    group, times, calls = EPGroup.single("cpu"), PhaseTimes(torch.device("cpu")), []

    def call() -> None:
        calls.append(len(calls))
        for name, secs in (("dispatch", 0.002), ("experts", 0.001 * len(calls)), ("dispatch", 0.002)):
            with times.phase(name):
                time.sleep(secs)

    times.start_call()
    samples = time_calls(call, group, warmup=1, repeats=3, on_call=times.start_call)
    phases = times.samples_us()
    assert len(calls) == 4
    assert [len(values) for values in phases.values()] == [4, 4]
    assert min(phases["dispatch"]) >= 4000
    assert phases["experts"][3] >= 4000
    assert all(a + b <= c for a, b, c in zip(phases["dispatch"][1:], phases["experts"][1:], samples, strict=True))
    with pytest.raises(RuntimeError, match="a CUDA graph needs a GPU"):
        capture(lambda: torch.zeros(1), group.device)


def slowest_of_two(group: EPGroup) -> dict[str, list[float]]:
    """Samples in which rank 1 has the longer calls, rank 0 the longer dispatch."""
    calls, dispatch = ([5.0, 4.0, 90.0], [8.0, 6.0, 7.0]), (4.0, 1.0)
    return slowest(group, {"call": calls[group.rank], "dispatch": [dispatch[group.rank]] * 3}, whole="call")


def test_all_phases_are_those_of_the_rank_with_the_slowest_call() -> None:
    for timings in launch(slowest_of_two, num_ranks=2, device="cpu"):
        assert spread("call", timings["call"]) == {"call_us": 7.0, "call_min_us": 6.0, "call_max_us": 8.0}
        assert timings["dispatch"] == [1.0] * 3


def test_kernels_belong_to_the_part_that_they_name() -> None:
    fill, a, b = ("fill", 0.5), ("_a_pack", 3.0), ("_b", 1.0)
    longer = [fill, fill, ("_a_pack", 4.0), ("_b", 1.0), ("_b", 2.0)]
    assert part_times([fill, fill, a, b, b, *longer], ("a_", "b"), repeats=2) == {"a_": [4.0, 5.0], "b": [2.0, 3.0]}
    for unclear, wrong in (("fill", [fill, a, fill, b]), ("fill", [a, b, fill]), ("b_a_", [a, b, ("b_a_", 1.0)])):
        with pytest.raises(ValueError, match=f"^kernels are not of one of a_, b: {unclear}$"):
            part_times(wrong * 2, ("a_", "b"), repeats=2)
    with pytest.raises(ValueError, match=r"^0 kernels of b in 2 calls$"):
        part_times([a, a], ("a_", "b"), repeats=2)
    with pytest.raises(ValueError, match=r"^3 kernels of b in 2 calls$"):
        part_times([b] * 3, ("b",), repeats=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_times_on_a_gpu_and_of_a_graph() -> None:
    group = EPGroup.single("cuda")
    times, x = PhaseTimes(group.device), torch.randn(4096, 4096, device=group.device)
    out = torch.zeros_like(x)

    def late_product() -> torch.Tensor:
        torch.cuda._sleep(10_000_000)  # cycles: 3.3 ms at 3 GHz, more if other processes use the GPU
        return torch.mm(x, x, out=out)

    def call() -> None:
        with times.phase("product"):
            late_product()

    times.start_call()
    samples = time_calls(call, group, warmup=1, repeats=5, on_call=times.start_call)
    phases = times.samples_us()["product"][1:]
    assert all(3300 < phase <= whole for phase, whole in zip(phases, samples, strict=True))
    graph = capture(late_product, group.device)
    expected = out.clone()
    out.zero_()
    assert torch.equal(graph.replayed(), expected)
    assert min(time_calls(graph.replay, group, warmup=1, repeats=5)) > 3300

    def some_rows() -> torch.Tensor:
        torch.mm(x[:5], x, out=out[:5])
        return out

    written = capture(some_rows, group.device).replayed()
    assert not written[:5].isnan().any()
    assert written[5:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_the_kernels_of_a_graph_take_as_long_as_its_replay() -> None:
    group = EPGroup.single("cuda")
    x = torch.randn(4096, 4096, device=group.device)
    graph = capture(lambda: torch.mm(x, x).relu(), group.device)
    kernels = profile_kernels(graph.replay, group, repeats=3)
    assert len(kernels) % 3 == 0
    replays = time_calls(graph.replay, group, warmup=1, repeats=5, cold=False)
    assert 0.5 < sum(us for _, us in kernels) / 3 / min(replays) < 1.2


class TwoMachines:
    """Rank 2 of three: ranks 0 and 1 on machine 0, this rank on machine 1, whose clock is 5 s ahead."""

    rank, node = 2, 1

    def barrier(self) -> None:
        """Every rank leaves at once."""

    def all_gather_object(self, mine: tuple[int, list[int]]) -> list[tuple[int, list[int]]]:
        """The readings of ranks 0 and 1, then this rank's."""
        theirs = [(0, [stamp - 5 * 10**9 + late for stamp in mine[1]]) for late in (0, 400)]
        self.first_ns = theirs[0][1][0]
        return [*theirs, mine]


def test_machines_of_a_trace_have_one_clock(tmp_path: Path) -> None:
    group = TwoMachines()
    made = trace.Trace(group, tmp_path / "t.json")
    assert made._begin_ns == group.first_ns + 5 * 10**9


def test_lanes_of_a_trace() -> None:
    def event(name: str, category: str, pid: int, tid: int, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": 10.0, **more}

    events = [
        event("dispatch", "user_annotation", 77, 770),
        event("launch", "cuda_runtime", 77, 770, args={"correlation": 5}),
        event("_dispatch_kernel", "kernel", 0, 7, args={"stream": 7}),
        event("dispatch", "gpu_user_annotation", 0, 7),
        event("Memset", "gpu_memset", 0, 9),
        event("beat", "cpu_op", 77, 771),
        event("to kernel", "ac2g", 77, 770) | {"ph": "s", "id": 5},
        event("to kernel", "ac2g", 0, 7) | {"ph": "f", "id": 5},
        event("other arrow", "fwdbwd", 77, 770) | {"ph": "s", "id": 5},
        event("PyTorch Profiler (0)", "Trace", 0, 0) | {"pid": "Spans", "tid": "PyTorch Profiler"},
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
    ]
    lanes: dict[tuple[Any, Any, bool], int] = {(77, 770, False): 1}
    moved = trace._moved(events, 3, lanes, shift_us=2.5, flow="3.0.")
    names = {e["tid"]: e["args"]["name"] for e in trace._names(lanes, 3, "rank 3") if e["name"] == "thread_name"}
    assert [(event["name"], names[event["tid"]]) for event in moved] == [
        ("dispatch", "host"),
        ("launch", "host"),
        ("_dispatch_kernel", "device, stream 7"),
        ("dispatch", "device, stream 7: ranges"),
        ("Memset", "device, stream 9"),
        ("beat", "host, thread 2"),
        ("to kernel", "host"),
        ("to kernel", "device, stream 7"),
    ]
    assert {(event["pid"], event["ts"]) for event in moved} == {(3, 12.5)}
    assert [event["id"] for event in moved if "id" in event] == ["3.0.5", "3.0.5"]
