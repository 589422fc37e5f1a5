"""Routing data and weights as triton_kernels has them, for those without that package.

Letters: T tokens, K top-k, E experts, G = T * K pairs of a token and an expert; K and N rows and columns of a weight.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from ep_moe.quant import get_scheme, quantize_weight


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedTensorMetadata:
    """How many pairs each expert has, as triton_kernels' class of this name; any object with slice_sizes serves."""

    slice_sizes: torch.Tensor  # [E] int32
    slice_offs: torch.Tensor | None = None  # not read, as those below: they follow from slice_sizes
    block_offs_data: torch.Tensor | None = None
    block_schedule_data: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class InFlexData:
    """The dtype of a quantized weight and its scale [1] float32, as triton_kernels' class of this name."""

    dtype: torch.dtype | None = None
    scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The scales of an MXFP4 weight, as triton_kernels' class of this name, whose other attributes are not read."""

    b_mx_scale: torch.Tensor | None = None  # [E, K / 32, N] e8m0 bytes


class TritonKernelTopKOutput(NamedTuple):
    """The routing of tokens, as SGLang's class of this name; any tuple in this order serves."""

    a_ragged_metadata: Any
    gather_indx: torch.Tensor  # [G], the token of each pair in the order of experts
    scatter_indx: torch.Tensor  # [G], its number, -1 none
    gate_scal: torch.Tensor  # [G], its weight
    n_expts_act: int  # K


def quantize(w: torch.Tensor, dtype: str, dev: Any, **opt: Any) -> tuple[Any, ...]:
    """A weight [E, K, N] in another dtype, on `dev`.

    Args:
        dtype: "bf16"; "fp8", e4m3 with one scale for the whole tensor, its largest magnitude / 448; "mx4", MXFP4 with a
            scale for 32 rows. opt: `swizzle_mx_scale` False, for "mx4".
    Returns: values and `InFlexData`, which has the scale of "fp8"; but for "bf16" also `PrecisionConfig`, with the
        scales of "mx4". Values of "fp8" and "mx4" are transposed views of a tensor whose rows are columns of w.
    Errors: ValueError for another dtype or option. Local.
    """
    if w.dim() != 3 or not w.is_floating_point():
        raise ValueError(f"w is {tuple(w.shape)} {w.dtype}; [E, K, N] of floats needed")
    for name, value in opt.items():
        if name != "swizzle_mx_scale" or value:
            raise ValueError(f"{name} ({value!r}) is given; swizzle_mx_scale False is supported, scales lie in order")
    if dtype == "bf16":
        return w.to(device=dev, dtype=torch.bfloat16), InFlexData()
    turned = w.to(dev).transpose(1, 2).contiguous()
    if dtype == "fp8":
        scale = turned.abs().amax().float().clamp(min=1e-10).reshape(1) / torch.finfo(torch.float8_e4m3fn).max
        values = (turned.float() / scale).to(torch.float8_e4m3fn)
        return values.transpose(1, 2), InFlexData(values.dtype, scale), PrecisionConfig()
    if dtype != "mx4":
        raise ValueError(f"dtype ({dtype!r}) is not one of bf16, fp8, mx4")
    matrix = quantize_weight(turned.float(), get_scheme("mxfp4_w4a16"))
    assert matrix.scale is not None
    scales = matrix.scale.view(torch.uint8).transpose(1, 2)
    return matrix.values.transpose(1, 2), InFlexData(), PrecisionConfig(scales)


def routing_from_topk(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> TritonKernelTopKOutput:
    """The same routing [T, K] as data by expert; ids outside of [0, num_experts) are left out. Local, no host sync."""
    flat, num_topk = topk_ids.reshape(-1).long(), topk_ids.shape[1]
    valid = (flat >= 0) & (flat < num_experts)
    expert = torch.where(valid, flat, num_experts)
    order = torch.sort(expert, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    pairs, tokens = torch.where(valid[order], order, -1).int(), (order // num_topk).int()
    data = RaggedTensorMetadata(counts[:-1])
    return TritonKernelTopKOutput(data, tokens, pairs, topk_weights.reshape(-1)[order], num_topk)
