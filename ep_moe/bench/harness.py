"""Shared by all benchmarks: checks of results before anything is timed, rows and reports, progress on stderr.

Letters: N rows of an output, H hidden, n checked rows.
"""

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ep_moe.group import EPGroup
from ep_moe.profiling.timing import Captured, capture, slowest, spread, time_calls
from ep_moe.report.records import OURS, device_name, versions
from ep_moe.testing import worst_row_error
from ep_moe.transport import CollectiveTransport, GatheredTransport, HierarchicalTransport, LocalTransport, Transport
from ep_moe.transport.deepep import DeepEPTransport

Row = dict[str, Any]
Figures = dict[str, dict[str, float]]  # by system (ours, each baseline) and name
Point = TypeVar("Point")
_TURN = 10  # calls of a system before the next one's turn


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one row measures.

    Args:
        what: for progress. shapes, setup: of the row. known: figures of ours that need no timing.
        check: returns errors of each system, ours first, and a line for each broken limit. Collective.
        time: returns the times of a system, once all are right. Collective. whole: their figure that speedups compare.
        limit: of the worst row error, if there is one. left_out: baselines that cannot be measured, and why.
    """

    what: str
    shapes: Mapping[str, Any]
    setup: Mapping[str, Any]
    check: Callable[[], tuple[Figures, list[str]]]
    time: Callable[[str], dict[str, float]]
    whole: str = "call_us"
    known: Mapping[str, float] = dataclasses.field(default_factory=dict)
    limit: float | None = None
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def measure(self, group: EPGroup) -> Row:
        """Check, then, if no limit is broken, time; returns the row of a report. Collective."""
        tell(group, f"{self.what}: check")
        figures, broken = self.check()
        figures[OURS] |= self.known
        for name in figures if not broken else ():
            tell(group, f"{self.what}: time {name}")
            with group.guard(f"time {name}"):
                figures[name] |= self.time(name)
        ours = figures.pop(OURS)
        for theirs in figures.values():
            for name in [name for name in theirs if name.endswith(self.whole)]:
                theirs[f"{name.removesuffix(self.whole)}speedup_ratio"] = theirs[name] / ours[name]
        times = {name: us for name, us in ours.items() if name.endswith("_us")}
        if times:  # of a long run that is cut off, these are what is left
            tell(group, f"{self.what}: " + ", ".join(f"{name} {us:.5g}" for name, us in times.items()))
        row: Row = {"ok": not broken, "broken": broken, "left_out": dict(self.left_out)}
        row |= {} if self.limit is None else {"row_error_limit": self.limit}
        baselines = {name: theirs for name, theirs in figures.items() if theirs}
        return row | {"shapes": dict(self.shapes), "setup": dict(self.setup), "figures": ours, "baselines": baselines}


def measure_all(
    bench: str,
    group: EPGroup,
    points: Iterable[Point],
    prepare: Callable[[Point, contextlib.ExitStack], Work | None],
) -> dict[str, Any]:
    """Measure one point after another until a result is wrong; returns the report, the same on every rank. Collective.

    Args:
        prepare: makes the work of a point, None to leave it out; the stack is closed after it was measured.
    """
    rows: list[Row] = []
    for point in points:
        with contextlib.ExitStack() as stack:
            work = prepare(point, stack)
            rows += [] if work is None else [work.measure(group)]
        if rows and not rows[-1]["ok"]:
            break
    return {
        "ok": all(row["ok"] for row in rows),
        "bench": bench,
        "gpu": device_name(group.device),
        "world_size": group.num_ranks,
        "versions": versions(group.device),
        "rows": rows,
    }


@dataclasses.dataclass(kw_only=True, slots=True)
class Contender:
    """An implementation to check, then time.

    Args:
        call: computes the output. rows: the rows [N, H] of the tokens in it.
        sample: [n] int64, rows that are checked. expected: computes what they should be, [n, H] float32.
        limit: the largest allowed error of a row, a relative L2 error. graph: of the call, captured by its check.
    """

    call: Callable[[], torch.Tensor]
    sample: torch.Tensor
    expected: Callable[[], torch.Tensor]
    limit: float
    rows: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    graph: Captured | None = None


def check(group: EPGroup, contenders: Mapping[str, Contender], *, graph: bool) -> tuple[Figures, list[str]]:
    """Compare each contender with its expected rows, over all ranks, and its CUDA graph with its own output on all.

    Args:
        graph: capture graphs. Returns: as `Work.check`. Collective, host sync.
    """
    with group.guard("check"):
        outputs = {name: contender.rows(contender.call()) for name, contender in contenders.items()}
    errors = {
        name: {"worst_row_error": worst_row_error(outputs[name][contender.sample], contender.expected())}
        for name, contender in contenders.items()
    }
    group.wait_for_all("check")  # ranks differ in time to compute what is expected
    for name, contender in contenders.items() if graph else ():
        with group.guard("check graph"):
            contender.graph = capture(contender.call, group.device)
            replayed = contender.rows(contender.graph.replayed())
            errors[name]["worst_graph_row_error"] = worst_row_error(replayed, outputs[name])
    errors = largest_of_ranks(group, errors)
    return errors, broken_limits(errors, {name: dict.fromkeys(errors[name], contenders[name].limit) for name in errors})


def largest_of_ranks(group: EPGroup, errors: Figures) -> Figures:
    """The largest of all ranks for each error, by system and name. Collective."""
    ranks = group.all_gather_object(errors)
    return {
        system: {name: largest(rank[system][name] for rank in ranks) for name in found}
        for system, found in errors.items()
    }


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if any is NaN, which Python's `max` may skip. Local."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def broken_limits(errors: Figures, limits: Figures) -> list[str]:
    """A line for each error that exceeds its limit or is NaN: "gathered worst_row_error (1) exceeds 0.01".

    Args:
        errors: by system and name. limits: the same; errors without a limit are not judged.
    Local.
    """
    return [
        f"{system} {name} ({errors[system][name]:.3g}) exceeds {limit:g}"
        for system, named in limits.items()
        for name, limit in named.items()
        if name in errors[system] and not errors[system][name] <= limit
    ]


def time_whole(group: EPGroup, call: Callable[[], object], *, name: str, warmup: int, repeats: int) -> dict[str, float]:
    """Figures of the time of a call, on the slowest rank, from a cold L2. Collective, host sync."""
    samples = time_calls(call, group, warmup=warmup, repeats=repeats)
    return spread(name, slowest(group, {name: samples}, whole=name)[name])


def time_in_turns(
    group: EPGroup,
    calls: Mapping[str, Callable[[], object]],
    *,
    warmup: int,
    repeats: int,
    on_call: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Microseconds of calls of each system on this rank, from a cold L2; the systems in turn, as the power that a call
    takes slows the next ones. Collective, host sync."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for start in range(0, repeats, _TURN):
        count = min(repeats - start, _TURN)
        for name, call in calls.items():
            samples[name] += time_calls(call, group, warmup=warmup, repeats=count, on_call=on_call)
    return samples


def field_values(source: object, *names: str) -> dict[str, Any]:
    """Values of a config by name, members of an enum by value. Local."""
    values = {name: getattr(source, name) for name in names}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


def implementation_name(implementation: object, known: Mapping[str, Any]) -> str:
    """The name in `known` of an implementation that "auto" chose: its own, or by its class or that's prefix. Local."""
    made_by, own = type(implementation), getattr(implementation, "name", None)
    if own in known:
        return str(own)
    names = [name for name, maker in known.items() if maker is made_by]
    names += [name for name in known if made_by.__name__.lower().startswith(name)]
    return names[0] if names else made_by.__name__


def waits_on_host(transport: Transport, device: torch.device) -> bool:
    """True if the transport's rounds read back to the host, which no CUDA graph can capture. Local."""
    if isinstance(transport, HierarchicalTransport):
        return not transport.gathers(transport.config.max_tokens_per_rank)
    reads_back = isinstance(transport, LocalTransport) and device.type == "cuda"
    waits = isinstance(transport, (CollectiveTransport, DeepEPTransport))
    return reads_back or (waits and not isinstance(transport, GatheredTransport))


def tell(group: EPGroup, text: str) -> None:
    """Print progress to standard error, on rank 0 only. Local."""
    if group.rank == 0:
        print(text, file=sys.stderr, flush=True)


def num_nodes(group: EPGroup) -> int:
    """The number of machines of the group. Collective."""
    return 1 + max(group.all_gather_object(group.node))
