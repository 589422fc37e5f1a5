"""Requantization of the intermediate between the two GEMMs to e4m3 in groups whose scales are powers of two.

Letters: I intermediate, G scale groups, Q row tiles of all experts.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.tile_list import _find_rows
from ep_moe.kernels.numerics import absmax, e4m3_scale, quantize_e4m3


@triton.jit(do_not_specialize=["scale_stride"])
def _requantize_rounded_kernel(
    inner_ptr,  # [Q * BLOCK_M, I] float32
    values_ptr,  # [Q * BLOCK_M, I] float8, out
    scale_ptr,  # [G, scale_stride] float32, out
    expert_num_tokens_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    intermediate,
    scale_stride,
    GROUP: tl.constexpr,  # columns that share a scale
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # at a time; divides BLOCK_M
    BLOCK: tl.constexpr,  # GROUP rounded up to a power of two
):
    """Requantize one scale group of ROWS rows at a time; rows without a token are skipped.

    Example: a largest magnitude of 448 gives the scale 1, one of 449 gives 2.
    """
    groups = tl.cdiv(intermediate, GROUP)
    for piece in range(tl.program_id(0), tl.load(num_tiles_ptr) * (BLOCK_M // ROWS) * groups, tl.num_programs(0)):
        _, row, row_mask = _find_rows(
            piece // groups, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M, ROWS
        )
        group, place = piece % groups, tl.arange(0, BLOCK)
        column = group * GROUP + place
        offset = row.to(tl.int64)[:, None] * intermediate + column[None, :]
        mask = row_mask[:, None] & ((place < GROUP) & (column < intermediate))[None, :]
        x = tl.load(inner_ptr + offset, mask=mask, other=0.0)
        scale = e4m3_scale(absmax(x, 1), True)
        tl.store(scale_ptr + group * scale_stride.to(tl.int64) + row, scale, mask=row_mask)
        tl.store(values_ptr + offset, quantize_e4m3(x, scale[:, None]), mask=mask)
