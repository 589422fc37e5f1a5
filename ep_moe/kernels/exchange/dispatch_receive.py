"""The receiving half of a dispatch: waits for all headers, and lays out tokens as they arrive.

Letters: K top-k, G scale groups, R ranks, M max_tokens_per_rank, L the most experts that a rank owns, C rows that share
a matrix of scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.headers import judge, place_experts
from ep_moe.kernels.exchange.peers import region
from ep_moe.kernels.exchange.round_state import (
    BEGUN,
    DONE,
    LOST,
    OUT_OF_ORDER,
    RUNS,
    SOURCE_TOKENS,
    VERDICT,
    add_waited,
    is_active,
    pick,
    report,
)
from ep_moe.kernels.exchange.waits import (
    LATE,
    OVER,
    SPREAD,
    TIMED_OUT,
    agree,
    clock,
    give_up,
    pause,
    trouble,
    wait_for_flag,
    wait_for_words,
)
from ep_moe.kernels.exchange.wire_layout import (
    DISPATCH,
    ENTRIES,
    FINE,
    FLAGS,
    HEADER_WORDS,
    HEADERS,
    LL_ROWS,
    SCALES,
    STATUS,
    VALUES,
    epoch_of,
    expert_of,
    make_word,
    payload_of,
    place_of,
    value_of,
)

FILLED = tl.constexpr(256)  # pool rows that are filled at a time
WARP = tl.constexpr(32)  # threads


class Batch(NamedTuple):
    """The tensors of a batch that a dispatch fills; the others are the slot's (`SlotState`)."""

    out_ptr: Any  # 32-bit words of the batch's values; if POOLED, the region of received rows itself
    out_scale_ptr: Any  # [experts, G, C]


class Receiving(NamedTuple):
    """Constants of the receiving half."""

    BLOCK_WORDS: tl.constexpr  # words of a row's values that one program takes at a time
    HEADER_SPAN: tl.constexpr  # `Ranks.header_stride` rounded up
    BATCHED: tl.constexpr
    POOLED: tl.constexpr
    TAKE_LL: tl.constexpr  # LL words may come
    TAKE_ROWS: tl.constexpr  # and rows


@triton.jit
def _write_token(
    values,  # [WORDS] int32, a block of the row
    scale,  # [GROUPS]
    entry,  # [COLUMNS] int32
    weight,  # [COLUMNS] float32
    first_rows,  # [RANKS * EXPERTS] int32
    word,
    pool_row,
    source,
    leads,
    own,
    batch,
    height,
    row: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POOLED: tl.constexpr,
    COPY: tl.constexpr,  # copy the values if POOLED; else they are always copied
):
    """Write a block of a token to all of its rows, and note the rows.

    Example: entry (expert 2, place 3) of a source whose first row for expert 2 is 64 is row 67.
    """
    column, group = tl.arange(0, row.COLUMNS), tl.arange(0, GROUPS)
    here = entry >= 0
    first_row = tl.gather(first_rows, tl.where(here, source * EXPERTS + expert_of(entry), 0), 0)
    to_row = tl.where(here, first_row + place_of(entry), -1)
    if POOLED:
        if leads:
            local = tl.where(here, expert_of(entry), -1)
            tl.store(own.token_to_row_ptr + pool_row * row.K + column, to_row, mask=column < row.K)
            tl.store(own.local_ids_ptr + pool_row * row.K + column, local, mask=column < row.K)
            tl.store(own.pooled_weights_ptr + pool_row * row.K + column, weight, mask=column < row.K)
            tl.store(own.row_index_ptr + to_row, tl.zeros([row.COLUMNS], tl.int32) + pool_row.to(tl.int32), mask=here)
            tl.store(own.rows_ptr + pool_row * row.K, tl.max(to_row, 0))  # whether there is one
        if COPY:
            tl.store(batch.out_ptr + pool_row * row.VALUE_WORDS + word, values, mask=word < row.VALUE_WORDS)
        if row.G > 0:
            tl.store(batch.out_scale_ptr + group.to(tl.int64) * height + pool_row, scale, mask=(group < row.G) & leads)
    else:
        order = tl.cumsum(here.to(tl.int32), 0) - 1
        for j in range(tl.sum(here.to(tl.int32), 0)):
            to = tl.max(tl.where(here & (order == j), to_row, 0), 0).to(tl.int64)
            tl.store(batch.out_ptr + to * row.VALUE_WORDS + word, values, mask=word < row.VALUE_WORDS)
            if row.G > 0:
                scale_to = (to // height * row.G + group) * height + to % height
                tl.store(batch.out_scale_ptr + scale_to, scale, mask=(group < row.G) & leads)
        if leads:
            tl.store(own.rows_ptr + pool_row * row.K + order, to_row, mask=here)
            tl.store(own.weights_ptr + pool_row * row.K + order, weight, mask=here)
            left = (column > tl.max(order, 0)) & (column < row.K)
            tl.store(own.rows_ptr + pool_row * row.K + column, tl.zeros([row.COLUMNS], tl.int32) - 1, mask=left)


@triton.jit
def _take_ll(
    row_ptr,  # words of the token
    links,
    own,
    batch,
    first_rows,
    pool_row,
    source,
    block,
    epoch,
    timeout_ns,
    height,
    ranks: tl.constexpr,
    row: tl.constexpr,
    receiving: tl.constexpr,
):
    """Wait for a block of a token that was sent as LL words, and write it out; returns 0 if the exchange is aborted.

    The words are used as the completing poll has read them: nothing is read twice.

    Rule: a warp uses only copies that it has checked itself, or has read after all warps agreed. Warps beyond the size
    of a short tensor hold copies of other warps' parts. Up to WARP elements every warp has all of them; above that
    scales are spread over all threads, and entries are read again.
    """
    K: tl.constexpr = row.K
    SPREAD_GROUPS: tl.constexpr = SPREAD if WARP < row.GROUPS and row.GROUPS < SPREAD else row.GROUPS
    column, group = tl.arange(0, row.COLUMNS), tl.arange(0, SPREAD_GROUPS)
    word = block * receiving.BLOCK_WORDS + tl.arange(0, receiving.BLOCK_WORDS)
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting, here = tl.full([], LATE, tl.int32), tl.zeros([], tl.int32)
    while waiting > 0:
        entries = tl.load(row_ptr + column, mask=column < K, other=0, volatile=True)
        weights = tl.load(row_ptr + K + column, mask=column < K, other=0, volatile=True)
        values = tl.load(row_ptr + row.ll_values + word, mask=word < row.VALUE_WORDS, other=0, volatile=True)
        entry = tl.where(column < K, payload_of(entries), -1)
        needed = tl.max(entry, 0) >= 0  # if no expert here needs the token, only its entry was sent
        late = (column < K) & ((epoch_of(entries) != epoch) | (epoch_of(weights) != epoch))
        missing = tl.max(late.to(tl.int32), 0)  # as this warp sees it, for all have their own entries
        scale = tl.zeros([SPREAD_GROUPS], batch.out_scale_ptr.dtype.element_ty)
        if row.G > 0:
            mask = (group < row.G) & (block == 0)
            scales = tl.load(row_ptr + row.ll_scales + group, mask=mask, other=0, volatile=True)
            missing += tl.max((needed & mask & (epoch_of(scales) != epoch)).to(tl.int32), 0)
            scale = payload_of(scales).to(batch.out_scale_ptr.dtype.element_ty, bitcast=True)
        late_values = needed & (word < row.VALUE_WORDS) & (epoch_of(values) != epoch)
        waiting = agree(late_values | (missing > 0), trouble(links, start, polls, timeout_ns))
        polls += 1
        if waiting == 0:
            if row.COLUMNS > WARP:
                entries = tl.load(row_ptr + column, mask=column < K, other=0, volatile=True)
                weights = tl.load(row_ptr + K + column, mask=column < K, other=0, volatile=True)
                entry = tl.where(column < K, payload_of(entries), -1)
            _write_token(
                payload_of(values),
                scale,
                entry,
                payload_of(weights).to(tl.float32, bitcast=True),
                first_rows,
                word,
                pool_row,
                source,
                block == 0,
                own,
                batch,
                height,
                row,
                SPREAD_GROUPS,
                ranks.EXPERTS,
                receiving.POOLED,
                True,
            )
            here += 1
        elif waiting >= OVER:
            if waiting >= TIMED_OUT:
                give_up(links, DISPATCH, epoch, source, ranks.R)
            waiting = waiting * 0
        else:
            pause()
    return here


@triton.jit
def _take_row(
    links,
    own,
    batch,
    first_rows,
    pool_row,
    source,
    block,
    epoch,
    timeout_ns,
    height,
    ranks: tl.constexpr,
    row: tl.constexpr,
    receiving: tl.constexpr,
):
    """Wait for the flag of a token that was sent as a row, and write out a block of it; returns 0 if aborted."""
    K: tl.constexpr = row.K
    column, group = tl.arange(0, row.COLUMNS), tl.arange(0, row.GROUPS)
    word = block * receiving.BLOCK_WORDS + tl.arange(0, receiving.BLOCK_WORDS)
    base = links.bases[ranks.RANK]
    flag_ptr = region(base, links, FLAGS, tl.int64) + pool_row
    present = wait_for_flag(flag_ptr, source, epoch, links, timeout_ns, DISPATCH, ranks.R)
    if present > 0:
        values, scale = word, group
        if not receiving.POOLED:
            from_ptr = region(base, links, VALUES, tl.int32) + pool_row * row.VALUE_WORDS
            values = tl.load(from_ptr + word, mask=word < row.VALUE_WORDS)
        if row.G > 0:
            scale_ptr = region(base, links, SCALES, batch.out_scale_ptr.dtype.element_ty) + pool_row * row.G
            scale = tl.load(scale_ptr + group, mask=group < row.G)
        tl.debug_barrier()  # issues the long loads first: arithmetic on the entry would delay them
        entry_ptr = region(base, links, ENTRIES, tl.int32) + pool_row * row.ENTRY
        entry = tl.load(entry_ptr + column, mask=column < K, other=-1)
        weight = tl.load(entry_ptr + K + column, mask=column < K, other=0).to(tl.float32, bitcast=True)
        _write_token(
            values,
            scale,
            entry,
            weight,
            first_rows,
            word,
            pool_row,
            source,
            block == 0,
            own,
            batch,
            height,
            row,
            row.GROUPS,
            ranks.EXPERTS,
            receiving.POOLED,
            False,
        )
    elif (present == 0) & (block == 0):
        tl.store(own.rows_ptr + pool_row * K, -1)
        if receiving.POOLED:
            nowhere = tl.zeros([row.COLUMNS], tl.int32) - 1
            _mark_unused(own, pool_row * K + column, nowhere, column < K)
    return (present >= 0).to(tl.int32)


@triton.jit
def _mark_unused(own, index, nowhere, mask):
    """Mark (pool row, column) pairs without an expert. nowhere: -1 for each."""
    tl.store(own.token_to_row_ptr + index, nowhere, mask=mask)
    tl.store(own.local_ids_ptr + index, nowhere, mask=mask)
    tl.store(own.pooled_weights_ptr + index, tl.zeros_like(nowhere).to(tl.float32), mask=mask)


@triton.jit
def _fill_unused(own, tokens, receiver, receivers, rows_per_rank, ranks: tl.constexpr, K: tl.constexpr):
    """Mark the pool rows that received no token as rows without experts."""
    for first in range(receiver * FILLED, ranks.R * rows_per_rank, receivers * FILLED):
        pool_row = first + tl.arange(0, FILLED).to(tl.int64)
        present = tl.zeros([FILLED], tl.int32)
        for s in tl.static_range(ranks.R):
            present = tl.where(pool_row // rows_per_rank == s, pick(tokens, s, ranks.RANKS), present)
        unused = (pool_row < ranks.R * rows_per_rank) & (pool_row % rows_per_rank >= present)
        for k in range(K):
            _mark_unused(own, pool_row * K + k, tl.zeros([FILLED], tl.int32) - 1, unused)


@triton.jit
def receive(
    links,
    own,
    batch,
    receiver,
    receivers,
    rows_per_rank,
    word_tokens,
    height,
    alignment,
    timeout_ns,
    round_,
    ranks: tl.constexpr,
    row: tl.constexpr,
    receiving: tl.constexpr,
):
    """Wait for the headers of all ranks, compute the place of every row, and write out this program's share of rows.

    Rule: the numbers of tokens come from this round's headers; the combine reads their copies in the slot's state.
    """
    R: tl.constexpr = ranks.R
    RANKS: tl.constexpr = ranks.RANKS
    SPAN: tl.constexpr = receiving.HEADER_SPAN
    BLOCKS: tl.constexpr = (row.VALUE_WORDS + receiving.BLOCK_WORDS - 1) // receiving.BLOCK_WORDS
    SPREAD_HEADERS: tl.constexpr = SPREAD if RANKS * SPAN < SPREAD else RANKS * SPAN
    leads = receiver == 0
    source = tl.arange(0, RANKS)
    is_source = (source < R) & is_active(round_.active, source)
    base = links.bases[ranks.RANK]
    num_experts = ranks.STARTS[ranks.RANK + 1] - ranks.STARTS[ranks.RANK]
    headers_ptr = region(base, links, HEADERS, tl.int64)
    if leads:
        tl.store(own.waited_ptr + source, tl.zeros([RANKS], tl.int64), mask=source < R)
    verdict, suspect, value = tl.zeros([], tl.int32) + LOST, tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    arrived = tl.zeros([], tl.int32)
    if round_.enabled:
        word = tl.arange(0, SPREAD_HEADERS)
        writer, place = word // SPAN, word % SPAN
        arrived = wait_for_words(
            headers_ptr + writer * ranks.header_stride + place,
            (writer < R) & (place < num_experts + HEADER_WORDS) & is_active(round_.active, writer),
            writer,
            round_.epoch,
            links,
            timeout_ns,
            DISPATCH,
            own.waited_ptr,
            leads,
            R,
        )
    writes = leads & (arrived > 0)
    first_rows = place_experts(headers_ptr, own, height, alignment, writes, round_.active, ranks, receiving.BATCHED)
    status_ptrs = headers_ptr + source * ranks.header_stride + STATUS
    statuses = payload_of(tl.load(status_ptrs, mask=source < R, other=0, volatile=True))
    if arrived > 0:
        verdict, suspect, value = judge(headers_ptr, round_, is_source, ranks)
    tokens = tl.where(is_source & (verdict == FINE), value_of(statuses), 0)
    if leads:
        if verdict != FINE:
            expert = tl.arange(0, ranks.EXPERTS)
            nothing = tl.zeros([ranks.EXPERTS], tl.int32)
            tl.store(own.num_rows_ptr + expert, nothing, mask=expert < num_experts)
            tl.store(own.row_start_ptr + expert, nothing, mask=expert < num_experts)
            if verdict == LOST:
                value = payload_of(tl.load(links.abort_ptr, volatile=True)).to(tl.int64)
            report(own.report_ptr, round_.epoch, verdict, suspect, value, make_word(round_.settings, round_.layer))
        if tl.load(own.state_ptr + BEGUN) != tl.load(own.state_ptr + DONE):
            wrong = tl.zeros([], tl.int32) + OUT_OF_ORDER
            report(own.report_ptr, round_.epoch, wrong, suspect * 0, value * 0, value * 0)
        add_waited(own.waited_ptr, R, RANKS)
        tl.debug_barrier()  # all warps have read the state
        tl.store(own.state_ptr + VERDICT, verdict)
        tl.store(own.state_ptr + SOURCE_TOKENS + source, tokens, mask=source < R)
        tl.store(own.state_ptr + RUNS, 0)
        tl.store(own.state_ptr + BEGUN, round_.epoch)
    if receiving.POOLED:
        _fill_unused(own, tokens, receiver, receivers, rows_per_rank, ranks, row.K)
    alive = (verdict == FINE).to(tl.int32)
    for i in range(receiver, tl.max(tokens, 0) * (R * BLOCKS), receivers):
        block, token = i % BLOCKS, i // (R * BLOCKS)
        s = (ranks.RANK + i // BLOCKS) % R
        present = pick(tokens, s, RANKS)
        if (token < present) & (alive > 0):
            pool_row = s * rows_per_rank + token
            as_ll = not receiving.TAKE_ROWS
            if receiving.TAKE_LL and receiving.TAKE_ROWS:
                as_ll = present <= word_tokens
            if as_ll:
                if receiving.TAKE_LL:
                    first = (s * word_tokens.to(tl.int64) + token) * row.ll_words
                    alive = _take_ll(
                        region(base, links, LL_ROWS, tl.int64) + first,
                        links,
                        own,
                        batch,
                        first_rows,
                        pool_row,
                        s,
                        block,
                        round_.epoch,
                        timeout_ns,
                        height,
                        ranks,
                        row,
                        receiving,
                    )
            elif receiving.TAKE_ROWS:
                alive = _take_row(
                    links,
                    own,
                    batch,
                    first_rows,
                    pool_row,
                    s,
                    block,
                    round_.epoch,
                    timeout_ns,
                    height,
                    ranks,
                    row,
                    receiving,
                )
