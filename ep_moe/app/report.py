"""Reports for people: tables on standard output."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_moe.report.plots import draw_loads
from ep_moe.report.tables import open_console, show_figure, show_verdict

# all but tab and newline, and those that reverse the direction of text
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _spans(experts: Sequence[int]) -> str:
    """Expert ids as ranges: [0, 1, 2, 5] is "0-2 5"."""
    spans: list[list[int]] = []
    for expert in experts:
        if spans and expert == spans[-1][1] + 1:
            spans[-1][1] = expert
        else:
            spans.append([expert, expert])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def _show_load(console: Console, expert_load: list[list[int]]) -> None:
    """A row for each expert, a column for each MoE layer; large models get each layer's extremes instead."""
    num_experts = len(expert_load[0])
    if num_experts <= 64 and len(expert_load) <= 12:
        table = _table(
            "Load: tokens that each expert was sent", "expert", *(f"layer {i}" for i in range(len(expert_load)))
        )
        for expert in range(num_experts):
            table.add_row(str(expert), *(str(layer[expert]) for layer in expert_load))
        table.add_section()
        table.add_row("max / mean", *(f"{_imbalance(layer):.2f}" for layer in expert_load))
    else:
        table = _table("Load: tokens that experts were sent", "layer", "least", "mean", "most", "max / mean")
        for index, layer in enumerate(expert_load):
            mean = sum(layer) / num_experts
            table.add_row(str(index), str(min(layer)), f"{mean:.1f}", str(max(layer)), f"{_imbalance(layer):.2f}")
    console.print(table)


def _imbalance(load: list[int]) -> float:
    return max(load) * len(load) / sum(load) if sum(load) else 0.0


def show_record(report: dict[str, Any]) -> None:
    """Print the load that was recorded."""
    console = open_console()
    _show_load(console, report["expert_load"])
    console.print(Text(f"{report['tokens']} choices of tokens in each layer, written to {report['out']}"))


def show_balance_plan(report: dict[str, Any]) -> None:
    """Print how balanced each layer's ranks are before and after a plan, and its moves."""
    console = open_console()
    table = _table("Balancedness", "layer", "before", "after")
    for index, layer in enumerate(report["layers"]):
        table.add_row(str(index), f"{layer['before']:.3f}", f"{layer['after']:.3f}")
    table.add_section()
    table.add_row("all", f"{report['balancedness_before']:.3f}", f"{report['balancedness']:.3f}")
    console.print(table)
    sizes = f"{report['redundant_experts']} copies on {report['ranks']} ranks"
    console.print(Text("balancedness is the mean rank's load over the fullest one's"))
    console.print(Text(f"{sizes}; {report['moves']} experts move from their places before"))
    if report["out"]:
        console.print(Text(f"written to {report['out']}"))
    if report["plot"]:
        console.print(Text(f"drawn to {report['plot']}"))


def _show_rebalancing(console: Console, found: dict[str, Any] | None) -> None:
    """A line about what the ranks have moved; none without a rebalancer."""
    if found is None:
        return
    text = (
        f"rebalanced {found['rebalances']} times, {found['moved_experts']} experts moved "
        f"({found['moved_bytes'] / 1e6:.1f} MB)"
    )
    if found["balancedness_before"] is not None:
        text += f"; last plan: balancedness {found['balancedness_before']:.3f} to {found['balancedness_after']:.3f}"
        text += ", too little to gain" if found["declined"] and not found["rebalances"] else ""
    if found["state"] in ("planning", "moving"):
        text += f"; ended while {found['state']}"
    console.print(Text(text))
    if found["last_error"]:
        console.print(Text(f"rebalancing failed: {found['last_error']}", style="bold red"), soft_wrap=True)


def _show_times(console: Console, *groups: dict[str, float]) -> None:
    table = _table("Seconds, of the slowest rank", "phase", "s")
    for index, times in enumerate(groups):
        if index:
            table.add_section()
        for name, secs in times.items():
            if name.endswith("_secs"):
                table.add_row(("  in the MoE layers: " if index else "") + name.removesuffix("_secs"), f"{secs:.2f}")
    console.print(table)


def show_run(report: dict[str, Any]) -> None:
    """Print the report of `ep-moe run`."""
    console = open_console()
    ranks = _table("Ranks", "rank", "device", "experts", "new tokens", "equal", "logit difference")
    for rank in report["ranks"]:
        ranks.add_row(
            str(rank["rank"]),
            rank["device"],
            _spans(rank["experts"]),
            str(rank["new_tokens"]),
            "yes" if rank["tokens_equal"] else "NO",
            f"{rank['max_logit_diff']:.1e}",
        )
    console.print(ranks)
    _show_load(console, report["expert_load"])
    _show_rebalancing(console, report["rebalancing"])
    _show_times(console, report["times"], report["layer_times"])
    console.print(Text("Text", style="bold"))
    for index, text in enumerate(report["text"]):
        console.print(f"  rank {index}: {text!r}", soft_wrap=True)
    console.print()
    allowed = report["max_logit_diff_allowed"]
    console.print(
        Text(
            f"{'ok' if report['ok'] else 'NOT OK'}: {report['world_size']} ranks against the whole model, tokens "
            f"{'equal' if report['tokens_equal'] else 'DIFFER'}, largest logit difference "
            f"{report['max_logit_diff']:.1e} (at most {allowed:.0e}) over {report['new_tokens']} new and "
            f"{report['teacher_tokens']} held-out tokens",
            style="bold green" if report["ok"] else "bold red",
        )
    )


def escaped(text: str) -> str:
    """The text with control characters as Python writes them: a terminal would obey them. Local."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def show_generate(report: dict[str, Any]) -> None:
    """Print the report of `ep-moe generate`."""
    console = open_console()
    for prompt, text in zip(report["prompts"], report["text"], strict=True):
        if console.is_terminal:
            console.print(Text(escaped(prompt), style="bold") + Text(escaped(text)), soft_wrap=True)
        else:
            print(prompt + text)
        print()
    times, errors = report["times"], open_console(stderr=True)
    _show_rebalancing(errors, report["rebalancing"])
    errors.print(
        f"{report['new_tokens']} tokens on {report['world_size']} ranks in {times['generate_secs']:.2f} s "
        f"({times['tokens_per_sec']:.1f} tokens/s)"
    )


def show_eval(report: dict[str, Any]) -> None:
    """Print the report of `ep-moe eval`."""
    console = open_console()
    table = _table(
        f"Held-out loss, {report['text_bytes']} bytes, {report['predicted_tokens']} predicted tokens",
        "model",
        "nats/byte",
        "bits/byte",
    )
    table.add_row(
        f"expert-parallel, {report['world_size']} ranks, {report['dtype']}, quant {report['scheme']}",
        f"{report['nats_per_byte']:.5f}",
        f"{report['bits_per_byte']:.5f}",
    )
    if "whole_nats_per_byte" in report:
        whole = report["whole_nats_per_byte"]
        table.add_row(
            f"whole, {report['dtype']}",
            f"{whole:.5f}",
            f"{whole / report['nats_per_byte'] * report['bits_per_byte']:.5f}",
        )
        table.add_row("difference", f"{report['difference']:+.5f}", f"{report['difference'] / whole:+.4%}")
    if "rounded_nats_per_byte" in report:
        rounded = report["rounded_nats_per_byte"]
        table.add_row(
            f"whole, experts rounded as in {report['scheme']}",
            f"{rounded:.5f}",
            f"{rounded / report['nats_per_byte'] * report['bits_per_byte']:.5f}",
        )
        table.add_row(
            "difference", f"{report['rounded_difference']:+.5f}", f"{report['rounded_difference'] / rounded:+.4%}"
        )
    console.print(table)
    _show_load(console, report["expert_load"])
    _show_times(console, report["times"])


def show_quantize(report: dict[str, Any]) -> None:
    """Print the report of `ep-moe quantize`."""
    before, after = report["expert_bytes_before"], report["expert_bytes_after"]
    print(
        f"{report['out']}: the experts of {report['layers']} layers in {report['scheme']}, {after / 1e6:.1f} MB "
        f"instead of {before / 1e6:.1f} MB ({after / before:.0%}), {report['secs']:.1f} s"
    )


def show_tune(report: dict[str, Any]) -> None:
    """Print what was tuned."""
    console = open_console()
    heads = "rows", "kernels", "us", "before", "gain", "tried", "refused", "search"
    table = _table(f"{report['gpu']}, {report['dtype']}", *heads)
    for row in report["rows"]:
        table.add_row(
            str(row["rows_per_expert"]),
            row["backend"],
            f"{row['us']:.1f}",
            f"{row['default_us']:.1f}",
            f"{row['speedup_ratio']:.2f}x",
            str(row["tried"]),
            str(row["refused"]),
            "done" if row["complete"] else "not to the end",
        )
    console.print(table)
    if "table" not in report:  # it was checked
        return
    console.print(f"{report['table']} is read from now on where it lies in a folder of tables", soft_wrap=True)
    if not all(row["complete"] for row in report["rows"]):
        console.print(f"Run it again to go on from {report['journal']}.", soft_wrap=True)


def show_paths(result: Mapping[str, Any]) -> None:
    """Print the paths that `ep-moe bench report` has written."""
    for path in result["written"] or [f"{result['page']} is up to date"]:
        print(path)


_WIDTHS = (9, 22, 0)  # columns of a finding; the last has the rest
_COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def show_findings(result: Mapping[str, Any]) -> None:
    """Print the report of `ep-moe doctor`: verdict, name and finding on a line, the mend below."""
    console, part = open_console(), ""
    for finding in result["findings"]:
        if finding["part"] != part:
            part = finding["part"]
            console.print(Text(part, style="bold"))
        name, found = finding["name"], CONTROLS.sub(" ", finding["found"])
        rows = [(Text(f"  {finding['verdict']}", style=_COLORS[finding["verdict"]]), Text(name), Text(found))]
        if finding["mend"]:
            rows.append((Text(""), Text("-> mend", style="bold"), Text(finding["mend"])))
        if not console.is_terminal:  # lines as they are, for grep
            for cells in rows:
                console.print(
                    Text(" ".join(f"{cell.plain:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)))
                )
            continue
        table = Table.grid(padding=(0, 1, 0, 0))
        for width in _WIDTHS:
            table.add_column(width=width or None)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    counts = {verdict: sum(each["verdict"] == verdict for each in result["findings"]) for verdict in _COLORS}
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    console.print(Text(f"{found}; looked for {result['secs']:g} s"))


def show_formats(result: Mapping[str, Any]) -> None:
    """Print the table of `ep-moe formats`."""
    console = open_console()
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("name", "weights of experts", "tokens sent", "bits"):
        table.add_column(title)
    for row in result["formats"]:
        table.add_row(row["name"], row["experts"], row["tokens"], f"{row['weight_bits']:.3g}")
    console.print(table)
    console.print(Text("bits: of a stored weight, with its scales. torch and triton experts compute all of them."))
    console.print(Text("Sizes may follow some names: fp8_block_64x128, int4_w4a16_g32_zp; see docs/formats.md."))


def show_bench_serve(report: dict[str, Any]) -> None:
    """Print a row for each level, times as p50 / p99."""
    console, times = open_console(), ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    title = f"{report['model']} at {report['url']}; ms, p50 / p99"
    columns = (name.removesuffix("_ms").upper() for name in times)
    table = _table(title, "clients", "requests/s", "answered", "tokens/s", *columns)
    for row in report["rows"]:
        table.add_row(
            str(row["concurrency"]),
            f"{row['rate']:g}" if row["rate"] else "-",
            f"{row['requests'] - row['failed']} of {row['requests']}",
            f"{row['tokens_per_sec']:.1f}",
            *(f"{row[name]['p50']:.1f} / {row[name]['p99']:.1f}" if name in row else "" for name in times),
        )
    console.print(table)
    for row in report["rows"]:
        for error in row["errors"]:
            console.print(f"{row['concurrency']} clients: {error}")


def show_bench_balance(report: dict[str, Any]) -> None:
    """Print a line for each layer, load and number of tokens."""
    console = open_console()
    columns = "load", "copies", "tokens/rank", "before us", "after us", "even load us", "after / even"
    table = _table(f"{report['world_size']} x {report['gpu']}", "layer", *columns, "balancedness before", "after")
    for row in report["rows"]:
        shapes, setup, ours = row["shapes"], row["setup"], row["figures"]
        before, even = (row["baselines"].get(name, {}) for name in ("linear", "uniform"))
        us = (show_figure("call_us", figures.get("call_us")) for figures in (before, ours, even))
        ratios = (even.get("time_ratio"), *(each.get("balancedness_ratio") for each in (before, ours)))
        table.add_row(
            f"{shapes['preset']} {setup['scheme']}",
            setup["routing"],
            str(shapes["redundant_experts"]),
            str(shapes["tokens_per_rank"]),
            *us,
            *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        )
    console.print(table)
    console.print(
        Text("before: experts in order; after: placed for the load, with copies. Even load: experts in order.")
    )
    show_verdict(report)


def draw_bench_loads(path: Path, report: dict[str, Any]) -> None:
    """Draw the load of ranks in each row of `ep-moe bench balance`. Errors: as `draw_loads`."""
    labels = [
        f"{row['shapes']['preset']} {row['setup']['scheme']}, {row['setup']['routing']}, "
        f"{row['shapes']['redundant_experts']} copies, {row['shapes']['tokens_per_rank']} tokens"
        for row in report["rows"]
    ]
    draw_loads(path, {"before": report["rank_load_before"], "after": report["rank_load"]}, labels)
