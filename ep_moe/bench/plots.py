"""Plots of what was measured, with matplotlib, which `pip install ep-moe[bench]` brings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ep_moe.bench.layer import BASELINE, PHASES
from ep_moe.bench.records import Record

WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.45, 120
LINES_HEIGHT = 12  # of a plot of lines, in bars
COLOURS = ("#9aa5b1", "#2f6fb0", "#d98324", "#4d9a5b")  # of the phases


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw one PNG for each bench that has a plot and rows; returns their paths.

    Errors: RuntimeError where matplotlib is missing. Local.
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
    figure.savefig(path, metadata={"Software": None})  # nothing that changes while the figures do not


def _bars(axes: Any, labels: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)


def plot_layer(axes: Any, rows: Sequence[Record]) -> int:
    """Phases of each layer end to end, the baseline's below them, in whole calls of it. Returns the number of bars."""
    labels: list[str] = []
    for record in rows:
        shapes, setup = record.shapes, record.setup
        what = f"{shapes['preset']}, {shapes['tokens_per_rank']} tokens, {setup['dtype']} {setup['scheme']}"
        ours = f"{setup['transport']} + {setup['experts']}"
        one = record.baselines[BASELINE]["call_us"]
        for name, values in {ours: record.figures, BASELINE: record.baselines[BASELINE]}.items():
            left = 0.0
            for phase, colour in zip(PHASES, COLOURS, strict=True):
                width = values[f"{phase}_us"] / one
                axes.barh(len(labels), width, left=left, color=colour, label=None if labels else phase)
                left += width
            whole = values["call_us"] / one
            axes.plot(whole, len(labels), "k|", markersize=14, label=None if labels else "whole call")
            labels.append(f"{what}: {name}, {values['call_us']:,.0f} us")
    axes.legend(fontsize=8)
    _bars(axes, labels, f"time / whole call of {BASELINE}")
    return len(labels)


def plot_model(axes: Any, rows: Sequence[Record]) -> int:
    """Tokens per second of each model, then of its baselines. Returns the number of bars."""
    labels: list[str] = []
    for record in rows:
        what = f"{record.shapes['preset']}, {record.shapes['layers']} layers, {record.setup['dtype']}"
        for index, (name, figures) in enumerate({"ep_moe": record.figures, **record.baselines}.items()):
            axes.barh(len(labels), figures["tokens_per_sec"], color=COLOURS[0] if index else COLOURS[1])
            labels.append(f"{what}: {name}")
    _bars(axes, labels, "tokens per second")
    return len(labels)


def plot_experts(axes: Any, rows: Sequence[Record]) -> int:
    """TFLOP/s against rows: memory bounds the slopes, arithmetic the plateaus. Returns the height in bars."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for record in rows:
        shapes, setup = record.shapes, record.setup
        what = f"{shapes['preset']}, {shapes['num_local_experts']} experts, {setup['dtype']} {setup['scheme']}"
        what += f", {setup['layout']}, {record.gpu}"
        for name, figures in {str(setup["experts"]): record.figures, **record.baselines}.items():
            line = lines.setdefault(what, {}).setdefault(name, {})
            line[int(shapes["rows_per_expert"])] = figures["tflops"]
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


PLOTS: dict[str, Callable[[Any, Sequence[Record]], int]] = {
    "layer": plot_layer,
    "model": plot_model,
    "experts": plot_experts,
}
