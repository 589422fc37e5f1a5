"""One GEMM of all experts, from rows of a batch to the same rows: as `ep_moe.kernels.gemm.grouped`, but alone.

Letters: L local experts, K columns that the GEMM reduces over, N columns of its result, V stored values of a row of
weights.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.epilogue import store_tile
from ep_moe.kernels.gemm.grouped import _compute_tile
from ep_moe.kernels.gemm.tile_list import find_tile


@triton.jit(do_not_specialize=["x_scale_height", "x_scale_stride_block", "x_scale_stride_group"])
def _rows_gemm_kernel(
    operands,  # Operands: the batch's pool of rows, w and its bias
    y,  # Stored: [rows, N], without scales
    scalars,
    rows,
    tiles,
    K,
    N,
    w_stride,  # V
    x_stride,
    x_scale_height,  # rows per block of scales: row r is row r % height of block r // height
    x_scale_stride_block,
    x_scale_stride_row,
    x_scale_stride_group,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """y = w @ x + bias, rounded once; rows of y that hold no token are not written."""
    num_columns = tl.cdiv(N, TILE.BLOCK_N)
    total = tl.load(tiles.num_tiles) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, _, column_tile = find_tile(t, num_columns, rows, tiles, TILE)
        token = row_tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        row_mask = token < num_tokens
        own_row = tl.load(rows.row_start + expert) + token
        row = own_row
        if rows.row_index is not None:
            row = tl.load(rows.row_index + row, mask=row_mask, other=0)
        first_column = column_tile * TILE.BLOCK_N
        columns = first_column + tl.arange(0, TILE.BLOCK_N)
        column_mask = columns < N
        x_scale_ptrs = operands.x_scale
        if SCALES.X != "none":
            block_offset = (row // x_scale_height).to(tl.int64) * x_scale_stride_block
            x_scale_ptrs += block_offset + (row % x_scale_height).to(tl.int64) * x_scale_stride_row
        sums, _ = _compute_tile(
            operands,
            scalars,
            operands.x + row.to(tl.int64)[:, None] * x_stride,
            x_scale_ptrs,
            row_mask,
            expert,
            first_column,
            columns,
            column_mask,
            K,
            N,
            w_stride,
            x_scale_stride_group,
            TILE,
            SCALES,
            CODES,
            EPILOGUE,
        )
        store_tile(sums, y, scalars, expert, own_row, row_mask, columns, column_mask, N, 0, TILE, SCALES, EPILOGUE)
