"""Shared by all benchmarks: checks of results before anything is timed, rows and reports, progress on stderr.

Letters: N rows of an output, H hidden, n checked rows.
"""

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ep_moe.bench.timing import Captured, capture, slowest, time_calls
from ep_moe.group import EPGroup
from ep_moe.report.records import device_name, versions
from ep_moe.testing import worst_row_error
from ep_moe.transport import CollectiveTransport, LocalTransport, Transport

Row = dict[str, Any]
Point = TypeVar("Point")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """An implementation to check, then time.

    Args:
        call: computes the output. rows: the rows [N, H] of the tokens in it.
        sample: [n] int64, rows that are checked. expected: computes what they should be, [n, H] float32.
        limit: the largest allowed error of a row, a relative L2 error.
    """

    call: Callable[[], torch.Tensor]
    sample: torch.Tensor
    expected: Callable[[], torch.Tensor]
    limit: float
    rows: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Results of a check: the errors of each contender by name, the graphs of their calls, the limits broken."""

    errors: dict[str, dict[str, float]]
    graphs: dict[str, Captured]
    broken: list[str]


def check(group: EPGroup, contenders: Mapping[str, Contender], *, graph: bool) -> Checked:
    """Compare each contender with its expected rows, over all ranks, and its CUDA graph with its own output on all.

    Args:
        graph: capture graphs. Collective, host sync.
    """
    with group.guard("check"):
        outputs = {name: contender.rows(contender.call()) for name, contender in contenders.items()}
    errors = {
        name: {"worst_row_error": worst_row_error(outputs[name][contender.sample], contender.expected())}
        for name, contender in contenders.items()
    }
    group.wait_for_all("check")  # ranks differ in time to compute what is expected
    graphs: dict[str, Captured] = {}
    for name, contender in contenders.items() if graph else ():
        with group.guard("check graph"):
            graphs[name] = capture(contender.call, group.device)
            replayed = contender.rows(graphs[name].replayed())
            errors[name]["worst_graph_row_error"] = worst_row_error(replayed, outputs[name])
    errors = largest_of_ranks(group, errors)
    limits = {name: dict.fromkeys(found, contenders[name].limit) for name, found in errors.items()}
    return Checked(errors=errors, graphs=graphs, broken=broken_limits(errors, limits))


def largest_of_ranks(group: EPGroup, errors: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The largest of all ranks for each error, by system and name. Collective."""
    ranks = group.all_gather_object(errors)
    return {
        system: {name: largest(rank[system][name] for rank in ranks) for name in found}
        for system, found in errors.items()
    }


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if any is NaN, which Python's `max` may skip. Local."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def broken_limits(errors: Mapping[str, Mapping[str, float]], limits: Mapping[str, Mapping[str, float]]) -> list[str]:
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
    return slowest(group, {name: samples}, whole=name)[name].figures(name)


def make_row(
    broken: Sequence[str],
    *,
    shapes: Mapping[str, Any],
    setup: Mapping[str, Any],
    figures: dict[str, float],
    baselines: dict[str, dict[str, float]],
    limit: float | None = None,
) -> Row:
    """A row of a report: `ok` if no limit is broken, then times may be added; `limit` of the worst row error. Local."""
    row: Row = {"ok": not broken, "broken": list(broken)}
    row |= {} if limit is None else {"row_error_limit": limit}
    return row | {"shapes": dict(shapes), "setup": dict(setup), "figures": figures, "baselines": baselines}


def measure_all(
    bench: str, group: EPGroup, points: Iterable[Point], measure: Callable[[Point], Row | None]
) -> dict[str, Any]:
    """Measure one point after another until a result is wrong; returns the report, the same on every rank. Collective.

    Args:
        measure: returns the row of a point, None to leave it out.
    """
    rows: list[Row] = []
    for point in points:
        row = measure(point)
        rows += [] if row is None else [row]
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


def field_values(source: object, *names: str) -> dict[str, Any]:
    """Values of a config by name, members of an enum by value. Local."""
    values = {name: getattr(source, name) for name in names}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


def implementation_name(implementation: object, known: Mapping[str, Any]) -> str:
    """The name in `known` of an implementation that "auto" chose, by its class or its class's prefix. Local."""
    made_by = type(implementation)
    names = [name for name, maker in known.items() if maker is made_by]
    names += [name for name in known if made_by.__name__.lower().startswith(name)]
    return names[0] if names else made_by.__name__


def waits_on_host(transport: Transport, device: torch.device) -> bool:
    """True if the transport's rounds read back to the host, which no CUDA graph can capture. Local."""
    reads_back = isinstance(transport, LocalTransport) and device.type == "cuda"
    return reads_back or isinstance(transport, CollectiveTransport)


def tell(group: EPGroup, text: str) -> None:
    """Print progress to standard error, on rank 0 only. Local."""
    if group.rank == 0:
        print(text, file=sys.stderr, flush=True)


def num_nodes(group: EPGroup) -> int:
    """The number of machines of the group. Collective."""
    return 1 + max(group.all_gather_object(group.node))
