"""Rows gathered into the order of the tile list, where TMA can load them: on Hopper it has no gather.

Letters: L local experts, H hidden, G scale groups, Q row tiles of all experts.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.tile_list import find_rows, num_pieces


@triton.jit(do_not_specialize=["scale_height", "scale_stride_block", "scale_stride_group", "packed_stride"])
def _gather_rows_kernel(
    x,  # rows of the pool, H each
    x_scale,  # float32, or None
    packed,  # Stored: [Q * BLOCK_M, H] and [G, packed_stride], out
    rows,
    tiles,
    hidden,
    x_stride,
    scale_height,  # rows per block of scales: row r is row r % height of block r // height
    scale_stride_block,
    scale_stride_row,
    scale_stride_group,
    packed_stride,
    PIECES,  # RowGroups
    G: tl.constexpr,
    GROUPS: tl.constexpr,  # G rounded up to a power of two
):
    """Copy the rows of all experts, and their scales; rows of a tile that hold no token are not written."""
    column = tl.arange(0, PIECES.BLOCK)
    for piece in range(tl.program_id(0), num_pieces(tiles, PIECES), tl.num_programs(0)):
        expert, row, row_mask = find_rows(piece, rows, tiles, PIECES)
        place = tl.load(rows.row_start + expert) + row - tl.load(tiles.first_tile + expert) * PIECES.BLOCK_M
        source = tl.load(rows.row_index + place, mask=row_mask, other=0)
        x_ptrs = x + source.to(tl.int64)[:, None] * x_stride + column[None, :]
        out_ptrs = packed.data + row.to(tl.int64)[:, None] * hidden + column[None, :]
        for start in range(0, hidden, PIECES.BLOCK):
            mask = row_mask[:, None] & (start + column < hidden)[None, :]
            tl.store(out_ptrs + start, tl.load(x_ptrs + start, mask=mask), mask=mask)
        if x_scale is not None:
            group = tl.arange(0, GROUPS)
            mask = row_mask[:, None] & (group < G)[None, :]
            block = (source // scale_height).to(tl.int64) * scale_stride_block
            scale_ptrs = x_scale + block + (source % scale_height).to(tl.int64) * scale_stride_row
            scale = tl.load(scale_ptrs[:, None] + group.to(tl.int64)[None, :] * scale_stride_group, mask=mask)
            tl.store(packed.scale + group.to(tl.int64)[None, :] * packed_stride + row[:, None], scale, mask=mask)
