"""Requantization of the intermediate by kernels of its own, if the first GEMM's tiles do not hold whole scale groups.

Letters: L local experts, I intermediate, G scale groups, Q row tiles of all experts. All take rows and tiles as
`Rows` and `TileList` of `ep_moe.kernels.gemm.arguments`, and skip rows that hold no token.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.tile_list import find_rows, num_pieces
from ep_moe.kernels.gemm.tokens import order_columns
from ep_moe.kernels.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    MIN_AMAX,
    absmax,
    e2m1_value,
    e4m3_group_scale,
    e4m3_value,
    quantize_e2m1,
    quantize_to,
    round_to,
    scale_for,
)


@triton.jit
def _expert_amax_kernel(
    inner,  # Stored: [Q * BLOCK_M, I] float32
    rows,
    tiles,  # amax: out
    intermediate,
    PIECES,  # RowGroups: BLOCK is I rounded up to a power of two
):
    """Find the largest magnitude of each expert's rows, by an integer atomic max: magnitudes order as their bits."""
    column = tl.arange(0, PIECES.BLOCK)
    for piece in range(tl.program_id(0), num_pieces(tiles, PIECES), tl.num_programs(0)):
        expert, row, row_mask = find_rows(piece, rows, tiles, PIECES)
        ptrs = inner.data + row.to(tl.int64)[:, None] * intermediate
        x = tl.load(ptrs + column[None, :], mask=row_mask[:, None] & (column < intermediate)[None, :], other=0.0)
        largest = absmax(tl.reshape(x, [PIECES.ROWS * PIECES.BLOCK]), 0)
        tl.atomic_max(tiles.amax + expert, largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["scale_stride"])
def _requantize_kernel(
    inner,  # Stored: [Q * BLOCK_M, I] float32
    out,  # Stored: [Q * BLOCK_M, out_stride] e4m3, also in float16, or int8; and [ceil(I / group_width), scale_stride]
    rows,
    tiles,  # amax: None unless all rows of an expert share a scale
    intermediate,
    out_stride,  # intermediate, or more if columns are ordered
    group_width,  # columns that share a scale; intermediate for one scale per token
    scale_stride,
    PIECES,  # RowGroups: BLOCK is group_width, or out_stride if that is more, rounded up to a power of two
    POWER_OF_TWO: tl.constexpr,  # round scales up to powers of two
    ORDER: tl.constexpr,  # as `Epilogue.ORDER`; not 0 only if a scale is of a whole row
):
    """Requantize all columns of ROWS rows, one scale group after the other."""
    OUT: tl.constexpr = out.data.dtype.element_ty
    DTYPE: tl.constexpr = tl.float8e4nv if tl.float16 == OUT else OUT
    for piece in range(tl.program_id(0), num_pieces(tiles, PIECES), tl.num_programs(0)):
        expert, row, row_mask = find_rows(piece, rows, tiles, PIECES)
        offset = row.to(tl.int64)[:, None] * intermediate
        for start in range(0, intermediate, group_width):
            column = start + tl.arange(0, PIECES.BLOCK)
            mask = row_mask[:, None] & ((column < intermediate) & (column < start + group_width))[None, :]
            x = tl.load(inner.data + offset + column[None, :], mask=mask, other=0.0)
            if tiles.amax is not None:
                amax = tl.load(tiles.amax + expert).to(tl.float32, bitcast=True)
                scale = scale_for(amax, DTYPE, POWER_OF_TWO) + tl.zeros([PIECES.ROWS], tl.float32)
            else:
                scale = scale_for(absmax(x, 1), DTYPE, POWER_OF_TWO)
            tl.store(out.scale + start // group_width * scale_stride.to(tl.int64) + row, scale, mask=row_mask)
            values = quantize_to(x, scale[:, None], DTYPE)
            if tl.float16 == OUT:
                values = round_to(e4m3_value(values), OUT)
            if ORDER != 0:
                values = order_columns(values, ORDER)
                mask = row_mask[:, None] & (column < out_stride)[None, :]
            out_offset = row.to(tl.int64)[:, None] * out_stride
            tl.store(out.data + out_offset + column[None, :], values, mask=mask)


@triton.jit
def _requantize_nvfp4_kernel(
    inner,  # Stored: [Q * BLOCK_M, I] float32
    out,  # Stored: [Q * BLOCK_M, I] bfloat16, values times scales, which is exact, and [1, Q * BLOCK_M], global scales
    rows,
    tiles,
    intermediate,
    out_stride,  # intermediate, or more if columns are ordered
    GROUP: tl.constexpr,  # columns that share a scale in e4m3
    PIECES,  # RowGroups: BLOCK is out_stride rounded up to a power of two
    ORDER: tl.constexpr,  # as `Epilogue.ORDER`
):
    """Round ROWS rows to NVFP4, each with a global scale by the rule of weights: `ep_moe.quant.micro.round_trip`."""
    for piece in range(tl.program_id(0), num_pieces(tiles, PIECES), tl.num_programs(0)):
        _, row, row_mask = find_rows(piece, rows, tiles, PIECES)
        column = tl.arange(0, PIECES.BLOCK)
        offset = row.to(tl.int64)[:, None] * intermediate + column[None, :]
        mask = row_mask[:, None] & (column < intermediate)[None, :]
        x = tl.load(inner.data + offset, mask=mask, other=0.0)
        grouped = tl.reshape(x, [PIECES.ROWS, PIECES.BLOCK // GROUP, GROUP])
        amax = absmax(grouped, 2)
        largest = tl.max(tl.where(amax < float("inf"), amax, 0.0), 1)
        global_scale = tl.div_rn(tl.maximum(largest, MIN_AMAX), E2M1_MAX * E4M3_MAX)
        scale = e4m3_value(e4m3_group_scale(tl.div_rn(amax, global_scale[:, None])))
        codes = quantize_e2m1(grouped, (scale * global_scale[:, None])[:, :, None])
        real = tl.reshape(e2m1_value(codes) * scale[:, :, None], [PIECES.ROWS, PIECES.BLOCK])
        values = round_to(real, out.data.dtype.element_ty)
        if ORDER != 0:
            values = order_columns(values, ORDER)
            mask = row_mask[:, None] & (column < out_stride)[None, :]
        ptrs = out.data + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(ptrs, values, mask=mask)
        tl.store(out.scale + row, global_scale, mask=row_mask)
