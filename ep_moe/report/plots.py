"""Plots of summaries, with matplotlib, which `pip install ep-moe[bench]` installs.

Each colour has one meaning: blue is ours where it is faster, orange (hatched in bars) where it is slower; the grey line
at 1 is the baseline.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_moe.report.records import BENCHES, Record
from ep_moe.report.summaries import Summary, is_slower
from ep_moe.report.tables import show_figure

WIDTH_INCHES, DPI = 8.0, 100  # 800 pixels, or what the words need
BAR_INCHES, HEAD_INCHES, LINES_INCHES = 0.34, 1.3, 4.2
SMALL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
OURS_COLOUR, SLOWER_COLOUR, BASELINE_COLOUR = "#2f6fb0", "#d9730d", "#6b7280"
LINE_STYLES = ("-", ":")  # of the ratio to the first baseline, and to the second
MARKERS, SHADES = "osD^", ("#2f6fb0", "#0b3d70", "#6ea3d8", "#9ec3e6")  # of each number of GPUs


def _bars(axes: Any, rows: Sequence[Record], summary: Summary) -> float:
    """Draw a bar of the ratio for each row; returns the height in inches."""
    name, title = next(iter(summary.baselines.items()))
    ratios = [summary.ratio(row, name) or 0.0 for row in rows]
    for place, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        slower = is_slower(ratio)
        axes.barh(place, ratio, color=SLOWER_COLOUR if slower else OURS_COLOUR, hatch="//" if slower else None)
        ours, theirs = (show_figure(summary.figure, value) for value in (summary.ours(row), summary.theirs(row, name)))
        text = f"{ratio:.2f}x  ({ours} beside {theirs} {summary.unit}){'  slower' if slower else ''}"
        axes.annotate(text, (ratio, place), (4, 0), va="center", **SMALL)
    axes.axvline(1, color=BASELINE_COLOUR, linewidth=1.5)
    axes.set_xlim(0, max(ratios) * 1.9)
    axes.set_yticks(range(len(rows)), summary.labels(rows)[1], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"times as fast as {title} (grey line)")
    return HEAD_INCHES + BAR_INCHES * len(rows)


def _lines(axes: Any, rows: Sequence[Record], summary: Summary) -> float:
    """Draw the ratio against the first of the words, a line for each number of GPUs and baseline."""
    x = next(iter(summary.words.values()))
    for shade, marker, gpus in zip(SHADES, MARKERS, sorted({row.world_size for row in rows}), strict=False):
        for style, (name, title) in zip(LINE_STYLES, summary.baselines.items(), strict=False):
            points: dict[int, float] = {}
            for row in rows:
                ratio = summary.ratio(row, name)
                if row.world_size == gpus and ratio is not None:  # of several layouts the slowest is drawn
                    at = int(row.value(x))
                    points[at] = min(ratio, points.get(at, ratio))
            if points:
                places, ratios = zip(*sorted(points.items()), strict=True)
                label = f"{gpus} GPUs, beside {title}"
                options = {"color": shade, "marker": marker, "markersize": 5, "linewidth": 2, "label": label}
                axes.plot(places, ratios, style, **options)
                for at, ratio in points.items():
                    if is_slower(ratio):
                        axes.plot([at], [ratio], marker, color=SLOWER_COLOUR, markersize=6, zorder=3)
                        text = f"{ratio:.2f}, {gpus} GPUs"
                        axes.annotate(text, (at, ratio), (-8, -8 - 6 * (gpus == 2)), ha="right", **SMALL)
    axes.axhline(1, color=BASELINE_COLOUR, linewidth=1.5)
    axes.annotate("as fast as NCCL; orange is slower", (1, 1), (0, -12), **SMALL)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(row.value(x)) for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(next(iter(summary.words)))
    axes.set_ylabel("times as fast, slowest layout")
    axes.legend(fontsize=9)
    return LINES_INCHES


KINDS = {"bars": _bars, "lines": _lines}


def plot_rows(axes: Any, rows: Sequence[Record], summary: Summary) -> float:
    """Draw the rows of a summary on matplotlib's axes; returns the height in inches. Local."""
    height = KINDS[summary.plot](axes, rows, summary)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    shared = summary.labels(rows)[0]
    axes.set_title(", ".join(filter(None, (summary.title, shared, rows[0].gpu))), fontsize=11)
    return height


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw one PNG for each known bench with rows in its summary; returns their paths.

    Errors: RuntimeError if matplotlib is missing. Local.
    """
    drawn = []
    for bench in BENCHES:
        summary = Summary.of(bench)
        rows = summary.choose([record for record in records if record.bench == bench])
        if rows:
            drawn.append(directory / f"{bench}.png")
            _save(rows, summary, drawn[-1])
    return drawn


def _save(rows: Sequence[Record], summary: Summary, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "plots need matplotlib: pip install 'ep-moe[bench]', or leave them out (--no-plots)"
        ) from error
    figure = Figure(layout="constrained", dpi=DPI)
    height = plot_rows(figure.add_subplot(), rows, summary)
    figure.set_size_inches(WIDTH_INCHES, height)
    # all words are inside; no version: equal figures make equal files
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})


def draw_loads(path: Path, loads: Mapping[str, Sequence[Sequence[float]]], rows: str | Sequence[str]) -> None:
    """Draw a heat map for each of these loads [row][rank], by the row's mean rank.

    Args:
        rows: what a row is, or a label for each.
    Errors: RuntimeError if matplotlib is missing; ValueError for a file that cannot be written. Local.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("a plot needs matplotlib; install: pip install 'ep-moe[bench]'") from None
    ratios = {
        name: [[tokens * len(ranks) / (sum(ranks) or 1) for tokens in ranks] for ranks in load]
        for name, load in loads.items()
    }
    most = max(max(ranks) for load in ratios.values() for ranks in load)
    count = len(next(iter(ratios.values())))
    figure = Figure(figsize=(10, 5 if isinstance(rows, str) else max(4.0, 1 + 0.2 * count)), layout="constrained")
    axes = figure.subplots(1, len(loads), sharey=True)
    for panel, (name, load) in zip(axes, ratios.items(), strict=True):
        image = panel.imshow(load, aspect="auto", cmap="RdBu_r", vmin=2 - most, vmax=most, interpolation="nearest")
        panel.set_title(f"{name}: fullest rank {max(map(max, load)):.2f}")
        panel.set_xlabel("rank")
        panel.set_xticks(range(len(load[0])) if len(load[0]) <= 16 else panel.get_xticks())
    if isinstance(rows, str):
        axes[0].set_ylabel(rows)
    else:
        axes[0].set_yticks(range(count), rows, fontsize=8)
    figure.colorbar(image, ax=axes, label="load by the mean rank's")
    try:
        figure.savefig(path, dpi=DPI, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot ({str(path)!r}) cannot be written: {error}") from None
