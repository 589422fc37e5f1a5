"""The receiving half of a combine: waits for the rows of all ranks and sums them.

Letters: T tokens on this rank, H hidden, R ranks, M max_tokens_per_rank.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import clock, newest, pause, spread
from ep_moe.kernels.exchange.peers import region
from ep_moe.kernels.exchange.waits import LATE, OVER, TIMED_OUT, give_up, troubles
from ep_moe.kernels.exchange.wire_layout import COMBINE, RETURNED
from ep_moe.kernels.numerics import round_to


class Summing(NamedTuple):
    """A program that receives results."""

    index: Any
    count: Any  # of such programs
    num_tokens: Any  # T
    rows_per_rank: Any  # M


class ResultStrides(NamedTuple):
    """Distances between rows of `Results`, in units of UNIT elements."""

    shared: Any
    out: Any


@triton.jit
def _load_rows(returned_ptr, dest_rank_mask, rows_per_rank, token, column, inside, H: tl.constexpr, R: tl.constexpr):
    """A block of a token's row from each rank that it went to, as bits; zeros for the others."""
    rows = tl.tuple([])
    for r in tl.static_range(R):
        row_ptr = returned_ptr + (r * rows_per_rank + token) * H
        sent = inside & (((dest_rank_mask >> r) & 1) > 0)
        rows = rows + tl.tuple([tl.load(row_ptr + column, mask=sent, other=0, volatile=True, cache_modifier=newest())])
    return rows


@triton.jit
def sum_rows(exchange, ranks: tl.constexpr, round_, results, summing, alive, strides, combining: tl.constexpr):
    """Sum every token's rows in rank order in float32 as they arrive, add `shared`, round once.

    A token with a missing row becomes NaN.
    """
    links, own = exchange.links, exchange.own
    receiver, receivers, rows_per_rank = summing.index, summing.count, summing.rows_per_rank
    H: tl.constexpr = combining.H
    R: tl.constexpr = ranks.R
    UNIT: tl.constexpr = combining.UNIT
    BLOCK: tl.constexpr = combining.SUMMED_BLOCK
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = results.out_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.uint32 if dtype.primitive_bitwidth == 32 else tl.uint16
    EMPTY: tl.constexpr = 0xFFFFFFFF if dtype.primitive_bitwidth == 32 else 0xFFFF
    returned_ptr = region(links.bases[ranks.RANK], links, RETURNED, BITS)
    rank = tl.arange(0, spread())
    items = summing.num_tokens * BLOCKS
    dest_rank_mask = tl.load(own.dest_rank_mask_ptr + receiver // BLOCKS, mask=receiver < items, other=0)
    for i in range(receiver, items, receivers):
        next_i = i + receivers  # whose ranks are read while this item's rows arrive
        next_dest_rank_mask = tl.load(own.dest_rank_mask_ptr + next_i // BLOCKS, mask=next_i < items, other=0)
        token = (i // BLOCKS) + tl.zeros([], tl.int64)
        column = i % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        sent_by = (rank < R) & (((dest_rank_mask >> (rank & 31)) & 1) > 0)
        last = tl.minimum(i % BLOCKS * BLOCK + BLOCK, H) - 1  # only this one is polled, to read less
        start, polls = clock(), tl.zeros([], tl.int64)
        waiting = alive
        while waiting > 0:
            rows = _load_rows(returned_ptr, dest_rank_mask, rows_per_rank, token, column, inside, H, R)
            tl.debug_barrier()  # all loads are issued before the first comparison, for which the compiler would wait
            missing = tl.zeros([BLOCK], tl.int32)
            for r in tl.static_range(R):
                missing = tl.where(rows[r] == EMPTY, r + 1, missing)
            waiting = tl.max(missing, 0)  # the same in all warps: each holds columns of its own
            if waiting == 0:
                total = tl.zeros([BLOCK], tl.float32)
                for r in tl.static_range(R):
                    total = total + rows[r].to(dtype, bitcast=True).to(tl.float32)
                if combining.SHARED:
                    shared_row_ptr = results.shared_ptr + token * strides.shared * UNIT
                    total = total + tl.load(shared_row_ptr + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(results.out_ptr + token * strides.out * UNIT + column, round_to(total, dtype), mask=inside)
                for r in tl.static_range(R):
                    row_ptr = returned_ptr + (r * rows_per_rank + token) * H
                    sent = inside & (((dest_rank_mask >> r) & 1) > 0)
                    tl.store(row_ptr + column, tl.full([BLOCK], EMPTY, BITS), mask=sent)
            else:
                suspect, found = waiting - 1, tl.full([], LATE, tl.int32)
                while found == LATE:
                    pause()
                    probe_ptr = returned_ptr + (rank * rows_per_rank + token) * H + last
                    late = sent_by & (
                        tl.load(probe_ptr, mask=sent_by, other=0, volatile=True, cache_modifier=newest()) == EMPTY
                    )
                    # an abort or timeout counts even if no last column is missing
                    what = troubles(exchange, ranks, round_, start, polls, rank % ranks.RANKS)
                    found = tl.max(tl.where(late, LATE, 0) | what, 0)
                    late_rank = tl.max(tl.where(late, rank, -1), 0)
                    suspect = tl.where(late_rank >= 0, late_rank, suspect)
                    polls += 1
                if found >= TIMED_OUT:
                    if found < OVER:
                        give_up(exchange, ranks, COMBINE, round_, suspect)
                    waiting, alive = waiting * 0, alive * 0
        dest_rank_mask = next_dest_rank_mask
        if alive == 0:
            lost = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(results.out_ptr + token * strides.out * UNIT + column, round_to(lost, dtype), mask=inside)
    return alive
