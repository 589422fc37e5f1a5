"""The search for tiles, on the CPU by Triton's interpreter, whose times mean nothing but are times."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ep_moe.config import EngineConfig
from ep_moe.experts.tile_tables import find_table, tiles_of_json
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.tune import run
from ep_moe.tune.candidates import neighbours
from ep_moe.tune.config import TuneConfig
from ep_moe.tune.journal import Journal, Trial
from ep_moe.tune.problem import Problem

ENGINE = EngineConfig(dtype="float32", scheme="fp8_block", device="cpu")
CONFIG = TuneConfig(preset="tiny", ep_size=8, rows=(4, 40))


def cost(tiles: ExpertTiles) -> float:
    """A time that has one least value: microseconds of tiles, as a GPU might have them."""
    gemms = (tiles.first, 64), (tiles.second, 128)
    widths = sum(abs(math.log2(gemm.block_n / best)) + abs(gemm.num_stages - 2) for gemm, best in gemms)
    return 10 + widths + abs(math.log2(tiles.block_m / 32))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ExpertTiles]:
    """Replaces the clock by `cost`; the tiles that were timed."""
    tiles_timed: list[ExpertTiles] = []

    def times(self: Problem, tiles: ExpertTiles, repeats: int) -> Sequence[float]:
        tiles_timed.append(tiles)
        return [cost(tiles)] * repeats

    monkeypatch.setattr(Problem, "times", times)
    return tiles_timed


def test_finds_the_fastest_and_goes_on_where_it_was(
    tmp_path: Path, measured: list[ExpertTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[ExpertTiles] = []
    monkeypatch.setattr(Problem, "error", lambda self, tiles: checked.append(tiles) or 0.0)
    config = dataclasses.replace(CONFIG, out=tmp_path, rows=(40,))
    report = run.tune(ENGINE, config)
    table = find_table(128, 256, torch.device("cpu"), "fp8_block", tmp_path)
    assert table is not None
    assert report["table"] == table.source
    best = table.choose(40)
    assert (best.block_m, best.first.block_n, best.second.block_n) == (32, 64, 128)
    assert (best.first.num_stages, best.second.num_stages) == (2, 2)
    (row,) = report["rows"]
    assert (row["us"], row["complete"], row["refused"]) == (10, True, 0)
    assert row["default_us"] > 10
    assert set(measured) <= set(checked)  # nothing is timed that was not compared with the oracle
    assert len(checked) == len(set(checked)) == row["tried"]
    measured.clear()
    assert run.tune(ENGINE, config) == report
    assert measured == []  # all is in the journal
    journal = Path(report["journal"])
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:6]) + '\n{"trial": {"rows"')  # killed while it wrote
    checked.clear()
    assert run.tune(ENGINE, config)["rows"][0]["us"] == 10
    kept = [tiles_of_json(json.loads(line)["trial"]["tiles"], "journal") for line in lines[1:6]]
    assert not set(kept) & set(checked)


def test_computes_what_it_times(tmp_path: Path) -> None:
    """With the true oracle: the default passes, and tiles whose rows are not written, or wrong, are refused."""
    problem = Problem(
        run.Sizes(moe=CONFIG.moe(ENGINE), engine=ENGINE, num_experts=2, bias=False, seed=0), torch.device("cpu")
    )
    problem.set_rows(4)
    tiles = problem.experts(None).choose_tiles(problem.shape)
    assert problem.error(tiles) <= problem.limit
    problem._weights.w2.values.view(torch.uint8)[1, 5] ^= 1 << 6
    assert not problem.error(tiles) <= problem.limit
    around = list(neighbours(tiles, problem.shape, 227 * 1024))
    assert len(around) == len(set(around)) > 8
    assert tiles not in around
    for other in around:
        assert 128 % other.first.block_k == 128 % other.second.block_k == 0  # no step crosses a scale
    assert statistics.fmean(problem.times(tiles, 1)) > 0


def test_refuses_the_wrong_ones(tmp_path: Path, measured: list[ExpertTiles], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "error", lambda self, tiles: 1.0 if tiles.first.block_n == 64 else 0.0)
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path, rows=(40,)))
    assert report["rows"][0]["refused"] > 0
    table = json.loads(Path(report["table"]).read_text())
    assert table["40"]["first"]["BLOCK_SIZE_N"] != 64
    entries = [json.loads(line) for line in Path(report["journal"]).read_text().splitlines()]
    wrong = [entry["trial"] for entry in entries if entry.get("trial", {}).get("why")]
    assert all("worst row error (1) exceeds" in trial["why"] and "us" not in trial for trial in wrong)


def test_a_short_time_keeps_the_default(tmp_path: Path, measured: list[ExpertTiles]) -> None:
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path, minutes=1e-6))
    assert [row["complete"] for row in report["rows"]] == [False, False]
    assert all(row["speedup_ratio"] >= 1 for row in report["rows"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minutes": 0.0}, r"minutes \(0.0\) is not above 0"),
        ({"rows": (16, 4)}, r"rows \(16, 4\) do not ascend"),
        ({"ep_size": 17}, r"ep_size \(17\) exceeds the 16 experts of tiny"),
        ({"preset": "huge"}, r"preset \('huge'\) is not one of"),
    ],
)
def test_wrong_options(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]


def test_the_journal_of_another_gpu_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    default = Problem(
        run.Sizes(moe=CONFIG.moe(ENGINE), engine=ENGINE, num_experts=1, bias=False, seed=0), torch.device("cpu")
    )
    default.set_rows(1)
    tiles = default.experts(None).choose_tiles(default.shape)
    Journal(path, {"gpu": "one"}).add(Trial(rows=1, tiles=tiles, us=2.0))
    assert Journal(path, {"gpu": "one"}).trials[1, tiles].us == 2.0
    assert not Journal(path, {"gpu": "other"}).trials
