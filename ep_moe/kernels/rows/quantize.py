"""Quantization of activations to fp8 e4m3 or int8, bitwise equal to `ep_moe.quant.scaled.quantize`.

Letters: T rows, H row width, G scale groups of a row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import E4M3_MAX, INT8_MAX, absmax, quantize_e4m3, tile_scale, to_int8


class Groups(NamedTuple):
    """The scale groups of a row."""

    H: tl.constexpr
    WIDTH: tl.constexpr  # columns that share a scale
    COLUMNS: tl.constexpr  # WIDTH rounded up to a power of two
    G: tl.constexpr
    BLOCK: tl.constexpr  # groups that one program quantizes


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(
    x_ptr,  # [T, H] float32, bfloat16 or float16, rows `x_stride` apart
    given_ptr,  # [1] float32, the scale if SCALE is "static", the largest magnitude if it is "tensor"; else None
    values_ptr,  # [T, H] e4m3 or int8, out
    scale_ptr,  # [G, T] float32, out
    num_tokens,
    x_stride,
    GROUPS,  # Groups
    SCALE: tl.constexpr,  # "own", "tensor" or "static"
    POWER_OF_TWO: tl.constexpr,  # round scales up to powers of two
):
    """Quantize BLOCK groups: group i is group i % G of row i // G; the last of a row may be short."""
    IS_INT8: tl.constexpr = values_ptr.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = INT8_MAX if IS_INT8 else E4M3_MAX
    index = tl.program_id(0).to(tl.int64) * GROUPS.BLOCK + tl.arange(0, GROUPS.BLOCK)
    token, group = index // GROUPS.G, index % GROUPS.G
    column = tl.arange(0, GROUPS.COLUMNS)
    inside = (
        (token < num_tokens)[:, None]
        & (column < GROUPS.WIDTH)[None, :]
        & (group[:, None] * GROUPS.WIDTH + column[None, :] < GROUPS.H)
    )
    x_ptrs = x_ptr + (token * x_stride + group * GROUPS.WIDTH)[:, None] + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if SCALE == "static":
        scale = tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(given_ptr)
    elif SCALE == "tensor":
        scale = tile_scale(tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(given_ptr), LARGEST, POWER_OF_TWO)
    else:
        scale = tile_scale(absmax(x, 1), LARGEST, POWER_OF_TWO)
    values_ptrs = values_ptr + (token * GROUPS.H + group * GROUPS.WIDTH)[:, None] + column[None, :]
    if IS_INT8:
        tl.store(values_ptrs, to_int8(tl.div_rn(x, scale[:, None])), mask=inside)
    else:
        tl.store(values_ptrs, quantize_e4m3(x, scale[:, None]), mask=inside)
    tl.store(scale_ptr + group * num_tokens + token, scale, mask=token < num_tokens)
