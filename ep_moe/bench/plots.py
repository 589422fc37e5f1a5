"""Plots of measured rows, with matplotlib, which `pip install ep-moe[bench]` installs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_moe.bench.layer import BASELINE, OURS, PHASES
from ep_moe.bench.records import Record

WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.45, 120
LINES_HEIGHT = 12  # of a line plot, in units of bars
COLOURS = ("#9aa5b1", "#2f6fb0", "#d98324", "#4d9a5b")  # of the phases


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw one PNG for each bench that has a plot and rows; returns their paths.

    Errors: ValueError names a row that lacks a plotted figure; RuntimeError if matplotlib is missing. Local.
    """
    drawn = []
    for bench, plot in PLOTS.items():
        rows = [record for record in records if record.bench == bench]
        if rows:
            path = directory / f"{bench}.png"
            _save(plot, rows, path)
            drawn.append(path)
    return drawn


def _save(plot: Callable[[Any, Sequence[Record]], int], rows: Sequence[Record], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "plots need matplotlib: pip install 'ep-moe[bench]', or leave them out (--no-plots)"
        ) from error
    figure = Figure(layout="constrained", dpi=DPI)
    bars = plot(figure.add_subplot(), rows)
    figure.set_size_inches(WIDTH_INCHES, 1.5 + ROW_INCHES * bars)
    figure.savefig(path, metadata={"Software": None})  # no version: equal figures make equal files


def _bars(axes: Any, labels: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)


def _value(record: Record, path: str) -> Any:
    """The value at a path such as "baselines.grouped_mm.tflops"."""
    part, *names = path.split(".")
    value: Any = getattr(record, part)
    for name in names:
        if name not in value:
            raise ValueError(f"the row of {record.bench}, {record.date}, commit {record.commit}, has no {path} to plot")
        value = value[name]
    return value


def _labels(rows: Sequence[Record], paths: Mapping[str, str]) -> list[str]:
    """A label for each row: the values at `paths`, each followed by its unit, and other values in which rows differ."""
    words = [_words(record) for record in rows]
    shown = {path.partition(".")[2] for path in paths}
    others = [name for name in dict.fromkeys(name for entry in words for name in entry) if name not in shown]
    differ = [name for name in others if len({str(entry.get(name)) for entry in words}) > 1]
    labels = []
    for record, entry in zip(rows, words, strict=True):
        given = [f"{_value(record, path)}{counted}" for path, counted in paths.items()]
        labels.append(", ".join([*given, *(f"{name} {entry[name]}" for name in differ if name in entry)]))
    return labels


def _words(record: Record) -> Mapping[str, Any]:
    return {**record.shapes, **record.setup, "ranks": record.world_size, "on": record.gpu}


def plot_layer(axes: Any, rows: Sequence[Record]) -> int:
    """Stacked phases of each layer, then of its baseline, over the baseline's call time. Returns the number of bars."""
    labels: list[str] = []
    work = _labels(rows, {"shapes.preset": "", "shapes.tokens_per_rank": " tokens", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        one = _value(record, f"baselines.{BASELINE}.call_us")
        for name, part in {OURS: "figures", BASELINE: f"baselines.{BASELINE}"}.items():
            left = 0.0
            for phase, color in zip(PHASES, COLOURS, strict=True):
                width = _value(record, f"{part}.{phase}_us") / one
                axes.barh(len(labels), width, left=left, color=color, label=None if labels else phase)
                left += width
            whole = _value(record, f"{part}.call_us")
            axes.plot(whole / one, len(labels), "k|", markersize=14, label=None if labels else "whole call")
            labels.append(f"{what}:\n{name}, {whole:,.0f} us")
    axes.legend(fontsize=8)
    _bars(axes, labels, f"time / whole call of {BASELINE}")
    return len(labels)


def plot_model(axes: Any, rows: Sequence[Record]) -> int:
    """Tokens per second of each model, then of its baselines. Returns the number of bars."""
    labels: list[str] = []
    work = _labels(rows, {"shapes.preset": "", "shapes.layers": " layers", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        for index, name in enumerate((OURS, *record.baselines)):
            path = f"baselines.{name}.tokens_per_sec" if index else "figures.tokens_per_sec"
            axes.barh(len(labels), _value(record, path), color=COLOURS[0] if index else COLOURS[1])
            labels.append(f"{what}:\n{name}")
    _bars(axes, labels, "tokens per second")
    return len(labels)


def plot_experts(axes: Any, rows: Sequence[Record]) -> int:
    """TFLOP/s against rows: memory bounds the slopes, arithmetic the plateaus. Returns the height in bars."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    # rows per expert are the x axis, so they must not separate lines
    same = [dataclasses.replace(record, shapes={**record.shapes, "rows_per_expert": 0}) for record in rows]
    work = _labels(same, {"shapes.preset": "", "shapes.num_local_experts": " experts", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        count = int(_value(record, "shapes.rows_per_expert"))
        for name in (str(_value(record, "setup.experts")), *record.baselines):
            path = f"baselines.{name}.tflops" if name in record.baselines else "figures.tflops"
            lines.setdefault(what, {}).setdefault(name, {})[count] = _value(record, path)
    styles = ("o-", "x--", "+:")
    for index, (what, names) in enumerate(lines.items()):
        for style, (name, line) in zip(styles, names.items(), strict=False):
            points = sorted(line.items())
            axes.loglog(*zip(*points, strict=True), style, color=f"C{index}", markersize=4, label=f"{what}: {name}")
    measured = sorted({int(record.shapes["rows_per_expert"]) for record in rows})
    axes.set_xticks(measured, [str(number) for number in measured])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("rows of an average expert")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return LINES_HEIGHT


def plot_transport(axes: Any, rows: Sequence[Record]) -> int:
    """Latency of a pair against tokens: most ranks, uniform routing, COMPACT or BATCHED. Returns the height in bars.

    A line joins rows that differ only in tokens and layout, the first row for each number of tokens; lines of a single
    point are left out if there are others.
    """
    most = max(record.world_size for record in rows)
    lines: dict[str, dict[int, Record]] = {}
    for record in rows:
        packed = _value(record, "setup.layout") in ("batched", "compact")
        if record.world_size == most and _value(record, "setup.routing") == "uniform" and packed:
            line = lines.setdefault(_without_tokens(record).configuration, {})
            line.setdefault(int(_value(record, "shapes.tokens")), record)
    drawn = [line for line in lines.values() if len(line) > 1] or list(lines.values())
    labels = _labels([_without_tokens(next(iter(line.values()))) for line in drawn], {"setup.transport": ""})
    for index, (what, line) in enumerate(zip(labels, drawn, strict=True)):
        points = sorted(line.items())
        names = list(dict.fromkeys(name for _, record in points for name in record.baselines))
        for style, name in zip(("o-", "x--", "+:"), (OURS, *names), strict=False):
            path = "figures.sum_us" if name == OURS else f"baselines.{name}.sum_us"
            xy = [(tokens, _value(record, path)) for tokens, record in points]
            label = what if name == OURS else f"{name}, beside {what}"
            axes.loglog(*zip(*xy, strict=True), style, color=f"C{index}", markersize=4, label=label)
    measured = sorted({tokens for line in drawn for tokens in line})
    axes.set_xticks(measured, [str(tokens) for tokens in measured])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"tokens of each of {most} ranks")
    axes.set_ylabel("dispatch and combine, us")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return LINES_HEIGHT


def _without_tokens(record: Record) -> Record:
    """The row without its number of tokens and its layout, which do not separate lines."""
    return dataclasses.replace(record, shapes={**record.shapes, "tokens": 0}, setup={**record.setup, "layout": "any"})


PLOTS: dict[str, Callable[[Any, Sequence[Record]], int]] = {
    "layer": plot_layer,
    "transport": plot_transport,
    "model": plot_model,
    "experts": plot_experts,
}
