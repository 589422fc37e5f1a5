"""The expected results of rounds with shapes known to the host, in plain torch without host sync.

Letters: T tokens of a rank, M max_tokens_per_rank, N = R * M, H hidden, V stored values, G scale groups, K top-k,
L local experts.
"""

import dataclasses

import torch

from ep_moe.config import Layout
from ep_moe.kernels.exchange.round_state import SlotState
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, as_bytes, dequantize_rows, quantize
from ep_moe.testing.rounds import expert_function

WRONG = ("counts", "starts", "values", "scales", "tokens", "rows", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of all ranks to a round, the same on every rank."""

    x: torch.Tensor  # [R, M, H]
    ids: torch.Tensor  # [R, M, K] int64
    weights: torch.Tensor  # [R, M, K] float32
    shared: torch.Tensor  # [M, H]
    tokens: tuple[int, ...]  # T of each rank


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of rows of any strides, [n, bytes of a row]."""
    return as_bytes(tensor).contiguous().view(torch.uint8)


def compute(batch: ExpertBatch, first: int) -> torch.Tensor:
    """The experts' output, NaN in rows without a token; FLAT gets the weighted sum."""
    x = as_bytes(batch.x.reshape(-1, batch.x.shape[-1]))
    num_rows = x.shape[0] if batch.row_index is None else batch.row_index.shape[0]
    row = torch.arange(num_rows, device=x.device, dtype=torch.int32)
    local = (torch.searchsorted(batch.expert_row_start, row, right=True) - 1).clamp(min=0)
    place = row - batch.expert_row_start[local]
    index = row.long() if batch.row_index is None else batch.row_index.long().clamp(0, x.shape[0] - 1)
    scale = None
    if batch.scale is not None:
        scale = as_bytes(batch.scale).reshape(-1, batch.scale.shape[-1])[index].view(batch.scale.dtype)
    values = dequantize_rows(x[index].view(batch.x.dtype), scale, batch.scheme)
    y = expert_function(values, (local + first).float().unsqueeze(1), batch.dtype)
    live = (place >= 0) & (place < batch.expert_num_tokens[local])
    y = torch.where(live.unsqueeze(1), y, torch.nan)
    if isinstance(batch, Flat):
        return weighted_sum(y, batch.token_to_row, batch.topk_weights)
    return y.reshape(*batch.x.shape[:-1], batch.hidden)


def _payload(inputs: Inputs, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [N, V] and scales [N, G] of all ranks' tokens, in a scheme that works row by row."""
    x = inputs.x.flatten(0, 1)
    if not scheme.payload.quantized:
        return x, None
    quantized = quantize(x, scheme)
    return quantized.values, quantized.scale


def _merge(ids: torch.Tensor, weights: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, K] relative to `first`, -1 for experts elsewhere and for repeats, and their weights, repeats added."""
    columns, merged = [], []
    for column in range(ids.shape[1]):
        expert = ids[:, column]
        fresh = (expert >= first) & (expert < last) & (ids[:, :column] != expert.unsqueeze(1)).all(1)
        weight = torch.zeros_like(weights[:, 0])
        for other in range(ids.shape[1]):
            weight = torch.where(ids[:, other] == expert, weight + weights[:, other], weight)
        columns.append(torch.where(fresh, expert - first, -1))
        merged.append(torch.where(fresh, weight, 0.0))
    return torch.stack(columns, 1), torch.stack(merged, 1)


def count_wrong(
    batch: ExpertBatch, slot: SlotState | None, inputs: Inputs, *, first: int, last: int, layout: Layout, alignment: int
) -> torch.Tensor:
    """Count what differs in a batch of the experts [first, last), as WRONG says, int64 on the device.

    Values and scales are compared for each source, token and expert at their row in the batch; in FLAT also the ids and
    weights of all rows. Rows and weights are those that the combine reads in the slot. In FLAT and in the slot, row
    t * R + r is token t of rank r. Without a slot, of a transport that packs rows on arrival, these are left out.
    """
    device, (found_x, found_scale) = batch.x.device, (batch.x, batch.scale)
    local = torch.arange(first, last, device=device)
    hit = (inputs.ids.flatten(0, 1).unsqueeze(1) == local[None, :, None]).any(2)  # [N, L]
    count, start = hit.sum(0), batch.expert_row_start.long()
    places = torch.where(hit, start + hit.cumsum(0) - 1, 0)
    row = places.flatten()
    if layout is Layout.BATCHED:
        expected_start = torch.arange(last - first, device=device) * found_x.shape[1]
    else:
        step = alignment if batch.row_index is None else 1
        aligned = (count + step - 1) // step * step
        expected_start = aligned.cumsum(0) - aligned
    if found_x.numel() == 0:  # the host knew that there are no rows
        row, found_x = torch.zeros_like(row), found_x.new_zeros(1, found_x.shape[-1])
        found_scale = None if found_scale is None else found_scale.new_zeros(1, found_scale.shape[-1])
    elif batch.row_index is not None:
        row = batch.row_index[row].long().clamp(0, found_x.shape[0] - 1)
    token = torch.arange(hit.shape[0], device=device).repeat_interleave(last - first)
    values, scale = _payload(inputs, batch.scheme)

    def differing(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        rows = as_bytes(found).reshape(-1, found.shape[-1])[row]
        return ((raw(rows) != raw(as_bytes(wanted)[token])).any(1) & hit.flatten()).sum()

    wrong = [(batch.expert_num_tokens != count).sum(), (start != expected_start).sum(), differing(found_x, values)]
    nothing = torch.zeros_like(wrong[0])
    wrong.append(nothing if scale is None or found_scale is None else differing(found_scale, scale))
    if slot is None:
        return torch.stack([*wrong, *[nothing] * (len(WRONG) - len(wrong))])
    ids, weights = _merge(inputs.ids.flatten(0, 1), inputs.weights.flatten(0, 1), first, last)
    ranks, most = len(inputs.tokens), len(ids) // len(inputs.tokens)

    def by_source(found: torch.Tensor, lacking: int) -> torch.Tensor:
        """The rows of `most` tokens of each rank; `lacking` for those that a batch with a bound lacks."""
        by_token = found.reshape(-1, ranks, ids.shape[1])[:most]
        filled = torch.nn.functional.pad(by_token, (0, 0, 0, 0, 0, most - len(by_token)), value=lacking)
        return filled.transpose(0, 1).reshape(ids.shape)

    if isinstance(batch, Flat):
        found_ids, found_weights = by_source(batch.local_topk_ids, -1), by_source(batch.topk_weights, 0)
        wrong.append(((found_ids != ids) | (found_weights != weights)).sum())
    else:
        wrong.append(nothing)
    rows = torch.where(ids >= 0, places.gather(1, ids.clamp(min=0)), -1)
    found_rows, found_weights = (by_source(each[: ids.numel()], 0) for each in (slot.rows_ptr, slot.weights_ptr))
    tokens = torch.arange(most, device=device)
    present = torch.cat([tokens < count for count in inputs.tokens]).unsqueeze(1)
    if isinstance(batch, Flat):  # whether there is one: the sum is made already
        wrong += [((found_rows[:, :1] != rows.amax(1, keepdim=True)) & present).sum(), nothing]
    else:  # columns without a row come last
        order = (rows < 0).int().argsort(dim=1, stable=True)
        rows, weights = rows.gather(1, order), weights.gather(1, order)
        wrong += [
            ((each != wanted) & there).sum()
            for each, wanted, there in ((found_rows, rows, present), (found_weights, weights, present & (rows >= 0)))
        ]
    return torch.stack(wrong)


def expected_output(
    inputs: Inputs, rank: int, placement: Placement, *, scheme: QuantScheme, shared: bool
) -> torch.Tensor:
    """The result of a rank's tokens [M, H]: columns on each expert rank, then ranks, all in order."""
    most, dtype = inputs.ids.shape[1], inputs.x.dtype
    own = slice(rank * most, (rank + 1) * most)
    values, scale = _payload(inputs, scheme)
    real = dequantize_rows(values[own], None if scale is None else scale[own], scheme)
    ids, weights = inputs.ids[rank], inputs.weights[rank]
    total = torch.zeros_like(real)
    for first, last in zip(placement.starts, placement.starts[1:], strict=False):
        partial, (local, merged) = torch.zeros_like(real), _merge(ids, weights, first, last)
        for expert, weight in zip(local.unbind(1), merged.unbind(1), strict=True):
            part = expert_function(real, (expert + first).float().unsqueeze(1), dtype).float() * weight.unsqueeze(1)
            partial = torch.where((expert >= 0).unsqueeze(1), partial + part, partial)
        any_here = (local >= 0).any(1)
        total = torch.where(any_here.unsqueeze(1), total + partial.to(dtype).float(), total)
    return (total + inputs.shared.float() if shared else total).to(dtype)
