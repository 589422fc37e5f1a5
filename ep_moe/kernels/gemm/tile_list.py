"""The list of row tiles that the expert kernels process.

Letters: L local experts, Q row tiles of all experts.

Tokens of an expert are split into row tiles of BLOCK_M. Tiles are numbered expert by expert, and each owns BLOCK_M rows
of the intermediate, so that the intermediate is dense in any layout of the batch.
Example: counts [3, 0, 40] with BLOCK_M = 16 are 4 row tiles, experts [0, 2, 2, 2], first tiles [0, 1, 1].
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_experts", "max_tiles"])
def _tile_list_kernel(
    expert_num_tokens_ptr,  # [L] int32
    tile_expert_ptr,  # [>= Q] int32, out
    first_tile_ptr,  # [L] int32, out
    num_tiles_ptr,  # [1] int32, out: Q
    amax_ptr,  # [L] int32, out: zeros, if HAS_AMAX
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,  # L rounded up to a power of two
    TILES: tl.constexpr,  # list entries per program
    HAS_AMAX: tl.constexpr,
):
    """List the row tiles of all experts. Programs are independent: each finds the experts of its own entries."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    counts = tl.load(expert_num_tokens_ptr + expert, mask=is_expert, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(first_tile_ptr + expert, end - tiles, mask=is_expert)
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
        if HAS_AMAX:
            tl.store(amax_ptr + expert, tl.zeros([EXPERTS], tl.int32), mask=is_expert)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    tl.store(tile_expert_ptr + tile, tl.minimum(owner, num_experts - 1), mask=tile < max_tiles)


@triton.jit
def _find_tile(
    t,
    num_columns,
    expert_num_tokens_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return (expert, its tokens, row tile within the expert, first row tile of the expert, column tile) of tile t.

    Tiles of an expert are ordered in groups of GROUP_M row tiles, each of which covers all columns before the next
    group, so that concurrent tiles share weights and tokens in the cache.
    """
    expert = tl.load(tile_expert_ptr + t // num_columns)
    num_tokens = tl.load(expert_num_tokens_ptr + expert)
    first_tile = tl.load(first_tile_ptr + expert)
    row_tiles = (num_tokens + BLOCK_M - 1) // BLOCK_M
    within = t - first_tile * num_columns
    group = within // (GROUP_M * num_columns)
    rows_of_group = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    within -= group * GROUP_M * num_columns
    return expert, num_tokens, group * GROUP_M + within % rows_of_group, first_tile, within // rows_of_group


@triton.jit
def _find_rows(
    group, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr
):
    """Return (expert, rows of the intermediate [ROWS], which of them hold a token) of the group-th ROWS rows."""
    row = group * ROWS + tl.arange(0, ROWS)
    expert = tl.load(tile_expert_ptr + group * ROWS // BLOCK_M)
    num_tokens = tl.load(expert_num_tokens_ptr + expert)
    return expert, row, row - tl.load(first_tile_ptr + expert) * BLOCK_M < num_tokens
