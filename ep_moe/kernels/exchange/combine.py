"""The combine kernel: stores the experts' results into the memory of the tokens' source ranks, and sums them there.

The rank of the experts weights and sums a token's local experts and stores one row at the token's source rank, which
sums the rows of all ranks. No flag says that a row has arrived; rows carry a Lamport-style sentinel instead: the source
rank fills the place of each expected row with all ones, which no stored element is (a NaN is stored as another NaN),
polls until none are left, and restores them after it has read the row. So a row is summed as soon as it arrives, and
nothing is fenced.

Rule: a combine header says that its rank has read all that this round's dispatch sent it; only then may the next
round's dispatch overwrite that. Rule: the combine reads only this slot's own copies of what the dispatch brought, since
peers may send the next round as soon as they have all combine headers. Rule: every rank waits for all combine headers.
Rule: a round's results are sent once: the source rank has restored the sentinel by then, and would take a second copy
for the next round's results. Rule: a rank restores the sentinel before it sends its next dispatch's header, which peers
wait for before they send results again.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.peers import base_of, put_rows, put_word, region, target
from ep_moe.kernels.exchange.round_state import (
    ACTIVE,
    BEGUN,
    DONE,
    LOST,
    OUT_OF_ORDER,
    OWN_TOKENS,
    RESUME,
    SOURCE_TOKENS,
    VERDICT,
    add_waited,
    begin_combine,
    is_active,
    pick,
    report,
)
from ep_moe.kernels.exchange.waits import (
    LATE,
    OVER,
    SPREAD,
    TIMED_OUT,
    clock,
    give_up,
    is_over,
    pause,
    trouble,
    wait_for_launch,
    wait_for_words,
)
from ep_moe.kernels.exchange.wire_layout import (
    COMBINE,
    COMBINE_HEADERS,
    FINE,
    RETURNED,
    make_word,
    payload_of,
)
from ep_moe.kernels.numerics import round_to


class Results(NamedTuple):
    """The tensors that a combine reads and writes."""

    y_ptr: Any  # [rows, H], or [R * M, H] if SUMMED: the experts' output, in the model's dtype
    shared_ptr: Any  # [T, H], rows `shared_stride` units of UNIT apart, if SHARED
    out_ptr: Any  # [T, H] in the model's dtype, rows `out_stride` units apart, out


class Combining(NamedTuple):
    """Constants of a combine."""

    H: tl.constexpr
    K: tl.constexpr
    COLUMNS: tl.constexpr  # K rounded up
    SENT_BLOCK: tl.constexpr  # columns that are sent at a time
    SUMMED_BLOCK: tl.constexpr  # and summed
    ROWS_IN_FLIGHT: tl.constexpr  # rows that are loaded at a time
    UNIT: tl.constexpr  # elements that the strides of `Results` are multiples of
    SUMMED: tl.constexpr  # y is weighted and summed already (FLAT)
    POISONED: tl.constexpr  # there is no y: NaN is sent
    SHARED: tl.constexpr


@triton.jit
def _clean(total, dtype: tl.constexpr):
    """Round a block of a row to `dtype`, every NaN to one that is not all ones."""
    return round_to(tl.where(total == total, total, float("nan")), dtype)


@triton.jit
def _rows_of_item(i, tokens, rows_per_rank, ranks: tl.constexpr, BLOCKS: tl.constexpr):
    """Return an item's source rank, its token, and the token's pool row, -1 if the source has fewer tokens."""
    token = i // (ranks.R * BLOCKS)
    source = (ranks.RANK + 1 + i // BLOCKS) % ranks.R  # this rank's own come last: they need no time on the wire
    pool_row = tl.where(token < pick(tokens, source, ranks.RANKS), source * rows_per_rank + token, -1)
    return source, token, pool_row


@triton.jit
def _return_rows(
    y_ptr,
    links,
    own,
    tokens,  # [RANKS] int32, of each rank
    rows_per_rank,
    sender,
    senders,
    ranks: tl.constexpr,
    combining: tl.constexpr,
):
    """Weight and sum the outputs of this rank's experts for each received token, and store them at its source rank.

    The bits are those of `ep_moe.layout.weighted_sum`: float32, column order, no fused multiply-add. ROWS_IN_FLIGHT
    rows are loaded at a time.
    """
    H: tl.constexpr = combining.H
    K: tl.constexpr = combining.K
    COLUMNS: tl.constexpr = combining.COLUMNS
    BLOCK: tl.constexpr = combining.SENT_BLOCK
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    place = tl.arange(0, COLUMNS)
    items = tl.max(tokens, 0) * (ranks.R * BLOCKS)
    source, token, pool_row = _rows_of_item(sender, tokens, rows_per_rank, ranks, BLOCKS)
    rows = tl.load(own.rows_ptr + pool_row * K + place, mask=(place < K) & (pool_row >= 0) & (sender < items), other=-1)
    for i in range(sender, items, senders):
        next_i = i + senders  # whose rows are read while this item's are summed
        next_source, next_token, next_pool_row = _rows_of_item(next_i, tokens, rows_per_rank, ranks, BLOCKS)
        mask = (place < K) & (next_pool_row >= 0) & (next_i < items)
        next_rows = tl.load(own.rows_ptr + next_pool_row * K + place, mask=mask, other=-1)
        column = i % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        if pick(rows, 0, COLUMNS) >= 0:
            total = tl.zeros([BLOCK], tl.float32)
            if combining.POISONED:
                total += float("nan")
            elif combining.SUMMED:
                total += tl.load(y_ptr + pool_row * H + column, mask=inside, other=0.0).to(tl.float32)
            else:
                count = tl.sum((rows >= 0).to(tl.int32), 0)
                for first in range(0, count, combining.ROWS_IN_FLIGHT):
                    for j in tl.static_range(combining.ROWS_IN_FLIGHT):
                        there = first + j < count
                        row = tl.load(own.rows_ptr + pool_row * K + first + j, mask=there, other=0).to(tl.int64)
                        weight = tl.load(own.weights_ptr + pool_row * K + first + j, mask=there, other=0.0)
                        part = tl.load(y_ptr + row * H + column, mask=inside & there, other=0.0).to(tl.float32)
                        total = total + part * weight
            to_row = (ranks.RANK * rows_per_rank + token) * H
            to = target(base_of(links, source, ranks.R), links, RETURNED, to_row, dtype)
            put_rows(to, column, _clean(total, dtype), inside)
        source, token, pool_row, rows = next_source, next_token, next_pool_row, next_rows


@triton.jit
def _load_rows(returned_ptr, dest_rank_mask, rows_per_rank, token, column, inside, H: tl.constexpr, R: tl.constexpr):
    """A block of a token's row from each rank that it went to, as bits; zeros for the others."""
    rows = tl.tuple([])
    for r in tl.static_range(R):
        row_ptr = returned_ptr + (r * rows_per_rank + token) * H
        sent = inside & (((dest_rank_mask >> r) & 1) > 0)
        rows = rows + tl.tuple([tl.load(row_ptr + column, mask=sent, other=0, volatile=True)])
    return rows


@triton.jit
def _sum_rows(
    links,
    own,
    results,
    alive,
    num_tokens,
    rows_per_rank,
    shared_stride,
    out_stride,
    epoch,
    timeout_ns,
    receiver,
    receivers,
    ranks: tl.constexpr,
    combining: tl.constexpr,
):
    """Sum every token's rows in rank order in float32 as they arrive, add `shared`, round once.

    A token with a missing row becomes NaN.
    """
    H: tl.constexpr = combining.H
    R: tl.constexpr = ranks.R
    UNIT: tl.constexpr = combining.UNIT
    BLOCK: tl.constexpr = combining.SUMMED_BLOCK
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = results.out_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.uint32 if dtype.primitive_bitwidth == 32 else tl.uint16
    EMPTY: tl.constexpr = 0xFFFFFFFF if dtype.primitive_bitwidth == 32 else 0xFFFF
    returned_ptr = region(links.bases[ranks.RANK], links, RETURNED, BITS)
    rank = tl.arange(0, SPREAD)
    items = num_tokens * BLOCKS
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
                    shared_row_ptr = results.shared_ptr + token * shared_stride * UNIT
                    total = total + tl.load(shared_row_ptr + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(results.out_ptr + token * out_stride * UNIT + column, round_to(total, dtype), mask=inside)
                for r in tl.static_range(R):
                    row_ptr = returned_ptr + (r * rows_per_rank + token) * H
                    sent = inside & (((dest_rank_mask >> r) & 1) > 0)
                    tl.store(row_ptr + column, tl.full([BLOCK], EMPTY, BITS), mask=sent)
            else:
                suspect, found = waiting - 1, tl.full([], LATE, tl.int32)
                while found == LATE:
                    pause()
                    probe_ptr = returned_ptr + (rank * rows_per_rank + token) * H + last
                    late = sent_by & (tl.load(probe_ptr, mask=sent_by, other=0, volatile=True) == EMPTY)
                    # an abort or timeout counts even if no last column is missing
                    found = tl.max(tl.where(late, LATE, 0) | trouble(links, start, polls, timeout_ns), 0)
                    late_rank = tl.max(tl.where(late, rank, -1), 0)
                    suspect = tl.where(late_rank >= 0, late_rank, suspect)
                    polls += 1
                if found >= OVER:
                    if found >= TIMED_OUT:
                        give_up(links, COMBINE, epoch, suspect, R)
                    waiting, alive = waiting * 0, alive * 0
        dest_rank_mask = next_dest_rank_mask
        if alive == 0:
            lost = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(results.out_ptr + token * out_stride * UNIT + column, round_to(lost, dtype), mask=inside)
    return alive


@triton.jit(
    do_not_specialize=[
        "max_tokens_per_rank",
        "senders",
        "first_receiver",
        "shared_stride",
        "out_stride",
        "timeout_ns",
    ]
)
def _combine_kernel(
    links,  # `peers.Links`
    own,  # `round_state.SlotState`
    max_tokens_per_rank,  # M
    senders,
    first_receiver,
    results,  # `Results`
    shared_stride,
    out_stride,
    timeout_ns,
    ranks: tl.constexpr,  # `wire_layout.Ranks`
    combining: tl.constexpr,  # `Combining`
    halves: tl.constexpr,  # `round_state.Halves`
):
    """One round's combine, or one half of it. The first programs send, the last receive, one may do both."""
    wait_for_launch(halves.PDL)
    R: tl.constexpr = ranks.R
    RANKS: tl.constexpr = ranks.RANKS
    pid = tl.program_id(0)
    epoch = tl.load(own.state_ptr + BEGUN)
    verdict = tl.load(own.state_ptr + VERDICT)
    active = tl.load(own.state_ptr + ACTIVE)
    repeated, over = begin_combine(links, own, epoch, halves.SEND, halves.RECEIVE)
    nobody = tl.zeros([], tl.int32)
    if repeated & (pid == 0):
        report(own.report_ptr, epoch, nobody + OUT_OF_ORDER, nobody, nobody, nobody)
    rows_per_rank = max_tokens_per_rank.to(tl.int64)
    source = tl.arange(0, RANKS)
    if halves.SEND:
        if (pid < senders) & (over == 0):
            tokens = tl.load(own.state_ptr + SOURCE_TOKENS + source, mask=source < R, other=0)
            if pid == 0:
                header = make_word(epoch, tl.zeros([], tl.int32))
                for r in tl.static_range(R):
                    if is_active(active, r):
                        put_word(target(links.bases[r], links, COMBINE_HEADERS, ranks.RANK, tl.int64), 0, header, None)
            if verdict == FINE:
                _return_rows(results.y_ptr, links, own, tokens, rows_per_rank, pid, senders, ranks, combining)
    if halves.RECEIVE:
        if pid >= first_receiver:
            leads = pid == first_receiver
            num_tokens = tl.load(own.state_ptr + OWN_TOKENS)
            if leads:
                tl.store(own.waited_ptr + source, tl.zeros([RANKS], tl.int64), mask=source < R)
            alive = (over == 0).to(tl.int32)
            if alive > 0:
                index = tl.arange(0, SPREAD)
                alive = wait_for_words(
                    region(links.bases[ranks.RANK], links, COMBINE_HEADERS, tl.int64) + index,
                    (index < R) & is_active(active, index),
                    index,
                    epoch,
                    links,
                    timeout_ns,
                    COMBINE,
                    own.waited_ptr,
                    leads,
                    R,
                )
            alive = tl.where(verdict == FINE, alive, 0)
            alive = _sum_rows(
                links,
                own,
                results,
                alive,
                num_tokens,
                rows_per_rank,
                shared_stride,
                out_stride,
                epoch,
                timeout_ns,
                pid - first_receiver,
                tl.num_programs(0) - first_receiver,
                ranks,
                combining,
            )
            if leads & (repeated == 0):
                add_waited(own.waited_ptr, R, RANKS)
                tl.debug_barrier()  # all warps have read the state
                if epoch == tl.load(own.state_ptr + RESUME):
                    tl.store(own.state_ptr + RESUME, 0)
                tl.store(own.state_ptr + DONE, epoch)
            if alive == 0:
                if is_over(links.abort_ptr):
                    abort = tl.load(links.abort_ptr, volatile=True)
                    report(own.report_ptr, epoch, nobody + LOST, nobody, payload_of(abort), nobody)
