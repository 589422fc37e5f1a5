"""The experts of one rank applied to tokens that it holds, without transport, group or placement.

Letters: T tokens, H hidden, K top-k, L local experts, E experts of all ranks.
"""

import dataclasses
import math

import torch

from ep_moe.config import Layout
from ep_moe.experts import Experts
from ep_moe.layout import Flat, Packed, pack_routed, weighted_sum
from ep_moe.quant import Quantized, quantize
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights


def local_moe(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    experts: Experts,
    *,
    layout: Layout = Layout.COMPACT,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    num_experts: int | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge repeated experts, pack, compute the local experts, and sum their weighted outputs in float32.

    Example: with experts [4, 8) on this rank, `local_expert_offset` is 4 and `num_local_experts` 4. The result is this
    rank's part of the sum; over all ranks the parts add up to the layer's output.

    Args:
        x: [T, H] in the model's dtype, quantized here if the scheme of `weights` quantizes tokens; or `Quantized`.
        routing: ids of all E experts, [T, K]. Ids outside [local_expert_offset, local_expert_offset +
            num_local_experts), including -1 and ids of no expert, are ignored, as in FlashInfer.
        weights: of the L local experts. experts: the implementation that computes them.
        num_local_experts: L, by default that of `weights`.
        num_experts: E, by default L; tiles are chosen for T * K / E rows per expert.
        dtype: the model's; by default that of x, and required if x is `Quantized`.
        out: optional result, [T, H] in the model's dtype.
    Returns: `out`, or [T, H] in the model's dtype; a token without a local expert is zero.
    Errors: ValueError, with the value and the limit, for arguments that do not fit each other.
    Local, on the current stream. On a GPU no host sync, and safe in CUDA graphs, if `experts` is.
    """
    packed = _pack(
        x,
        routing,
        weights,
        layout,
        local_expert_offset=local_expert_offset,
        num_local_experts=num_local_experts,
        num_experts=num_experts,
        dtype=dtype,
    )
    if isinstance(packed.batch, Flat):
        return experts(packed.batch, weights, out=out)
    return weighted_sum(experts(packed.batch, weights), packed.token_to_row, packed.topk_weights, out=out)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The local experts' outputs before they are weighted and summed."""

    y: torch.Tensor  # [rows, H] in the model's dtype; rows that no token has are undefined
    token_to_row: torch.Tensor  # [T, K] int32, the row that computes token t's k-th expert, -1 none
    topk_weights: torch.Tensor  # [T, K] float32, of those rows, 0 where there is none


def local_rows(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    experts: Experts,
    *,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    num_experts: int | None = None,
    dtype: torch.dtype | None = None,
) -> ExpertRows:
    """`local_moe` without its last step, the weighted sum.

    Args and errors: as of `local_moe`.
    Returns: T * min(K, L) rows; a repeated expert has one row, at its first place, and the sum of its weights.
    Local, on the current stream. On a GPU no host sync, and safe in CUDA graphs, if `experts` is.
    """
    packed = _pack(
        x,
        routing,
        weights,
        Layout.COMPACT,
        local_expert_offset=local_expert_offset,
        num_local_experts=num_local_experts,
        num_experts=num_experts,
        dtype=dtype,
    )
    y = experts(packed.batch, weights)
    return ExpertRows(y=y, token_to_row=packed.token_to_row, topk_weights=packed.topk_weights)


def _pack(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    layout: Layout,
    *,
    local_expert_offset: int,
    num_local_experts: int | None,
    num_experts: int | None,
    dtype: torch.dtype | None,
) -> Packed:
    """Check the arguments of `local_moe`, quantize and pack."""
    num_local = weights.num_local_experts if num_local_experts is None else num_local_experts
    num_total = num_local if num_experts is None else num_experts
    num_rows, num_topk = routing.topk_ids.shape
    model_dtype = x.dtype if isinstance(x, torch.Tensor) else dtype
    if model_dtype is None:
        raise ValueError("dtype is needed if x is Quantized, which does not contain the model's dtype")
    if dtype not in (None, model_dtype):
        raise ValueError(f"x is {model_dtype}, dtype says {dtype}")
    if num_local != weights.num_local_experts:
        raise ValueError(f"num_local_experts ({num_local}) is not that of the weights ({weights.num_local_experts})")
    if local_expert_offset < 0 or (num_experts is not None and local_expert_offset + num_local > num_experts):
        raise ValueError(
            f"local experts [{local_expert_offset}, {local_expert_offset + num_local}) are not in "
            f"[0, num_experts ({num_experts}))"
        )
    values = x.values if isinstance(x, Quantized) else x
    if values.shape[0] != num_rows:
        raise ValueError(f"topk_ids has {num_rows} rows, x is {tuple(values.shape)}")
    if weights.scheme.payload.quantized and isinstance(x, torch.Tensor):
        x = quantize(x, weights.scheme, static_scale=weights.w13_input_scale)
    packed = pack_routed(
        x,
        routing.topk_ids,
        routing.topk_weights,
        layout,
        scheme=weights.scheme,
        dtype=model_dtype,
        first=local_expert_offset,
        num_local_experts=num_local,
        capacity=num_rows,
    )
    # packing assumes that all of a token's experts are local, which would choose tiles for too many rows
    expected_rows = max(math.ceil(num_rows * num_topk / max(num_total, 1)), 1)
    return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, expected_rows=expected_rows))
