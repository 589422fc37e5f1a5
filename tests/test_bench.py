"""Benchmarks: their rows, the checks of results before timing, and the page made from the rows."""

import dataclasses
import json
import pkgutil
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from transformers.utils import is_accelerate_available
from typer.testing import CliRunner, Result

from ep_moe import cli
from ep_moe.bench import configs, exchanges, experts_alone, grouped, harness
from ep_moe.bench import layer as layer_bench
from ep_moe.bench import model as model_bench
from ep_moe.bench import transport as transport_bench
from ep_moe.bench.configs import (
    ExpertsBenchConfig,
    LayerBenchConfig,
    ModelBenchConfig,
    TransportBenchConfig,
    TransportPoint,
)
from ep_moe.bench.exchanges import by_collectives
from ep_moe.bench.experts_alone import experts_rank_main
from ep_moe.bench.gathered import GatheredMoE
from ep_moe.bench.layer import layer_rank_main
from ep_moe.bench.model import model_rank_main
from ep_moe.bench.presets import LAYER_PRESETS, MODEL_PRESETS
from ep_moe.bench.transport import transport_rank_main
from ep_moe.cli import app
from ep_moe.config import EngineConfig, Layout
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.profiling import timing, trace
from ep_moe.profiling.kernels import part_times, profile_kernels
from ep_moe.profiling.phases import PhaseTimes
from ep_moe.profiling.timing import Captured, capture, slowest, spread, time_calls
from ep_moe.quant import SCHEMES as QUANT_SCHEMES
from ep_moe.report import plots
from ep_moe.report.page import make_report, newest
from ep_moe.report.records import FIELDS, Record, append_records, read_records
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.testing.whole_rounds import make_routing
from ep_moe.transport import CollectiveTransport, Dispatched, Transport, create_transport

ROOT = Path(__file__).parent.parent
VERSION = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
HAS_HOOK = VERSION >= (5, 23) or VERSION < (5, 19)
needs_accelerate = pytest.mark.skipif(
    not is_accelerate_available(), reason="transformers spreads nothing over ranks without accelerate"
)
PHASES = ("route", "dispatch", "experts", "combine")
PHASE_FIGURES = {"call_us", *(f"{phase}_us" for phase in PHASES), "tokens_per_sec"}
HOST_FIGURES = {"host_us", *(f"host_{phase}_us" for phase in PHASES)}


def bench(*words: str, cwd: Path, ranks: tuple[str, ...] = ("--nproc", "2")) -> Result:
    """`ep-moe bench ...` on CPU ranks, in a folder that is not the repository; in this process."""
    command = ["bench", *words, *ranks, "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["ep-moe", *command])
        return CliRunner().invoke(app, command, env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


# Rows.


def make_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "bench": "layer",
        "date": "2026-11-22T10:00:00+00:00",
        "commit": "0123abc",
        "gpu": "Abacus 9",
        "world_size": 4,
        "versions": {"torch": "2.11.0", "nccl": None},
        "command": "ep-moe bench layer --tokens 128",
        "sweep": False,
        "shapes": {"preset": "tiny", "tokens_per_rank": 128},
        "setup": {"dtype": "bfloat16", "scheme": "none", "transport": "collective", "experts": "torch"},
        "figures": dict.fromkeys(PHASE_FIGURES, 100.0) | {"worst_row_error": 3e-3},
        "baselines": {"allgather_reducescatter": dict.fromkeys(PHASE_FIGURES, 250.0) | {"speedup_ratio": 2.5}},
    }
    return Record(**values | changes)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [make_record(), make_record(bench="kernels", figures={"copy_gbs": 4300, "tile_count": 3}, baselines={})]
    append_records(tmp_path / "new" / "a.jsonl", records[:1])
    append_records(tmp_path / "new" / "a.jsonl", records[1:])
    assert read_records(tmp_path / "new") == records
    lines = (tmp_path / "new" / "a.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [list(FIELDS)] * 2


WRONG_ROWS = {
    "unit": ({"figures": {"call": 1.0}}, "figures.call does not say its unit"),
    "baseline-unit": ({"baselines": {"nccl": {"latency": 1.0}}}, "baselines.nccl.latency does not say its unit"),
    "nan": ({"figures": {"call_us": float("nan")}}, "figures.call_us (nan) is not a finite number"),
    "text": ({"figures": {"call_us": "12"}}, "figures.call_us ('12') is not a finite number"),
    "no-figures": ({"figures": {}}, "figures ({}) is not a mapping with at least one figure"),
    "commit": ({"commit": "main"}, "commit ('main') is not 7 to 40 hex digits"),
    "date": ({"date": "22 November"}, "date ('22 November') is not an ISO 8601 date"),
    "zone": ({"date": "2026-11-22T10:00:00"}, "has no time zone"),
    "world_size": ({"world_size": 0}, "world_size (0) must be"),
    "sweep": ({"sweep": "no"}, "sweep ('no') is not true or false"),
    "gpu": ({"gpu": ""}, "gpu ('') must be a text"),
    "shapes": ({"shapes": {"tokens": [1, 2]}}, "shapes.tokens ([1, 2]) is not one of str, int, float, bool"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_refused(name: str, tmp_path: Path) -> None:
    changes, message = WRONG_ROWS[name]
    with pytest.raises(ValueError) as caught:
        make_record(**changes)
    assert message in str(caught.value)
    content = json.loads(make_record().to_line()) | changes
    (tmp_path / "a.jsonl").write_text(f"{make_record().to_line()}\n{json.dumps(content)}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: "):
        read_records(tmp_path)


def test_unknown_and_missing_keys_are_named(tmp_path: Path) -> None:
    content = json.loads(make_record().to_line())
    with pytest.raises(ValueError, match=r"^here: unknown key speed; known: bench, date"):
        Record.from_line(json.dumps(content | {"speed": 1}), "here")
    del content["sweep"], content["commit"]
    with pytest.raises(ValueError, match=r"^here: missing key commit, sweep$"):
        Record.from_line(json.dumps(content), "here")
    with pytest.raises(ValueError, match="here: not JSON"):
        Record.from_line("{", "here")
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        append_records(tmp_path / "rows.txt", [make_record()])


# Keys at the top level of a flat row of `bench transport`, on which other readers of the files rely.
CONTRACT = {
    *("bench", "date", "commit", "gpu", "world_size", "versions", "command", "sweep", "baselines"),
    *("transport", "tokens", "hidden", "num_topk", "num_experts", "layout", "payload", "dtype", "graph", "routing"),
    *("num_sms", "dispatch_us", "combine_us", "sum_us", "wire_bytes", "wire_gbs", "floor_share_ratio"),
}


def make_exchange_record(**changes: Any) -> Record:
    """A row of `bench transport`, with single values changed."""
    nccl = {"dispatch_us": 40.0, "combine_us": 60.0, "sum_us": 99.0, "speedup_ratio": 1.98}
    parts: dict[str, dict[str, Any]] = {
        "shapes": {"tokens": 128, "hidden": 7168, "num_topk": 8, "num_experts": 256},
        "setup": {
            "transport": "nvlink",
            "layout": "batched",
            "payload": "fp8_block",
            "dtype": "bfloat16",
            "graph": True,
            "routing": "uniform",
            "num_sms": 0,
            "nodes": 1,
            "seed": 0,
            "warmup": 5,
            "repeats": 20,
        },
        "figures": {
            "dispatch_us": 20.5,
            "combine_us": 25.5,
            "sum_us": 50.0,
            "wire_bytes": 7562000.0,
            "wire_gbs": 151.2,
            "floor_share_ratio": 0.4088,
        },
    }
    for name, words in parts.items():
        words.update(changes.pop(name, {}))
    baselines = {"allgather_reducescatter": nccl, "all_to_all_single": nccl}
    return make_record(**{"bench": "transport", "baselines": baselines, **parts} | changes)


def test_flat_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [make_exchange_record(), make_exchange_record(figures={"host_dispatch_us": 12.5})]
    append_records(tmp_path / "a.jsonl", [*records, make_record()])
    assert read_records(tmp_path) == [*records, make_record()]
    first, second, nested = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert set(first) == CONTRACT | {"nodes", "seed", "warmup", "repeats"}
    assert (first["tokens"], first["graph"], first["sum_us"]) == (128, True, 50.0)
    assert first["baselines"]["all_to_all_single"]["speedup_ratio"] == 1.98
    assert set(second) - set(first) == {"host_dispatch_us"}
    assert set(nested) == set(FIELDS)


WRONG_FLAT_ROWS = {
    "unknown": ({"speed": 1}, "here: unknown key speed; known: bench, date"),
    "nested": ({"shapes": {"tokens": 1}}, "here: unknown key shapes; known: bench, date"),
    "missing-word": ({"num_topk": None, "layout": None}, "here: missing key num_topk, layout"),
    "missing-field": ({"commit": None}, "here: missing key commit"),
    "no-figures": (
        {name: None for name in CONTRACT if name.endswith(("_us", "_bytes", "_gbs", "_ratio"))},
        "here: figures ({}) is not a mapping with at least one figure",
    ),
    "text": ({"sum_us": "12"}, "here: figures.sum_us ('12') is not a finite number"),
    "list": ({"tokens": [1]}, "here: shapes.tokens ([1]) is not one of str, int, float, bool"),
    "bench": ({"bench": ["transport"]}, "here: unknown key"),
}


@pytest.mark.parametrize("name", WRONG_FLAT_ROWS)
def test_a_wrong_flat_row_is_refused(name: str) -> None:
    changes, message = WRONG_FLAT_ROWS[name]
    content = json.loads(make_exchange_record().to_line()) | changes
    line = json.dumps({key: value for key, value in content.items() if value is not None})
    with pytest.raises(ValueError) as caught:
        Record.from_line(line, "here")
    assert str(caught.value).startswith(message)


def test_a_flat_row_is_not_written_with_other_words() -> None:
    with pytest.raises(ValueError, match="^shapes: unknown key heads; known: tokens, hidden"):
        make_exchange_record(shapes={"heads": 8})
    setup = {name: word for name, word in make_exchange_record().setup.items() if name != "graph"}
    with pytest.raises(ValueError, match="^setup: missing key graph"):
        dataclasses.replace(make_exchange_record(), setup=setup)


# Times.


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

    def call() -> None:
        with times.phase("product"):
            torch.mm(x, x, out=out)

    times.start_call()
    samples = time_calls(call, group, warmup=1, repeats=5, on_call=times.start_call)
    phases = times.samples_us()["product"][1:]
    assert all(0 < phase <= whole for phase, whole in zip(phases, samples, strict=True))
    graph = capture(lambda: torch.mm(x, x, out=out), group.device)
    expected = out.clone()
    out.zero_()
    assert torch.equal(graph.replayed(), expected)
    replays = time_calls(graph.replay, group, warmup=1, repeats=5)
    assert 0.5 < min(replays) / min(samples) < 2

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


# The layer.


def test_bench_layer_and_its_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "tiny", "--tokens", "5", "--tokens", "24", "--quant", "fp8_block", "--routing", "skewed"]
    more = ["--placement", "round_robin", "--layout", "batched", "--repeats", "3", "--warmup", "1"]
    more += ["--micro-batches", "2", "--num-sms", "20"]
    row_options = ["--json", "--append", "rows/layer.jsonl", "--commit=0123456789abcdef", "--sweep"]
    done = bench("layer", *options, *more, *row_options, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    records, progress = read_records(tmp_path / "rows"), capfd.readouterr().err
    assert [record.shapes["tokens_per_rank"] for record in records] == [5, 24]
    for record, row in zip(records, report["rows"], strict=True):
        gathered = record.baselines["allgather_reducescatter"]
        told = f"call_us {record.figures['call_us']:.5g}"  # as soon as it is known: the run may be cut off
        assert told in progress
        assert set(record.figures) >= PHASE_FIGURES | HOST_FIGURES
        assert set(gathered) >= PHASE_FIGURES | HOST_FIGURES
        assert min([*record.figures.values(), *gathered.values()]) > 0
        assert 1e-4 < record.figures["worst_row_error"] < row["row_error_limit"]
        assert 1e-4 < gathered["worst_row_error"] < row["row_error_limit"]
        assert gathered["speedup_ratio"] == gathered["call_us"] / record.figures["call_us"]
        overlapped = record.baselines["micro_batches"]
        names = {"call_us", "call_min_us", "call_max_us", "speedup_ratio", "worst_row_error"}
        assert set(overlapped) == names
        assert 1e-4 < overlapped["worst_row_error"] < row["row_error_limit"]
        assert overlapped["speedup_ratio"] == overlapped["call_us"] / record.figures["call_us"]
        assert (record.setup["micro_batches"], record.setup["num_sms"]) == (2, 20)
        assert record.figures["expert_load_ratio"] > 1
        assert (record.setup["transport"], record.setup["experts"]) == ("collective", "torch")
        assert (record.setup["layout"], record.setup["routing"]) == ("batched", "skewed")
        ran = {"nodes": 1, "graph": False, "warmup": 1, "repeats": 3}
        assert {name: record.setup[name] for name in ran} == ran
        assert (record.sweep, record.commit, record.world_size) == (True, "0123456789abcdef", 2)
        assert record.command == " ".join(["ep-moe bench layer", *options, *more, "--nproc 2 --device cpu"])


def test_micro_batches_of_other_bits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ExpertParallelMoE.forward_micro_batches

    def rounded(*args: Any, **options: Any) -> torch.Tensor:
        y = sound(*args, **options)
        y[3, 7] = torch.nextafter(y[3, 7], torch.tensor(9.0))
        return y

    config = LayerBenchConfig(preset="tiny", tokens=(8,), warmup=1, repeats=1, micro_batches=3)
    run = EPGroup.single("cpu"), EngineConfig(dtype="float32", scheme="none"), config
    (row,) = layer_rank_main(*run)["rows"]
    assert row["ok"]
    monkeypatch.setattr(ExpertParallelMoE, "forward_micro_batches", rounded)
    (row,) = layer_rank_main(*run)["rows"]
    assert row["broken"] == ["micro-batches against calls of each: 1 of 8 differ"]
    assert set(row["baselines"]["micro_batches"]) == {"worst_row_error"}
    with pytest.raises(ValueError, match=r"micro_batches \(3\) exceeds the fewest tokens, 2"):
        LayerBenchConfig(tokens=(8, 2), micro_batches=3)
    with pytest.raises(ValueError, match=r"num_sms \(20\) is of the exchange of micro-batches; micro_batches is 1"):
        LayerBenchConfig(num_sms=20)


def test_bench_layer_traces_all_ranks(tmp_path: Path) -> None:
    options = ["--preset", "tiny", "--tokens", "5", "--tokens", "6", "--repeats", "1", "--warmup", "1"]
    done = bench("layer", *options, "--trace", "new/trace.json", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert re.search(r"host us, median.*\n.*\n *route +\S+ +\S+ *\n *dispatch ", done.stdout)
    found = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    ranges: list[list[dict[str, Any]]] = []
    for rank in range(2):
        host = [event for event in found if event["ph"] == "X" and named[event["pid"], event["tid"]] == "host"]
        ranges.append([event for event in host if event["pid"] == rank and event["cat"] == "user_annotation"])
    calls = [f"{tokens} tokens, call {number}" for tokens in (5, 6) for number in (1, 2, 3)]
    wanted = [name for call in calls for name in (call, *PHASES)]
    assert [[event["name"] for event in events] for events in ranges] == [wanted] * 2
    for call in range(len(calls)):  # no rank combines before all have dispatched: the ranks' times are of one clock
        _, _, dispatch, _, combine = zip(*(events[5 * call : 5 * call + 5] for events in ranges), strict=True)
        assert max(event["ts"] for event in dispatch) < min(event["ts"] + event["dur"] for event in combine)
        assert min(event["dur"] for event in (*dispatch, *combine)) > 0


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


SCHEMES = {
    "float32": ("float32", "none", "tiny"),
    "static-tensor-scales": ("bfloat16", "fp8_tensor", "tiny"),
    "groups-and-bias": ("bfloat16", "none", "deepseek-v3"),
    "biases-and-swiglu": ("bfloat16", "fp8_token", "gpt-oss-120b"),
}


def measure_all(group: EPGroup) -> dict[str, dict[str, Any]]:
    """The layer in all number formats, then with a fault on rank 1: in its experts, or in the baseline."""
    found = {}
    small = {"tokens": (9,), "warmup": 1, "repeats": 1, "hidden": 160, "intermediate": 48}
    for name, (dtype, scheme, preset) in SCHEMES.items():
        engine = EngineConfig(dtype=dtype, scheme=scheme, layout="flat")
        found[name] = layer_rank_main(group, engine, LayerBenchConfig(preset=preset, **small))
    config = LayerBenchConfig(preset="tiny", tokens=(9, 10), warmup=1, repeats=1)
    for name, (owner, attribute, fault) in FAULTS.items():
        sound = getattr(owner, attribute)
        if group.rank == 1:
            setattr(owner, attribute, fault(sound))
        found[name] = layer_rank_main(group, EngineConfig(dtype="float32", scheme="none"), config)
        setattr(owner, attribute, sound)
    return found


def louder_expert(sound: Callable[..., Any]) -> Callable[..., Any]:
    """One of this rank's experts is 1 % too large."""

    def local(self: RandomExperts, *args: Any) -> Any:
        weights = sound(self, *args)
        weights.w2.values[3] *= 1.01 if weights.w2.values.dtype != torch.bfloat16 else 1  # not of the baseline
        return weights

    return local


def lost_row(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The baseline loses this rank's first token."""

    def scatter(self: GatheredMoE, y: torch.Tensor) -> torch.Tensor:
        out = sound(self, y)
        out[0] = 0
        return out

    return scatter


def not_a_number(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The expected output on this rank is NaN."""
    return lambda *args, **options: sound(*args, **options) * float("nan")


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "expert": (RandomExperts, "local", louder_expert),
    "baseline": (GatheredMoE, "_scatter", lost_row),
    "oracle": (RandomExperts, "expected_output", not_a_number),
}


def test_the_layer_is_checked_in_all_arithmetic_and_a_wrong_one_is_not_timed() -> None:
    found = launch(measure_all, num_ranks=2, device="cpu")
    for rank in found:
        for name in SCHEMES:
            [row] = rank[name]["rows"]
            assert row["ok"], (name, row)
            assert row["figures"]["call_us"] > 0
        for name in FAULTS:
            [row] = rank[name]["rows"]  # none after the wrong one
            assert not rank[name]["ok"]
            assert not row["ok"]
            assert "call_us" not in row["figures"]
            assert "call_us" not in row["baselines"]["allgather_reducescatter"]
        errors = {name: rank[name]["rows"][0]["figures"]["worst_row_error"] for name in FAULTS}
        assert 1e-3 < errors["expert"] < 0.02
        assert errors["baseline"] < 1e-5
        assert rank["baseline"]["rows"][0]["baselines"]["allgather_reducescatter"]["worst_row_error"] == 1.0
        assert errors["oracle"] != errors["oracle"]


# hidden, intermediate, experts, top-k, of the config.json of DeepSeek-V3, Qwen3-235B-A22B, Qwen3-30B-A3B, Mixtral-8x7B
# and gpt-oss-120b
PUBLISHED = {
    "deepseek-v3": (7168, 2048, 256, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_sizes_of_the_models(name: str) -> None:
    config = LayerBenchConfig(preset=name).moe(EngineConfig(scheme="fp8_block"))
    assert config.routing is not None
    assert (config.hidden, config.intermediate, config.num_experts, config.routing.num_topk) == PUBLISHED[name]
    config = LayerBenchConfig(preset=name, hidden=64, num_topk=1).moe(EngineConfig(scheme="none"))
    assert config.routing is not None
    assert (config.hidden, config.intermediate, config.routing.num_topk) == (64, PUBLISHED[name][1], 1)
    if name in MODEL_PRESETS:
        model = model_bench.transformers_config(ModelBenchConfig(preset=name))
        sizes = (model.hidden_size, model.moe_intermediate_size, model.num_experts, model.num_experts_per_tok)
        assert sizes == PUBLISHED[name]


def fake_capture(missing_rows: int) -> Callable[..., Captured]:
    """A capture for a CPU, whose replay omits the first rows."""

    def capture(call: Callable[[], torch.Tensor], device: torch.device, count: int = 1) -> Captured:
        output = call().clone()

        def replay() -> None:
            output[missing_rows:] = call()[missing_rows:]

        return Captured(replay, output, count)

    return capture


@pytest.mark.parametrize("missing_rows", [0, 1])
def test_graphs_are_checked_before_they_are_timed(missing_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "capture", fake_capture(missing_rows))
    config = LayerBenchConfig(preset="tiny", tokens=(20,), warmup=1, repeats=1, sample_rows=2, graph=True)
    report = layer_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="float32", scheme="none"), config)
    [row] = report["rows"]
    figures, gathered = row["figures"], row["baselines"]["allgather_reducescatter"]
    if missing_rows:
        assert not report["ok"]
        assert [line.split()[:3] for line in row["broken"]] == [
            [name, "worst_graph_row_error", "(nan)"] for name in ("ep_moe", "allgather_reducescatter")
        ]
        assert "call_us" not in figures
    else:
        assert report["ok"]
        assert figures["worst_graph_row_error"] == gathered["worst_graph_row_error"] == 0
        assert gathered["graph_speedup_ratio"] == gathered["graph_call_us"] / figures["graph_call_us"]
        assert row["setup"]["graph"]


def test_a_transport_that_no_graph_can_capture_is_told_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_bench, "RandomExperts", None)  # no weights are made
    config = LayerBenchConfig(preset="tiny", graph=True)
    with pytest.raises(ValueError, match="graph: transport 'collective' waits on the host in each round"):
        layer_rank_main(
            EPGroup.single("cpu"), EngineConfig(dtype="float32", scheme="none", transport="collective"), config
        )


# The exchange.

SMALL_POINT = {"hidden": 160, "num_topk": 3, "num_experts": 9, "warmup": 1, "repeats": 2}


def test_bench_transport_on_a_cpu_checks_and_its_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "5", "--tokens", "17", "--hidden", "160", "--num-topk", "3", "--num-experts", "9"]
    more = ["--layout", "batched", "--layout", "flat", "--routing", "one_rank", "--dtype", "float16", "--seed", "3"]
    done = bench(
        "transport", *options, *more, "--json", "--append", "a.jsonl", "--commit", "0123abc", "--sweep", cwd=tmp_path
    )
    assert done.exit_code == 0, done.stderr
    assert "results are checked, nothing is timed on a CPU" in capfd.readouterr().err  # of rank 0
    report, records = json.loads(done.stdout), read_records(tmp_path)
    assert report["ok"]
    assert [(row["layout"], row["tokens"]) for row in report["rows"]] == [
        (layout, tokens) for layout in ("batched", "flat") for tokens in (5, 17)
    ]
    for record, row in zip(records, report["rows"], strict=True):
        # rank 0 sends all its tokens, rank 1 none: fp8 values, 2 scales, 3 ids and weights out, and float16 back
        assert record.figures == {"wire_bytes": record.shapes["tokens"] / 2 * (160 + 2 * 4 + 3 * 8 + 160 * 2)}
        assert set(row) - {"ok", "broken", "left_out"} < set(json.loads(record.to_line()))
        assert (record.setup["transport"], record.setup["graph"]) == ("collective", False)
        assert record.command == " ".join(["ep-moe bench transport", *options, *more, "--nproc 2 --device cpu"])


def misplace(sound: CollectiveTransport, rank: int) -> Transport:
    """Two rows of an expert are swapped in dispatch, and swapped back in combine."""

    def swap(rows: torch.Tensor) -> torch.Tensor:
        swapped = rows.clone()
        swapped[0, [0, 1]] = rows[0, [1, 0]]
        return swapped

    send, recv = sound.combine_send, sound.dispatch_recv

    def dispatch_recv(*, slot: int = 0) -> Dispatched:
        dispatched = recv(slot=slot)
        assert dispatched.batch.scale is not None
        x, scale = swap(dispatched.batch.x.view(torch.uint8)), swap(dispatched.batch.scale)
        batch = dataclasses.replace(dispatched.batch, x=x.view(dispatched.batch.x.dtype), scale=scale)
        return dataclasses.replace(dispatched, batch=batch)

    if rank == 1:
        sound.dispatch_recv = dispatch_recv
        sound.combine_send = lambda y, dispatched: send(swap(y), dispatched)
    return sound


def lose(sound: CollectiveTransport, rank: int) -> Transport:
    """The result of a token of rank 1 is zero."""
    recv = sound.combine_recv

    def combine_recv(*args: Any, **options: Any) -> torch.Tensor:
        out = recv(*args, **options)
        out[0] = 0
        return out

    if rank == 1:
        sound.combine_recv = combine_recv
    return sound


# fault, transports, message
EXCHANGE_FAULTS: dict[str, tuple[Callable[[CollectiveTransport, int], Transport], tuple[str, ...], list[str]]] = {
    "none": (lambda sound, rank: sound, (), []),
    "order": (
        misplace,
        ("auto",),
        ["rank 1: values of experts' rows: 2 of", "rank 1: scales of experts' rows: 2 of"],
    ),
    "lost": (
        lose,
        ("auto",),
        [
            "rank 1: output against the other transport's: 1 of 9 differ",
            "rank 1: output against the expectation: 1 of 9 differ",
        ],
    ),
    "lost-by-both": (lose, ("auto", "collective"), ["rank 1: output against the expectation: 1 of 9 differ"]),
}


def wrong_exchanges(group: EPGroup) -> dict[str, dict[str, Any]]:
    """`bench transport`, also timed on the CPU, with one fault after another."""
    found = {}
    transport_bench.is_timed = lambda device: True
    for name, (fault, faulty, _) in EXCHANGE_FAULTS.items():

        def create(which: str, *args: Any, fault: Any = fault, faulty: tuple[str, ...] = faulty) -> Transport:
            made = create_transport(which, *args)
            return fault(made, group.rank) if which in faulty else made

        transport_bench.create_transport = create
        config = TransportBenchConfig(tokens=(9, 10), layout=(Layout.BATCHED,), graph=False, **SMALL_POINT)
        found[name] = transport_rank_main(group, EngineConfig(dtype="bfloat16"), config)
    transport_bench.create_transport = create_transport
    config = TransportBenchConfig(tokens=(9,), layout=tuple(Layout), payload=("none", "fp8_tensor"), **SMALL_POINT)
    found["formats"] = transport_rank_main(group, EngineConfig(dtype="float32"), config)
    return found


def test_a_wrong_exchange_is_not_timed() -> None:
    ranks = launch(wrong_exchanges, num_ranks=2, device="cpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ranks[0] == ranks[1]
    for name, (_, _, told) in EXCHANGE_FAULTS.items():
        row = ranks[0][name]["rows"][0]
        assert (row["ok"], ranks[0][name]["ok"]) == (not told, not told)
        assert len(row["broken"]) == len(told)
        assert all(line.startswith(words) for line, words in zip(row["broken"], told, strict=True)), row["broken"]
        if told:
            assert len(ranks[0][name]["rows"]) == 1
            assert (set(row["figures"]), row["baselines"]) == ({"wire_bytes"}, {})
    assert [row["ok"] for row in ranks[0]["formats"]["rows"]] == [True] * 6
    for row in [*ranks[0]["none"]["rows"], *ranks[0]["formats"]["rows"]]:
        figures = row["figures"]
        times = {"dispatch_us", "combine_us", "sum_us"}
        assert set(figures) == times | {
            *("host_dispatch_us", "host_combine_us", "wire_bytes", "wire_gbs", "floor_share_ratio")
        }
        assert min(figures.values()) > 0
        assert figures["wire_gbs"] == pytest.approx(figures["wire_bytes"] / figures["sum_us"] * 1e6 / 1e9)
        assert figures["floor_share_ratio"] == pytest.approx(figures["wire_gbs"] / 370)
        assert set(row["baselines"]) == {"allgather_reducescatter", "all_to_all_single"}
        for theirs in row["baselines"].values():
            assert set(theirs) == times | {"speedup_ratio"}
            assert theirs["speedup_ratio"] == theirs["sum_us"] / figures["sum_us"]


@pytest.mark.parametrize("fault", ["none", "missing-row", "other-kernel"])
def test_a_graph_of_pairs_is_checked_and_its_kernels_are_told_apart(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport_bench, "is_timed", lambda device: True)
    monkeypatch.setattr(transport_bench, "capture", fake_capture(int(fault == "missing-row")))
    other, pairs = [("memset", 0.5)] if fault == "other-kernel" else [], transport_bench.MANY_PAIRS

    def kernels(call: Callable[[], object], group: EPGroup, *, repeats: int) -> list[tuple[str, float]]:
        return [("_dispatch_kernel", 30.0), ("_combine_rows", 12.0), ("_combine_sum", 8.0), *other] * pairs * repeats

    monkeypatch.setattr(exchanges, "profile_kernels", kernels)

    def clock(*args: Any, cold: bool, on_call: Callable[[], None] | None = None, **options: Any) -> list[float]:
        samples = time_calls(*args, cold=cold, on_call=on_call, **options)
        return samples if on_call else [50.0 * pairs + cold] * len(samples)

    monkeypatch.setattr(timing, "time_calls", clock)
    config = TransportBenchConfig(tokens=(20,), transport=("auto", "local"), **SMALL_POINT)
    report = transport_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="float32"), config)
    [row] = report["rows"]  # "auto" is "local", which is not measured twice
    assert row["setup"]["graph"]
    if fault == "missing-row":
        assert row["broken"] == ["rank 0: output of the graph: 1 of 20 differ"]
        assert set(row["figures"]) == {"wire_bytes"}
        return
    assert report["ok"]
    assert row["figures"]["sum_us"] == 50.0
    timed = (row["figures"]["dispatch_us"], row["figures"]["combine_us"])
    assert (timed == (30.0, 20.0)) == (fault == "none")
    assert (
        "by events of eager calls: kernels are not of one of dispatch, combine: memset" in capsys.readouterr().err
    ) == (fault == "other-kernel")


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_exchanges_on_gpus() -> None:
    config = TransportBenchConfig(tokens=(16, 600), transport=("auto", "collective"), repeats=3)
    report, _ = launch(transport_rank_main, EngineConfig(dtype="bfloat16"), config, num_ranks=2, device="cuda")
    assert report["ok"], [row["broken"] for row in report["rows"]]
    for row in report["rows"]:
        figures = row["figures"]
        assert 0 < figures["dispatch_us"] < 1e6
        assert 0 < figures["combine_us"] < 1e6
        assert 0 < figures["floor_share_ratio"] < 1.1
        assert set(row["baselines"]) == {"allgather_reducescatter", "all_to_all_single"}
        assert all(0 < us < 1e6 for theirs in row["baselines"].values() for us in theirs.values())


def exchange_rows(group: EPGroup) -> dict[str, torch.Tensor]:
    """The baselines' results on a rank of two, with payload and outputs that identify their source."""
    rank, sent, received = group.rank, ([1, 2], [3, 0])[group.rank], ([1, 3], [2, 0])[group.rank]
    rows = {name: torch.arange(n) for name, n in {"T": 2, "all": 4, "sent": 3, "got": sum(received)}.items()}
    payload = {
        name: (100 * rank + n).to(torch.uint8).unsqueeze(1).expand(-1, 5).contiguous() for name, n in rows.items()
    }
    y = {name: (100.0 * rank + n).unsqueeze(1).expand(-1, 3).contiguous() for name, n in rows.items()}
    gathered = by_collectives(group, payload["T"], y["all"])
    to_all = by_collectives(group, payload["sent"], y["got"], (sent, received))
    found = {}
    for name, exchange in {"gathered": gathered, "to_all": to_all}.items():
        found[f"{name}-out"], found[f"{name}-home"] = exchange.dispatch(), exchange.combine()
    return {name: tensor[:, -1].clone() for name, tensor in found.items()}


def test_baselines_bring_every_row_where_it_belongs() -> None:
    expected = [
        {"gathered-out": [0, 1, 100, 101], "gathered-home": [100, 102], "to_all-out": [0, 100, 101, 102]},
        {"gathered-out": [0, 1, 100, 101], "gathered-home": [104, 106], "to_all-out": [1, 2]},
    ]
    expected[0]["to_all-home"], expected[1]["to_all-home"] = [0, 100, 101], [1, 2, 3]
    for rank, found in enumerate(launch(exchange_rows, num_ranks=2, device="cpu")):
        assert {name: rows.tolist() for name, rows in found.items()} == expected[rank]


@pytest.mark.parametrize("name", ["uniform", "skewed", "one_rank"])
def test_routings_of_the_exchange(name: str) -> None:
    placement, generator = Placement.linear(32, 4), torch.Generator().manual_seed(1)
    routing = make_routing(name, placement, num_tokens=500, num_topk=4, generator=generator)
    ids = routing.topk_ids
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=32)
    share = {"uniform": counts.max() / counts.sum(), "skewed": counts[:4].sum() / counts.sum()}
    share["one_rank"] = counts[24:].sum() / counts.sum()
    low, high = {"uniform": (1 / 32, 2 / 32), "skewed": (0.5, 0.9), "one_rank": (1, 1)}[name]
    assert low <= share[name] <= high
    assert torch.allclose(routing.topk_weights.sum(1), torch.ones(500))
    assert routing.topk_weights.min() > 0


def test_an_exchange_has_the_sizes_of_a_preset() -> None:
    [point] = TransportBenchConfig(preset="qwen3-30b", tokens=(1,), num_topk=4).points
    assert (point.hidden, point.num_experts, point.num_topk) == (2048, 128, 4)
    assert TransportBenchConfig(tokens=(1,)).points == (TransportPoint(tokens=1, layout=Layout.COMPACT),)
    with pytest.raises(ValueError, match=r"preset \(qwen3-30b\) is set by suite 'standard'"):
        TransportBenchConfig(preset="qwen3-30b", suite="standard")


def test_the_standard_suite_changes_one_thing_at_a_time() -> None:
    points = TransportBenchConfig(suite="standard").points
    assert len(set(points)) == len(points) == 21
    assert [(point.tokens, point.layout.value) for point in points[:5]] == [
        *((tokens, "batched") for tokens in (1, 16, 128, 512)),
        (4096, "compact"),
    ]
    base = points[2]
    assert base == TransportPoint(tokens=128, hidden=7168, num_topk=8, num_experts=256, layout=Layout.BATCHED)
    changes = [
        {field.name: getattr(point, field.name)}
        for point in points[5:-4]
        for field in dataclasses.fields(point)
        if getattr(point, field.name) != getattr(base, field.name)
    ]
    assert changes == [
        {"layout": Layout.COMPACT},
        {"layout": Layout.FLAT},
        {"payload": "none"},
        *({"hidden": hidden} for hidden in (2048, 2880, 4096)),
        *({"num_topk": num_topk} for num_topk in (1, 4, 6, 10)),
        {"routing": "skewed"},
        {"graph": False},
    ]
    assert points[-4:] == tuple(dataclasses.replace(points[4], num_sms=number) for number in (16, 32, 64, 128))
    assert points[-1].config(torch.bfloat16).num_sms == 128
    assert [point.config(torch.bfloat16).max_tokens_per_rank for point in points[:2]] == [8, 16]
    # of 128 tokens about 0.9 go to each of 3 other ranks, which is 7.0 us and 13.4 us at 370 GB/s
    assert 128 * 0.9035 * 3 * base.row_bytes(torch.bfloat16) / 370e3 == pytest.approx(7.0, rel=0.01)


# The experts of one rank.


def test_bench_experts_and_its_rows(tmp_path: Path) -> None:
    options = ["--preset", "tiny", "--ep-size", "5", "--rows", "1", "--rows", "20", "--quant", "fp8_token"]
    more = ["--layout", "batched", "--repeats", "3", "--warmup", "1", "--sample-experts", "2"]
    done = bench("experts", *options, *more, "--append", "rows.jsonl", "--commit", "0123abc", cwd=tmp_path, ranks=())
    assert done.exit_code == 0, done.stderr
    assert "all results checked (worst row at most 0.03)" in done.stdout
    records = read_records(tmp_path)
    assert [record.shapes["rows_per_expert"] for record in records] == [1, 20]
    weight_bytes = 4 * (3 * 256 * 128 + 4 * (2 * 128 + 256))  # fp8, and a float32 scale of each row
    for record in records:
        counts = ExpertsBenchConfig(preset="tiny", ep_size=5).row_counts(int(record.shapes["rows_per_expert"]))
        assert counts.shape == (4,)
        assert counts.min() >= 1
        assert counts.max() <= 1.3 * record.shapes["rows_per_expert"]
        figures, secs = record.figures, record.figures["call_us"] * 1e-6
        assert figures["call_min_us"] <= figures["call_us"] <= figures["call_max_us"]
        assert figures["tflops"] == pytest.approx(2 * int(counts.sum()) * 256 * 128 * 3 / secs / 1e12)
        assert figures["weight_gbs"] == pytest.approx(weight_bytes / secs / 1e9)
        assert 1e-4 < figures["worst_row_error"] < 0.03
        assert (record.bench, record.world_size, record.baselines) == ("experts", 1, {})
        assert (record.shapes["num_local_experts"], record.setup["layout"]) == (4, "batched")
        assert (record.setup["scheme"], record.setup["experts"]) == ("fp8_token", "torch")
        assert (record.setup["warmup"], record.setup["repeats"]) == (1, 3)
        assert record.command == " ".join(["ep-moe bench experts", *options, *more, "--device cpu"])
    assert len(set(counts.tolist())) > 1  # of the 20


def measure_experts(dtype: str = "float32", scheme: str = "none", layout: str = "compact") -> dict[str, Any]:
    """The row of half of the preset "small", with the first and the last expert checked."""
    config = ExpertsBenchConfig(preset="small", ep_size=2, rows=(7,), warmup=1, repeats=1, sample_experts=2)
    report = experts_rank_main(EPGroup.single("cpu"), EngineConfig(dtype=dtype, scheme=scheme, layout=layout), config)
    [row] = report["rows"]
    assert report["ok"] == row["ok"]
    return row


def make_small(monkeypatch: pytest.MonkeyPatch, like: str) -> None:
    """Add the preset "small", 8 small experts, and let the baseline run on a CPU."""
    preset = LAYER_PRESETS[like]
    sizes = dataclasses.replace(preset.sizes, hidden=160, intermediate=48, num_experts=8)
    monkeypatch.setitem(LAYER_PRESETS, "small", dataclasses.replace(preset, sizes=sizes))
    monkeypatch.setattr(experts_alone, "has_grouped_gemm", lambda device: True)


@pytest.mark.parametrize("like", ["gpt-oss-120b", "qwen3-30b"])
def test_experts_and_grouped_gemm_are_checked(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, like)
    preset = LAYER_PRESETS["small"]
    for layout, dtype, scheme in (
        ("batched", "float32", "none"),
        ("compact", "bfloat16", "fp8_tensor"),
        ("flat", "bfloat16", "fp8_block"),
    ):
        row = measure_experts(dtype, scheme, layout)
        theirs = row["baselines"]["grouped_mm"]
        assert row["ok"], row
        assert 1e-3 < theirs["worst_row_error"] < 1e-2
        assert theirs["speedup_ratio"] == theirs["call_us"] / row["figures"]["call_us"]
        weights = 4 * (3 * 160 * 48 + (2 * 48 + 160 if preset.bias else 0)) * 2
        assert theirs["weight_gbs"] == pytest.approx(weights / theirs["call_us"] / 1e3)


EXPERTS_FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "expert": (RandomExperts, "local", louder_expert),
    "baseline": (grouped, "_activate", lambda sound: lambda *args: sound(*args) * 1.02),
    "oracle": (RandomExperts, "expected_output", not_a_number),
}


@pytest.mark.parametrize("name", EXPERTS_FAULTS)
def test_wrong_experts_are_not_timed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, "gpt-oss-120b")
    owner, attribute, fault = EXPERTS_FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    row = measure_experts()
    ours, theirs = row["figures"], row["baselines"]["grouped_mm"]
    assert not row["ok"]
    assert set(ours) == set(theirs) == {"worst_row_error"}
    assert (ours["worst_row_error"] <= 1e-5) == (name == "baseline")
    assert (theirs["worst_row_error"] <= 1e-2) == (name == "expert")

    monkeypatch.setattr(
        cli, "on_ranks", lambda target, *args: pkgutil.resolve_name(target)(EPGroup.single("cpu"), *args)
    )
    options = ["--preset", "small", "--ep-size", "2", "--rows", "3", "--append", str(tmp_path / "a.jsonl")]
    done = CliRunner().invoke(app, ["bench", "experts", *options, "--commit", "0123abc", "--dtype", "float32"])
    assert done.exit_code == 1
    assert "NOT OK: a result is wrong, it was not timed" in done.stdout
    told = re.findall(r"^(\w+) worst_row_error \((\S+)\) exceeds (\S+)$", done.stdout, re.MULTILINE)
    wrong = {"expert": [("ep_moe", "1e-05")], "baseline": [("grouped_mm", "0.01")]}
    both = [("ep_moe", "1e-05"), ("grouped_mm", "0.01")]
    assert [(who, limit) for who, _, limit in told] == wrong.get(name, both)
    assert not (tmp_path / "a.jsonl").exists()


# The model.


@pytest.mark.parametrize("num_ranks", [1, 2])
@needs_accelerate
def test_bench_model_of_another_architecture(num_ranks: int, tmp_path: Path) -> None:
    """Biases, a gate interleaved with up, transposed weights, a router of another name; and a single rank."""
    sizes = ["--preset", "tiny-gpt-oss", "--layers", "2", "--batch", "2", "--prompt-tokens", "6", "--new-tokens", "2"]
    done = bench(
        "model", *sizes, "--repeats", "1", "--dtype", "float32", cwd=tmp_path, ranks=("--nproc", str(num_ranks))
    )
    assert done.exit_code == 0, done.stderr
    assert "all results checked (worst row at most 1e-05)" in done.stdout


@needs_accelerate
def test_bench_model_and_its_row(tmp_path: Path) -> None:
    options = ["--preset", "tiny", "--layers", "2", "--batch", "2", "--prompt-tokens", "6", "--new-tokens", "4"]
    more = ["--repeats", "1", "--dtype", "float32", "--placement", "round_robin", *(["--hook"] if HAS_HOOK else [])]
    done = bench("model", *options, *more, "--append", "model.jsonl", "--commit", "0123abc", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "all results checked (worst row at most 1e-05)" in done.stdout
    [record] = read_records(tmp_path)
    others = {"transformers_ep"} | ({"transformers_ep_hook"} if HAS_HOOK else set())
    assert set(record.baselines) == others
    assert record.figures["worst_block_row_error"] < 1e-5
    for figures in (record.figures, *(record.baselines[name] for name in others - {"transformers_ep"})):
        assert figures["worst_first_logits_error"] < 1e-5
        assert figures["same_tokens_share"] == 1.0
    ran = {
        "baseline_dense": "replicated" if VERSION < (5, 19) else "tensor_parallel",
        "hook": HAS_HOOK,
        "nodes": 1,
        "repeats": 1,
    }
    assert {name: record.setup[name] for name in ran} == ran
    for figures in (record.figures, *record.baselines.values()):
        assert {"tokens_per_sec", "generate_secs", "prefill_ms", "decode_step_ms", "host_us"} < set(figures)
        assert figures["tokens_per_sec"] == 2 * 2 * 4 / figures["generate_secs"]
    assert record.command == " ".join(["ep-moe bench model", *options, *more, "--nproc 2 --device cpu"])
    assert not record.sweep


def louder_experts(model: Any) -> None:
    """An expert is 1 % too large."""
    model.ep_moe.layers[1].weights.w2.values[0] *= 1.01


def other_head(model: Any) -> None:
    """The rows of the head are reversed."""
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def other_attention(model: Any) -> None:
    """The output of attention is that of another model."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = 3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).to(weight)


def rotated_rows(model: Any) -> None:
    """Every rank gets the next rank's result rows."""
    layer, group = model.ep_moe.layers[0], model.ep_moe.group
    combine = layer.transport.combine

    def combine_wrongly(*args: Any, **options: Any) -> torch.Tensor:
        mine = combine(*args, **options)
        ranks = group.all_gather_object(mine.tolist())
        return mine.new_tensor(ranks[(group.rank + 1) % group.num_ranks])

    layer.transport.combine = combine_wrongly


# fault, its ranks, dtype, the bounds that it breaks
MODEL_FAULTS: dict[str, tuple[Callable[[Any], None], tuple[int, ...], str, set[str]]] = {
    "experts": (louder_experts, (1,), "float32", {"worst_block_row_error", "worst_first_logits_error"}),
    "head": (other_head, (1,), "bfloat16", {"median_first_logits_error"}),
    "attention": (other_attention, (0,), "float32", {"median_first_logits_error", "worst_first_logits_error"}),
    "rows": (rotated_rows, (0, 1), "bfloat16", {"worst_block_row_error", "median_first_logits_error"}),
}


def wrong_models(group: EPGroup) -> dict[str, dict[str, Any]]:
    """`bench model` with one fault after another in the model of ep_moe."""
    shard, found = model_bench.shard_experts, {}
    config = ModelBenchConfig(preset="tiny", layers=2, batch=2, prompt_tokens=4, new_tokens=2, repeats=1)
    for name, (fault, ranks, dtype, _) in MODEL_FAULTS.items():

        def shard_wrongly(
            model: Any, group: EPGroup, fault: Any = fault, ranks: tuple[int, ...] = ranks, **options: Any
        ) -> Any:
            shard(model, group, **options)
            if group.rank in ranks:
                fault(model)
            return model

        model_bench.shard_experts = shard_wrongly
        found[name] = model_rank_main(group, EngineConfig(dtype=dtype), config)
    model_bench.shard_experts = shard
    return found


@needs_accelerate
def test_a_wrong_model_is_not_timed(capfd: pytest.CaptureFixture[str]) -> None:
    for rank in launch(wrong_models, num_ranks=2, device="cpu", env={"CUDA_VISIBLE_DEVICES": ""}):
        for name, (_, _, _, bounds) in MODEL_FAULTS.items():
            [row] = rank[name]["rows"]
            assert not rank[name]["ok"]
            assert {line.split()[1] for line in row["broken"]} == bounds, name
            assert all(line.startswith("ep_moe ") for line in row["broken"])
            assert "tokens_per_sec" not in row["figures"]
        [row] = rank["experts"]["rows"]
        assert 1e-4 < row["figures"]["worst_block_row_error"] < 0.02
        assert row["baselines"]["transformers_ep"]["worst_block_row_error"] < 1e-5
    assert re.search(r"layers\.1\.mlp\.experts of ep_moe on rank \d has a row error of", capfd.readouterr().err)


def test_ranks_that_transformers_cannot_spread_a_model_over(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelBenchConfig(preset="qwen3-30b")
    for spreads in (False, True):
        monkeypatch.setattr(configs, "spreads_dense", lambda spreads=spreads: spreads)
        for num_ranks in (2, 4):
            assert config.why_no_baseline(num_ranks) == ""
        assert config.why_no_baseline(1) == ""
        config.check_ranks(3)
        with pytest.raises(ValueError, match=r"hook with nproc \(1\): .* at least 2"):
            dataclasses.replace(config, hook=True).check_ranks(1)
        with pytest.raises(ValueError, match=r"hook: nproc \(3\) does not divide the 128 experts of qwen3-30b"):
            dataclasses.replace(config, hook=True).check_ranks(3)
    assert config.why_no_baseline(8).startswith("nproc (8) does not divide the 4 KV heads of qwen3-30b: transformers 5")


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("reason", ["", "too many ranks"])
def test_our_model_is_right_beside_routers_that_choose_otherwise_and_alone(
    reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 4 has a token with two equal scores in bfloat16, of which transformers takes the higher expert."""
    monkeypatch.setattr(ModelBenchConfig, "why_no_baseline", lambda config, num_ranks: reason)
    config = ModelBenchConfig(preset="tiny", layers=5, batch=1, prompt_tokens=2, new_tokens=2, repeats=1)
    report = model_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="bfloat16"), config)
    [row] = report["rows"]
    assert row["broken"] == []
    assert row["figures"]["tokens_per_sec"] > 0
    assert set(row["baselines"]) == (set() if reason else {"transformers_ep"})
    assert row["left_out"] == ({"transformers_ep": reason} if reason else {})
    cli.show_rows(report)
    assert ("without transformers_ep: too many ranks\n" in capsys.readouterr().out) == bool(reason)


# The page.


def write_rows(folder: Path) -> list[Record]:
    """Rows of two layers, the first measured again later, a sweep, a model, experts, and an unknown bench."""
    tokens = {"preset": "tiny", "tokens_per_rank": 4096}
    model = {"preset": "qwen3-30b", "layers": 8}
    speed = {"tokens_per_sec": 1234.5}
    experts = {"preset": "tiny", "num_local_experts": 2, "rows_per_expert": 4}
    setup = {"dtype": "bfloat16", "scheme": "fp8_block", "experts": "triton", "layout": "compact"}
    kernels = {"call_us": 98.5, "tflops": 611.25, "weight_gbs": 4012.0}
    records = [
        make_record(),
        make_record(shapes=tokens),
        make_record(
            date="2026-11-23T01:00:00+02:00", figures=dict(make_record().figures) | {"call_us": 77.7}, commit="7777777"
        ),
        make_record(date="2026-11-22T22:00:00+00:00", commit="8888888"),
        make_record(date="2026-12-24T10:00:00+00:00", sweep=True, commit="5555555", shapes=tokens),
        make_record(bench="model", shapes=model, figures=speed, baselines={"transformers_ep": speed}),
        make_record(bench="wires", shapes={"wire_bytes": 16}, figures={"send_gbs": 345.6}, baselines={}),
        make_record(bench="experts", shapes=experts, setup=setup, figures=kernels, baselines={"grouped_mm": kernels}),
        make_record(
            bench="experts", shapes=experts | {"rows_per_expert": 64}, setup=setup, figures=kernels, baselines={}
        ),
    ]
    for record in records:
        append_records(folder / f"{record.bench}.jsonl", [record])
    shutil.copytree(ROOT / "docs" / "benchmarks" / "methods", folder / "methods")
    return records


def write_note(folder: Path, name: str, text: str) -> None:
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    (folder / "notes" / name).write_text(text)


def note(title: str) -> str:
    return f"# {title}\n\n## Question\nHow?\n\n## Method\nSo.\n\n### Twice\n\n## Result\nWhat no row says.\n"


def test_the_newest_row_that_counts(tmp_path: Path) -> None:
    records = write_rows(tmp_path)
    assert newest(records) == [records[2], records[1], *records[5:]]


@pytest.mark.parametrize("name", ["benchmarks", "measured"])
def test_the_page_and_its_drift(name: str, tmp_path: Path) -> None:
    folder, page = tmp_path / "docs" / name, tmp_path / "docs" / "BENCHMARKS.md"
    write_rows(folder)
    for file, title in (("2026-11-20-b.md", "Of then"), ("2026-11-21-b.md", "Of B"), ("2026-11-21-a-2.md", "Of A")):
        write_note(folder, file, note(title))
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(folder)])
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    assert re.findall(r"^##+ .*", text, re.MULTILINE) == [
        "## One MoE layer",
        "### tiny, 4 x Abacus 9",
        "## A whole model",
        "### qwen3-30b, 4 x Abacus 9",
        "## One rank's experts",
        "### tiny, 4 x Abacus 9",
        "## Wires",
        "### 4 x Abacus 9",
        "## Notes",
    ]
    assert "What no row says." not in text
    notes = [("2026-11-21", "Of A", "2026-11-21-a-2.md"), ("2026-11-21", "Of B", "2026-11-21-b.md")]
    notes.append(("2026-11-20", "Of then", "2026-11-20-b.md"))
    links = [(date, title, f"{name}/notes/{file}") for date, title, file in notes]
    assert re.findall(r"^- (\S+): \[(.*)\]\((.*)\)$", text, re.MULTILINE) == links
    assert "| 77.7 |" in text
    layer = text.partition("## A whole model")[0]
    assert "All rows: dtype bfloat16, scheme none, transport collective, implementation torch.\n" in layer
    assert re.findall(r"^\| (\d) \| (\S+) \| (\d+) \|", layer, re.MULTILINE) == [
        ("1", "2026-11-23", "128"),
        ("2", "2026-11-22", "4096"),
    ]
    assert "1. 2026-11-23, commit 7777777, torch 2.11.0: `ep-moe bench layer --tokens 128`\n" in layer
    assert "2. 2026-11-22, commit 0123abc, torch 2.11.0: `ep-moe bench layer --tokens 128`\n" in layer
    assert "8888888" not in text
    assert "5555555" not in text
    assert "| figures.send_gbs |" in text
    assert "shapes.wire_bytes 16, setup.dtype bfloat16" in text
    assert "| 345.6 |" in text
    assert [path.read_bytes()[:4] for path in sorted(folder.glob("*.png"))] == [b"\x89PNG"] * 3
    assert re.findall(r"!\[.*\]\((.*?)\)", text) == [f"{name}/{plot}.png" for plot in ("layer", "model", "experts")]
    assert f"from {name}/*.jsonl, notes/*.md and methods/*.md;" in text
    assert "dtype bfloat16, scheme fp8_block, implementation triton, layout compact." in text
    assert "| 1 | 2026-11-22 | 4 | 98.5 | 611.2 | 4,012 | 98.5 |" in text

    check = ["bench", "report", "--check", "--dir", str(folder)]
    assert CliRunner().invoke(app, check).exit_code == 0
    (folder / "model.png").rename(folder / "kept")
    assert CliRunner().invoke(app, check).exit_code == 1
    (folder / "kept").rename(folder / "model.png")
    assert CliRunner().invoke(app, check).exit_code == 0
    (folder / "notes" / "2026-11-21-b.md").rename(folder / "kept")
    assert CliRunner().invoke(app, check).exit_code == 1
    (folder / "kept").rename(folder / "notes" / "2026-11-21-b.md")
    assert CliRunner().invoke(app, check).exit_code == 0
    append_records(folder / "layer.jsonl", [make_record(date="2026-12-25T10:00:00+00:00")])
    done = CliRunner().invoke(app, check)
    assert done.exit_code == 1
    assert "differs from the page made from the rows" in done.stderr
    assert page.read_text() == text
    with open(folder / "layer.jsonl", "a") as file:
        file.write("{}\n")
    done = CliRunner().invoke(app, check)
    assert done.exit_code == 2
    assert "layer.jsonl:7: missing key bench" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("host-time.md", note("A"), "the name of a note is <date>-<topic>.md"),
        ("2026-11-21.md", note("A"), "the name of a note is <date>-<topic>.md"),
        ("2026-11-21-Host time.md", note("A"), "the name of a note is <date>-<topic>.md"),
        ("2026-11-21-a.md", note("A").replace("# A\n", ""), "a note is a title (# ...) and the sections"),
        ("2026-11-21-a.md", note("A").replace("## Method", "Method"), "a note is a title (# ...) and the sections"),
        ("2026-11-21-a.md", note("A") + "\n## Result\nMore.\n", "a note is a title (# ...) and the sections"),
        ("2026-11-21-a.md", "", "a note is a title (# ...) and the sections Question, Method, Result (## ...)"),
    ],
)
def test_a_note_that_is_not_one_is_named(name: str, text: str, error: str, tmp_path: Path) -> None:
    append_records(tmp_path / "rows" / "layer.jsonl", [make_record()])
    write_note(tmp_path / "rows", name, text)
    done = CliRunner().invoke(app, ["bench", "report", "--no-plots", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 2
    assert f"{name}: {error}" in done.stderr
    assert not (tmp_path / "BENCHMARKS.md").exists()


def test_a_method_without_a_title_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    (tmp_path / "rows" / "methods" / "layer.md").write_text("How it is measured.\n")
    done = CliRunner().invoke(app, ["bench", "report", "--no-plots", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 2
    assert "layer.md: a benchmark's text begins with a title (# ...)" in done.stderr
    assert not (tmp_path / "BENCHMARKS.md").exists()


def test_the_page_shows_the_exchange(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "rows"
    points = [(1, "batched", 16.6), (128, "batched", 43.7), (4096, "compact", 800.0), (128, "compact", 45.0)]
    records = [
        make_exchange_record(shapes={"tokens": tokens}, setup={"layout": layout}, figures={"sum_us": us})
        for tokens, layout, us in points
    ]
    records += [
        make_exchange_record(shapes={"hidden": 2048}, figures={"sum_us": 30.0}),
        make_exchange_record(setup={"routing": "skewed"}),
        make_exchange_record(setup={"graph": False}, figures={"host_dispatch_us": 61.25, "host_combine_us": 33.5}),
        make_exchange_record(world_size=2),
    ]
    append_records(folder / "transport.jsonl", records)
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(folder)])
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "docs" / "BENCHMARKS.md").read_text()
    assert re.findall(r"^##+ .*", text, re.MULTILINE) == ["## Transport", "### 4 x Abacus 9", "### 2 x Abacus 9"]
    assert "![Transport](rows/transport.png)" in text
    assert "All rows: transport nvlink, top-k 8, experts 256, payload fp8_block, dtype bfloat16, SMs 0, nodes 1" in text
    assert "| 1 | 2026-11-22 | 4096 | 7168 | compact | uniform | True | 20.5 | 25.5 | 800.0 |" in text
    assert "| 61.25 | 33.5 | 7,562,000 | 151.2 | 0.4088 | 40 | 60 | 99 | 1.98 |" in text

    drawn: dict[str, tuple[list[int], list[float]]] = {}

    class Axes:
        """Axes that record what is drawn."""

        def loglog(self, x: list[int], y: list[float], *args: Any, label: str, **options: Any) -> None:
            drawn[label] = (list(x), list(y))

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: None

    plots.plot_rows(Axes(), records)
    assert list(drawn) == ["nvlink", "allgather_reducescatter, beside nvlink", "all_to_all_single, beside nvlink"]
    assert drawn["nvlink"] == ([1, 128, 4096], [16.6, 43.7, 800.0])


def test_without_matplotlib_the_mend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 1
    assert "plots need matplotlib: pip install 'ep-moe[bench]'" in done.stderr
    assert not (tmp_path / "BENCHMARKS.md").exists()
    for mode in ("--no-plots", "--check"):  # the page without plots shows none, and none is missing
        assert CliRunner().invoke(app, ["bench", "report", "--dir", str(tmp_path / "rows"), mode]).exit_code == 0
    assert "](" not in (tmp_path / "BENCHMARKS.md").read_text()


def test_a_row_that_cannot_be_plotted_is_named(tmp_path: Path) -> None:
    append_records(tmp_path / "rows" / "layer.jsonl", [make_record(), make_record(commit="7777777", baselines={})])
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 2
    assert "commit 7777777, has no baselines.allgather_reducescatter.call_us to plot" in done.stderr
    assert not (tmp_path / "BENCHMARKS.md").exists()


def test_a_call_without_phases_is_one_bar() -> None:
    bars: dict[int, list[float]] = {}

    class Axes:
        """Axes that record bars."""

        def barh(self, place: int, width: float, **options: Any) -> None:
            bars.setdefault(place, []).append(width)

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: None

    record = make_record()
    record.baselines["micro_batches"] = {"call_us": 500.0}
    plots.plot_rows(Axes(), [record])
    assert bars == {0: [0.4] * 4, 1: [1.0] * 4, 2: [2.0]}


def test_labels_say_in_what_rows_differ() -> None:
    setup = {"dtype": "bfloat16", "transport": "collective", "layout": "flat"}
    rows = [
        make_record(setup=setup),
        make_record(setup=setup | {"layout": "compact"}),
        make_record(setup=setup, world_size=8),
    ]
    labels = plots.row_labels(rows, {"shapes.preset": "", "shapes.tokens_per_rank": " tokens"})
    assert labels == [f"tiny, 128 tokens, layout {a}, ranks {b}" for a, b in (("flat", 4), ("compact", 4), ("flat", 8))]


def test_the_page_of_this_repository_is_what_its_rows_make() -> None:
    assert make_report(ROOT / "docs" / "benchmarks", check=True, plots=False)["ok"], "run: ep-moe bench report"


# Arguments.

WRONG = {
    "no-commit": (["layer", "--append", "a.jsonl"], "append needs --commit"),
    "bad-commit": (["layer", "--append", "a.jsonl", "--commit", "HEAD"], "commit ('HEAD') is not 7 to 40 hex digits"),
    "no-append": (["model", "--sweep"], "--commit and --sweep require --append"),
    "suffix": (["model", "--append", "a.json", "--commit", "0123abc"], "append ('a.json') must end in .jsonl"),
    "folder": (
        ["layer", "--append", f"{__file__}/a.jsonl", "--commit", "0123abc"],
        f"append ('{__file__}/a.jsonl') cannot be written",
    ),
    "trace": (["layer", "--trace", f"{__file__}/t.json"], f"trace ('{__file__}/t.json') cannot be written"),
    "preset": (["layer", "--preset", "huge"], "preset ('huge') is not one of deepseek-v3, qwen3-235b"),
    "tokens": (["layer", "--tokens", "0"], "tokens ((0,)) must be one or more numbers of at least 1"),
    "routing": (["layer", "--routing", "odd"], "routing ('odd') is not one of uniform, skewed"),
    "hidden": (["layer", "--hidden", "100"], "hidden (100) must be a positive multiple of 16"),
    "num_topk": (["layer", "--preset", "mixtral", "--num-topk", "9"], "num_topk (9) exceeds num_experts (8)"),
    "rows": (["experts", "--rows", "0"], "rows ((0,)) must be one or more numbers of at least 1"),
    "ep_size": (["experts", "--preset", "tiny", "--ep-size", "17"], "ep_size (17) exceeds the 16 experts of tiny"),
    "scheme": (["experts", "--quant", "auto"], "scheme ('auto') is not one of none"),
    "layer-scheme": (["layer", "--quant", "auto"], "scheme ('auto') is not one of none"),
    "graph": (["layer", "--graph", "--device", "cpu"], "a CUDA graph needs a GPU for each rank"),
    "one-rank": (
        ["model", "--nproc", "1", "--hook"],
        "hook with nproc (1): transformers' own expert parallelism needs",
    ),
    "odd-ranks": (["model", "--nproc", "3", "--hook"], "hook: nproc (3) does not divide the 128 experts of qwen3-30b"),
    "exchange-preset": (["transport", "--preset", "huge"], "preset ('huge') is not one of deepseek-v3, qwen3-235b"),
    "repeats": (["layer", "--repeats", "0"], "repeats (0) must be at least 1"),
    "new_tokens": (["model", "--new-tokens", "1"], "new_tokens (1) must be at least 2"),
    "baseline": (["model", "--baseline-experts", "fast"], "baseline_experts ('fast') is not one of grouped_mm"),
    "transport": (["layer", "--transport", "pigeon"], "transport ('pigeon') is not one of auto"),
    "exchange-tokens": (["transport", "--tokens", "0"], "tokens (0) must be at least 1"),
    "exchange-hidden": (["transport", "--hidden", "100"], "hidden (100) must be a positive multiple of 16"),
    "exchange-topk": (["transport", "--num-topk", "9", "--num-experts", "8"], "num_topk (9) is not in [1, num_experts"),
    "payload": (["transport", "--payload", "fp7"], "scheme ('fp7') is not one of none, fp8_tensor"),
    "exchange-routing": (["transport", "--routing", "odd"], "routing ('odd') is not one of uniform, skewed, one_rank"),
    "exchange-transport": (["transport", "--transport", "pigeon"], "transport ('pigeon') is not one of auto, local"),
    "suite": (["transport", "--suite", "huge"], "suite ('huge') is not one of standard"),
    "beside-suite": (
        ["transport", "--suite", "standard", "--hidden", "64"],
        "hidden (64) is set by suite 'standard'; leave it out",
    ),
    "one_rank": (
        ["transport", "--routing", "one_rank", "--num-experts", "31", "--nproc", "4"],
        "routing 'one_rank': num_topk (8) exceeds the 7 experts of the last of 4 ranks",
    ),
    "untimed": (
        ["transport", "--device", "cpu", "--append", "a.jsonl", "--commit", "0123abc"],
        "append on a CPU needs --sweep: nothing is timed there",
    ),
    "dir": (["report", "--dir", "no/such"], "directory ('no/such') is not a directory"),
}


def no_ranks(*args: Any) -> None:
    """Fail if ranks are started: errors must come before."""
    raise AssertionError(f"ranks start for {args}")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_told_with_exit_code_2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, message = WRONG[name]
    monkeypatch.setattr(cli, "on_ranks", no_ranks)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_the_help_offers_no_scheme_that_is_refused() -> None:
    group: Any = typer.main.get_command(app)
    for name in ("layer", "experts"):
        [option] = [option for option in group.commands["bench"].commands[name].params if option.name == "scheme"]
        assert set(re.findall(r"[a-z0-9_]+", option.help.partition(":")[2])) == set(QUANT_SCHEMES)
    [option] = [option for option in group.commands["bench"].commands["transport"].params if option.name == "payload"]
    assert set(re.findall(r"[a-z0-9_]+", option.help.partition(":")[2])) == set(QUANT_SCHEMES)


def append_a_layer(folder: Path, *options: str) -> Any:
    """`bench layer --append` in this process."""
    words = ["bench", "layer", "--preset", "tiny", "--tokens", "2", "--repeats", "1", "--warmup", "1", "--nproc", "1"]
    return CliRunner().invoke(app, [*words, "--append", str(folder / "a.jsonl"), "--commit", "0123abc", *options])


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the only rank in this process."""
    monkeypatch.setattr(
        cli, "on_ranks", lambda target, *args: pkgutil.resolve_name(target)(EPGroup.single("cpu"), *args)
    )


@pytest.mark.usefixtures("one_rank")
def test_rows_that_cannot_be_written_in_the_end_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, records: list[Record]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "append_records", full_disk)
    done = append_a_layer(tmp_path / "new")
    assert done.exit_code == 1
    assert "cannot be written: [Errno 28] No space left on device; the rows are:\n" in done.stderr
    row = Record.from_line(done.stderr.strip().splitlines()[-1], "stderr")
    assert row.shapes["tokens_per_rank"] == 2
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_interpreted_rows_are_sweeps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    done = append_a_layer(tmp_path)
    assert done.exit_code == 2
    assert "append under TRITON_INTERPRET needs --sweep" in done.stderr
    assert append_a_layer(tmp_path, "--sweep").exit_code == 0
    [record] = read_records(tmp_path)
    assert record.sweep


def test_a_row_of_torchrun_is_repeated_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": 0,
        "WORLD_SIZE": 16,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 8,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 29500,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    repeated = cli._repeatable(["bench", "layer", "--json", "--append", "a.jsonl", "--trace=t.json", "--graph"])
    assert repeated == "torchrun --nnodes 2 --nproc-per-node 8 -m ep_moe bench layer --graph"


def test_defaults_have_the_sizes_of_the_models() -> None:
    layer, model = LayerBenchConfig(), ModelBenchConfig()
    assert (layer.preset, layer.tokens) == ("deepseek-v3", (128, 4096))
    sizes = layer.moe(EngineConfig(scheme="none"))
    assert (sizes.hidden, sizes.intermediate, sizes.num_experts) == (7168, 2048, 256)
    assert (model.preset, model.layers) == ("qwen3-30b", 8)
    config = model_bench.transformers_config(model)
    assert (config.hidden_size, config.moe_intermediate_size, config.num_experts) == (2048, 768, 128)
