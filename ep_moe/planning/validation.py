"""Compares predictions with measured rows that no constant comes from."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from ep_moe.planning.calibration import NCCL, chosen_rows, exchange_of, experts_of, layer_of, nccl_of
from ep_moe.planning.hardware import Hardware
from ep_moe.planning.times import SCHEMES
from ep_moe.report.records import WORDS, Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A figure of a row, measured and predicted; or, without a prediction, the reason why there is none.

    Args:
        what: the figure, such as "transport nvlink" or "layer". label: the row.
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
    elif record.bench == "layer":
        yield _of("layer", label, record.figures["graph_call_us"], layer_of(hw, record))
    else:
        yield _of("exchange nvlink", label, record.figures["sum_us"], sum(exchange_of(hw, record)))
        yield _of("exchange by NCCL", label, record.baselines[NCCL]["sum_us"], nccl_of(hw, record))


def _of(what: str, label: str, measured: float, predicted: float) -> Comparison:
    return Comparison(what=what, label=label, measured_us=measured, predicted_us=predicted)


def _why_not(hw: Hardware, record: Record) -> str:
    """Why a row cannot be predicted; empty if it can."""
    setup = record.setup
    if record.gpu != hw.gpu:
        return f"measured on {record.gpu}"
    if record.bench not in ("transport", "experts", "layer"):
        return "a whole model: attention and sampling are not predicted"
    if record.bench != "experts" and not setup["graph"]:
        return "eager calls: the host's time is not predicted"
    if setup.get("routing", "uniform") != "uniform":
        return f"{setup['routing']} routing: loads of its experts are not recorded"
    scheme = setup.get("scheme", setup.get("payload"))
    if scheme not in SCHEMES:
        return f"scheme {scheme} without constants"
    if setup.get("transport", "nvlink") != "nvlink":
        return f"transport {setup['transport']} without a measured exchange of its own"
    return ""


def _label(record: Record) -> str:
    shown = ["preset", "tokens", "tokens_per_rank", "rows_per_expert", "hidden", "num_topk", "scheme", "payload"]
    words = {name: value for part in WORDS for name, value in getattr(record, part).items()}
    texts = [f"{name} {words[name]}" for name in [*shown, "layout"] if name in words]
    if words.get("num_sms"):
        texts.append(f"num_sms {words['num_sms']}")
    return f"{record.world_size} GPU, {', '.join(texts)}, commit {record.commit[:7]}"
