"""Plots of measured rows, with matplotlib, which `pip install ep-moe[bench]` installs."""

import dataclasses
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_moe.report.records import BENCHES, OURS, Record

WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.45, 120
LINES_HEIGHT = 12  # of a line plot, in units of bars
LABEL_CHARACTERS, LABEL_LINES = 56, 3  # of a line of a bar's label, and lines that fit beside a bar
LEGEND_CHARACTERS = 72  # of a line of a legend
COLOURS = ("#9aa5b1", "#2f6fb0", "#d98324", "#4d9a5b")  # of the phases; the second of ours, the first of others
WHOLE_COLOUR = "#d5dbe1"  # of a call that has no phases
STYLES = ("o-", "x--", "+:")  # of ours and of its baselines


def _bars(
    axes: Any,
    rows: Sequence[Record],
    *,
    label: Mapping[str, str],
    parts: Mapping[str, str],
    unit: str,
    whole: str = "",
    over: str = "",
) -> float:
    """Draw a bar for each row and each of its baselines; returns their height, in bars with short labels.

    Args:
        label: as `row_labels`. parts: figures that are stacked, by their names in the legend, "" for none.
        whole: a figure that is marked, and drawn for a baseline without parts. over: the path of a figure that
            divides all others. unit: of the axis.
    """
    labels: list[str] = []
    for record, what in zip(rows, row_labels(rows, label), strict=True):
        one = _value(record, over) if over else 1
        for name in (OURS, *record.baselines):
            place, left, suffix = len(labels), 0.0, ""
            undivided = whole and name != OURS and not {*parts.values()} & {*record.baselines[name]}
            if undivided:
                axes.barh(place, _figure_of(record, name, whole) / one, color=WHOLE_COLOUR)
            for (part, figure), color in zip(() if undivided else parts.items(), COLOURS, strict=False):
                color = color if part else COLOURS[name == OURS]
                width = _figure_of(record, name, figure) / one
                axes.barh(place, width, left=left, color=color, label=part if part and not place else None)
                left += width
            if whole:
                us = _figure_of(record, name, whole)
                axes.plot(us / one, place, "k|", markersize=14, label=None if place else "whole call")
                suffix = f", {us:,.0f} us"
            labels.append(
                f"{textwrap.fill(what, LABEL_CHARACTERS)}:\n{name}{suffix}" if name == OURS else f"{name}{suffix}"
            )
    if whole:
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(parts) + 1)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    return len(labels) * max(max(1 + label.count("\n") for label in labels) / LABEL_LINES, 1)


def _lines(
    axes: Any,
    rows: Sequence[Record],
    *,
    label: Mapping[str, str],
    mixed: tuple[str, ...],
    y: str,
    units: tuple[str, str],
    legend: tuple[str, str],
    only: Mapping[str, tuple[str, ...]] = types.MappingProxyType({}),
    points: bool = True,
) -> int:
    """Draw a line for all rows on the most ranks that differ only in x, the first of each x; and of their baselines.

    Args:
        label: as `row_labels`. mixed: paths of values that do not separate lines, the first of them is x.
        y: name of a figure. units: of both axes, {ranks} is the most. legend: the texts of ours and of a baseline.
        only: path -> values of the rows that are drawn, as are rows that lack it.
        points: False leaves out lines of one point beside longer ones.
    Returns: the height in bars.
    """
    most = max(record.world_size for record in rows)
    lines: dict[str, dict[int, Record]] = {}
    for record in rows:
        if record.world_size == most and all(record.value(path) in ("", *values) for path, values in only.items()):
            line = lines.setdefault(_without(record, mixed).configuration, {})
            line.setdefault(int(_value(record, mixed[0])), record)
    if not points:
        lines = {name: line for name, line in lines.items() if len(line) > 1} or lines
    labels = row_labels([_without(next(iter(line.values())), mixed) for line in lines.values()], label)
    for index, (what, line) in enumerate(zip(labels, lines.values(), strict=True)):
        given = [(name, figures) for _, record in sorted(line.items()) for name, figures in record.baselines.items()]
        names = (OURS, *dict.fromkeys(name for name, figures in given if y in figures))
        for style, name in zip(STYLES, names, strict=False):
            text = legend[name != OURS].format(what=what, name=name, experts=line[min(line)].setup.get("experts"))
            measured = {
                x: record for x, record in sorted(line.items()) if name == OURS or y in record.baselines.get(name, ())
            }
            xy = zip(*((x, _figure_of(record, name, y)) for x, record in measured.items()), strict=True)
            wrapped = textwrap.fill(text, LEGEND_CHARACTERS)
            axes.loglog(*xy, style, color=f"C{index}", markersize=4, label=wrapped)
    ticks = sorted({x for line in lines.values() for x in line})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(units[0].format(ranks=most))
    axes.set_ylabel(units[1])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return LINES_HEIGHT


KINDS: dict[str, Callable[..., float]] = {"bars": _bars, "lines": _lines}


def plot_rows(axes: Any, rows: Sequence[Record]) -> float:
    """Draw rows of one bench on matplotlib's axes; returns the height in bars.

    Errors: ValueError names a row that lacks a plotted figure. Local.
    """
    options = dict(BENCHES[rows[0].bench]["plot"])
    return KINDS[options.pop("kind")](axes, rows, **options)


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw one PNG for each bench that has a plot and rows; returns their paths.

    Errors: ValueError names a row that lacks a plotted figure; RuntimeError if matplotlib is missing. Local.
    """
    drawn = []
    for bench in BENCHES:
        rows = [record for record in records if record.bench == bench]
        if rows:
            drawn.append(directory / f"{bench}.png")
            _save(rows, drawn[-1])
    return drawn


def _save(rows: Sequence[Record], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "plots need matplotlib: pip install 'ep-moe[bench]', or leave them out (--no-plots)"
        ) from error
    figure = Figure(layout="constrained", dpi=DPI)
    bars = plot_rows(figure.add_subplot(), rows)
    figure.set_size_inches(WIDTH_INCHES, 1.5 + ROW_INCHES * bars)
    figure.savefig(path, metadata={"Software": None})  # no version: equal figures make equal files


def _value(record: Record, path: str) -> Any:
    """The value at a path such as "baselines.grouped_mm.tflops", which the row must have."""
    value = record.value(path)
    if value == "":
        raise ValueError(f"the row of {record.bench}, {record.date}, commit {record.commit}, has no {path} to plot")
    return value


def _figure_of(record: Record, name: str, figure: str) -> Any:
    """A figure of a baseline, or of ours."""
    return _value(record, f"figures.{figure}" if name == OURS else f"baselines.{name}.{figure}")


def _without(record: Record, paths: Sequence[str]) -> Record:
    """The row with 0 at the paths, so that rows that differ only there are the same."""
    parts: dict[str, Any] = {"shapes": dict(record.shapes), "setup": dict(record.setup)}
    for part, _, name in (path.partition(".") for path in paths):
        parts[part][name] = 0
    return dataclasses.replace(record, **parts)


def row_labels(rows: Sequence[Record], paths: Mapping[str, str]) -> list[str]:
    """A label for each row: the values at `paths`, each followed by its unit, and others in which rows with the same
    values there differ.
    """
    words = [{**row.shapes, **row.setup, "ranks": row.world_size, "on": row.gpu} for row in rows]
    given = [", ".join(f"{_value(row, path)}{counted}" for path, counted in paths.items()) for row in rows]
    shown = {path.partition(".")[2] for path in paths}
    others = [name for name in dict.fromkeys(name for entry in words for name in entry) if name not in shown]
    differ = [
        name
        for name in others
        if len({(what, str(entry.get(name))) for what, entry in zip(given, words, strict=True)}) > len(set(given))
    ]
    return [
        ", ".join([what, *(f"{name} {entry[name]}" for name in differ if name in entry)])
        for what, entry in zip(given, words, strict=True)
    ]
