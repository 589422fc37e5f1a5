"""The layouts that experts compute on, with packing and unpacking: the only interface of transport and experts.

`reference` implements it in torch for CPUs, `triton` in kernels for GPUs; the tensors' device selects one.

Letters: N received token rows, K top-k, H hidden, L local experts, C = R * M rows of an expert in BATCHED.
Received rows are ordered by (source rank, source token), and so are the rows of every expert: results are bitwise
reproducible.
"""

from types import ModuleType
from typing import Any

import torch

from ep_moe.config import Layout
from ep_moe.layout import reference
from ep_moe.layout.base import Batched, Compact, ExpertBatch, Flat, Packed, TokenRows
from ep_moe.layout.frame import Place
from ep_moe.quant import Quantized, QuantScheme


def _implementation(tensor: torch.Tensor) -> ModuleType:
    """The module for the tensor's device. Triton exists only on Linux and is slow to import."""
    if not tensor.is_cuda:
        return reference
    from ep_moe.layout import triton

    return triton


def merge_repeats(
    ids: torch.Tensor, weights: torch.Tensor, *, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ids local and merge repeated experts of a row: the first keeps the sum of their weights, in column order.

    Example: ids [[3, 5, 3, 9]], weights [[.1, .2, .3, .4]], first 3 and last 7 give [[0, 2, -1, -1]] and
    [[.4, .2, 0, 0]].

    Args:
        ids: [N, K] int32 or int64, -1 none. weights: [N, K] float32. Both of any strides.
        first, last: this rank's experts [first, last); all others become -1. last = None is no upper limit.
    Returns: new ids [N, K] int32 and weights [N, K] float32, 0 where the id is -1. Local, no host sync.
    """
    return _implementation(ids).merge_repeats(ids, weights, first=first, last=last)


def pack(
    rows: TokenRows,
    layout: Layout,
    *,
    scheme: QuantScheme,
    dtype: torch.dtype,
    num_local_experts: int,
    capacity: int,
    alignment: int = 1,
    max_rows: int | None = None,
    place: Place | None = None,
) -> Packed:
    """Copy received rows into a layout for the experts.

    Example, COMPACT, alignment 2, two experts: local_topk_ids [[0, 1], [1, -1], [1, 0]] gives expert_num_tokens
    [2, 3], expert_row_start [0, 2], token_to_row [[0, 2], [3, -1], [4, 1]] and x of 8 rows, the last three unwritten:
    without `max_rows` all 6 ids may be rows, and each expert may leave one row unused.

    Args:
        rows: N received rows, any row strides. layout: of the batch. scheme, dtype: of the payload and of the model.
        num_local_experts: L. capacity: C, rows of an expert in BATCHED. alignment: of starts in COMPACT.
        max_rows: upper bound of the ids in `local_topk_ids` that are not -1; N * min(K, L) by default. It determines
            the size of COMPACT and FLAT batches, so that no count is read back.
        place: on a GPU, what fills ids and weights of `rows` and counts the rows of experts, in one launch; by default
            they are filled, and two launches count.
    Returns: the batch and `token_to_row`.
    Errors: ValueError if an expert has more than C rows in BATCHED, on a GPU already if N, or `rows.max_expert_rows`,
    exceeds C; on a CPU also if there are more than `max_rows` rows, or of an expert more than `rows.max_expert_rows`. A
    GPU cannot check these two without a host sync: it drops rows beyond `max_rows`, and takes the other as a promise.
    Local, on the current stream; no host sync on a GPU.
    """
    sizes = {"num_local_experts": num_local_experts, "capacity": capacity, "alignment": alignment, "max_rows": max_rows}
    options: dict[str, Any] = {} if place is None else {"place": place}
    return _implementation(rows.x).pack(rows, layout, scheme=scheme, dtype=dtype, **options, **sizes)


def pack_routed(
    x: torch.Tensor | Quantized,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layout: Layout,
    *,
    first: int,
    num_local_experts: int,
    **options: Any,
) -> Packed:
    """`merge_repeats` and `pack`, for tokens that are on this rank with the ids and weights of their routing.

    Args:
        x: [N, H], `Quantized` if the scheme quantizes the payload. topk_ids, topk_weights: [N, K]; ids outside
            [first, first + num_local_experts) are left out.
        layout, options: as of `pack`.
    Errors, host sync: as of `pack`. Local, on the current stream.
    """
    ids, weights = merge_repeats(topk_ids, topk_weights, first=first, last=first + num_local_experts)
    values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    rows = TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights)
    return pack(rows, layout, num_local_experts=num_local_experts, **options)


def weighted_sum(
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's rows in float32, in column order, without fused multiply-add, rounded once.

    Args:
        y: [rows, H], or [L, C, H], the experts' output. token_to_row: [N, K] int32, -1 none.
        topk_weights: [N, K] float32; None means weight 1.
        shared: [N, H], any float dtype, added last, in float32.
        out: optional result, [N, H], any float dtype.
    Returns: `out`, or [N, H] in y's dtype; a token without rows is zero (or `shared`). Other rows are never read.
    Errors: ValueError for another shape or device.
    Local, on the current stream; no host sync on a GPU.
    """
    shape_of_result = (token_to_row.shape[0], y.shape[-1])
    for name, tensor, shape in (
        ("topk_weights", topk_weights, tuple(token_to_row.shape)),
        ("shared", shared, shape_of_result),
        ("out", out, shape_of_result),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.device != y.device):
            raise ValueError(f"{name} is {tuple(tensor.shape)} on {tensor.device}, needed is {shape} on {y.device}")
    return _implementation(y).weighted_sum(y, token_to_row, topk_weights, shared=shared, out=out)


__all__ = [
    "Batched",
    "Compact",
    "ExpertBatch",
    "Flat",
    "Packed",
    "Place",
    "TokenRows",
    "merge_repeats",
    "pack",
    "pack_routed",
    "weighted_sum",
]
