"""`ep-moe bench experts`, `formats` and `calls`: results are checked before they are timed."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.benches import bench, louder_expert, not_a_number
from torch.nn.functional import grouped_mm
from typer.testing import CliRunner

from ep_moe.bench import calls, experts_alone, grouped
from ep_moe.bench.calls import calls_rank_main
from ep_moe.bench.configs import CALL_CASES, CallsBenchConfig, ExpertsBenchConfig, FormatsBenchConfig
from ep_moe.bench.experts_alone import experts_rank_main
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.cli import app
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.report.records import read_records
from ep_moe.testing.random_experts import RandomExperts


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
        assert counts.max() <= 1.3 / 0.7 * record.shapes["rows_per_expert"]
        assert abs(int(counts.sum()) - 4 * record.shapes["rows_per_expert"]) <= 2  # rounded one by one
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


@pytest.mark.usefixtures("one_rank")
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

    options = ["--preset", "small", "--ep-size", "2", "--rows", "3", "--append", str(tmp_path / "a.jsonl")]
    done = CliRunner().invoke(app, ["bench", "experts", *options, "--commit", "0123abc", "--dtype", "float32"])
    assert done.exit_code == 1
    assert "NOT OK: a result is wrong, it was not timed" in done.stdout
    told = re.findall(r"^(\w+) worst_row_error \((\S+)\) exceeds (\S+)$", done.stdout, re.MULTILINE)
    wrong = {"expert": [("ep_moe", "1e-05")], "baseline": [("grouped_mm", "0.01")]}
    both = [("ep_moe", "1e-05"), ("grouped_mm", "0.01")]
    assert [(who, limit) for who, _, limit in told] == wrong.get(name, both)
    assert not (tmp_path / "a.jsonl").exists()


def test_formats_are_the_experts_in_each_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, "gpt-oss-120b")
    schemes = ("none", "int8_token", "mxfp8")
    config = FormatsBenchConfig(preset="small", ep_size=4, rows=(2, 5), schemes=schemes, warmup=1, repeats=1)
    report = experts_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="bfloat16", scheme="none"), config)
    assert report["ok"], [row["broken"] for row in report["rows"]]
    found = [(row["setup"]["scheme"], row["shapes"]["rows_per_expert"]) for row in report["rows"]]
    assert found == list(itertools.product(schemes, (2, 5)))
    assert {row["shapes"]["counts"] for row in report["rows"]} == {"even"}
    with pytest.raises(ValueError, match=r"scheme \('fp7'\) is not one of"):
        FormatsBenchConfig(schemes=("none", "fp7"))


def call_report(case: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of all calls on small layers."""
    preset = LAYER_PRESETS[CALL_CASES[case][0]]
    sizes = dataclasses.replace(preset.sizes, hidden=256, intermediate=128, num_experts=16)
    monkeypatch.setitem(LAYER_PRESETS, CALL_CASES[case][0], dataclasses.replace(preset, sizes=sizes))
    config = CallsBenchConfig(case=(case,), tokens=(5,), others=True, warmup=1, repeats=1)
    return calls_rank_main(EPGroup.single("cpu"), EngineConfig(), config)


@pytest.mark.parametrize("case", CALL_CASES)
def test_calls_of_other_libraries(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = call_report(case, monkeypatch)
    assert report["ok"], report["rows"][-1]
    for row in report["rows"]:
        assert row["baselines"]["torch"]["speedup_ratio"] > 0
        assert {"call_us", "host_us", "host_in_a_row_us", "worst_row_error"} < set(row["figures"])


def test_a_wrong_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, which ends the run."""
    monkeypatch.setattr(calls, "grouped_mm", lambda *args, **options: 2 * grouped_mm(*args, **options))
    [row] = call_report(next(iter(CALL_CASES)), monkeypatch)["rows"]
    assert not row["ok"]
    assert "call_us" not in row["figures"]
