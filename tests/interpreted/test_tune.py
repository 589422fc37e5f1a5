"""The search for tiles, on the CPU by Triton's interpreter, whose times mean nothing but are times."""

import dataclasses
import json
import logging
import math
import statistics
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ep_moe.config import EngineConfig
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.prepared import choose_backend
from ep_moe.experts.tile_tables import find_table, log_once, table_name, tiles_of_json, tiles_to_json
from ep_moe.experts.triton import TritonGemms
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles
from ep_moe.tune import problem as problem_module
from ep_moe.tune import run, search
from ep_moe.tune.candidates import neighbours
from ep_moe.tune.config import TuneConfig
from ep_moe.tune.journal import Journal, Trial
from ep_moe.tune.problem import Problem, tuned_backends
from interpreted.common import ON_CPU

pytestmark = pytest.mark.skipif(not ON_CPU, reason="the problems of these tests are on the CPU")
HOPPER_US = 9.5  # of the best tiles; Triton's take 10
ENGINE = EngineConfig(dtype="float32", scheme="fp8_block", device="cpu")
CONFIG = TuneConfig(preset="tiny", ep_size=8, rows=(4, 40))
SIZES = run.Sizes(moe=CONFIG.moe(ENGINE), engine=ENGINE, num_experts=2, bias=False, seed=0)


def cost(tiles: ExpertTiles) -> float:
    """A time that has one least value for each backend: microseconds of tiles, as a GPU might have them."""
    if tiles.backend == "hopper":
        return HOPPER_US + abs(math.log2(tiles.group_m / 32))
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
    tried = [number for number, line in enumerate(lines) if line.startswith('{"trial"')][:5]
    journal.write_text("\n".join(lines[: tried[-1] + 1]) + '\n{"trial": {"rows"')  # killed while it wrote
    checked.clear()
    assert run.tune(ENGINE, config)["rows"][0]["us"] == 10
    kept = [tiles_of_json(json.loads(lines[number])["trial"]["tiles"], "journal") for number in tried]
    assert not set(kept) & set(checked)


def test_measures_what_an_earlier_run_has_compiled(
    tmp_path: Path, measured: list[ExpertTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Problem, "error", lambda self, tiles: 0.0)
    config = dataclasses.replace(CONFIG, out=tmp_path)
    compiled = run.tune(ENGINE, dataclasses.replace(config, stage="compile"))
    assert (compiled["rows"], measured) == ([], [])
    assert not Path(compiled["table"]).exists()
    assert compiled["compiled"] > 8
    report = run.tune(ENGINE, dataclasses.replace(config, stage="measure"))
    assert report["compiled"] == compiled["compiled"] >= len(set(measured))
    assert [row["complete"] for row in report["rows"]] == [False, False]  # the best lie farther away
    assert all(row["us"] < row["default_us"] for row in report["rows"])
    assert all(row["us"] > 10 for row in report["rows"])
    assert [row["us"] for row in run.tune(ENGINE, config)["rows"]] == [10, 10]
    rows = run.tune(ENGINE, dataclasses.replace(config, stage="check", rows=(3, 40)))[
        "rows"
    ]  # with the table of 4 and 40
    assert [(row["us"], row["default_us"]) for row in rows] == [(10, 14), (10, 14)]


def test_computes_what_it_times(tmp_path: Path) -> None:
    """With the true oracle: the default passes, and tiles whose rows are not written, or wrong, are refused."""
    problem = Problem(SIZES, torch.device("cpu"))
    problem.set_rows(4)
    (tiles,) = problem.choices()
    assert tiles.backend == "triton"
    assert problem.error(tiles) <= problem.limit
    problem._weights.w2.values.view(torch.uint8)[1, 5] ^= 1 << 6
    assert not problem.error(tiles) <= problem.limit
    around = list(neighbours(tiles, problem.shape))
    assert len(around) == len(set(around)) > 8
    assert tiles not in around
    for other in around:
        assert 128 % other.first.block_k == 128 % other.second.block_k == 0  # no step crosses a scale
    assert statistics.fmean(problem.times(tiles, 1)) > 0


class Gemms(TritonGemms):
    """Stands for Hopper's kernels, which the interpreter does not run: Triton's under another name."""

    name = "hopper"

    def tiles(self, shape: CallShape, wanted: ExpertTiles | None = None, source: str = "") -> ExpertTiles | None:
        if wanted is not None and wanted.backend == self.name:
            return wanted
        return HOPPER_TILES if shape.expected_rows >= 64 else None

    def default_tiles(self, shape: CallShape) -> ExpertTiles:
        return HOPPER_TILES

    def obstacle(self, shape: CallShape) -> str | None:
        return "they take no biases" if shape.hidden == 512 else None


BOTH = Gemms(), TritonGemms()


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "tuned_backends", lambda name, device: BOTH)


@pytest.mark.usefixtures("two_backends")
def test_measures_both_backends_and_writes_which_is_faster(
    tmp_path: Path, measured: list[ExpertTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the true oracle on the first calls of both backends; only the clock is made up."""
    error, checked = Problem.error, list[str]()

    def first_errors(self: Problem, tiles: ExpertTiles) -> float:
        checked.append(tiles.backend)
        return error(self, tiles) if checked.count(tiles.backend) == 1 else 0.0

    monkeypatch.setattr(Problem, "error", first_errors)
    config = dataclasses.replace(CONFIG, out=tmp_path, rows=(4,))
    report = run.tune(ENGINE, config)
    best = dataclasses.replace(HOPPER_TILES, group_m=32)
    (row,) = report["rows"]
    assert (row["backend"], row["us"], row["complete"], row["refused"]) == ("hopper", HOPPER_US, True, 0)
    assert json.loads(Path(report["table"]).read_text()) == {"4": {"backend": "hopper", "GROUP_SIZE_M": 32}}
    assert {tiles.backend for tiles in measured} == {"hopper", "triton"}
    assert cost(min((tiles for tiles in measured if tiles.backend == "triton"), key=cost)) == 11  # tiles of 16 rows
    measured.clear()
    assert run.tune(ENGINE, config) == report
    assert measured == []
    problem = Problem(SIZES, torch.device("cpu"))
    problem.set_rows(4)
    backend, tiles = choose_backend(problem.shape, BOTH, tmp_path)
    assert (backend.name, tiles) == ("hopper", best)
    assert error(problem, best) <= problem.limit


@pytest.mark.usefixtures("two_backends")
def test_the_default_backend_stays_unless_another_is_faster(
    tmp_path: Path, measured: list[ExpertTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Problem, "error", lambda self, tiles: 0.0)
    monkeypatch.setattr(sys.modules[__name__], "HOPPER_US", 9.95)  # less than 1 % below Triton's best
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path, rows=(4, 80)))
    few, many = report["rows"]
    assert [row["backend"] for row in (few, many)] == ["hopper", "hopper"]
    assert (few["us"], many["us"]) == (9.95, 9.95)  # the defaults are far slower
    monkeypatch.setattr(sys.modules[__name__], "HOPPER_US", 10.05)
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path / "other", rows=(80,)))
    assert report["rows"][0]["backend"] == "triton"
    monkeypatch.setattr(problem_module.Problem, "times", lambda self, tiles, repeats: [10.0 - tiles.group_m / 1e3])
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path / "third", rows=(80,)))
    table = json.loads(Path(report["table"]).read_text())
    assert table == {"80": {"backend": "hopper", "GROUP_SIZE_M": 8}}  # others gain half a percent


@pytest.mark.usefixtures("two_backends")
def test_the_time_is_shared_by_the_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial takes a second: the search ends when the time does, and has tried both backends."""
    now = [0.0]

    def times(self: Problem, tiles: ExpertTiles, repeats: int) -> Sequence[float]:
        now[0] += 1
        return [cost(tiles)] * repeats

    monkeypatch.setattr(Problem, "times", times)
    monkeypatch.setattr(Problem, "error", lambda self, tiles: 0.0)
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    for module in (run, search):
        monkeypatch.setattr(module, "time", clock)
    report = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path, rows=(4,), minutes=0.25))
    (row,) = report["rows"]
    assert (row["complete"], row["backend"], row["us"]) == (False, "hopper", HOPPER_US)
    assert 15 <= row["tried"] <= 17
    finished = run.tune(ENGINE, dataclasses.replace(CONFIG, out=tmp_path, rows=(4,), minutes=5))
    assert finished["rows"][0]["complete"]
    assert finished["rows"][0]["tried"] > row["tried"]


def test_hopper_s_tiles_are_those_of_its_kernels() -> None:
    arguments = pytest.importorskip("ep_moe.kernels.hopper.arguments", reason="this Triton has no Gluon")
    assert HOPPER_TILES.block_m == arguments.ROWS.value
    assert HOPPER_TILES.first.block_n == HOPPER_TILES.second.block_n == arguments.HALF_N.value


def test_a_table_s_backend_that_cannot_run_is_left_for_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem = Problem(SIZES, torch.device("cpu"))
    moe = SIZES.moe
    path = tmp_path / "cpu" / table_name(moe.intermediate, moe.hidden, "cpu", "fp8_block")
    path.parent.mkdir()
    problem.set_rows(80)
    (default,) = problem.choices()
    few = tiles_to_json(dataclasses.replace(default, group_m=2))
    path.write_text(json.dumps({"16": few, "64": {"backend": "hopper", "GROUP_SIZE_M": 4}}))
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="ep_moe.experts"):
        for _ in range(2):
            backend, tiles = choose_backend(problem.shape, BOTH[1:], tmp_path)
            assert (backend.name, dataclasses.replace(tiles, backend="triton")) == ("triton", default)
    reason = f"{path}: backend 'hopper' is not used, defaults are: these experts compute by 'triton' kernels"
    assert caplog.messages == [f"expert kernels take {path}", reason]
    chosen = []
    for rows in (9, 17, 80):
        problem.set_rows(rows)
        backend, tiles = choose_backend(problem.shape, BOTH, tmp_path)
        chosen.append((backend.name, tiles.group_m))
    assert chosen == [("triton", 2), ("hopper", 4), ("hopper", 4)]
    wide = dataclasses.replace(problem.shape, hidden=512)
    other = tmp_path / "cpu" / table_name(moe.intermediate, 512, "cpu", "fp8_block")
    other.write_text(path.read_text())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ep_moe.experts"):
        backend, _ = choose_backend(wide, BOTH, tmp_path)
    assert backend.name == "hopper"  # by default, as many rows are
    assert caplog.messages[1] == f"{other}: backend 'hopper' is not used, defaults are: they take no biases"
    with pytest.raises(ValueError, match="tiles are for backend 'hopper': these experts compute by 'triton' kernels"):
        choose_backend(problem.shape, BOTH[1:], HOPPER_TILES)


def test_which_experts_are_tuned() -> None:
    cpu = torch.device("cpu")
    assert [[one.name for one in tuned_backends(name, cpu)] for name in ("auto", "triton")] == [["triton"]] * 2
    with pytest.raises(RuntimeError, match=r"experts 'hopper' need a GPU of compute capability \(9, 0\)"):
        tuned_backends("hopper", cpu)
    with pytest.raises(ValueError, match=r"experts \('torch'\) is not one of auto, triton, hopper"):
        tuned_backends("torch", cpu)


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
    default = Problem(SIZES, torch.device("cpu"))
    default.set_rows(1)
    (tiles,) = default.choices()
    Journal(path, {"gpu": "one"}).add(Trial(rows=1, tiles=tiles, us=2.0))
    whole, inode = path.read_text(), path.stat().st_ino
    assert Journal(path, {"gpu": "one"}).trials[1, tiles].us == 2.0
    assert path.stat().st_ino == inode  # not written anew
    for wrong in ("5", '{"trial": 5}', '{"trial": {"rows": 1}}', '{"trial": {"rows": 1, "ti'):
        path.write_text(f"{whole}{wrong}\n")
        assert len(Journal(path, {"gpu": "one"}).trials) == 1
        assert path.read_text() == whole
    assert not Journal(path, {"gpu": "other"}).trials
