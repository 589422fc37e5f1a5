"""Routing data and weights as triton_kernels has them, for those without that package.

Letters: T tokens, K top-k, E experts, G = T * K pairs of a token and an expert; K and N rows and columns of a weight.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from ep_moe.quant import get_scheme, quantize_weight


@dataclasses.dataclass(frozen=True, slots=True)
class GatherIndx:
    """Indices of pairs, as triton_kernels' class of this name: row i by expert is pair src_indx[i]."""

    src_indx: torch.Tensor  # [G] int32, -1 none
    dst_indx: torch.Tensor  # [G] int32, its inverse; not read


@dataclasses.dataclass(frozen=True, slots=True)
class ScatterIndx:
    """Indices of pairs, as triton_kernels' class of this name: row i by expert goes to pair dst_indx[i]."""

    src_indx: torch.Tensor  # [G] int32, its inverse; not read
    dst_indx: torch.Tensor  # [G] int32, -1 none


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingData:
    """The pairs of each expert, as triton_kernels' class of this name; any object with these attributes serves."""

    gate_scal: torch.Tensor  # [G], weights in the order of experts
    expt_hist: torch.Tensor  # [n_expts_tot] int32, pairs of each expert
    n_expts_tot: int
    n_expts_act: int  # K
    expt_data: Any = None  # not read
    expected_tokens_per_expt: int | None = None  # not read


@dataclasses.dataclass(frozen=True, slots=True)
class InFlexData:
    """The dtype of a quantized weight and its scale [1] float32, as triton_kernels' class of this name."""

    dtype: torch.dtype | None = None
    scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MicroscalingCtx:
    """The scales of an MXFP4 weight, [E, K / 32, N] e8m0 bytes; serves as `w1_pcg` and `w2_pcg`."""

    weight_scale: torch.Tensor | None = None


class TritonKernelTopKOutput(NamedTuple):
    """The routing of tokens, as SGLang's class of this name; any tuple in this order serves."""

    routing_data: Any
    gather_indx: Any
    scatter_indx: Any


def quantize(w: torch.Tensor, dtype: str, dev: Any, **opt: Any) -> tuple[Any, ...]:
    """A weight [E, K, N] in another dtype, on `dev`.

    Args:
        dtype: "bf16"; "fp8", e4m3 with one scale for the whole tensor, its largest magnitude / 448; "mx4", MXFP4 with a
            scale for 32 rows. opt: `swizzle_mx_scale` False, for "mx4".
    Returns: values and `InFlexData`, which has the scale of "fp8"; but for "bf16" also `MicroscalingCtx`, with the
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
        return values.transpose(1, 2), InFlexData(values.dtype, scale), MicroscalingCtx()
    if dtype != "mx4":
        raise ValueError(f"dtype ({dtype!r}) is not one of bf16, fp8, mx4")
    matrix = quantize_weight(turned.float(), get_scheme("mxfp4_w4a16"))
    assert matrix.scale is not None
    scales = matrix.scale.view(torch.uint8).transpose(1, 2)
    return matrix.values.transpose(1, 2), InFlexData(), MicroscalingCtx(scales)


def routing_from_topk(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> TritonKernelTopKOutput:
    """The same routing [T, K] as data by expert; ids outside of [0, num_experts) are left out. Local, no host sync."""
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    expert = torch.where(valid, flat, num_experts)
    order = torch.sort(expert, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    pairs = torch.where(valid[order], order, -1).int()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(flat.numel(), device=flat.device))
    places = torch.where(valid, places, -1).int()
    data = RoutingData(topk_weights.reshape(-1)[order], counts[:-1], num_experts, topk_ids.shape[1])
    return TritonKernelTopKOutput(data, GatherIndx(pairs, places), ScatterIndx(places, pairs))
