"""Checks a transport's round: its input, experts that multiply, and the comparison bit for bit.

Every expert computes something different of its rows, so that every rank can compute the expected output.
Letters: T tokens on this rank, H hidden, K top-k, L local experts, N rows of all local experts, G scale groups.
"""

import torch

from ep_moe.config import Layout
from ep_moe.layout import ExpertBatch, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, as_bytes, dequantize, quantize
from ep_moe.routing import Routing
from ep_moe.testing.rounds import compute_experts, expert_function, token_rows
from ep_moe.transport import Transport

HOT_EXPERTS, HEAT = 4, 0.75  # number of hot experts on rank 0, and the bonus on their scores, which are in [0, 1)
COUNTS = "rows of each expert"


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
    scores = torch.rand(num_tokens, placement.num_physical, generator=generator, dtype=torch.float32, device=device)
    if name == "skewed":
        scores[:, :HOT_EXPERTS] += HEAT
    if name == "one_rank":
        scores[:, placement.starts[-2] :] += 1
    weights = torch.rand(num_tokens, num_topk, generator=generator, dtype=torch.float32, device=device) + 0.1
    ids = scores.topk(num_topk, dim=1).indices.int()
    return Routing(topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


def expected_output(
    x: torch.Tensor, routing: Routing, placement: Placement, scheme: QuantScheme, ranks_per_sum: int = 1
) -> torch.Tensor:
    """The expected output on this rank [T, H], without an exchange: sums per expert rank, rounded, then in rank order.

    Args:
        x: [T, H]. routing: of the tokens, without repeats. ranks_per_sum: the transport's order of sums.
    Local.
    """
    num_tokens, num_topk = routing.topk_ids.shape
    real = dequantize(quantize(x, scheme)) if scheme.payload.quantized else x.float()
    y = expert_function(real.repeat_interleave(num_topk, dim=0), routing.topk_ids.reshape(-1, 1), x.dtype)
    rows = torch.arange(num_tokens * num_topk, dtype=torch.int32, device=x.device).view(num_tokens, num_topk)
    partial, source = [], []
    for rank, (first, last) in enumerate(zip(placement.starts[:-1], placement.starts[1:], strict=True)):
        here = (routing.topk_ids >= first) & (routing.topk_ids < last)
        partial.append(weighted_sum(y, torch.where(here, rows, -1), routing.topk_weights))
        token = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
        source.append(torch.where(here.any(1), token + rank * num_tokens, -1))
    rows, index = torch.cat(partial), torch.stack(source, dim=1)
    sums = [weighted_sum(rows, part, None) for part in index.split(ranks_per_sum, dim=1)]
    token = torch.arange(num_tokens, dtype=torch.int32, device=x.device).unsqueeze(1)
    every = torch.cat([token + number * num_tokens for number in range(len(sums))], dim=1)
    return weighted_sum(torch.cat(sums), every, None)


def expert_rows(batch: ExpertBatch) -> dict[str, torch.Tensor]:
    """The rows of a batch as bytes, sorted by expert; a copy, as a transport may reuse its buffers. Local, host sync.

    Returns: rows of each expert [L], values [N, stored width] and, if there are any, scales [N, G].
    """
    *_, source = token_rows(batch)
    stored = {"values of experts' rows": batch.x, "scales of experts' rows": batch.scale}
    rows = {name: as_bytes(t).reshape(-1, t.shape[-1])[source] for name, t in stored.items() if t is not None}
    return {COUNTS: batch.expert_num_tokens.long(), **rows}


def run_round(
    transport: Transport, x: torch.Tensor, routing: Routing, *, layout: Layout, scheme: QuantScheme
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Run one round. Returns the experts' rows, as `expert_rows`, their output y, and the combined output [T, H].

    Collective, host sync.
    """
    dispatched = transport.dispatch(x, routing, layout=layout, scheme=scheme)
    rows = expert_rows(dispatched.batch)
    y = compute_experts(dispatched.batch, transport.placement.starts[transport.rank])
    output = transport.combine(y, dispatched, out=torch.full_like(x, float("nan")))
    transport.check()
    return rows, y, output


def compare_rows(what: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """A message with the number of rows that differ in any bit; none if none does. Local, host sync."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [f"{what}: {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"]
    rows = [t.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8) for t in (actual, expected)]
    count = int((rows[0] != rows[1]).any(1).sum())
    return [f"{what}: {count} of {len(actual)} differ"] if count else []
