"""Reports of `ep-moe bench` as tables on standard output."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_moe.bench.records import unit_of


def show_rows(report: Mapping[str, Any]) -> None:
    """Print each row of a benchmark, figures and baselines in columns, and whether all results are right."""
    console = Console()
    for row in report["rows"]:
        shapes = ", ".join(f"{name} {value}" for name, value in row["shapes"].items())
        setup = ", ".join(f"{name} {value}" for name, value in row["setup"].items())
        console.print(Text(f"{report['world_size']} x {report['gpu']}: {shapes}", style="bold"))
        console.print(Text(setup))
        console.print(_table(row["figures"], row["baselines"]))
    if report["ok"]:
        limits = [row["row_error_limit"] for row in report["rows"] if "row_error_limit" in row]
        how = f"worst row at most {max(limits):g}" if limits else "bit for bit"
        console.print(Text(f"all results checked ({how})", style="bold green"))
        return
    console.print(Text("NOT OK: a result is wrong, it was not timed", style="bold red"))
    for row in report["rows"]:
        for bound in row["broken"]:
            console.print(Text(bound, style="red"), soft_wrap=True)


def _table(figures: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for name in ("ep_moe", *baselines):
        table.add_column(name, justify="right")
    names = dict.fromkeys([*figures, *(name for other in baselines.values() for name in other)])
    for name in names:
        table.add_row(name, *(show_figure(name, column.get(name)) for column in (figures, *baselines.values())))
    return table


def show_figure(name: str, value: float | None) -> str:
    """A figure formatted for a table: errors in scientific notation, others to about four digits. Local."""
    if value is None:
        return ""
    if name.endswith("_error"):
        return f"{value:.1e}"
    if unit_of(name) == "" or abs(value) < 100:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, ending in a newline. Local."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
