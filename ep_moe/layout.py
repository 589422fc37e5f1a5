"""The layouts that experts compute on, with packing and unpacking in torch. Transport and experts meet here only.

Letters: N received token rows, K top-k, H hidden, G scale groups, L local experts, C = R * M rows per expert in
BATCHED. Received rows are ordered by (source rank, source token), and so are the rows of every expert: the same
input gives the same bits, run after run.
"""

import dataclasses
import math
from typing import Any

import torch

from ep_moe.config import Layout
from ep_moe.quant import QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Tokens as they arrive at a rank, one row for each (source rank, source token), before any packing.

    An expert stands at most once in a row of `local_topk_ids` (`merge_repeats`).
    """

    x: torch.Tensor  # [N, H] in the model's dtype or the scheme's
    scale: torch.Tensor | None  # [N, G] float32, None where the scheme does not scale
    local_topk_ids: torch.Tensor  # [N, K] int32, local expert, -1 none here
    topk_weights: torch.Tensor  # [N, K] float32, 0 where the id is -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBatch:
    """What every layout carries. Row i of expert e is `expert_row_start[e] + i`, for i < `expert_num_tokens[e]`.

    Where `row_index` is set, that row of the batch reads row `row_index[expert_row_start[e] + i]` of `x`, a pool.
    Rows that belong to no token hold anything, NaN included, and are never read.
    """

    x: torch.Tensor  # the subclass says the shape
    scale: torch.Tensor | None  # float32, one more dimension of G instead of H, rows contiguous
    scheme: QuantScheme
    dtype: torch.dtype  # the model's, which the experts' output has
    expert_row_start: torch.Tensor  # [L] int32
    expert_num_tokens: torch.Tensor  # [L] int32
    row_index: torch.Tensor | None  # [rows] int32
    expected_rows: int  # host hint: rows of an average local expert, rounded up

    @property
    def hidden(self) -> int:
        """H."""
        return self.x.shape[-1]

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.expert_num_tokens.shape[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the experts' output: that of x, or [rows of row_index, H] where rows come from a pool."""
        return tuple(self.x.shape) if self.row_index is None else (self.row_index.shape[0], self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batched(ExpertBatch):
    """`x` [L, C, H], `scale` [L, C, G] with strides (C*G, 1, C); expert e starts at e*C.

    The same as PPLX, DeepEP low latency, vLLM BatchedExperts and SGLang masked, but for the order of scales (PPLX).
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compact(ExpertBatch):
    """`x` [rows, H], `scale` [rows, G] with strides (1, rows); starts are an aligned prefix sum.

    The same as DeepGEMM contiguous.
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flat(ExpertBatch):
    """`x` [N, H], the received rows themselves; `row_index` lists them expert by expert (DeepEP normal, vLLM Standard).

    The experts weigh and sum here: their output is [N, H], row n the weighted sum over this rank's experts.
    """

    local_topk_ids: torch.Tensor  # [N, K] int32, -1 none
    topk_weights: torch.Tensor  # [N, K] float32
    token_to_row: torch.Tensor  # [N, K] int32, row of the batch that computes this token's k-th expert, -1 none

    @property
    def output_shape(self) -> tuple[int, ...]:
        """[N, H]: a row for each received token."""
        return tuple(self.x.shape)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A batch and the way back: `token_to_row` [N, K] int32 is the row that computes token n's k-th expert, -1 none."""

    batch: ExpertBatch
    token_to_row: torch.Tensor


def merge_repeats(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an expert that stands several times in a row stand once, where it stood first, with the summed weight.

    Example: ids [[3, 5, 3, -1]], weights [[.1, .2, .3, .4]] give [[3, 5, -1, -1]] and [[.4, .2, 0, 0]].

    Args:
        ids: [N, K] integer, -1 none. weights: [N, K] float32.
    Returns: new ids and weights of the same shapes and dtypes. Local; sums in column order, so the same bits always.
    """
    merged_ids, merged_weights = ids.clone(), torch.where(ids >= 0, weights, 0.0)
    for column in range(1, ids.shape[1]):
        for earlier in range(column):
            repeat = (ids[:, column] >= 0) & (merged_ids[:, earlier] == ids[:, column])
            merged_weights[:, earlier] += torch.where(repeat, merged_weights[:, column], 0.0)
            merged_weights[:, column].masked_fill_(repeat, 0.0)
            merged_ids[:, column].masked_fill_(repeat, -1)
    return merged_ids, merged_weights


def _place_rows(
    local_topk_ids: torch.Tensor, num_local_experts: int, capacity: int | None, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (expert_row_start [L], expert_num_tokens [L], token_to_row [N, K]), all int32.

    `capacity` rows apart for BATCHED; None for an aligned prefix sum of the counts.
    """
    flat = local_topk_ids.reshape(-1).long()
    key = torch.where(flat >= 0, flat, num_local_experts)
    counts = torch.bincount(key, minlength=num_local_experts + 1)[:num_local_experts]
    if capacity is None:
        aligned = (counts + alignment - 1) // alignment * alignment
        starts = torch.cumsum(aligned, 0) - aligned
    else:
        starts = torch.arange(num_local_experts, device=flat.device) * capacity
    order = torch.argsort(key, stable=True)
    sorted_key = key[order]
    first_of_expert = torch.cat([torch.cumsum(counts, 0) - counts, counts.sum().reshape(1)])
    index_in_expert = torch.arange(flat.numel(), device=flat.device) - first_of_expert[sorted_key]
    start_of_key = torch.cat([starts, starts.new_zeros(1)])
    row = torch.empty_like(flat)
    row[order] = start_of_key[sorted_key] + index_in_expert
    token_to_row = torch.where(flat >= 0, row, -1).reshape(local_topk_ids.shape)
    return starts.int(), counts.int(), token_to_row.int()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View one-byte floats as uint8, for which every device can index; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def pack(
    rows: TokenRows,
    layout: Layout,
    *,
    scheme: QuantScheme,
    dtype: torch.dtype,
    num_local_experts: int,
    capacity: int,
    alignment: int = 1,
) -> Packed:
    """Lay received rows out for the experts.

    Example, COMPACT, alignment 2, two experts: local_topk_ids [[0, 1], [1, -1], [1, 0]] gives expert_num_tokens
    [2, 3], expert_row_start [0, 2], token_to_row [[0, 2], [3, -1], [4, 1]] and x of 6 rows, the last one unwritten.

    Args:
        rows: N received rows. layout: which one. scheme, dtype: of the payload and of the model.
        num_local_experts: L. capacity: C, rows of an expert in BATCHED. alignment: of starts in COMPACT.
    Returns: the batch and `token_to_row`.
    Errors: ValueError where an expert has more than C rows in BATCHED.
    Local, on the current stream, reads counts back to the host.
    """
    batched, align = layout is Layout.BATCHED, alignment if layout is Layout.COMPACT else 1
    starts, counts, token_to_row = _place_rows(
        rows.local_topk_ids, num_local_experts, capacity if batched else None, align
    )
    host_counts = counts.tolist()
    if batched and max(host_counts, default=0) > capacity:
        raise ValueError(f"an expert has {max(host_counts)} rows, which exceeds capacity ({capacity})")
    token, column = torch.nonzero(token_to_row >= 0, as_tuple=True)
    row = token_to_row[token, column].long()
    common: dict[str, Any] = {
        "scheme": scheme,
        "dtype": dtype,
        "expert_row_start": starts,
        "expert_num_tokens": counts,
        "expected_rows": math.ceil(sum(host_counts) / max(num_local_experts, 1)),
    }
    if layout is Layout.FLAT:
        row_index = torch.empty(sum(host_counts), dtype=torch.int32, device=row.device)
        row_index[row] = token.int()
        flat = Flat(
            x=rows.x,
            scale=None if rows.scale is None else rows.scale.t().contiguous().t(),
            row_index=row_index,
            local_topk_ids=rows.local_topk_ids,
            topk_weights=rows.topk_weights,
            token_to_row=token_to_row,
            **common,
        )
        return Packed(batch=flat, token_to_row=token_to_row)
    experts, height = num_local_experts, capacity
    if not batched:
        experts, height = 1, sum(-(-count // align) * align for count in host_counts)
    x, scale = _copy_rows(rows, token, row, experts, height)
    batch: ExpertBatch
    if batched:
        batch = Batched(x=x, scale=scale, row_index=None, **common)
    else:
        batch = Compact(x=x[0], scale=None if scale is None else scale[0], row_index=None, **common)
    return Packed(batch=batch, token_to_row=token_to_row)


def _copy_rows(
    rows: TokenRows, token: torch.Tensor, row: torch.Tensor, experts: int, height: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy each `token` of `rows` to its `row`: x [experts, height, H], scale [experts, height, G], rows contiguous."""
    hidden, device = rows.x.shape[1], rows.x.device
    x = torch.empty(experts, height, hidden, dtype=rows.x.dtype, device=device)
    _bytes(x).view(-1, hidden)[row] = _bytes(rows.x)[token]
    if rows.scale is None:
        return x, None
    scale = torch.empty(experts, rows.scale.shape[1], height, dtype=torch.float32, device=device).transpose(1, 2)
    scale[row // max(height, 1), row % max(height, 1)] = rows.scale[token]
    return x, scale


def weighted_sum(y: torch.Tensor, token_to_row: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Weigh and sum each token's expert rows in float32, in column order, without fused multiply-add.

    Args:
        y: [rows, H], or [L, C, H], the experts' output. token_to_row: [N, K], -1 none. topk_weights: [N, K] float32.
    Returns: [N, H] in y's dtype; a row without experts is zero. Rows that hold no token are never read.
    Local, on the current stream, reads back which ids are valid.
    """
    y = y.reshape(-1, y.shape[-1])
    total = torch.zeros(token_to_row.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for column in range(token_to_row.shape[1]):
        token = torch.nonzero(token_to_row[:, column] >= 0).squeeze(1)
        row = token_to_row[token, column].long()
        total[token] += topk_weights[token, column].unsqueeze(1) * y[row].float()
    return total.to(y.dtype)
