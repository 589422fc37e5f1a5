"""Quantization of activations to fp8 e4m3 or int8, bitwise equal to `ep_moe.quant.scaled.quantize`.

Letters: T rows, H row width, G scale groups of a row.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import E4M3_MAX, INT8_MAX, absmax, quantize_e4m3, tile_scale, to_int8


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(
    x_ptr,  # [T, H] float32, bfloat16 or float16, rows `x_stride` apart
    given_ptr,  # [1] float32, the scale if SCALE is "static", the largest magnitude if it is "tensor"
    values_ptr,  # [T, H] e4m3 or int8, out
    scale_ptr,  # [G, T] float32, out
    num_tokens,
    x_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    COLUMNS: tl.constexpr,  # GROUP rounded up to a power of two
    G: tl.constexpr,
    GROUPS: tl.constexpr,  # groups that one program quantizes
    SCALE: tl.constexpr,  # "own", "tensor" or "static"
    POWER_OF_TWO: tl.constexpr,  # round scales up to powers of two
):
    """Quantize GROUPS groups: group i is group i % G of row i // G; the last of a row may be short."""
    IS_INT8: tl.constexpr = values_ptr.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = INT8_MAX if IS_INT8 else E4M3_MAX
    index = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    token, group = index // G, index % G
    column = tl.arange(0, COLUMNS)
    inside = (token < num_tokens)[:, None] & (column < GROUP)[None, :] & (group[:, None] * GROUP + column[None, :] < H)
    x_ptrs = x_ptr + (token * x_stride + group * GROUP)[:, None] + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if SCALE == "static":
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr)
    elif SCALE == "tensor":
        scale = tile_scale(tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr), LARGEST, POWER_OF_TWO)
    else:
        scale = tile_scale(absmax(x, 1), LARGEST, POWER_OF_TWO)
    values_ptrs = values_ptr + (token * H + group * GROUP)[:, None] + column[None, :]
    if IS_INT8:
        tl.store(values_ptrs, to_int8(tl.div_rn(x, scale[:, None])), mask=inside)
    else:
        tl.store(values_ptrs, quantize_e4m3(x, scale[:, None]), mask=inside)
    tl.store(scale_ptr + group * num_tokens + token, scale, mask=token < num_tokens)
