"""Counts of the rows that each expert gets from the tokens before each block of tokens, for dispatches of many tokens.

Letters: T tokens on this rank, K top-k, P physical experts, B blocks of tokens.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["max_tokens", "num_physical", "ids_stride"])
def _count_block_kernel(
    ids_ptr,  # [T, K] int32 or int64, rows `ids_stride` apart
    num_tokens_ptr,  # [1] int32, if HAS_NUM_TOKENS
    counts_ptr,  # [B + 1, P + 1] int32, out: rows of each expert in a block of tokens; last, bad ids
    max_tokens,
    num_physical,
    ids_stride,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # that one program counts
    HAS_NUM_TOKENS: tl.constexpr,
):
    """Count the rows of EXPERTS experts in one block of TOKENS tokens; a token goes to an expert once."""
    block = tl.program_id(0).to(tl.int64)
    num_tokens = max_tokens
    if HAS_NUM_TOKENS:
        num_tokens = tl.minimum(tl.load(num_tokens_ptr), max_tokens)
    token = block * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    hit = tl.zeros([TOKENS, EXPERTS], tl.int32)
    bad = tl.zeros([TOKENS], tl.int32)
    for k in tl.static_range(K):
        theirs = tl.load(ids_ptr + token * ids_stride + k, mask=token < num_tokens, other=-1)
        hit = hit | (theirs[:, None] == expert[None, :]).to(tl.int32)
        bad += ((theirs < -1) | (theirs >= num_physical)).to(tl.int32)
    row_ptr = counts_ptr + block * (num_physical + 1)
    tl.store(row_ptr + expert, tl.sum(hit, 0), mask=expert < num_physical)
    if tl.program_id(1) == 0:
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
