"""`ep-moe plan`: which EP size, redundancy, transport and layout suit a model, its load and a latency target."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.fields import Field, check_fields, require
from ep_moe.planning.calibration import Comparison, calibrate, compare, worst_and_median
from ep_moe.planning.hardware import Hardware
from ep_moe.planning.planner import MODELS, Candidate, Job, best_of_size, plan
from ep_moe.planning.times import SCHEMES, LayerShape
from ep_moe.report.plots import DPI
from ep_moe.report.records import read_records
from ep_moe.report.tables import open_console

ROUTINGS = ("uniform", "recorded")
RECORDED = Path(__file__).parent / "model" / "training.json"  # with the load of every expert of the shipped model
SHOWN = 12  # candidates of a table
LEAST_WIDTH = 108  # of the table, in characters
MOST_RANKS = 2048  # of a plot
COLORS = {"dispatch_us": "#9aa5b1", "experts_us": "#2f6fb0", "combine_us": "#d98324", "rest_us": "#c9c9c9"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """A model, GPUs and a load for `ep-moe plan`."""

    model: Annotated[str, Field(help="A known model", choices=tuple(MODELS))] = "deepseek-v3"
    gpus: Annotated[int, Field(help="GPUs in all", at_least=1)] = 32
    tokens: Annotated[int, Field(help="Tokens of one rank in a pass", at_least=1)] = 128
    hardware: Annotated[str, Field(help="A name in configs/hardware-NAME.toml, or the path of such a file")] = (
        "h200-cx7"
    )
    scheme: Annotated[str, Field(help="Scheme of weights and payload", choices=SCHEMES, option="--quant")] = "fp8_block"
    routing: Annotated[
        str, Field(help="Loads of experts: equal, or as uneven as the shipped model's", choices=ROUTINGS)
    ] = "uniform"
    load: Annotated[
        Path | None, Field(help="Loads of experts as uneven as in this file of `ep-moe balance record` instead")
    ] = None
    target_ms: Annotated[
        float, Field(help="Most milliseconds for all MoE layers of a pass; 0 is no target", at_least=0)
    ] = 0.0
    plot: Annotated[Path | None, Field(help=f"Draw EP sizes from 1 to {MOST_RANKS} ranks to this file")] = None
    validate: Annotated[bool, Field(help="Compare predictions with all measured rows instead")] = False
    calibrate: Annotated[bool, Field(help="Print the constants that fit the hardware's rows instead")] = False
    rows: Annotated[Path, Field(help="Folder of measured rows, for --validate and --calibrate")] = Path(
        "docs/benchmarks"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.validate and self.calibrate:
            raise ValueError("validate and calibrate exclude each other")
        if self.load is not None and self.routing != "uniform":
            raise ValueError(f"load ({str(self.load)!r}) and routing ({self.routing!r}) exclude each other")
        if self.plot is not None and (self.validate or self.calibrate):
            raise ValueError(f"plot ({str(self.plot)!r}) is of a plan, which --validate and --calibrate do not make")

    def job(self) -> Job:
        """The model and its load."""
        layer = LAYER_PRESETS[self.model].sizes
        assert layer.routing is not None
        measured: Sequence[Sequence[float]] = ()
        if self.routing == "recorded":
            measured = json.loads(RECORDED.read_text(encoding="utf-8"))["expert_load"]
        if self.load is not None:
            from ep_moe.balance import RecordedLoad  # imports torch

            measured = RecordedLoad.read(self.load).load
            require(any(map(any, measured)), f"load ({str(self.load)!r}) has no token of any expert")
        return Job(
            shape=LayerShape(
                hidden=layer.hidden,
                intermediate=layer.intermediate,
                num_experts=layer.num_experts,
                num_topk=layer.routing.num_topk,
                scheme=self.scheme,
                gated=layer.activation.kind.gated,
            ),
            moe_layers=int(MODELS[self.model]["moe_layers"]),
            other_params=float(MODELS[self.model]["other_params"]),
            gpus=self.gpus,
            tokens=self.tokens,
            target_ms=self.target_ms,
            measured=tuple(tuple(layer_loads) for layer_loads in measured),
        )


def make_plan(config: PlanConfig) -> dict[str, Any]:
    """The report: candidates, the best first, or, with `validate` or `calibrate`, errors or constants.

    Errors: ValueError for unknown hardware or rows; RuntimeError for a plot without matplotlib. Local.
    """
    hw = Hardware.read(config.hardware)
    if config.validate:
        return _validation(hw, config)
    if config.calibrate:
        found = calibrate(hw, read_records(config.rows))
        values = dataclasses.asdict(found)
        return {"constants": {name: value for name, value in values.items() if not isinstance(value, tuple)}}
    job = config.job()
    candidates = plan(hw, job)
    if config.plot is not None:
        _draw(hw, job, config)
    values = dataclasses.asdict(config) | {"plot": None if config.plot is None else str(config.plot)}
    values["routing"] = config.routing if config.load is None else str(config.load)
    head = {name: values[name] for name in ("model", "gpus", "tokens", "hardware", "scheme", "routing", "target_ms")}
    best = candidates[0].row() if candidates and candidates[0].fits else None
    return head | {"plot": values["plot"], "best": best, "candidates": [candidate.row() for candidate in candidates]}


def _validation(hw: Hardware, config: PlanConfig) -> dict[str, Any]:
    found = compare(hw, read_records(config.rows))
    worst, median = worst_and_median(found)
    kinds = sorted({comparison.what for comparison in found if not comparison.reason})
    groups = {}
    for kind in kinds:
        chosen = [comparison for comparison in found if comparison.what == kind and not comparison.reason]
        groups[kind] = dict(zip(("worst", "median"), worst_and_median(chosen), strict=True)) | {"figures": len(chosen)}
    return {
        "hardware": config.hardware,
        "worst": worst,
        "median": median,
        "groups": groups,
        "compared": [_compared(comparison) for comparison in found if not comparison.reason],
        "left_out": [{"row": f"{c.what}, {c.label}", "reason": c.reason} for c in found if c.reason],
    }


def _compared(comparison: Comparison) -> dict[str, Any]:
    return {
        "what": comparison.what,
        "row": comparison.label,
        "measured_us": comparison.measured_us,
        "predicted_us": comparison.predicted_us,
        "error": comparison.error,
    }


def show_plan(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    console = open_console()
    if console.width < LEAST_WIDTH:  # no figure is cut off: a narrower terminal, or a pipe, gets longer lines
        console.width = LEAST_WIDTH
    if "constants" in report:
        for name, value in report["constants"].items():
            console.print(Text(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value:g}"))
    elif "left_out" in report:
        _show_validation(console, report)
    else:
        _show_candidates(console, report)


def _show_candidates(console: Console, report: dict[str, Any]) -> None:
    target = f", target {report['target_ms']:g} ms" if report["target_ms"] else ""
    console.print(
        Text(
            f"{report['model']}, {report['scheme']}, {report['gpus']} GPUs ({report['hardware']}), {report['tokens']} "
            f"tokens per rank, {report['routing']} routing{target}",
            style="bold",
        )
    )
    table = Table(box=box.SIMPLE)
    names = ("EP", "copies", "transport", "layout", "us: dispatch\n+ experts + combine")
    for name in (*names, "pass\nms", "tokens/s\nper GPU", "GiB: weights\n+ buffers", "fits"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("transport", "layout", "fits") else "right")
    for row in report["candidates"][:SHOWN]:
        why_not = "" if row["fits_target"] else "too slow"
        table.add_row(
            *(str(row[name]) for name in ("ep_size", "redundant", "transport", "layout")),
            " + ".join(f"{row[name]:.0f}" for name in ("dispatch_us", "experts_us", "combine_us")),
            f"{row['pass_ms']:.1f}",
            f"{row['tokens_per_sec']:,.0f}",
            f"{row['weights_gib']:,.1f} + {row['buffers_gib']:,.1f}",
            "yes" if row["fits"] else "no memory" if not row["fits_memory"] else why_not,
        )
    console.print(table)
    more = len(report["candidates"]) - SHOWN
    if more > 0:
        console.print(Text(f"{more} more with --json"))
    if report["best"] is None:
        console.print(Text("nothing fits", style="bold red"))
    if report["plot"]:
        console.print(Text(f"drawn to {report['plot']}"))


def _show_validation(console: Console, report: dict[str, Any]) -> None:
    table = Table("figure", "row", "measured us", "predicted us", "error", box=box.SIMPLE)
    for row in sorted(report["compared"], key=lambda row: (row["what"], -abs(row["error"]))):
        figures = f"{row['measured_us']:,.1f}", f"{row['predicted_us']:,.1f}", f"{row['error']:+.1%}"
        table.add_row(row["what"], row["row"], *figures)
    console.print(table)
    table = Table("left out", "reason", box=box.SIMPLE)
    for row in report["left_out"]:
        table.add_row(row["row"], row["reason"])
    console.print(table)
    for kind, group in report["groups"].items():
        text = f"{kind}: {group['figures']} figures, median error {group['median']:.1%}, worst {group['worst']:.1%}"
        console.print(Text(text))
    count = len(report["compared"])
    text = f"all {count} figures: median error {report['median']:.1%}, worst {report['worst']:.1%}"
    console.print(Text(text, style="bold"))


def _draw(hw: Hardware, job: Job, config: PlanConfig) -> None:
    """For each power of two of ranks that share the experts: phases of the fastest way, and memory of a rank."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("a plot needs matplotlib; install: pip install 'ep-moe[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = [best_of_size(hw, job, 2**power) for power in range(MOST_RANKS.bit_length())]
    figure, (times, memory) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    ticks = range(len(best))
    _stack(times, [{name: getattr(c.times, name) for name in COLORS} for c in best], list(COLORS.values()))
    _stack(memory, [{"weights": c.weights_gib, "buffers": c.buffers_gib} for c in best], ["#2f6fb0", "#d98324"])
    memory.axhline(hw.gpu_memory_gib * hw.memory_share, color="black", linestyle="--", linewidth=1)
    times.set_ylabel("predicted us of one layer")
    memory.set_ylabel("predicted GiB of a rank")
    memory.set_yscale("log")
    memory.set_xticks(ticks, [_tick(candidate) for candidate in best], fontsize=7)
    memory.set_xlabel("ranks that share the experts; redundant experts; transport and layout")
    times.set_title(f"{config.model}, {config.scheme}, {config.tokens} tokens per rank, {config.routing} routing")
    figure.tight_layout()
    assert config.plot is not None
    try:
        figure.savefig(config.plot, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot ({str(config.plot)!r}) cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _stack(axes: Any, parts: list[dict[str, float]], colors: list[str]) -> None:
    """A bar for each entry, of parts on top of each other."""
    bottom = [0.0] * len(parts)
    for name, color in zip(parts[0], colors, strict=True):
        heights = [part[name] for part in parts]
        axes.bar(range(len(parts)), heights, bottom=bottom, color=color, label=name.removesuffix("_us"))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _tick(candidate: Candidate) -> str:
    return f"{candidate.ep_size}\n+{candidate.redundant}\n{candidate.transport}\n{candidate.layout}"
