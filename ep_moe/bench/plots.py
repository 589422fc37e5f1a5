"""Plots of measured rows, with matplotlib, which `pip install ep-moe[bench]` installs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_moe.bench.harness import GATHERED, OURS, PHASES
from ep_moe.bench.records import Record

WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.45, 120
LINES_HEIGHT = 12  # of a line plot, in units of bars
COLOURS = ("#9aa5b1", "#2f6fb0", "#d98324", "#4d9a5b")  # of the phases
STYLES = ("o-", "x--", "+:")  # of ours and of its baselines


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw one PNG for each bench that has a plot and rows; returns their paths.

    Errors: ValueError names a row that lacks a plotted figure; RuntimeError if matplotlib is missing. Local.
    """
    drawn = []
    for bench, plot in PLOTS.items():
        rows = [record for record in records if record.bench == bench]
        if rows:
            drawn.append(directory / f"{bench}.png")
            _save(plot, rows, drawn[-1])
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


def _bars(axes: Any, labels: Sequence[str], unit: str) -> int:
    """Finish a plot of one bar for each label; returns their number."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    return len(labels)


def _lines(axes: Any, lines: Mapping[str, Mapping[str, Mapping[int, float]]], x: str, y: str) -> int:
    """Draw lines of points (x -> y) by label, those of one group in one color; returns the height in bars.

    Args:
        lines: group -> label -> points. x, y: names of the axes.
    """
    for index, group in enumerate(lines.values()):
        for style, (label, points) in zip(STYLES, group.items(), strict=False):
            xy = zip(*sorted(points.items()), strict=True)
            axes.loglog(*xy, style, color=f"C{index}", markersize=4, label=label)
    measured = sorted({place for group in lines.values() for points in group.values() for place in points})
    axes.set_xticks(measured, [str(place) for place in measured])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return LINES_HEIGHT


def _value(record: Record, path: str) -> Any:
    """The value at a path such as "baselines.grouped_mm.tflops", which the row must have."""
    value = record.value(path)
    if value == "":
        raise ValueError(f"the row of {record.bench}, {record.date}, commit {record.commit}, has no {path} to plot")
    return value


def _figure_of(record: Record, name: str, figure: str) -> Any:
    """A figure of a baseline, or of ours for any other name."""
    return _value(record, f"baselines.{name}.{figure}" if name in record.baselines else f"figures.{figure}")


def _labels(rows: Sequence[Record], paths: Mapping[str, str]) -> list[str]:
    """A label for each row: the values at `paths`, each followed by its unit, and other values in which rows differ."""
    words = [{**row.shapes, **row.setup, "ranks": row.world_size, "on": row.gpu} for row in rows]
    shown = {path.partition(".")[2] for path in paths}
    others = [name for name in dict.fromkeys(name for entry in words for name in entry) if name not in shown]
    differ = [name for name in others if len({str(entry.get(name)) for entry in words}) > 1]
    labels = []
    for record, entry in zip(rows, words, strict=True):
        given = [f"{_value(record, path)}{counted}" for path, counted in paths.items()]
        labels.append(", ".join([*given, *(f"{name} {entry[name]}" for name in differ if name in entry)]))
    return labels


def plot_layer(axes: Any, rows: Sequence[Record]) -> int:
    """Stacked phases of each layer, then of its baseline, over the baseline's call time. Returns the number of bars."""
    labels: list[str] = []
    work = _labels(rows, {"shapes.preset": "", "shapes.tokens_per_rank": " tokens", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        one = _value(record, f"baselines.{GATHERED}.call_us")
        for name in (OURS, GATHERED):
            left = 0.0
            for phase, color in zip(PHASES, COLOURS, strict=True):
                width = _figure_of(record, name, f"{phase}_us") / one
                axes.barh(len(labels), width, left=left, color=color, label=None if labels else phase)
                left += width
            whole = _figure_of(record, name, "call_us")
            axes.plot(whole / one, len(labels), "k|", markersize=14, label=None if labels else "whole call")
            labels.append(f"{what}:\n{name}, {whole:,.0f} us")
    axes.legend(fontsize=8)
    return _bars(axes, labels, f"time / whole call of {GATHERED}")


def plot_model(axes: Any, rows: Sequence[Record]) -> int:
    """Tokens per second of each model, then of its baselines. Returns the number of bars."""
    labels: list[str] = []
    work = _labels(rows, {"shapes.preset": "", "shapes.layers": " layers", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        for name in (OURS, *record.baselines):
            color = COLOURS[1] if name == OURS else COLOURS[0]
            axes.barh(len(labels), _figure_of(record, name, "tokens_per_sec"), color=color)
            labels.append(f"{what}:\n{name}")
    return _bars(axes, labels, "tokens per second")


def plot_experts(axes: Any, rows: Sequence[Record]) -> int:
    """TFLOP/s against rows: memory bounds the slopes, arithmetic the plateaus. Returns the height in bars."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    # rows per expert are the x axis, so they must not separate lines
    same = [dataclasses.replace(record, shapes={**record.shapes, "rows_per_expert": 0}) for record in rows]
    work = _labels(same, {"shapes.preset": "", "shapes.num_local_experts": " experts", "setup.dtype": ""})
    for record, what in zip(rows, work, strict=True):
        count = int(_value(record, "shapes.rows_per_expert"))
        for name in (str(_value(record, "setup.experts")), *record.baselines):
            points = lines.setdefault(what, {}).setdefault(f"{what}: {name}", {})
            points[count] = _figure_of(record, name, "tflops")
    return _lines(axes, lines, "rows of an average expert", "TFLOP/s")


def plot_transport(axes: Any, rows: Sequence[Record]) -> int:
    """Latency of a pair against tokens: on the most ranks, uniform routing, COMPACT or BATCHED; returns the height.

    A line joins rows that differ only in tokens and layout, the first row for each number of tokens; lines of a single
    point are left out if there are others.
    """
    most = max(record.world_size for record in rows)
    found: dict[str, dict[int, Record]] = {}
    for record in rows:
        packed = _value(record, "setup.layout") in ("batched", "compact")
        if record.world_size == most and _value(record, "setup.routing") == "uniform" and packed:
            line = found.setdefault(_without_tokens(record).configuration, {})
            line.setdefault(int(_value(record, "shapes.tokens")), record)
    drawn = [line for line in found.values() if len(line) > 1] or list(found.values())
    labels = _labels([_without_tokens(next(iter(line.values()))) for line in drawn], {"setup.transport": ""})
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for what, line in zip(labels, drawn, strict=True):
        names = dict.fromkeys(name for _, record in sorted(line.items()) for name in record.baselines)
        lines[what] = {
            what if name == OURS else f"{name}, beside {what}": {
                tokens: _figure_of(record, name, "sum_us") for tokens, record in line.items()
            }
            for name in (OURS, *names)
        }
    return _lines(axes, lines, f"tokens of each of {most} ranks", "dispatch and combine, us")


def _without_tokens(record: Record) -> Record:
    """The row without its number of tokens and its layout, which do not separate lines."""
    return dataclasses.replace(record, shapes={**record.shapes, "tokens": 0}, setup={**record.setup, "layout": "any"})


PLOTS: dict[str, Callable[[Any, Sequence[Record]], int]] = {
    "layer": plot_layer,
    "transport": plot_transport,
    "model": plot_model,
    "experts": plot_experts,
}
