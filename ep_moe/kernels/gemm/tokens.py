"""Rows of x: loaded for a product, or prepared for it once by a kernel of their own.

Letters: K columns that a GEMM reduces over, G scales of a row in a piece of columns, Q row tiles of all experts.

Weights that are decoded in registers are multiplied in another order of columns (`order_columns`), and rows with
scales of one byte, or in fp8, are multiplied in bfloat16. All column tiles of an expert read the same rows, so they are
prepared before the first GEMM. The numbers of fp8 and MXFP8, and those of NVFP4 without a global scale, are exact in
bfloat16.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
from ep_moe.kernels.gemm.tile_list import find_rows
from ep_moe.kernels.numerics import e2m1_value, e4m3_value, e8m0_value, round_to, to_bf16


@triton.jit
def load_rows(ptrs, row_mask, places_left, TILE):
    """Load stored values [BLOCK_M, BLOCK_K] of a step, zeros out of bounds."""
    if TILE.EVEN_K:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    places = tl.arange(0, TILE.BLOCK_K)[None, :]
    return tl.load(ptrs, mask=row_mask[:, None] & (places < places_left), other=0.0)


@triton.jit
def order_columns(x, PACKED: tl.constexpr):
    """Order columns of x [R, C], or of decoded weights, as they are summed if weights are SHUFFLED.

    Of each 64 stored bytes of a row of weights, a thread of the four that share a row of a fragment has 16: pairs of
    8-bit weights that are neighbors, or of 4-bit weights (PACKED is 2) that are four apart. C is a power of two from
    16; fewer columns than of 64 bytes keep their order within these: `ordered_places` has their places.
    Example of 8-bit weights: 0, 1, 16, 17, 32, 33, 48, 49, 2, 3, 18, ...
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    THREADS: tl.constexpr = min(columns // (16 * PACKED), 4) if columns >= 16 * PACKED else 1
    if PACKED == 1:
        blocks = tl.reshape(x, [rows, columns // (16 * THREADS), THREADS, 8, 2])
        return tl.reshape(tl.permute(blocks, 0, 1, 3, 2, 4), [rows, columns])
    else:
        WORDS: tl.constexpr = min(columns // 8, 4)
        whole: tl.constexpr = columns // (8 * THREADS * WORDS)
        blocks = tl.reshape(x, [rows, whole, THREADS, WORDS, 2, 2, 2])  # thread, word, code: 3 bits
        return tl.reshape(tl.permute(blocks, 0, 1, 3, 6, 5, 2, 4), [rows, columns])


@triton.jit
def ordered_places(first, COLUMNS: tl.constexpr, PACKED: tl.constexpr):
    """Where the COLUMNS columns from `first` on, a multiple of them, are in an ordered row: [COLUMNS], ascending.

    They are in the order in which `order_columns` returns them.
    Example of 8-bit weights: the 32 columns from 32 on are at 4, 5, 6, 7, 12, 13, 14, 15, 20, ...
    """
    THREADS: tl.constexpr = min(COLUMNS // (16 * PACKED), 4) if COLUMNS >= 16 * PACKED else 1
    RUN: tl.constexpr = 2 * THREADS  # places one after the other
    place = tl.arange(0, COLUMNS)
    begin = first // (64 * PACKED) * (64 * PACKED) + first // (16 * PACKED) % 4 * 2
    if PACKED == 2:
        begin += first // 8 % 4 * 32
    return begin + place // RUN * 8 + place % RUN


@triton.jit
def _decode_rows(x, scale, GROUP: tl.constexpr):
    """Turn e4m3 [R, C], or two codes of e2m1 in a byte [R, C / 2], into bfloat16 [R, C].

    Args:
        scale: [R, G] uint8, of GROUP columns each: e8m0 beside e4m3, e4m3 beside e2m1.
    """
    rows: tl.constexpr = scale.shape[0]
    columns: tl.constexpr = scale.shape[1] * GROUP
    if x.dtype == tl.uint8:
        values = tl.join(e2m1_value(x & 15), e2m1_value(x >> 4))
        factor = e4m3_value(scale.to(tl.float8e4nv, bitcast=True))
    else:
        values = e4m3_value(x)
        factor = e8m0_value(scale.to(tl.int32))
    grouped = tl.reshape(values, [rows, columns // GROUP, GROUP])
    return to_bf16(tl.reshape(grouped * factor[:, :, None], [rows, columns]))


@triton.jit(do_not_specialize=["x_scale_height", "x_scale_stride_block", "x_scale_stride_group"])
def _prepare_rows_kernel(
    pool,  # the batch's rows
    pool_scale,  # their scales, or None
    out,  # Stored: [Q * BLOCK_M, K rounded up to BLOCK]; and [Q * BLOCK_M], if each row has a scale
    rows,
    tiles,
    K,
    x_stride,
    x_scale_height,  # as `_first_gemm_kernel` has them
    x_scale_stride_block,
    x_scale_stride_row,
    x_scale_stride_group,
    PIECES,  # RowGroups: BLOCK columns at a time
    GROUP: tl.constexpr,  # columns that share a scale of one byte; 0 if there are no such scales
    ORDER: tl.constexpr,  # PACKED of SHUFFLED weights, else 0
):
    """Copy the batch's rows in the order of the tile list, decoded and ordered; zeros beyond rows and columns.

    A scale of one byte is multiplied into its group; one for each row is copied.
    """
    start_early()
    PACKED: tl.constexpr = 2 if pool.dtype.element_ty == tl.uint8 else 1
    blocks = tl.cdiv(K, PIECES.BLOCK)
    column = tl.arange(0, PIECES.BLOCK)
    place = tl.arange(0, PIECES.BLOCK // PACKED)
    pieces = tl.load(tiles.num_tiles) * (PIECES.BLOCK_M // PIECES.ROWS)
    for t in range(tl.program_id(0), pieces * blocks, tl.num_programs(0)):
        expert, inner_row, row_mask = find_rows(t // blocks, rows, tiles, PIECES)
        row = tl.load(rows.row_start + expert) + inner_row - tl.load(tiles.first_tile + expert) * PIECES.BLOCK_M
        if rows.row_index is not None:
            row = tl.load(rows.row_index + row, mask=row_mask, other=0)
        first = t % blocks * PIECES.BLOCK
        mask = row_mask[:, None] & (place < (K - first) // PACKED)[None, :]
        ptrs = pool + row.to(tl.int64)[:, None] * x_stride + (first // PACKED + place)[None, :]
        x = tl.load(ptrs, mask=mask, other=0.0)
        if GROUP != 0 or out.scale is not None:
            block_offset = (row // x_scale_height).to(tl.int64) * x_scale_stride_block
            scale_ptrs = pool_scale + block_offset + (row % x_scale_height).to(tl.int64) * x_scale_stride_row
        if out.scale is not None:
            x = round_to(e4m3_value(x), out.data.dtype.element_ty)
            scale = tl.load(scale_ptrs, mask=row_mask & (first == 0), other=0.0)
            tl.store(out.scale + inner_row, scale, mask=row_mask & (first == 0))
        elif GROUP != 0:
            group = first // GROUP + tl.arange(0, PIECES.BLOCK // GROUP)
            mask = row_mask[:, None] & (group < tl.cdiv(K, GROUP))[None, :]
            ptrs = scale_ptrs[:, None] + group.to(tl.int64)[None, :] * x_scale_stride_group
            x = _decode_rows(x, tl.load(ptrs, mask=mask, other=0), GROUP)
        if ORDER != 0:
            x = order_columns(x, ORDER)
        ptrs = out.data + inner_row.to(tl.int64)[:, None] * (blocks * PIECES.BLOCK)
        tl.store(ptrs + (first + column)[None, :], x)
