"""`ep-moe bench report`: docs/BENCHMARKS.md, results and plots, made from the rows of docs/benchmarks/*.jsonl.

The page has a section for each benchmark: a summary of its newest rows on one kind of GPU, as a table and a plot, and
how it is measured; then links to the topics. results/ has a page for each benchmark, with the newest row that counts of
each configuration. How it is measured, topics and notes are written by hand.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_moe.fields import require
from ep_moe.report.plots import draw
from ep_moe.report.records import BENCHES, WORDS, Record, newest, read_records
from ep_moe.report.summaries import Summary, is_slower
from ep_moe.report.tables import markdown_table, show_figure

DATE = len("2026-11-22")
NOTES, TOPICS, RESULTS = "archive", "topics", "results"  # folders beside the rows
NOTE_HEADINGS = ["Question", "Method", "Result"]
PROSE_COLUMNS = 120
METHODS = "methods"  # folder of the texts that head the sections, one for each benchmark
MADE_BY = "<!-- Made by `ep-moe bench report` from "  # the mark of pages that may be overwritten and deleted
MARK = MADE_BY + "{folder}/*.jsonl, methods/*.md and topics/*.md; do not edit. -->"


def check_notes(folder: Path) -> None:
    """Check the notes of a directory: a note is named <date>-<topic>.md and has a title and NOTE_HEADINGS.

    Errors: ValueError names a note that is named otherwise or lacks one of them. Local.
    """
    for path in sorted(folder.glob("*.md")):
        named = re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name) is not None
        require(named, f"{path}: the name of a note is <date>-<topic>.md, as in 2026-11-21-host-time.md")
        title, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        fits = title.startswith("# ") and headings == NOTE_HEADINGS
        require(fits, f"{path}: a note is a title (# ...) and the sections {', '.join(NOTE_HEADINGS)} (## ...)")


def read_topics(folder: Path) -> dict[str, str]:
    """File and title of each topic of a directory, by title; {} without a directory.

    Errors: ValueError names a file without a title. Local.
    """
    titles = {path.name: _title(path, "a topic")[0] for path in folder.glob("*.md")}
    return dict(sorted(titles.items(), key=lambda item: item[1]))


def _title(path: Path, what: str) -> tuple[str, str]:
    title, _, text = path.read_text(encoding="utf-8").partition("\n")
    require(title.startswith("# "), f"{path}: {what} begins with a title (# ...)")
    return title.removeprefix("# ").strip(), text.strip()


def read_method(folder: Path, bench: str) -> tuple[str, str]:
    """Title and text of a benchmark's section, from <bench>.md of a directory; the name and command without it.

    Errors: ValueError names a file without a title. Local.
    """
    path = folder / f"{bench}.md"
    if not path.is_file():
        return bench.capitalize(), f"`ep-moe bench {bench}`."
    return _title(path, "a benchmark's text")


def render(records: Sequence[Record], folder: Path) -> dict[Path, str]:
    """The text of each page of the rows of a directory: BENCHMARKS.md beside it, and results/BENCH.md in it.

    Errors: ValueError as `read_topics` and `read_method`. Local.
    """
    rows, topics = newest(records), read_topics(folder / TOPICS)
    benches = {record.bench for record in rows}
    mark = MARK.format(folder=folder.name)
    parts, pages = [f"# Benchmarks\n\n{mark}\n"], {}
    for bench in [*(known for known in BENCHES if known in benches), *sorted(benches - set(BENCHES))]:
        title, text = read_method(folder / METHODS, bench)
        members = [record for record in rows if record.bench == bench]
        where = f"{folder.name}/{RESULTS}/{bench}.md"
        parts += [f"## {title}\n", *_summary(members, folder)]
        parts.append(f"All rows, with versions and commands: [{len(members)} rows]({where}).\n")
        parts.append(f"### How it is measured\n\n{text}\n" if bench in BENCHES else f"{text}\n")
        pages[folder / RESULTS / f"{bench}.md"] = "\n".join([f"# {title}: all rows\n\n{mark}\n", *_tables(members)])
    if topics:
        links = [f"- [{title}]({folder.name}/{TOPICS}/{file})\n" for file, title in topics.items()]
        parts.append(
            "## What was tried\n\nOne page for each topic: what was tried, and what it gave.\n\n" + "".join(links)
        )
    return {folder.parent / "BENCHMARKS.md": "\n".join(parts), **pages}


def _summary(records: Sequence[Record], folder: Path) -> list[str]:
    """Table and plot of the newest rows of a bench on one kind of GPU; nothing for an unknown bench."""
    bench = records[0].bench
    rows = Summary.of(bench).choose(records) if bench in BENCHES else []
    if not rows:
        return []
    summary = Summary.of(bench)
    columns = [("GPUs", [str(row.world_size) for row in rows])]
    for title, path in summary.words.items():
        words = [str(row.value(path)) for row in rows]
        columns += [(title, words)] if len({*words}) > 1 or len(rows) == 1 else []
    columns.append((f"ep_moe, {summary.unit}", [show_figure(summary.figure, summary.ours(row)) for row in rows]))
    slower = 0
    for name, title in summary.baselines.items():
        theirs, ratios = ([which(row, name) for row in rows] for which in (summary.theirs, summary.ratio))
        columns.append((f"{title}, {summary.unit}", [show_figure(summary.figure, value) for value in theirs]))
        columns.append(("times as fast", [_times(ratio) for ratio in ratios]))
        slower += sum(map(is_slower, ratios))
    columns.append(("commit", [row.commit[:7] for row in rows]))
    days = sorted({row.date[:DATE] for row in rows})
    lost = (
        f"{slower} figure{'s' * (slower > 1)} below 1: slower" if slower else "Nothing here is slower than its baseline"
    )
    shared = "".join(f"{words}, " for words in summary.labels(rows)[:1] if words)
    text = f"{shared}{rows[0].gpu}, {' to '.join(dict.fromkeys((days[0], days[-1])))}. {lost}.\n"
    plot = [f"![{summary.title}]({folder.name}/{bench}.png)\n"] if (folder / f"{bench}.png").is_file() else []
    return [text, *plot, markdown_table(columns)]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}{' (slower)' * is_slower(ratio)}"


def _tables(records: Sequence[Record]) -> list[str]:
    """A table for each preset and machine, after a line of the values that all its rows share, before their sources."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        preset = f"{record.shapes['preset']}, " if record.shapes.get("preset") else ""
        groups.setdefault(f"## {preset}{record.world_size} x {record.gpu}\n", []).append(record)
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
    """Write the page beside `directory`, and into it the pages of results and the plots. Local.

    The page links the plots that exist, so that a check fails if a plot of the page is missing.

    Args:
        directory: holds *.jsonl, methods/*.md, topics/*.md and archive/*.md; BENCHMARKS.md is written beside it.
        check: write nothing, only compare the pages. plots: draw them first.
    Returns: `ok`, False if a page differs under `check`; `page`, the one that differs, else BENCHMARKS.md; `written`,
        the paths; `rows`, how many count.
    Errors: ValueError for a wrong directory, row, topic or note, without rows, and before a file without the mark of
        these pages would be overwritten or deleted; RuntimeError if matplotlib is missing.
    """
    folder = Path(directory).resolve()
    records = read_records(directory)
    require(bool(newest(records)), f"directory ({str(directory)!r}) has no rows")
    check_notes(folder / NOTES)  # errors come before plots are drawn
    pages = render(records, folder)
    extra = sorted(set((folder / RESULTS).glob("*.md")) - set(pages))
    for path in () if check else (*pages, *extra):
        ours = not path.exists() or MADE_BY.encode() in path.read_bytes()
        require(ours, f"{path} was not made by `ep-moe bench report`: move it away, or name another --dir")
    drawn = draw(records, folder) if plots and not check else []
    pages = render(records, folder) if drawn else pages
    differ = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if not check:
        (folder / RESULTS).mkdir(exist_ok=True)
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        for path in extra:
            path.unlink()
    named = [*differ, *extra, *pages][0]
    written = [] if check else [*pages, *drawn]
    return {
        "ok": not check or not differ + extra,
        "page": str(named if check else next(iter(pages))),
        "written": [str(path) for path in written],
        "rows": len(newest(records)),
    }
