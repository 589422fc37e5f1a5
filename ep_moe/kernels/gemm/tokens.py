"""Rows of x as they are stored: loaded, and decoded in registers if groups of a row have a scale of one byte.

Letters: K columns that a GEMM reduces over, G scales of a row in a step over K.

The numbers of MXFP8, and those of NVFP4 without a global scale, are exact in bfloat16.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import e2m1_value, e4m3_value, e8m0_value, to_bf16


@triton.jit
def load_byte_scales(scale_ptrs, stride_group, row_mask, k, K, TILE, SCALES):
    """Load the scales [BLOCK_M, G] uint8 of the step over K that begins at k; none beyond K."""
    group = k // SCALES.GROUP_K + tl.arange(0, TILE.BLOCK_K // SCALES.GROUP_K)
    mask = row_mask[:, None] & (group < tl.cdiv(K, SCALES.GROUP_K))[None, :]
    return tl.load(scale_ptrs[:, None] + group.to(tl.int64)[None, :] * stride_group, mask=mask, other=0)


@triton.jit
def load_rows(ptrs, row_mask, places_left, TILE, PACKED: tl.constexpr):
    """Load stored values [BLOCK_M, BLOCK_K / PACKED] of a step, zeros out of bounds."""
    if TILE.EVEN_K:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    places = tl.arange(0, TILE.BLOCK_K // PACKED)[None, :]
    return tl.load(ptrs, mask=row_mask[:, None] & (places < places_left), other=0.0)


@triton.jit
def decode_rows(x, scale, TILE, SCALES):
    """Turn e4m3 [BLOCK_M, BLOCK_K], or two codes of e2m1 in a byte, into bfloat16 [BLOCK_M, BLOCK_K].

    Args:
        scale: [BLOCK_M, G] uint8, of GROUP_K columns each: e8m0 beside e4m3, e4m3 beside e2m1.
    """
    if x.dtype == tl.uint8:
        values = tl.reshape(tl.join(e2m1_value(x & 15), e2m1_value(x >> 4)), [TILE.BLOCK_M, TILE.BLOCK_K])
        factor = e4m3_value(scale.to(tl.float8e4nv, bitcast=True))
    else:
        values = e4m3_value(x)
        factor = e8m0_value(scale.to(tl.int32))
    shape: tl.constexpr = [TILE.BLOCK_M, TILE.BLOCK_K // SCALES.GROUP_K, SCALES.GROUP_K]
    return to_bf16(tl.reshape(tl.reshape(values, shape) * factor[:, :, None], [TILE.BLOCK_M, TILE.BLOCK_K]))
