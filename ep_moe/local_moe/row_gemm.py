"""One grouped GEMM by itself: rows that lists name, times the weight of their expert, stored where lists say.

Letters: L experts, N and K rows and columns of a weight, G scale groups of a row, M listed rows.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch

from ep_moe.config import DTYPES
from ep_moe.experts.formats import kernels_compute
from ep_moe.experts.launching import aligned
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, as_bytes, dequantize_rows, dequantize_weight

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowLists:
    """The rows of each expert: row i of expert e is entry expert_row_start[e] + i of the lists.

    Args:
        expert_row_start, expert_num_tokens: [L] int32.
        source: [M] int32, rows of x. target: [M] int32, rows of the result, each at most once.
        factor: [M] float32, multiplies a row of the result; None: 1.
        zeros: [at most R] bool, rows of the result that become zeros unless they are a target; None: no row does.
        expected_rows: of an expert, by which tiles are chosen.
    """

    expert_row_start: torch.Tensor
    expert_num_tokens: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    factor: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    expected_rows: int


def by_kernels(device: torch.device, scheme: QuantScheme) -> bool:
    """Whether `gemm_rows` launches kernels by default: on a GPU, if they compute `scheme`. Local."""
    return device.type == "cuda" and kernels_compute(scheme)


def gemm_rows(
    x: torch.Tensor | Quantized,
    rows: RowLists,
    weight: StoredMatrix,
    scheme: QuantScheme,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    tiles: ExpertTiles | None = None,
    kernels: bool | None = None,
) -> None:
    """out[target] = (weight[expert] @ x[source] + bias[expert]) * factor, in float32, rounded once.

    Args:
        x: [T, K] in the dtype of `out`, or `Quantized` in the payload of `scheme`.
        weight: [L, N, K] in `scheme.weight`. bias: [L, N], any float dtype.
        out: [R, N] float32, bfloat16 or float16, contiguous; others than targets and zeros stay as they are.
        tiles: of which the first GEMM's count; None chooses by table.
        kernels: Triton's, or torch; by default Triton's on a GPU if they compute `scheme`.
    Errors: ValueError for tensors that do not fit each other.
    Local, on the current stream. By kernels no host sync, and safe in CUDA graphs after a call of the same kind.
    """
    values = x.values if isinstance(x, Quantized) else x
    num_experts, columns = weight.values.shape[:2]
    needed = scheme.payload.row_values(scheme.weight.row_width(weight.values.shape[2]))
    if values.dim() != 2 or values.shape[1] != needed:
        raise ValueError(f"x is {tuple(values.shape)}, a weight {tuple(weight.values.shape)} needs [rows, {needed}]")
    if out.dim() != 2 or out.shape[1] != columns or not out.is_contiguous() or out.dtype not in DTYPES.values():
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; contiguous [rows, {columns}] needed")
    if bias is not None and tuple(bias.shape) != (num_experts, columns):
        raise ValueError(f"bias is {tuple(bias.shape)}; {(num_experts, columns)} needed")
    if not rows.source.shape[0] or not columns:
        return
    if by_kernels(values.device, scheme) if kernels is None else kernels:
        gemm_by_kernels(x, rows, weight, scheme, bias=bias, out=out, tiles=tiles)
    else:
        _by_torch(x, rows, weight, scheme, bias, out)


def gemm_by_kernels(
    x: torch.Tensor | Quantized,
    rows: RowLists,
    weight: StoredMatrix,
    scheme: QuantScheme,
    *,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: ExpertTiles | None,
) -> "LaunchSequence":
    """`gemm_rows` by kernels, with checked arguments. Returns its launches, over tensors named as here."""
    from ep_moe.local_moe.row_kernels import launch_row_gemm  # Triton exists only on Linux

    values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    named = {
        "x": values if values.stride(1) == 1 else values.contiguous(),
        "x_scale": None if scale is None else as_bytes(scale),
        "row_start": rows.expert_row_start,
        "num_tokens": rows.expert_num_tokens,
        "source": rows.source,
        "target": rows.target,
        "factor": rows.factor,
        "zeros": None if rows.zeros is None else as_bytes(rows.zeros),
        **{f"w_{part}": aligned(tensor) for part, tensor in weight.tensors.items()},
        "bias": None if bias is None else bias.contiguous(),
        "out": out,
    }
    if weight.scale is not None and weight.scale.dtype == torch.float8_e8m0fnu:  # which Triton has not
        named["w_scale"] = as_bytes(aligned(weight.scale))
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    hidden = scheme.weight.row_width(weight.values.shape[2])
    return launch_row_gemm(tensors, scheme, hidden=hidden, expected_rows=rows.expected_rows, tiles=tiles)


def _by_torch(
    x: torch.Tensor | Quantized,
    rows: RowLists,
    weight: StoredMatrix,
    scheme: QuantScheme,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One expert after the other; reads counts and starts back to the host."""
    if rows.zeros is not None:
        out[: rows.zeros.shape[0]][rows.zeros] = 0
    values, scale = (as_bytes(x.values), x.scale) if isinstance(x, Quantized) else (x, None)
    starts, counts = torch.stack([rows.expert_row_start, rows.expert_num_tokens]).tolist()
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if not count:
            continue
        entries = slice(start, start + count)
        source = rows.source[entries].long()
        picked = values[source].view(x.values.dtype) if isinstance(x, Quantized) else values[source]
        own_scale = None if scale is None else as_bytes(scale)[source].view(scale.dtype)
        sums = dequantize_rows(picked, own_scale, scheme) @ dequantize_weight(weight[expert], scheme).t()
        if bias is not None:
            sums += bias[expert].float()
        if rows.factor is not None:
            sums *= rows.factor[entries, None]
        out[rows.target[entries].long()] = sums.to(out.dtype)
