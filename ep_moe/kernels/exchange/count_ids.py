"""What a dispatch of many tokens needs to know of its ids beforehand.

For each block of tokens the rows that each expert gets from the tokens before it; for each row its place in the block.

Letters: T tokens on this rank, K top-k, P physical experts, B blocks of tokens.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
from ep_moe.kernels.numerics import clamp_to_int32

PLANNED_BITS = tl.constexpr(8)  # of a planned id: a row's place among those of its expert in its block; the id above
PLANNED_MASK = tl.constexpr(2**8 - 1)


@triton.jit
def planned_id(planned):
    """The physical expert of a planned id."""
    return planned >> PLANNED_BITS


@triton.jit
def planned_place(planned):
    """The place of a planned id."""
    return planned & PLANNED_MASK


@triton.jit(do_not_specialize=["max_tokens", "num_physical", "ids_stride", "weights_stride"])
def _count_block_kernel(
    ids_ptr,  # [T, K] int32 or int64, rows `ids_stride` apart
    weights_ptr,  # [T, K] float32, rows `weights_stride` apart
    num_tokens_ptr,  # [1] int32, if HAS_NUM_TOKENS
    counts_ptr,  # [B + 1, P + 1] int32, out: rows of each expert in a block of tokens; last, bad ids
    planned_ids_ptr,  # [T, K] int32, out: ids with their place in the block, -1 for repeats and none
    planned_weights_ptr,  # [T, K] float32, out: with those of repeats added to the first's
    max_tokens,
    num_physical,
    ids_stride,
    weights_stride,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # that one program counts
    HAS_NUM_TOKENS: tl.constexpr,
):
    """Count the rows of EXPERTS experts in one block of TOKENS tokens; a token goes to an expert once.

    Also place them. Weights are added in column order, as in `ep_moe.layout.reference.merge_repeats`.
    """
    start_early()
    block, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    num_tokens = max_tokens
    if HAS_NUM_TOKENS:
        num_tokens = tl.minimum(tl.load(num_tokens_ptr), max_tokens)
    token = block * TOKENS + tl.arange(0, TOKENS)
    first = part * EXPERTS
    expert = first + tl.arange(0, EXPERTS)
    hit = tl.zeros([TOKENS, EXPERTS], tl.int32)
    bad = tl.zeros([TOKENS], tl.int32)
    ids = tl.tuple([])
    for k in tl.static_range(K):
        theirs = tl.load(ids_ptr + token * ids_stride + k, mask=token < num_tokens, other=-1)
        bad += ((theirs < -1) | (theirs >= num_physical)).to(tl.int32)
        ids = ids + tl.tuple([clamp_to_int32(theirs)])
    for k in tl.static_range(K):
        hit = hit | (ids[k][:, None] == expert[None, :]).to(tl.int32)
    place = tl.cumsum(hit, 0) - hit
    for k in tl.static_range(K):
        repeated = tl.zeros([TOKENS], tl.int32)
        for j in tl.static_range(k):
            repeated = repeated | (ids[j] == ids[k]).to(tl.int32)
        valid = (ids[k] >= 0) & (ids[k] < num_physical) & (repeated == 0)
        counted = valid & (ids[k] >= first) & (ids[k] < first + EXPERTS)  # by this program
        own_place = tl.sum(tl.where(ids[k][:, None] == expert[None, :], place, 0), 1)
        to = planned_ids_ptr + token * K + k
        tl.store(to, ids[k] << PLANNED_BITS | own_place, mask=counted & (token < num_tokens))
        if part == k % parts:
            tl.store(to, tl.zeros([TOKENS], tl.int32) - 1, mask=(valid == 0) & (token < num_tokens))
            weight = tl.load(weights_ptr + token * weights_stride + k, mask=token < num_tokens, other=0.0)
            for j in tl.static_range(k + 1, K):
                other = tl.load(weights_ptr + token * weights_stride + j, mask=token < num_tokens, other=0.0)
                weight = weight + tl.where(ids[j] == ids[k], other, 0.0)
            tl.store(planned_weights_ptr + token * K + k, weight, mask=token < num_tokens)
    row_ptr = counts_ptr + block * (num_physical + 1)
    tl.store(row_ptr + expert, tl.sum(hit, 0), mask=expert < num_physical)
    if part == 0:
        tl.store(row_ptr + num_physical, tl.sum(bad, 0))


@triton.jit(do_not_specialize=["num_blocks", "num_physical"])
def _sum_blocks_kernel(
    counts_ptr,  # [B + 1, P + 1] int32, in: of each block; out: of the blocks before it, last of all
    num_blocks,
    num_physical,
    BLOCKS: tl.constexpr,  # that are summed at a time
    EXPERTS: tl.constexpr,  # of one program
):
    """Turn counts of blocks into counts of the blocks before. Example: 2, 0, 3 become 0, 2, 2 and 5."""
    start_early()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    inside = expert <= num_physical
    width = (num_physical + 1).to(tl.int64)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = (start + tl.arange(0, BLOCKS)).to(tl.int64)
        pointers = counts_ptr + block[:, None] * width + expert[None, :]
        mask = (block < num_blocks)[:, None] & inside[None, :]
        counts = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + num_blocks.to(tl.int64) * width + expert, total, mask=inside)
