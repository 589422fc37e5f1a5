"""Rows of benchmarks: written and read, and the page and plots made from them."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_moe.cli import app
from ep_moe.report import plots
from ep_moe.report.page import make_report, newest
from ep_moe.report.records import FIELDS, Record, append_records, read_records

ROOT = Path(__file__).parents[2]


PHASES = ("route", "dispatch", "experts", "combine")


PHASE_FIGURES = {"call_us", *(f"{phase}_us" for phase in PHASES), "tokens_per_sec"}


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
    words = {"transport": "nvlink", "layout": "batched", "payload": "fp8_block", "dtype": "bfloat16", "graph": True}
    words |= {"routing": "uniform", "num_sms": 0, "nodes": 1, "seed": 0, "warmup": 5, "repeats": 20}
    times = {"dispatch_us": 20.5, "combine_us": 25.5, "sum_us": 50.0}
    rates = {"wire_bytes": 7562000.0, "wire_gbs": 151.2, "floor_share_ratio": 0.4088}
    shapes = {"tokens": 128, "hidden": 7168, "num_topk": 8, "num_experts": 256}
    parts: dict[str, dict[str, Any]] = {"shapes": shapes, "setup": words, "figures": times | rates}
    for name, values in parts.items():
        values.update(changes.pop(name, {}))
    baselines = {"allgather_reducescatter": nccl, "all_to_all_single": nccl}
    return make_record(**{"bench": "transport", "baselines": baselines, **parts} | changes)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    nested = [make_record(), make_record(bench="kernels", figures={"copy_gbs": 4300, "tile_count": 3}, baselines={})]
    flat = [make_exchange_record(), make_exchange_record(figures={"host_dispatch_us": 12.5})]
    append_records(tmp_path / "new" / "a.jsonl", flat)
    append_records(tmp_path / "new" / "a.jsonl", nested)
    assert read_records(tmp_path / "new") == [*flat, *nested]
    first, second, *others = map(json.loads, (tmp_path / "new" / "a.jsonl").read_text().splitlines())
    assert [list(line) for line in others] == [list(FIELDS)] * 2
    assert set(first) == CONTRACT | {"nodes", "seed", "warmup", "repeats"}
    assert (first["tokens"], first["graph"], first["sum_us"]) == (128, True, 50.0)
    assert first["baselines"]["all_to_all_single"]["speedup_ratio"] == 1.98
    assert set(second) - set(first) == {"host_dispatch_us"}


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


def note(title: str) -> str:
    return f"# {title}\n\n## Question\nHow?\n\n## Method\nSo.\n\n### Twice\n\n## Result\nWhat no row says.\n"


def test_the_newest_row_that_counts(tmp_path: Path) -> None:
    records = write_rows(tmp_path)
    assert newest(records) == [records[2], records[1], *records[5:]]


def test_the_page_and_its_drift(tmp_path: Path) -> None:
    name = "measured"
    folder, page = tmp_path / "docs" / name, tmp_path / "docs" / "BENCHMARKS.md"
    write_rows(folder)
    (folder / "notes").mkdir()
    for file, title in (("2026-11-20-b.md", "Of then"), ("2026-11-21-b.md", "Of B"), ("2026-11-21-a-2.md", "Of A")):
        (folder / "notes" / file).write_text(note(title))
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
    for missing in (folder / "model.png", folder / "notes" / "2026-11-21-b.md"):
        missing.rename(folder / "kept")
        assert CliRunner().invoke(app, check).exit_code == 1
        (folder / "kept").rename(missing)
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


NAME, SECTIONS = "the name of a note is <date>-<topic>.md", "a note is a title (# ...) and the sections"
WRONG_TEXTS = [
    ("notes/host-time.md", note("A"), NAME),
    ("notes/2026-11-21.md", note("A"), NAME),
    ("notes/2026-11-21-Host time.md", note("A"), NAME),
    ("notes/2026-11-21-a.md", note("A").replace("# A\n", ""), SECTIONS),
    ("notes/2026-11-21-a.md", note("A").replace("## Method", "Method"), SECTIONS),
    ("notes/2026-11-21-a.md", note("A") + "\n## Result\nMore.\n", SECTIONS),
    ("notes/2026-11-21-a.md", "", f"{SECTIONS} Question, Method, Result (## ...)"),
    ("methods/layer.md", "How it is measured.\n", "a benchmark's text begins with a title (# ...)"),
]


@pytest.mark.parametrize(("name", "text", "error"), WRONG_TEXTS)
def test_a_wrong_note_or_method_is_named(name: str, text: str, error: str, tmp_path: Path) -> None:
    append_records(tmp_path / "rows" / "layer.jsonl", [make_record()])
    (tmp_path / "rows" / name).parent.mkdir()
    (tmp_path / "rows" / name).write_text(text)
    done = CliRunner().invoke(app, ["bench", "report", "--no-plots", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 2
    assert f"{name.partition('/')[2]}: {error}" in done.stderr
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
