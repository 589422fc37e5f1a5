"""Tables of figures: of a report on standard output, and in Markdown."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_moe.report.records import OURS, PHASES, PURE_NUMBERS, WORDS

UNLIMITED = 100_000  # columns of output that is no terminal


def open_console(*, stderr: bool = False) -> Console:
    """A console that prints texts as they are, and wraps lines on a terminal only. Local."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNLIMITED
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def show_rows(report: Mapping[str, Any]) -> None:
    """Print each row of a benchmark, figures and baselines in columns, and whether all results are right."""
    console = open_console()
    for row in report["rows"]:
        shapes, setup = (", ".join(f"{name} {value}" for name, value in row[part].items()) for part in WORDS)
        console.print(Text(f"{report['world_size']} x {report['gpu']}: {shapes}", style="bold"))
        console.print(Text(setup))
        columns = {OURS: row["figures"], **row["baselines"]}
        names = dict.fromkeys(name for figures in columns.values() for name in figures)
        host = {name: f"host_{name}_us" for name in PHASES} | {"whole call": "host_us"}
        console.print(_table("", columns, {name: name for name in names if name not in host.values()}))
        if set(host.values()) <= set(names):
            console.print(_table("host us, median, no sync inside", columns, host))
        for name, reason in row["left_out"].items():
            console.print(Text(f"without {name}: {reason}", style="yellow"))
    show_verdict(report)


def show_verdict(report: Mapping[str, Any]) -> None:
    """Print whether all results of a benchmark are right."""
    console = open_console()
    if report["ok"]:
        limits = [row["row_error_limit"] for row in report["rows"] if "row_error_limit" in row]
        how = f"worst row at most {max(limits):g}" if limits else "bit for bit"
        console.print(Text(f"all results checked ({how})", style="bold green"))
        return
    console.print(Text("NOT OK: a result is wrong, it was not timed", style="bold red"))
    for broken in itertools.chain.from_iterable(row["broken"] for row in report["rows"]):
        console.print(Text(broken, style="red"), soft_wrap=True)


def _table(title: str, columns: Mapping[str, Mapping[str, float]], lines: Mapping[str, str]) -> Table:
    """Figures of each system, a line for each title and name of a figure."""
    table = Table(title, box=box.SIMPLE)
    for system in columns:
        table.add_column(system, justify="right")
    for line, name in lines.items():
        table.add_row(line, *(show_figure(name, figures.get(name)) for figures in columns.values()))
    return table


def show_figure(name: str, value: float | None) -> str:
    """A figure formatted for a table: errors in scientific notation, others to about four digits. Local."""
    if value is None:
        return ""
    if name.endswith("_error"):
        return f"{value:.1e}"
    if name.endswith(PURE_NUMBERS) or abs(value) < 100:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def markdown_table(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table in Markdown of columns, each a title and its cells, ending in a newline. Local."""
    titles, cells = zip(*columns, strict=True)
    lines = [titles, ["---"] * len(titles), *zip(*cells, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
