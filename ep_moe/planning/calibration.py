"""Finds the constants of `Hardware` in measured rows, and compares predictions with the rows that no constant is of."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ep_moe.planning.hardware import Hardware
from ep_moe.planning.times import SCHEMES, LayerShape, collective_us, experts_us, nvlink_us, rows_of_experts
from ep_moe.planning.traffic import Traffic, traffic, uniform
from ep_moe.report.records import WORDS, Record

NCCL = "all_to_all_single"  # the baseline that moves what the transport `collective` moves
DIGITS = 4  # of a constant
OVERLAPS = [1 + step / 10 for step in range(21)]


def chosen_rows(records: Sequence[Record], texts: Sequence[str]) -> list[Record]:
    """The row that each text describes: a bench, then "name=value" of a row's shapes, setup, world_size or commit.

    Errors: ValueError names a text that describes no row or several.
    """
    found = []
    for text in texts:
        bench, *words = text.split()
        pairs = [word.split("=", 1) for word in words]
        matches = [record for record in records if record.bench == bench and _has(record, pairs)]
        if len(matches) != 1:
            raise ValueError(f"rows: {text!r} describes {len(matches)} measured rows instead of one")
        found.append(matches[0])
    return found


def _has(record: Record, pairs: Sequence[list[str]]) -> bool:
    words = record.shapes | record.setup | {"world_size": record.world_size, "commit": record.commit[:7]}
    return all(str(words.get(name)) == value for name, value in pairs)


def shape_of(record: Record) -> LayerShape:
    """The layer, or the part of one, that a row has measured."""
    words = record.shapes | record.setup
    return LayerShape(
        hidden=words["hidden"],
        intermediate=words.get("intermediate", 1),
        num_experts=words.get("num_experts", words.get("num_local_experts", 1)),
        num_topk=words.get("num_topk", 1),
        scheme=words.get("scheme", words.get("payload", "none")),
    )


def ranks_per_node(record: Record) -> int:
    """The ranks of each of a row's nodes."""
    return int(record.world_size // record.setup.get("nodes", 1))


def traffic_of(record: Record) -> Traffic:
    """The traffic of a row with uniform routing."""
    shape = shape_of(record)
    return traffic(uniform(shape.num_experts), shape.num_topk, record.world_size, 0, ranks_per_node(record))


def exchange_of(hw: Hardware, record: Record) -> tuple[float, float]:
    """Predicted dispatch and combine of a row of the bench `transport`."""
    setup = record.setup
    return nvlink_us(
        hw,
        shape_of(record),
        record.shapes["tokens"],
        traffic_of(record),
        packs=setup["layout"] != "flat",
        num_sms=setup["num_sms"],
    )


def nccl_of(hw: Hardware, record: Record) -> float:
    """Predicted sum of a row's NCCL baseline, which does not pack."""
    bare = dataclasses.replace(hw, dispatch_pack_us=0.0, combine_pack_us=0.0)
    load = traffic_of(record)
    return sum(collective_us(bare, shape_of(record), record.shapes["tokens"], load, record.world_size))


def between_nodes_of(hw: Hardware, record: Record) -> float:
    """Predicted sum of a row of the transport `collective` between nodes."""
    return sum(collective_us(hw, shape_of(record), record.shapes["tokens"], traffic_of(record), record.world_size))


def experts_of(hw: Hardware, record: Record, shape: LayerShape | None = None) -> float:
    """Predicted time of a row of the bench `experts`, all of whose experts have as many rows; shape: `shape_of` it."""
    count, rows = float(record.shapes["num_local_experts"]), float(record.shapes["rows_per_expert"])
    return experts_us(hw, shape or shape_of(record), [rows], [count])


def layer_of(hw: Hardware, record: Record) -> float:
    """Predicted time of a row of the bench `layer` by a CUDA graph, with the transport `peer`."""
    shape, tokens, load = shape_of(record), record.shapes["tokens_per_rank"], traffic_of(record)
    exchange = nvlink_us(hw, shape, tokens, load, packs=record.setup["layout"] != "flat")
    return hw.layer_us + sum(exchange) + experts_us(hw, shape, *rows_of_experts(shape, tokens, record.world_size, load))


def calibrate(hw: Hardware, records: Sequence[Record]) -> Hardware:
    """The hardware with constants that fit the rows of `hw.rows` best, by relative error.

    Needs rows of the benches `transport` (all SMs; fewest SMs), `experts` and `layer`. The network's constants stay
    unless there are rows between nodes, of the transport `collective`.
    Errors: ValueError names a bench without rows.
    """
    rows = chosen_rows(records, hw.rows)
    by_bench = {bench: [row for row in rows if row.bench == bench] for bench in ("transport", "experts", "layer")}
    for bench, found in by_bench.items():
        if not found:
            raise ValueError(f"rows name none of the bench {bench}")
    here = [row for row in by_bench["transport"] if row.world_size == ranks_per_node(row)]
    full = [row for row in here if not row.setup["num_sms"]]
    hw = _fit(hw, full, ("dispatch_us", "dispatch_wire_us", "dispatch_pack_us"), _part(0), _figure("dispatch_us"))
    hw = _fit(hw, full, ("combine_us", "combine_wire_us", "combine_pack_us"), _part(1), _figure("combine_us"))
    hw = _fit(hw, full, ("collective_us", "collective_rank_us", "collective_wire_us"), nccl_of, _nccl)
    for row in here:
        if row.setup["num_sms"]:
            hw = _fit_sms(hw, row)
    hw = _fit_network(hw, [row for row in by_bench["transport"] if row not in here])
    hw = _fit_experts(hw, by_bench["experts"])
    bare = dataclasses.replace(hw, layer_us=0.0)
    rest = [row.figures["graph_call_us"] - layer_of(bare, row) for row in by_bench["layer"]]
    return _with(hw, {"layer_us": sum(rest) / len(rest)})


def _figure(name: str) -> Callable[[Record], float]:
    return lambda row: float(row.figures[name])


def _nccl(row: Record) -> float:
    return float(row.baselines[NCCL]["sum_us"])


def _part(index: int) -> Callable[[Hardware, Record], float]:
    return lambda hw, row: exchange_of(hw, row)[index]


def _with(hw: Hardware, values: dict[str, float]) -> Hardware:
    changes: dict[str, Any] = {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}
    return dataclasses.replace(hw, **changes)


def _fit(
    hw: Hardware,
    rows: Sequence[Record],
    names: Sequence[str],
    predicted: Callable[[Hardware, Record], float],
    measured: Callable[[Record], float],
) -> Hardware:
    """Fit constants that a prediction is linear in, none negative, by least squares of relative errors."""
    import torch

    free = dataclasses.replace(hw, link_gbs=1e9)  # what a link allows at most is not linear
    columns = []
    for name in names:
        only = dataclasses.replace(free, **{other: float(other == name) for other in names})  # type: ignore[arg-type]
        columns.append([predicted(only, row) / measured(row) for row in rows])
    x, y = torch.tensor(columns, dtype=torch.float64).T, torch.ones(len(rows), dtype=torch.float64)
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    for count in range(1, len(names) + 1):
        for kept in itertools.combinations(range(len(names)), count):
            solution = torch.linalg.lstsq(x[:, kept], y).solution
            error = float(((x[:, kept] @ solution - y) ** 2).sum())
            if (solution >= 0).all() and error < best[0]:
                best = (error, {names[index]: float(value) for index, value in zip(kept, solution, strict=True)})
    return _with(hw, dict.fromkeys(names, 0.0) | best[1])


def _fit_sms(hw: Hardware, row: Record) -> Hardware:
    """From how many SMs on more do not help, if time falls with their number until then."""
    whole = dataclasses.replace(row, setup=row.setup | {"num_sms": 0})
    values = {}
    for name, base, time in zip(
        ("dispatch", "combine"), (hw.dispatch_us, hw.combine_us), exchange_of(hw, whole), strict=True
    ):
        values[f"{name}_sms"] = row.setup["num_sms"] * (row.figures[f"{name}_us"] - base) / (time - base)
    return _with(hw, values)


def _fit_network(hw: Hardware, rows: Sequence[Record]) -> Hardware:
    """The latency and the rate between nodes, by least squares of relative errors; rows differ in their sizes."""
    import torch

    if not rows:
        return hw
    parts = []  # without a network, by its latency alone, by its rate alone
    for latency, gbs in ((0.0, 1e12), (1.0, 1e12), (0.0, 1.0)):
        part = dataclasses.replace(hw, network_us=latency, network_gbs=gbs)
        parts.append(torch.tensor([between_nodes_of(part, row) for row in rows], dtype=torch.float64))
    measured = torch.tensor([row.figures["sum_us"] for row in rows], dtype=torch.float64)
    x = torch.stack([(part - parts[0]) / measured for part in parts[1:]], 1)
    latency, inverse = torch.linalg.lstsq(x, (1 - parts[0] / measured)[:, None]).solution.flatten().tolist()
    return _with(hw, {"network_us": max(latency, 0.0), "network_gbs": 1 / inverse})


def _fit_experts(hw: Hardware, rows: Sequence[Record]) -> Hardware:
    """Coordinate descent over the five constants of the experts, on the sum of squared relative errors."""
    names = ("experts_us", "weight_gbs", "fp8_tflops", "bf16_tflops")

    shapes = [shape_of(row) for row in rows]

    def error(candidate: Hardware) -> float:
        predicted = (experts_of(candidate, row, shape) for row, shape in zip(rows, shapes, strict=True))
        return sum((us / row.figures["call_us"] - 1) ** 2 for us, row in zip(predicted, rows, strict=True))

    best = (float("inf"), hw)
    for overlap in OVERLAPS:
        found = dataclasses.replace(
            hw, overlap=overlap, experts_us=20.0, weight_gbs=4000.0, fp8_tflops=700.0, bf16_tflops=500.0
        )
        step = 0.2
        while step > 1e-3:
            trials = [
                dataclasses.replace(found, **{name: getattr(found, name) * factor})
                for name in names
                for factor in (1 - step, 1 + step)
            ]
            next_ = min(trials, key=error)
            if error(next_) < error(found):
                found = next_
            else:
                step /= 2
        best = min(best, (error(found), found), key=lambda pair: pair[0])
    return _with(best[1], {name: getattr(best[1], name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A figure of a row, measured and predicted; or, without a prediction, the reason why there is none.

    Args:
        what: the figure, such as "exchange peer" or "layer". label: the row.
    """

    what: str
    label: str
    measured_us: float = 0.0
    predicted_us: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_us / self.measured_us - 1


def compare(hw: Hardware, records: Sequence[Record]) -> list[Comparison]:
    """Every row: predicted figures beside measured ones, or why it is left out.

    Errors: ValueError if a row of `hw.rows` is not there. Local.
    """
    used = chosen_rows(records, hw.rows)
    return [comparison for record in records for comparison in _compare(hw, record, record in used)]


def worst_and_median(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Of the absolute relative errors of predictions. Errors: ValueError if there is none."""
    errors = [abs(comparison.error) for comparison in comparisons if not comparison.reason]
    if not errors:
        raise ValueError("no measured row can be predicted")
    return max(errors), statistics.median(errors)


def _compare(hw: Hardware, record: Record, used: bool) -> Iterator[Comparison]:
    label = _label(record)
    reason = "constants come from it" if used else _why_not(hw, record)
    if reason:
        yield Comparison(what=record.bench, label=label, reason=reason)
    elif record.bench == "experts":
        yield _of("experts", label, record.figures["call_us"], experts_of(hw, record))
    elif ranks_per_node(record) < record.world_size:
        yield _of("exchange between nodes", label, record.figures["sum_us"], between_nodes_of(hw, record))
    elif record.bench == "layer":
        yield _of("layer", label, record.figures["graph_call_us"], layer_of(hw, record))
    else:
        yield _of("exchange peer", label, record.figures["sum_us"], sum(exchange_of(hw, record)))
        yield _of("exchange by NCCL", label, record.baselines[NCCL]["sum_us"], nccl_of(hw, record))


def _of(what: str, label: str, measured: float, predicted: float) -> Comparison:
    return Comparison(what=what, label=label, measured_us=measured, predicted_us=predicted)


def _why_not(hw: Hardware, record: Record) -> str:
    """Why a row cannot be predicted; empty if it can."""
    setup = record.setup
    if record.gpu != hw.gpu:
        return f"measured on {record.gpu}"
    if record.commit[:7] in hw.superseded:
        return f"kernels of commit {record.commit[:7]} have been replaced"
    if record.bench not in ("transport", "experts", "layer"):
        return "a whole model: attention and sampling are not predicted"
    if record.bench == "transport" and setup.get("nodes", 1) > 1:
        if setup["transport"] != "collective":
            return f"transport {setup['transport']} between nodes without a prediction of its own"
        same = ranks_per_node(record) == hw.gpus_per_node
        return "" if same else f"nodes of {ranks_per_node(record)} GPUs instead of {hw.gpus_per_node}"
    if record.bench != "experts" and not setup["graph"]:
        return "eager calls: the host's time is not predicted"
    if setup.get("routing", "uniform") != "uniform":
        return f"{setup['routing']} routing: loads of its experts are not recorded"
    scheme = setup.get("scheme", setup.get("payload"))
    if scheme not in SCHEMES:
        return f"scheme {scheme} without constants"
    if setup.get("transport", "peer") != "peer":
        return f"transport {setup['transport']} without a measured exchange of its own"
    return ""


def _label(record: Record) -> str:
    shown = ["preset", "tokens", "tokens_per_rank", "rows_per_expert", "hidden", "num_topk", "scheme", "payload"]
    words = {name: value for part in WORDS for name, value in getattr(record, part).items()}
    texts = [f"{name} {words[name]}" for name in [*shown, "layout"] if name in words]
    if words.get("num_sms"):
        texts.append(f"num_sms {words['num_sms']}")
    return f"{record.world_size} GPU, {', '.join(texts)}, commit {record.commit[:7]}"
