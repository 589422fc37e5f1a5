"""`ep-moe bench report`: docs/BENCHMARKS.md and its plots, made from the rows of docs/benchmarks/*.jsonl.

The page has tables and plots for each benchmark, with the newest row that counts of each configuration, and a list of
links to the notes, which are written by hand.
"""

import dataclasses
import datetime
import re
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ep_moe.bench.plots import PLOTS, draw
from ep_moe.bench.records import Record, read_records
from ep_moe.bench.show import markdown_table, show_figure

NOTES = "notes"  # their folder, beside the rows
NOTE_HEADINGS = ["Question", "Method", "Result"]
PROSE_COLUMNS = 120
TITLES = {
    "layer": (
        "One MoE layer",
        "`ep-moe bench layer`: route, dispatch, experts, combine. The baseline is an all-gather of the tokens in the "
        "same format, the same experts in the FLAT layout and a reduce-scatter of their sums. Both results are checked "
        "against float32 experts first. Times are microseconds of the slowest rank, median, from a cold L2. A phase "
        "includes its waits; phases are timed in separate calls, on the rank whose whole call is slowest.",
    ),
    "transport": (
        "The exchange",
        "`ep-moe bench transport`: dispatch and combine alone, without experts between them. Before timing, every "
        "expert's rows and the combined output are compared bit for bit with those of `collective`, and the output "
        "with its expected value. Times are microseconds of the slowest rank, median, with a warm L2, as in the "
        "published figures of other libraries. With a CUDA graph, the sum is the replay time of a graph of 40 pairs (4 "
        "above 512 tokens) divided by their number; dispatch and combine are the times of their kernels in it (between "
        "events of eager calls if kernels cannot be told apart). Without a graph, the sum is the wall-clock time of a "
        "pair, dispatch and combine are times between events, and the host's times are how long a call keeps the host. "
        "Wire GB/s are the bytes that leave a rank, a token once for each other rank that needs it, over the sum; the "
        "floor's share is the time that these bytes take at 370 GB/s, over the sum. The baselines are NCCL alone, "
        "timed alike: an all-gather of payload rows and a reduce-scatter of outputs, which move every token to every "
        "rank, and two all-to-alls that know beforehand how many rows travel. The baselines do not quantize, pack rows "
        "for the experts, apply weights or sum a token's experts; the transport does.",
    ),
    "model": (
        "A whole model",
        "`ep-moe bench model`: random weights, greedy, all ranks together, beside transformers' own expert parallelism "
        "with the same weights and sequences. transformers shows every sequence to every rank; ep_moe gives each rank "
        "its share. The MoE blocks of both are checked against float32 experts first. The dense part of transformers "
        "until 5.18 is `replicated`: every rank computes attention and head for the sequences of all ranks, that many "
        "times the dense work of an ep_moe rank, and the ratio contains that. From 5.19 on it is `tensor_parallel`: "
        "the ranks share this work and exchange its partial sums.",
    ),
    "experts": (
        "One rank's experts",
        "`ep-moe bench experts`: both GEMMs and everything between them, on rows that are already on the rank. The "
        "baseline is torch's grouped GEMM in bfloat16 with the activation in plain torch, on the same rows and the "
        "same weights, dequantized. Both results are checked against float32 experts first. Each expert has 0.7 to 1.3 "
        "times the average number of rows; TFLOP/s count no padding. Times are microseconds of the replay of a CUDA "
        "graph (on a CPU, of plain calls), median, from a cold L2; GB/s are the bytes of the stored weights over that "
        "time.",
    ),
}
MARK = "<!-- Made by `ep-moe bench report` from {folder}/*.jsonl and {folder}/notes/*.md; do not edit. -->"
WORDS = ("shapes", "setup")  # parts of a row that say what was measured

# bench -> columns of its table: title, and path in a row. A bench that is not here shows all values of its rows.
_SIZES = (
    ("hidden", "shapes.hidden"),
    ("intermediate", "shapes.intermediate"),
    ("experts", "shapes.num_experts"),
    ("top-k", "shapes.num_topk"),
)
_RUN = (("seed", "setup.seed"), ("warm-up calls", "setup.warmup"), ("repeats", "setup.repeats"))
COLUMNS = {
    "layer": (
        ("tokens/rank", "shapes.tokens_per_rank"),
        *_SIZES,
        ("dtype", "setup.dtype"),
        ("scheme", "setup.scheme"),
        ("transport", "setup.transport"),
        ("implementation", "setup.experts"),
        ("layout", "setup.layout"),
        ("placement", "setup.placement"),
        ("routing", "setup.routing"),
        ("nodes", "setup.nodes"),
        *_RUN,
        ("route us", "figures.route_us"),
        ("dispatch us", "figures.dispatch_us"),
        ("experts us", "figures.experts_us"),
        ("combine us", "figures.combine_us"),
        ("whole us", "figures.call_us"),
        ("gathered us", "baselines.allgather_reducescatter.call_us"),
        ("ratio", "baselines.allgather_reducescatter.speedup_ratio"),
        ("graph us", "figures.graph_call_us"),
        ("gathered graph us", "baselines.allgather_reducescatter.graph_call_us"),
        ("tokens/s", "figures.tokens_per_sec"),
        ("worst row", "figures.worst_row_error"),
    ),
    "transport": (
        ("transport", "setup.transport"),
        ("tokens/rank", "shapes.tokens"),
        ("hidden", "shapes.hidden"),
        ("top-k", "shapes.num_topk"),
        ("experts", "shapes.num_experts"),
        ("layout", "setup.layout"),
        ("payload", "setup.payload"),
        ("dtype", "setup.dtype"),
        ("routing", "setup.routing"),
        ("graph", "setup.graph"),
        ("SMs", "setup.num_sms"),
        ("nodes", "setup.nodes"),
        *_RUN,
        ("dispatch us", "figures.dispatch_us"),
        ("combine us", "figures.combine_us"),
        ("sum us", "figures.sum_us"),
        ("host dispatch us", "figures.host_dispatch_us"),
        ("host combine us", "figures.host_combine_us"),
        ("wire bytes", "figures.wire_bytes"),
        ("wire GB/s", "figures.wire_gbs"),
        ("floor's share", "figures.floor_share_ratio"),
        ("all-gather us", "baselines.allgather_reducescatter.dispatch_us"),
        ("reduce-scatter us", "baselines.allgather_reducescatter.combine_us"),
        ("sum of both us", "baselines.allgather_reducescatter.sum_us"),
        ("ratio", "baselines.allgather_reducescatter.speedup_ratio"),
        ("all-to-all us", "baselines.all_to_all_single.dispatch_us"),
        ("and back us", "baselines.all_to_all_single.combine_us"),
        ("there and back us", "baselines.all_to_all_single.sum_us"),
        ("ratio to it", "baselines.all_to_all_single.speedup_ratio"),
    ),
    "model": (
        ("layers", "shapes.layers"),
        ("sequences/rank", "shapes.sequences_per_rank"),
        ("prompt", "shapes.prompt_tokens"),
        ("new", "shapes.new_tokens"),
        *_SIZES,
        ("dtype", "setup.dtype"),
        ("transport", "setup.transport"),
        ("implementation", "setup.experts"),
        ("layout", "setup.layout"),
        ("placement", "setup.placement"),
        ("transformers experts", "setup.baseline_experts"),
        ("transformers dense part", "setup.baseline_dense"),
        ("nodes", "setup.nodes"),
        *_RUN,
        ("tokens/s", "figures.tokens_per_sec"),
        ("transformers tokens/s", "baselines.transformers_ep.tokens_per_sec"),
        ("ratio", "baselines.transformers_ep.speedup_ratio"),
        ("with our hook tokens/s", "baselines.transformers_ep_hook.tokens_per_sec"),
        ("step ms", "figures.decode_step_ms"),
        ("transformers step ms", "baselines.transformers_ep.decode_step_ms"),
        ("first token ms", "figures.prefill_ms"),
        ("transformers first token ms", "baselines.transformers_ep.prefill_ms"),
        ("worst row", "figures.worst_block_row_error"),
    ),
    "experts": (
        ("local experts", "shapes.num_local_experts"),
        ("rows/expert", "shapes.rows_per_expert"),
        *_SIZES,
        ("activation", "setup.activation"),
        ("bias", "setup.bias"),
        ("dtype", "setup.dtype"),
        ("scheme", "setup.scheme"),
        ("implementation", "setup.experts"),
        ("layout", "setup.layout"),
        *_RUN,
        ("whole us", "figures.call_us"),
        ("TFLOP/s", "figures.tflops"),
        ("weights GB/s", "figures.weight_gbs"),
        ("grouped_mm us", "baselines.grouped_mm.call_us"),
        ("grouped_mm TFLOP/s", "baselines.grouped_mm.tflops"),
        ("grouped_mm weights GB/s", "baselines.grouped_mm.weight_gbs"),
        ("ratio", "baselines.grouped_mm.speedup_ratio"),
        ("worst row", "figures.worst_row_error"),
    ),
}


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A note written by hand: one measurement, its question, method and result."""

    date: str  # ISO
    topic: str  # its title
    file: str  # its name


def read_notes(folder: Path) -> list[Note]:
    """The notes of a directory, the newest first, those of one day by name; none if there is no such directory.

    A note is named <date>-<topic>.md and has a title and the sections Question, Method and Result.

    Errors: ValueError names a note that is named otherwise or lacks one of them. Local.
    """
    notes = []
    for path in sorted(folder.glob("*.md")):
        date, topic = path.name[:10], path.name[10:]
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", date) or not re.fullmatch(r"-[a-z0-9-]+\.md", topic):
            raise ValueError(f"{path}: the name of a note is <date>-<topic>.md, as in 2026-11-21-host-time.md")
        title, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        if not title.startswith("# ") or headings != NOTE_HEADINGS:
            raise ValueError(f"{path}: a note is a title (# ...) and the sections {', '.join(NOTE_HEADINGS)} (## ...)")
        notes.append(Note(date=date, topic=title.removeprefix("# ").strip(), file=path.name))
    return sorted(notes, key=lambda note: note.date, reverse=True)


def render(records: Sequence[Record], notes: Sequence[Note], *, folder: str, plots: Collection[str]) -> str:
    """The whole page.

    Args:
        folder: name of the rows' directory, which is beside the page. plots: benches whose plot is in it.
    Local.
    """
    rows = newest(records)
    parts = [f"# Benchmarks\n\n{MARK.format(folder=folder)}\n"]
    for bench in sorted({record.bench for record in rows}, key=_order):
        title, words = TITLES.get(bench, (bench.capitalize(), f"`ep-moe bench {bench}`."))
        parts.append(f"## {title}\n\n{textwrap.fill(words, PROSE_COLUMNS, break_on_hyphens=False)}\n")
        if bench in plots:
            parts.append(f"![{title}]({folder}/{bench}.png)\n")
        parts += _tables([record for record in rows if record.bench == bench])
    if notes:
        links = [f"- {note.date}: [{note.topic}]({folder}/{NOTES}/{note.file})\n" for note in notes]
        parts.append("## Notes\n\n" + "".join(links))
    return "\n".join(parts)


def _order(bench: str) -> tuple[int, str]:
    known = list(TITLES)
    return (known.index(bench) if bench in known else len(known), bench)


def _tables(records: Sequence[Record]) -> list[str]:
    """A table for each preset and machine, after a line of the values that all its rows share, before their sources."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        key = (str(record.shapes.get("preset", "")), record.gpu, record.world_size)
        groups.setdefault(key, []).append(record)
    parts = []
    for (preset, gpu, world_size), members in groups.items():
        sources = [_source(record) for record in members]
        numbers = {source: str(number) for number, source in enumerate(dict.fromkeys(sources), start=1)}
        parts.append(f"### {preset + ', ' if preset else ''}{world_size} x {gpu}\n")
        parts += _table(members, [numbers[source] for source in sources])
        parts.append("".join(f"{number}. {source}\n" for source, number in numbers.items()))
    return parts


def _table(records: Sequence[Record], runs: Sequence[str]) -> list[str]:
    """Rows as a line of the values that they share, and a table of the others without empty columns."""
    columns = COLUMNS.get(records[0].bench) or tuple((path, path) for record in records for path in _paths(record))
    common, shown = [], [("run", list(runs)), ("date", [record.date[:10] for record in records])]
    for title, path in dict(columns).items():
        cells = [_cell(record, path) for record in records]
        if path.startswith(WORDS) and len(set(cells)) == 1:
            common += [f"{title} {cells[0]}"] if cells[0] else []
        elif any(cells):
            shown.append((title, cells))
    table = markdown_table([title for title, _ in shown], list(zip(*(cells for _, cells in shown), strict=True)))
    line = textwrap.fill(f"All rows: {', '.join(common)}.", PROSE_COLUMNS, break_on_hyphens=False)
    return [f"{line}\n", table] if common else [table]


def _paths(record: Record) -> list[str]:
    baselines = [f"baselines.{name}.{key}" for name, figures in record.baselines.items() for key in figures]
    parts = {"shapes": record.shapes, "setup": record.setup, "figures": record.figures}
    return [f"{part}.{key}" for part, words in parts.items() for key in words] + baselines


def _cell(record: Record, path: str) -> str:
    part, *names = path.split(".")
    value = getattr(record, part)
    for name in names:
        value = value.get(name, "") if value else ""
    return show_figure(names[-1], value) if part in ("figures", "baselines") and value != "" else str(value)


def _source(record: Record) -> str:
    """Date, commit, versions and command of a row, the same for the rows of one command."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if version)
    return f"{record.date[:10]}, commit {record.commit[:12]}, {versions}: `{record.command}`"


def make_report(directory: str | Path, *, check: bool, plots: bool) -> dict[str, Any]:
    """Write the page beside `directory`, from the rows and the list of notes there, and the plots into `directory`.

    The page links the plots that exist, so that a check fails if a plot of the page is missing.

    Args:
        directory: holds *.jsonl and notes/*.md; the page is BENCHMARKS.md of the folder that it is in.
        check: write nothing, only compare the page. plots: draw them first.
    Returns: `ok`, False if the page differs under `check`; `page`; `written`, the paths; `rows`, how many count.
    Errors: ValueError for a wrong directory, row or note; RuntimeError if matplotlib is missing. Local.
    """
    folder = Path(directory).resolve()
    records = read_records(directory)
    page, notes = folder.parent / "BENCHMARKS.md", read_notes(folder / NOTES)
    drawn = draw(newest(records), folder) if plots and not check else []
    text = render(
        records,
        notes,
        folder=folder.name,
        plots={bench for bench in PLOTS if (folder / f"{bench}.png").is_file()},
    )
    same = page.is_file() and page.read_text(encoding="utf-8") == text
    written: list[str] = []
    if not check:
        page.write_text(text, encoding="utf-8")
        written = [str(page), *map(str, drawn)]
    return {"ok": same or not check, "page": str(page), "written": written, "rows": len(newest(records))}
