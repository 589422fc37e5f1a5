"""`ep-moe bench report`: docs/BENCHMARKS.md and its plots, made from the rows of docs/benchmarks/*.jsonl.

The page has a section for each benchmark: how it is measured, a plot, and tables with the newest row that counts of
each configuration; then links to the notes. How it is measured and the notes are written by hand.
"""

import datetime
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_moe.fields import require
from ep_moe.report.plots import draw
from ep_moe.report.records import BENCHES, WORDS, Record, read_records
from ep_moe.report.tables import markdown_table, show_figure

DATE = len("2026-11-22")
NOTES = "notes"  # their folder, beside the rows
NOTE_HEADINGS = ["Question", "Method", "Result"]
PROSE_COLUMNS = 120
METHODS = "methods"  # folder of the texts that head the sections, one for each benchmark
MARK = "<!-- Made by `ep-moe bench report` from {folder}/*.jsonl, notes/*.md and methods/*.md; do not edit. -->"


def newest(records: Sequence[Record]) -> list[Record]:
    """The newest row of each configuration, without sweeps, in the order of the configurations' first rows. Local."""
    chosen: dict[str, Record] = {}
    for record in records:
        before = chosen.get(record.configuration)
        if not record.sweep and (before is None or _when(record) >= _when(before)):
            chosen[record.configuration] = record
    return list(chosen.values())


def _when(record: Record) -> datetime.datetime:
    return datetime.datetime.fromisoformat(record.date)


def read_notes(folder: Path) -> dict[str, str]:
    """File and topic of each note of a directory, the newest first, those of one day by name; {} without a directory.

    A note is named <date>-<topic>.md and has a title and the sections Question, Method and Result.

    Errors: ValueError names a note that is named otherwise or lacks one of them. Local.
    """
    notes = {}
    for path in sorted(folder.glob("*.md")):
        named = re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name) is not None
        require(named, f"{path}: the name of a note is <date>-<topic>.md, as in 2026-11-21-host-time.md")
        title, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        fits = title.startswith("# ") and headings == NOTE_HEADINGS
        require(fits, f"{path}: a note is a title (# ...) and the sections {', '.join(NOTE_HEADINGS)} (## ...)")
        notes[path.name] = title.removeprefix("# ").strip()
    return {name: notes[name] for name in sorted(notes, key=lambda name: name[:DATE], reverse=True)}


def read_method(folder: Path, bench: str) -> tuple[str, str]:
    """Title and text of a benchmark's section, from <bench>.md of a directory; the name and command without it.

    Errors: ValueError names a file without a title. Local.
    """
    path = folder / f"{bench}.md"
    if not path.is_file():
        return bench.capitalize(), f"`ep-moe bench {bench}`."
    title, _, text = path.read_text(encoding="utf-8").partition("\n")
    require(title.startswith("# "), f"{path}: a benchmark's text begins with a title (# ...)")
    return title.removeprefix("# "), text.strip()


def render(records: Sequence[Record], folder: Path) -> str:
    """The whole page of the rows of a directory, with its notes, methods and plots.

    Errors: ValueError as `read_notes` and `read_method`. Local.
    """
    rows, notes = newest(records), read_notes(folder / NOTES)
    benches = {record.bench for record in rows}
    parts = [f"# Benchmarks\n\n{MARK.format(folder=folder.name)}\n"]
    for bench in [*(known for known in BENCHES if known in benches), *sorted(benches - set(BENCHES))]:
        title, text = read_method(folder / METHODS, bench)
        parts.append(f"## {title}\n\n{text}\n")
        if (folder / f"{bench}.png").is_file():
            parts.append(f"![{title}]({folder.name}/{bench}.png)\n")
        parts += _tables([record for record in rows if record.bench == bench])
    if notes:
        links = [f"- {file[:DATE]}: [{topic}]({folder.name}/{NOTES}/{file})\n" for file, topic in notes.items()]
        parts.append("## Notes\n\n" + "".join(links))
    return "\n".join(parts)


def _tables(records: Sequence[Record]) -> list[str]:
    """A table for each preset and machine, after a line of the values that all its rows share, before their sources."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        preset = f"{record.shapes['preset']}, " if record.shapes.get("preset") else ""
        groups.setdefault(f"### {preset}{record.world_size} x {record.gpu}\n", []).append(record)
    parts = []
    for heading, members in groups.items():
        sources = [_source(record) for record in members]
        numbers = {source: str(number) for number, source in enumerate(dict.fromkeys(sources), start=1)}
        parts += [heading, *_table(members, [numbers[source] for source in sources])]
        parts.append("".join(f"{number}. {source}\n" for source, number in numbers.items()))
    return parts


def _table(records: Sequence[Record], runs: Sequence[str]) -> list[str]:
    """Rows as a line of the values that they share, and a table of the others without empty columns."""
    common, shown = [], [("run", runs), ("date", [record.date[:DATE] for record in records])]
    for title, path in _columns(records):
        cells = [_cell(record, path) for record in records]
        if path.startswith(WORDS) and len(set(cells)) == 1:
            common += [f"{title} {cells[0]}"] if cells[0] else []
        elif any(cells):
            shown.append((title, cells))
    table = markdown_table(shown)
    words = " ".join(f"All rows: {', '.join(common)}.".split())
    return [textwrap.fill(words, PROSE_COLUMNS, break_on_hyphens=False) + "\n", table] if common else [table]


def _columns(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Title and path of each column of a bench's table."""
    paths = dict.fromkeys(path for record in records for path in _paths(record))
    if records[0].bench not in BENCHES:  # shows all values
        return [(path, path) for path in paths]
    known = {path.partition(".")[2].replace(".", "/"): path for path in paths}
    return [(title, known[name]) for title, name in BENCHES[records[0].bench]["columns"].items() if name in known]


def _paths(record: Record) -> list[str]:
    """The path of each value of a row."""
    parts = {part: getattr(record, part) for part in (*WORDS, "figures")}
    parts |= {f"baselines.{name}": figures for name, figures in record.baselines.items()}
    return [f"{part}.{name}" for part, values in parts.items() for name in values]


def _cell(record: Record, path: str) -> str:
    value = record.value(path)
    return str(value) if path.startswith(WORDS) or value == "" else show_figure(path.rpartition(".")[2], value)


def _source(record: Record) -> str:
    """Date, commit, versions and command of a row, the same for the rows of one command."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if version)
    return f"{record.date[:DATE]}, commit {record.commit[:12]}, {versions}: `{record.command}`"


def make_report(directory: str | Path, *, check: bool, plots: bool) -> dict[str, Any]:
    """Write the page beside `directory`, from the rows and the list of notes there, and the plots into `directory`.

    The page links the plots that exist, so that a check fails if a plot of the page is missing.

    Args:
        directory: holds *.jsonl, notes/*.md and methods/*.md; the page is BENCHMARKS.md of the folder that it is in.
        check: write nothing, only compare the page. plots: draw them first.
    Returns: `ok`, False if the page differs under `check`; `page`; `written`, the paths; `rows`, how many count.
    Errors: ValueError for a wrong directory, row or note; RuntimeError if matplotlib is missing. Local.
    """
    folder = Path(directory).resolve()
    records = read_records(directory)
    page = folder.parent / "BENCHMARKS.md"
    read_notes(folder / NOTES)  # their errors come before plots are drawn
    drawn = draw(newest(records), folder) if plots and not check else []
    text = render(records, folder)
    same = page.is_file() and page.read_text(encoding="utf-8") == text
    written: list[str] = []
    if not check:
        page.write_text(text, encoding="utf-8")
        written = [str(page), *map(str, drawn)]
    return {"ok": same or not check, "page": str(page), "written": written, "rows": len(newest(records))}
