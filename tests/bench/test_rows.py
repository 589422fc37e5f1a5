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
from ep_moe.report.page import MADE_BY, make_report
from ep_moe.report.records import FIELDS, Record, append_records, newest, read_records
from ep_moe.report.summaries import Summary

ROOT = Path(__file__).parents[2]


PHASES = ("route", "dispatch", "experts", "combine")


PHASE_FIGURES = {"call_us", "graph_call_us", *(f"{phase}_us" for phase in PHASES), "tokens_per_sec"}


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
        "setup": {
            "dtype": "bfloat16",
            "scheme": "fp8_block",
            "transport": "peer",
            "experts": "torch",
            "graph": True,
            "layout": "compact",
            "routing": "uniform",
        },
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
    older = content | {"setup": content["setup"] | {"transport": "nvlink"}}
    assert Record.from_line(json.dumps(older), "here") == make_record()
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
    words = {"transport": "peer", "layout": "batched", "payload": "fp8_block", "dtype": "bfloat16", "graph": True}
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
    model = {"preset": "qwen3-30b", "layers": 8, "sequences_per_rank": 16}
    whole = {"graph": True, "hook": False}
    speed = {"tokens_per_sec": 1234.5}
    experts = {"preset": "tiny", "num_local_experts": 2, "rows_per_expert": 16}
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
        make_record(bench="model", shapes=model, setup=whole, figures=speed, baselines={"transformers_ep": speed}),
        make_record(bench="wires", shapes={"wire_bytes": 16}, figures={"send_gbs": 345.6}, baselines={}),
        make_record(bench="experts", shapes=experts, setup=setup, figures=kernels, baselines={"grouped_mm": kernels}),
        make_record(
            bench="experts",
            shapes=experts | {"rows_per_expert": 512},
            setup=setup,
            figures=kernels,
            baselines={"grouped_mm": kernels | {"call_us": 49.25}},
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
    folder, page = tmp_path / "docs" / "measured", tmp_path / "docs" / "BENCHMARKS.md"
    write_rows(folder)
    (folder / "archive").mkdir()
    (folder / "archive" / "2026-11-20-b.md").write_text(note("Of then"))
    (folder / "topics").mkdir()
    for file, title in (("b.md", "Exchange"), ("a.md", "Tiles")):
        (folder / "topics" / file).write_text(f"# {title}\n\n| tried | gave |\n|---|---|\n")
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(folder)])
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    assert re.findall(r"^##+ .*", text, re.MULTILINE) == [
        *("## One MoE layer", "### How it is measured", "## A whole model", "### How it is measured"),
        *("## One rank's experts", "### How it is measured", "## Wires", "## What was tried"),
    ]
    assert "What no row says." not in text
    topics = [("Exchange", "measured/topics/b.md"), ("Tiles", "measured/topics/a.md")]
    assert re.findall(r"^- \[(.*)\]\((.*)\)$", text, re.MULTILINE) == topics
    assert "| 4 | tiny | uniform | 128 | 100.0 | 250.0 | 2.50 | 7777777 |" in text
    assert "| 4 | 512 | 98.5 | 49.25 | 0.50 (slower) | 0123abc |" in text
    assert "tiny, fp8_block, Abacus 9, 2026-11-22. 1 figure below 1: slower.\n" in text
    assert "Abacus 9, 2026-11-23. Nothing here is slower than its baseline.\n" in text
    assert not re.search("8888888|5555555", text)
    assert [path.read_bytes()[:4] for path in sorted(folder.glob("*.png"))] == [b"\x89PNG"] * 3
    assert re.findall(r"!\[.*\]\((.*?)\)", text) == [f"measured/{plot}.png" for plot in ("layer", "model", "experts")]
    assert "from measured/*.jsonl, methods/*.md and topics/*.md;" in text

    results = {path.stem: path.read_text() for path in (folder / "results").glob("*.md")}
    assert set(results) == {"layer", "model", "experts", "wires"}
    assert all(f"[{count} rows](measured/results/{name}.md)" in text for name, count in (("layer", 2), ("wires", 1)))
    layer = results["layer"]
    assert layer.startswith("# One MoE layer: all rows\n")
    assert "## tiny, 4 x Abacus 9\n" in layer
    assert "All rows: dtype bfloat16, scheme fp8_block, transport peer, implementation torch, layout compact," in layer
    assert re.findall(r"^\| (\d) \| (\S+) \| (\d+) \|", layer, re.MULTILINE) == [
        ("1", "2026-11-23", "128"),
        ("2", "2026-11-22", "4096"),
    ]
    assert "1. 2026-11-23, commit 7777777, torch 2.11.0: `ep-moe bench layer --tokens 128`\n" in layer
    assert "2. 2026-11-22, commit 0123abc, torch 2.11.0: `ep-moe bench layer --tokens 128`\n" in layer
    assert "| 77.7 |" in layer
    assert not re.search("8888888|5555555", layer)
    assert "| figures.send_gbs |" in results["wires"]
    assert "| 345.6 |" in results["wires"]
    assert "dtype bfloat16, scheme fp8_block, implementation triton, layout compact." in results["experts"]

    check = ["bench", "report", "--check", "--dir", str(folder)]
    assert CliRunner().invoke(app, check).exit_code == 0
    for missing in (folder / "model.png", folder / "topics" / "b.md", folder / "results" / "layer.md"):
        missing.rename(folder / "kept")
        assert CliRunner().invoke(app, check).exit_code == 1
        (folder / "kept").rename(missing)
    (folder / "results" / "old.md").write_text(f"of a bench without rows\n{MADE_BY}rows -->\n")
    done = CliRunner().invoke(app, check)
    assert (done.exit_code, "old.md differs from the page made from the rows" in done.stderr) == (1, True)
    assert CliRunner().invoke(app, ["bench", "report", "--no-plots", "--dir", str(folder)]).exit_code == 0
    assert not (folder / "results" / "old.md").exists()
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


def test_files_of_others_stay(tmp_path: Path) -> None:
    page, other, layer = tmp_path / "BENCHMARKS.md", tmp_path / "rows" / "results" / "notes.md", "layer.jsonl"
    call = ["bench", "report", "--no-plots", "--dir", str(tmp_path / "rows")]
    other.parent.mkdir(parents=True)
    for path in (page, other):
        path.write_text("by hand\n")
        done = CliRunner().invoke(app, call)
        assert (done.exit_code, "rows') has no rows" in done.stderr) == (2, True)
        append_records(tmp_path / "rows" / layer, [make_record()])
        done = CliRunner().invoke(app, call)
        assert (done.exit_code, f"{path} was not made by" in done.stderr) == (2, True)
        assert path.read_text() == "by hand\n"
        assert not (other.parent / "layer.md").exists()
        path.unlink()
        (tmp_path / "rows" / layer).unlink()
    assert not page.exists()


NAME, SECTIONS = "the name of a note is <date>-<topic>.md", "a note is a title (# ...) and the sections"
WRONG_TEXTS = [
    ("archive/host-time.md", note("A"), NAME),
    ("archive/2026-11-21.md", note("A"), NAME),
    ("archive/2026-11-21-Host time.md", note("A"), NAME),
    ("archive/2026-11-21-a.md", note("A").replace("# A\n", ""), SECTIONS),
    ("archive/2026-11-21-a.md", note("A").replace("## Method", "Method"), SECTIONS),
    ("archive/2026-11-21-a.md", note("A") + "\n## Result\nMore.\n", SECTIONS),
    ("archive/2026-11-21-a.md", "", f"{SECTIONS} Question, Method, Result (## ...)"),
    ("methods/layer.md", "How it is measured.\n", "a benchmark's text begins with a title (# ...)"),
    ("topics/tiles.md", "Tiles.\n", "a topic begins with a title (# ...)"),
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


class Axes:
    """Axes that record what is drawn."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[int], list[float]]] = {}
        self.bars: dict[int, tuple[float, bool]] = {}
        self.texts: list[str] = []

    def plot(self, x: list[int], y: list[float], *args: Any, **options: Any) -> None:
        if "label" in options:
            self.lines[options["label"]] = (list(x), list(y))

    def barh(self, place: int, width: float, *, hatch: str | None, **options: Any) -> None:
        self.bars[place] = (width, hatch is not None)

    def annotate(self, text: str, *args: Any, **options: Any) -> None:
        self.texts.append(text)

    def set_title(self, text: str, **options: Any) -> None:
        self.texts.append(text)

    def __getattr__(self, name: str) -> Any:
        return Axes() if name == "spines" else lambda *args, **options: None

    def __getitem__(self, names: Any) -> "Axes":
        return self


def test_the_summary_of_the_exchange() -> None:
    points = [(1, "batched", 16.5), (128, "batched", 44.0), (4096, "compact", 110.0), (4096, "flat", 99.0)]
    records = [
        make_exchange_record(shapes={"tokens": tokens}, setup={"layout": layout}, figures={"sum_us": us})
        for tokens, layout, us in points
    ]
    left_out = [
        make_exchange_record(shapes={"hidden": 2048}, figures={"sum_us": 30.0}),
        make_exchange_record(setup={"routing": "skewed"}),
        make_exchange_record(setup={"graph": False}, figures={"host_dispatch_us": 61.25, "host_combine_us": 33.5}),
        make_exchange_record(date="2026-11-01T10:00:00+00:00", gpu="Abacus 8"),
        make_exchange_record(date="2026-11-21T10:00:00+00:00", commit="7777777", setup={"layout": "compact"}),
    ]
    two = make_exchange_record(world_size=2)
    two.baselines.pop("all_to_all_single")
    summary = Summary.of("transport")
    rows = summary.choose([*left_out, *records, two])
    assert rows == [two, *records]
    assert summary.theirs(two, "all_to_all_single") is summary.ratio(two, "all_to_all_single") is None
    axes = Axes()
    plots.plot_rows(axes, rows, summary)
    gathered, exchanged = (f"beside {title}" for title in summary.baselines.values())
    assert list(axes.lines) == [f"2 GPUs, {gathered}", f"4 GPUs, {gathered}", f"4 GPUs, {exchanged}"]
    assert axes.lines[f"4 GPUs, {gathered}"] == ([1, 128, 4096], [6.0, 2.25, 0.9])
    assert axes.texts.count("0.90, 4 GPUs") == 2


def test_without_matplotlib_the_mend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(app, ["bench", "report", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 1
    assert "plots need matplotlib: pip install 'ep-moe[bench]'" in done.stderr
    assert not (tmp_path / "BENCHMARKS.md").exists()
    for mode in ("--no-plots", "--check"):  # the page without plots shows none, and none is missing
        assert CliRunner().invoke(app, ["bench", "report", "--dir", str(tmp_path / "rows"), mode]).exit_code == 0
    assert "![" not in (tmp_path / "BENCHMARKS.md").read_text()


def test_a_row_without_a_baseline_is_among_all_rows_alone(tmp_path: Path) -> None:
    alone = make_record(commit="7777777", baselines={}, shapes={"preset": "tiny", "tokens_per_rank": 1})
    append_records(tmp_path / "rows" / "layer.jsonl", [make_record(), alone])
    done = CliRunner().invoke(app, ["bench", "report", "--no-plots", "--dir", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.stderr
    assert "7777777" not in (tmp_path / "BENCHMARKS.md").read_text()
    assert "commit 7777777" in (tmp_path / "rows" / "results" / "layer.md").read_text()
    assert Summary.of("layer").choose([alone]) == []


def test_bars_that_lose_are_marked() -> None:
    slow = dict(make_record().figures) | {"graph_call_us": 500.0}
    records = [
        make_record(),
        make_record(shapes={"preset": "tiny", "tokens_per_rank": 1}, figures=slow),
        make_record(shapes={"preset": "tiny", "tokens_per_rank": 1}, figures=slow, world_size=2),
    ]
    summary, axes = Summary.of("layer"), Axes()
    rows = summary.choose(records)
    plots.plot_rows(axes, rows, summary)
    assert axes.bars == {0: (0.5, True), 1: (0.5, True), 2: (2.5, False)}
    assert axes.texts[0] == "0.50x  (500.0 beside 250.0 us)  slower"
    assert axes.texts[-1] == "One MoE layer in a CUDA graph, tiny, uniform, Abacus 9"
    labels = ["2 GPUs, 1 token per rank", "4 GPUs, 1 token per rank", "4 GPUs, 128 tokens per rank"]
    assert summary.labels(rows) == ("tiny, uniform", labels)
    many = [make_record(shapes={"preset": "tiny", "tokens_per_rank": n}) for n in range(1, 20)]
    axes = Axes()
    plots.plot_rows(axes, summary.choose(many), summary)
    assert len(axes.bars) == len(many)


@pytest.mark.parametrize(
    ("bench", "most"),
    [("layer", 12), ("transport", 13), ("model", 12), ("experts", 12), ("engine", 13), ("engine_serve", 24)],
)
def test_the_summaries_of_this_repository_are_small(bench: str, most: int) -> None:
    rows = Summary.of(bench).choose([row for row in read_records(ROOT / "docs" / "benchmarks") if row.bench == bench])
    assert 6 <= len(rows) <= most
    assert len({row.gpu for row in rows}) == 1


def test_the_page_of_this_repository_is_what_its_rows_make() -> None:
    assert make_report(ROOT / "docs" / "benchmarks", check=True, plots=False)["ok"], "run: ep-moe bench report"
