"""`ep-moe bench layer`: results are checked before they are timed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benches import bench, fake_capture, louder_expert, not_a_number

from ep_moe.bench import harness
from ep_moe.bench import layer as layer_bench
from ep_moe.bench import model as model_bench
from ep_moe.bench.configs import LayerBenchConfig, ModelBenchConfig
from ep_moe.bench.gathered import GatheredMoE
from ep_moe.bench.layer import layer_rank_main
from ep_moe.bench.presets import MODEL_PRESETS
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.report.records import read_records
from ep_moe.testing.random_experts import RandomExperts

PHASES = ("route", "dispatch", "experts", "combine")


PHASE_FIGURES = {"call_us", *(f"{phase}_us" for phase in PHASES), "tokens_per_sec"}


HOST_FIGURES = {"host_us", *(f"host_{phase}_us" for phase in PHASES)}


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
    options = ["--preset", "tiny", "--tokens", "5", "--repeats", "1", "--warmup", "1"]
    done = bench("layer", *options, "--trace", "new/trace.json", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert re.search(r"host us, median.*\n.*\n *route +\S+ +\S+ *\n *dispatch ", done.stdout)
    found = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    ranges: list[list[dict[str, Any]]] = []
    for rank in range(2):
        host = [event for event in found if event["ph"] == "X" and named[event["pid"], event["tid"]] == "host"]
        ranges.append([event for event in host if event["pid"] == rank and event["cat"] == "user_annotation"])
    calls = [f"5 tokens, call {number}" for number in (1, 2, 3)]
    wanted = [name for call in calls for name in (call, *PHASES)]
    assert [[event["name"] for event in events] for events in ranges] == [wanted] * 2
    for call in range(len(calls)):  # no rank combines before all have dispatched: the ranks' times are of one clock
        _, _, dispatch, _, combine = zip(*(events[5 * call : 5 * call + 5] for events in ranges), strict=True)
        assert max(event["ts"] for event in dispatch) < min(event["ts"] + event["dur"] for event in combine)
        assert min(event["dur"] for event in (*dispatch, *combine)) > 0


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


def lost_row(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The baseline loses this rank's first token."""

    def scatter(self: GatheredMoE, y: torch.Tensor) -> torch.Tensor:
        out = sound(self, y)
        out[0] = 0
        return out

    return scatter


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
