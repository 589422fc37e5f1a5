"""Requantization of the intermediate, in the first GEMM's epilogue, or in a kernel of its own if a scale spans more.

Letters: L local experts, I intermediate, Q row tiles of all experts.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.tile_list import _find_rows
from ep_moe.kernels.numerics import absmax, e4m3_scale, quantize_e4m3, round_to


@triton.jit
def _store_inner(
    inner,
    inner_ptr,
    inner_scale_ptr,
    static_scale_ptr,
    expert,
    inner_row,  # [BLOCK_M]
    columns,  # [BLOCK_N]
    column_mask,
    intermediate,
    inner_scale_stride,
    REQUANTIZE: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Round or requantize a tile of the intermediate [BLOCK_M, BLOCK_N] float32 and store it.

    "group": GROUP_K neighbors, a power of two up to BLOCK_N, share a scale. Rows beyond the expert's tokens are stored
    without a mask; they are never read.
    """
    ptrs = inner_ptr + inner_row.to(tl.int64)[:, None] * intermediate + columns[None, :]
    if REQUANTIZE == "group":
        GROUPS: tl.constexpr = BLOCK_N // GROUP_K
        grouped = tl.reshape(inner, [BLOCK_M, GROUPS, GROUP_K])
        scale = e4m3_scale(absmax(grouped, 2))
        values = tl.reshape(quantize_e4m3(grouped, scale[:, :, None]), [BLOCK_M, BLOCK_N])
        group = tl.min(columns, 0) // GROUP_K + tl.arange(0, GROUPS)
        tl.store(
            inner_scale_ptr + group.to(tl.int64)[None, :] * inner_scale_stride + inner_row[:, None],
            scale,
            mask=tl.broadcast_to((group < tl.cdiv(intermediate, GROUP_K))[None, :], [BLOCK_M, GROUPS]),
        )
        tl.store(ptrs, values, mask=column_mask[None, :])
    elif REQUANTIZE == "static":
        tl.store(ptrs, quantize_e4m3(inner, tl.load(static_scale_ptr + expert)), mask=column_mask[None, :])
    else:
        tl.store(ptrs, round_to(inner, inner_ptr.dtype.element_ty), mask=column_mask[None, :])


@triton.jit
def _expert_amax_kernel(
    inner_ptr,  # [Q * BLOCK_M, I] float32
    amax_ptr,  # [L] int32 zeros; out: the bits of the largest magnitude of each expert
    expert_num_tokens_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    intermediate,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # at a time; divides BLOCK_M
    BLOCK: tl.constexpr,  # I rounded up to a power of two
):
    """Find the largest magnitude of each expert's rows, by an integer atomic max: magnitudes order as their bits."""
    column = tl.arange(0, BLOCK)
    for group in range(tl.program_id(0), tl.load(num_tiles_ptr) * (BLOCK_M // ROWS), tl.num_programs(0)):
        expert, row, row_mask = _find_rows(group, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M, ROWS)
        ptrs = inner_ptr + row.to(tl.int64)[:, None] * intermediate
        x = tl.load(ptrs + column[None, :], mask=row_mask[:, None] & (column < intermediate)[None, :], other=0.0)
        largest = absmax(tl.reshape(x, [ROWS * BLOCK]), 0)
        tl.atomic_max(amax_ptr + expert, largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["scale_stride"])
def _requantize_kernel(
    inner_ptr,  # [Q * BLOCK_M, I] float32
    values_ptr,  # [Q * BLOCK_M, I] float8, out
    scale_ptr,  # [ceil(I / group_width), scale_stride], out
    amax_ptr,  # [L] int32, if PER_TENSOR
    expert_num_tokens_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    intermediate,
    group_width,  # columns that share a scale; intermediate for one scale per token
    scale_stride,
    PER_TENSOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # at a time; divides BLOCK_M
    BLOCK: tl.constexpr,  # group_width rounded up to a power of two
):
    """Requantize the intermediate if a tile of the first GEMM does not hold whole scale groups."""
    for group in range(tl.program_id(0), tl.load(num_tiles_ptr) * (BLOCK_M // ROWS), tl.num_programs(0)):
        expert, row, row_mask = _find_rows(group, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M, ROWS)
        offset = row.to(tl.int64)[:, None] * intermediate
        for start in range(0, intermediate, group_width):
            column = start + tl.arange(0, BLOCK)
            mask = row_mask[:, None] & ((column < intermediate) & (column < start + group_width))[None, :]
            x = tl.load(inner_ptr + offset + column[None, :], mask=mask, other=0.0)
            if PER_TENSOR:
                amax = tl.load(amax_ptr + expert).to(tl.float32, bitcast=True)
                scale = e4m3_scale(amax) + tl.zeros([ROWS], tl.float32)
            else:
                scale = e4m3_scale(absmax(x, 1))
            tl.store(scale_ptr + start // group_width * scale_stride.to(tl.int64) + row, scale, mask=row_mask)
            tl.store(values_ptr + offset + column[None, :], quantize_e4m3(x, scale[:, None]), mask=mask)
