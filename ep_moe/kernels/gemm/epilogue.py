"""The epilogue of both GEMMs, on a tile's float32 sums: scales, bias, activation, rounding or requantization, store.

Letters: L local experts, I intermediate, Q row tiles of all experts, N columns of a GEMM's result.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.pairs import deferred_scale
from ep_moe.kernels.gemm.tokens import order_columns, ordered_places
from ep_moe.kernels.numerics import (
    E4M3_MAX_EXPONENT,
    absmax,
    e4m3_value,
    e8m0_byte,
    e8m0_value,
    quantize_to,
    round_to,
    scale_for,
    to_mxfp8,
)


@triton.jit
def scale_sums(acc, operands, x, tile, columns, width, output_scale_ptr, SCALES, CODES):
    """Apply scales that do not vary along the reduction: per token, per channel or per tensor, and per expert.

    Args:
        x: TileRows. tile: TileColumns. columns: the rows of w, of `width` of an expert, that the columns are of.
    """
    if SCALES.X == "row":
        acc *= tl.load(x.scale_ptrs, mask=x.mask, other=0.0)[:, None]
    if SCALES.WEIGHT == "channel":
        scale_ptrs = operands.w_scale + tile.expert.to(tl.int64) * width + columns
        acc *= tl.load(scale_ptrs, mask=tile.mask, other=0.0).to(tl.float32)[None, :]
    elif SCALES.WEIGHT == "tensor":
        acc *= tl.load(operands.w_scale + tile.expert)
    if SCALES.WEIGHT == "fold":
        acc *= deferred_scale(operands.w_scale.dtype.element_ty, operands.x.dtype.element_ty, CODES)
    if operands.w_global_scale is not None:
        global_scale = tl.load(operands.w_global_scale + tile.expert)
        if CODES.DIVIDE:
            acc = acc / global_scale
        else:
            acc *= global_scale
    if output_scale_ptr is not None:
        acc *= tl.load(output_scale_ptr + tile.expert)
    return acc


@triton.jit
def add_bias(acc, bias_ptrs, column_mask):
    """Add a bias for each column."""
    return acc + tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def of_expert(ptr, expert, shared):
    """The expert's own number, or else the one that all experts share."""
    if ptr is not None:
        return tl.load(ptr + expert)
    else:
        return shared


@triton.jit
def store_tile(sums, out, scalars, tile, row, row_mask, N, strides, TILE, SCALES, EPILOGUE):
    """Round or requantize a tile [BLOCK_M, BLOCK_N] float32 and store it at these rows [BLOCK_M].

    "group": GROUP_K neighbors, a power of two up to BLOCK_N, share a scale. "mxfp8": the same in MXFP8, whose numbers
    bfloat16 represents: they are stored so. A `row_mask` of None stores all rows: those of the intermediate beyond the
    expert's tokens are never read. If ordered, zeros follow the N columns up to the stride.

    Args:
        tile: TileColumns. strides: between rows, and between groups of scales.
    """
    stride, scale_stride = strides
    columns, column_mask = tile.columns, tile.mask
    DTYPE: tl.constexpr = out.data.dtype.element_ty
    places = columns
    if EPILOGUE.ORDER != 0:
        sums = tl.where(column_mask[None, :], sums, 0.0)
        places = ordered_places(tl.min(columns, 0), TILE.BLOCK_N, EPILOGUE.ORDER)
        column_mask = places < stride
    mask = column_mask[None, :]
    if row_mask is not None:
        mask = row_mask[:, None] & mask
    ptrs = out.data + row.to(tl.int64)[:, None] * stride + places[None, :]
    if EPILOGUE.REQUANTIZE == "group":
        GROUPS: tl.constexpr = TILE.BLOCK_N // SCALES.GROUP_K
        grouped = tl.reshape(sums, [TILE.BLOCK_M, GROUPS, SCALES.GROUP_K])
        scale = scale_for(absmax(grouped, 2), DTYPE, EPILOGUE.POWER_OF_TWO)
        values = tl.reshape(quantize_to(grouped, scale[:, :, None], DTYPE), [TILE.BLOCK_M, TILE.BLOCK_N])
        group = tl.min(columns, 0) // SCALES.GROUP_K + tl.arange(0, GROUPS)
        tl.store(
            out.scale + group.to(tl.int64)[None, :] * scale_stride + row[:, None],
            scale,
            mask=tl.broadcast_to((group < tl.cdiv(N, SCALES.GROUP_K))[None, :], [TILE.BLOCK_M, GROUPS]),
        )
    elif EPILOGUE.REQUANTIZE == "mxfp8":
        grouped = tl.reshape(sums, [TILE.BLOCK_M, TILE.BLOCK_N // SCALES.GROUP_K, SCALES.GROUP_K])
        byte = e8m0_byte(absmax(grouped, 2), E4M3_MAX_EXPONENT)[:, :, None]
        real = e4m3_value(to_mxfp8(grouped, byte)) * e8m0_value(byte)
        values = round_to(tl.reshape(real, [TILE.BLOCK_M, TILE.BLOCK_N]), DTYPE)
    elif EPILOGUE.REQUANTIZE == "static":
        values = quantize_to(sums, tl.load(scalars.static_scale + tile.expert), DTYPE)
    else:
        values = round_to(sums, DTYPE)
    if EPILOGUE.ORDER != 0:
        values = order_columns(values, EPILOGUE.ORDER)
    tl.store(ptrs, values, mask=mask)
