"""Checks a transport's round: its input, experts that multiply, and the comparison bit for bit.

Expert e of E computes y = dequantized x * (1 + e / E), different for each expert, so that every rank can compute the
expected output. Letters: T tokens on this rank, H hidden, K top-k, E experts, R ranks, L local experts, N rows of all
local experts, G scale groups.
"""

import dataclasses

import torch

from ep_moe.config import Layout
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, dequantize, dequantize_rows, quantize
from ep_moe.routing import Routing
from ep_moe.transport import Transport

ROUTINGS = ("uniform", "skewed", "one_rank")
HOT_EXPERTS, HEAT = 4, 0.75  # number of hot experts on rank 0, and the bonus on their scores, which are in [0, 1)


def make_routing(
    name: str, placement: Placement, *, num_tokens: int, num_topk: int, generator: torch.Generator
) -> Routing:
    """Ids that differ within a token, and weights that sum to 1.

    Args:
        name: "uniform"; "skewed", a few hot experts on rank 0; "one_rank", only experts of the last rank.
        generator: of this rank; ids and weights are on its device.
    Local.
    """
    device = generator.device
    scores = torch.rand(num_tokens, placement.num_physical, generator=generator, device=device)
    if name == "skewed":
        scores[:, :HOT_EXPERTS] += HEAT
    if name == "one_rank":
        scores[:, placement.starts[-2] :] += 1
    weights = torch.rand(num_tokens, num_topk, generator=generator, device=device) + 0.1
    ids = scores.topk(num_topk, dim=1).indices.int()
    return Routing(topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The token rows of a batch, sorted by expert; a copy, as a transport may reuse its buffers."""

    counts: torch.Tensor  # [L] int64
    expert: torch.Tensor  # [N] int64, local
    place: torch.Tensor  # [N] int64, row of the batch
    values: torch.Tensor  # [N, stored width]
    scale: torch.Tensor | None  # [N, G]

    @classmethod
    def of(cls, batch: ExpertBatch) -> "Rows":
        """Copy the rows of a batch. Local, host sync."""
        counts = batch.expert_num_tokens.long()
        expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        nth = torch.arange(len(expert), device=counts.device) - (counts.cumsum(0) - counts)[expert]
        place = batch.expert_row_start.long()[expert] + nth
        source = place if batch.row_index is None else batch.row_index[place].long()
        scale = batch.scale
        return cls(
            counts=counts,
            expert=expert,
            place=place,
            values=batch.x.reshape(-1, batch.x.shape[-1])[source],
            scale=None if scale is None else scale.reshape(-1, scale.shape[-1])[source],
        )


def _compute(x: torch.Tensor, expert: torch.Tensor, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """The outputs of experts [N] for float32 rows [N, H]."""
    return (x * (1 + expert.float() / num_experts).unsqueeze(1)).to(dtype)


def compute_experts(batch: ExpertBatch, rows: Rows, *, first_expert: int, num_experts: int) -> torch.Tensor:
    """The experts' output for a batch; rows that hold no token are NaN. Local, host sync on a CPU."""
    x = dequantize_rows(rows.values, rows.scale, batch.scheme)
    computed = _compute(x, first_expert + rows.expert, num_experts, batch.dtype)
    shape = batch.output_shape
    if batch.row_index is not None:  # in FLAT the sum reads one row per entry of the index
        shape = (batch.row_index.shape[0], batch.hidden)
    y = torch.full(shape, float("nan"), dtype=batch.dtype, device=batch.x.device)
    y.view(-1, batch.hidden)[rows.place] = computed
    return weighted_sum(y, batch.token_to_row, batch.topk_weights) if isinstance(batch, Flat) else y


def expected_output(x: torch.Tensor, routing: Routing, placement: Placement, scheme: QuantScheme) -> torch.Tensor:
    """The expected output on this rank [T, H], without an exchange: sums per expert rank, rounded, then in rank order.

    Args:
        x: [T, H]. routing: of the tokens, without repeats.
    Local.
    """
    num_tokens, num_topk = routing.topk_ids.shape
    real = dequantize(quantize(x, scheme)) if scheme.payload.quantized else x.float()
    experts = routing.topk_ids.long().flatten()
    y = _compute(real.repeat_interleave(num_topk, dim=0), experts, placement.num_physical, x.dtype)
    rows = torch.arange(num_tokens * num_topk, dtype=torch.int32, device=x.device).view(num_tokens, num_topk)
    partial, home = [], []
    for rank, (first, last) in enumerate(zip(placement.starts[:-1], placement.starts[1:], strict=True)):
        here = (routing.topk_ids >= first) & (routing.topk_ids < last)
        partial.append(weighted_sum(y, torch.where(here, rows, -1), routing.topk_weights))
        token = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
        home.append(torch.where(here.any(1), token + rank * num_tokens, -1))
    return weighted_sum(torch.cat(partial), torch.stack(home, dim=1), None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The results of a round: the experts' rows, the experts' outputs, and the combined output."""

    rows: Rows
    y: torch.Tensor
    output: torch.Tensor  # [T, H]


def run_round(transport: Transport, x: torch.Tensor, routing: Routing, *, layout: Layout, scheme: QuantScheme) -> Round:
    """Run one round. Collective, host sync."""
    dispatched = transport.dispatch(x, routing, layout=layout, scheme=scheme)
    rows = Rows.of(dispatched.batch)
    placement = transport.placement
    y = compute_experts(
        dispatched.batch,
        rows,
        first_expert=placement.starts[transport.rank],
        num_experts=placement.num_physical,
    )
    output = transport.combine(y, dispatched, out=torch.full_like(x, float("nan")))
    transport.check()
    return Round(rows=rows, y=y, output=output)


def differences(ours: Round, theirs: Round, expected: torch.Tensor) -> list[str]:
    """A message for each result that differs in any bit; none if all are right.

    Args:
        ours, theirs: rounds of the same input by the transport under test and by another.
        expected: [T, H], the expected combined output.
    Local, host sync.
    """
    found = [compare_rows("rows of each expert", ours.rows.counts, theirs.rows.counts)]
    if not found[0]:  # otherwise row n is not the same token's
        found.append(compare_rows("values of experts' rows", ours.rows.values, theirs.rows.values))
        if ours.rows.scale is not None and theirs.rows.scale is not None:
            found.append(compare_rows("scales of experts' rows", ours.rows.scale, theirs.rows.scale))
    found.append(compare_rows("output against the other transport's", ours.output, theirs.output))
    found.append(compare_rows("output against the expectation", ours.output, expected))
    return [text for text in found if text]


def compare_rows(what: str, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """A message with the number of rows that differ in any bit; "" if none does. Local, host sync."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{what}: {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    differ = _bytes(actual) != _bytes(expected)
    count = int(differ.any(1).sum())
    return f"{what}: {count} of {differ.shape[0]} differ" if count else ""


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, bytes of a row]; a 1D tensor has rows of one element."""
    flat = rows.unsqueeze(1) if rows.dim() == 1 else rows
    return flat.contiguous().view(torch.uint8)
