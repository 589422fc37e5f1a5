"""The receiving half of a dispatch: waits for all headers, and lays out tokens as they arrive.

Letters: K top-k, G scale groups, R ranks, M max_tokens_per_rank, L the most experts that a rank owns, C rows that share
a matrix of scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import clock, newest, pause, spread, warp_size
from ep_moe.kernels.exchange.batch_rows import copy_row, fill_unused, note_rows
from ep_moe.kernels.exchange.headers import judge, place_experts
from ep_moe.kernels.exchange.peers import region
from ep_moe.kernels.exchange.round_state import (
    BEGUN,
    DONE,
    LOST,
    NUMBER,
    OUT_OF_ORDER,
    RUNS,
    SOURCE_TOKENS,
    VERDICT,
    add_waited,
    is_active,
    pick,
    report,
    report_loss,
)
from ep_moe.kernels.exchange.waits import (
    LATE,
    OVER,
    TIMED_OUT,
    agree,
    give_up,
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
    header_stride,
    ll_scales,
    ll_values,
    make_word,
    payload_of,
    tokens_per_flag,
    value_of,
)


class Receiver(NamedTuple):
    """A program that receives tokens."""

    index: Any
    count: Any  # of such programs
    rows_per_rank: Any  # M
    word_tokens: Any  # rows of a rank in LL_ROWS
    height: Any  # C
    alignment: Any  # of an expert's first row if not BATCHED


class Receiving(NamedTuple):
    """Constants of the receiving half."""

    BLOCK_WORDS: tl.constexpr  # words of a row's values that one program takes at a time
    TOKENS: tl.constexpr  # sent as rows, that one program takes at a time
    HEADER_SPAN: tl.constexpr  # `Ranks.header_stride` rounded up
    BATCHED: tl.constexpr
    POOLED: tl.constexpr
    TAKE_LL: tl.constexpr  # LL words may come
    TAKE_ROWS: tl.constexpr  # and rows


@triton.jit
def _take_ll(
    exchange,
    ranks: tl.constexpr,
    round_,
    batch,
    row_ptr,  # words of the token
    first_rows,
    pool_row,
    source,
    block,
    height,
    row: tl.constexpr,
    receiving: tl.constexpr,
):
    """Wait for a block of a token that was sent as LL words, and write it out; returns 0 if the exchange is aborted.

    The words are used as the completing poll has read them: nothing is read twice.

    Rule: they are used behind the loop. Triton loads a tensor of fewer elements than threads once for each layout that
    it is used in, and of several such loads only one is compared; but it never loads again what a `while` returns.

    Rule: a warp uses only copies that it has checked itself, or has read after all warps agreed. Warps beyond the size
    of a short tensor hold copies of other warps' parts. Up to a warp's size every warp has all of them; above that
    scales are spread over all threads, and entries are read again.
    """
    K: tl.constexpr = row.K
    SPREAD_GROUPS: tl.constexpr = spread() if warp_size() < row.GROUPS and spread() > row.GROUPS else row.GROUPS
    column, group = tl.arange(0, row.COLUMNS), tl.arange(0, SPREAD_GROUPS)
    word = block * receiving.BLOCK_WORDS + tl.arange(0, receiving.BLOCK_WORDS)
    entries, weights = tl.zeros([row.COLUMNS], tl.int64), tl.zeros([row.COLUMNS], tl.int64)
    values, scales = tl.zeros([receiving.BLOCK_WORDS], tl.int64), tl.zeros([SPREAD_GROUPS], tl.int64)
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting, here = tl.full([], LATE, tl.int32), tl.zeros([], tl.int32)
    while waiting > 0:
        entries = tl.load(row_ptr + column, mask=column < K, other=0, volatile=True, cache_modifier=newest())
        weights = tl.load(row_ptr + K + column, mask=column < K, other=0, volatile=True, cache_modifier=newest())
        values = tl.load(
            row_ptr + ll_values(row.K) + word,
            mask=word < row.VALUE_WORDS,
            other=0,
            volatile=True,
            cache_modifier=newest(),
        )
        # if no expert here needs the token, only its entry was sent
        needed = tl.max(tl.where(column < K, payload_of(entries), -1), 0) >= 0
        late = (column < K) & ((epoch_of(entries) != round_.epoch) | (epoch_of(weights) != round_.epoch))
        missing = tl.max(late.to(tl.int32), 0)  # as this warp sees it, for all have their own entries
        if row.G > 0:
            mask = (group < row.G) & (block == 0)
            scales = tl.load(
                row_ptr + ll_scales(row.K, row.VALUE_WORDS) + group,
                mask=mask,
                other=0,
                volatile=True,
                cache_modifier=newest(),
            )
            missing += tl.max((needed & mask & (epoch_of(scales) != round_.epoch)).to(tl.int32), 0)
        late_values = needed & (word < row.VALUE_WORDS) & (epoch_of(values) != round_.epoch)
        waiting = agree(late_values | (missing > 0), trouble(exchange, ranks, round_, start, polls))
        here = (waiting == 0).to(tl.int32)
        polls += 1
        if waiting >= TIMED_OUT:
            if waiting < OVER:
                give_up(exchange, ranks, DISPATCH, round_, source)
            waiting = waiting * 0
        elif waiting > 0:
            pause()
    if here > 0:
        if warp_size() < row.COLUMNS:
            entries = tl.load(row_ptr + column, mask=column < K, other=0, volatile=True, cache_modifier=newest())
            weights = tl.load(row_ptr + K + column, mask=column < K, other=0, volatile=True, cache_modifier=newest())
        entry = tl.where(column < K, payload_of(entries), -1)
        weight = payload_of(weights).to(tl.float32, bitcast=True)
        mask = (column >= 0) & (block == 0)
        to_row = note_rows(exchange, ranks, entry, weight, mask, first_rows, pool_row, source, row, 1, receiving.POOLED)
        scale = payload_of(scales).to(batch.out_scale_ptr.dtype.element_ty, bitcast=True)
        copy_row(
            batch, payload_of(values), scale, to_row, word, pool_row, block == 0, height, row, receiving.POOLED, True
        )
    return here


@triton.jit
def _wait_for_flags(exchange, ranks: tl.constexpr, round_, base, first, count, present, source, sent_row):
    """Wait for the flags of `count` tokens of a source from `first` on: a bit for each one sent here, -1 if aborted.

    Example: 4 tokens from 8 on, of which 8 and 10 were sent, give 5.
    """
    group = tokens_per_flag(present)
    at = first // group * group
    flags_ptr = region(base, exchange.links, FLAGS, tl.int64) + (sent_row - first)
    bits = wait_for_flag(exchange, ranks, round_, DISPATCH, flags_ptr + at, source)
    bits = tl.where(bits < 0, bits, (bits >> (first - at)) & ((1 << count) - 1))
    for later in range(at + group, tl.minimum(first + count, present), group):
        if bits >= 0:
            found = wait_for_flag(exchange, ranks, round_, DISPATCH, flags_ptr + later, source)
            bits = tl.where(found < 0, found, bits | (found << (later - first)))
    return bits


@triton.jit
def _take_rows(
    exchange,
    ranks: tl.constexpr,
    round_,
    batch,
    first_rows,
    first,
    present,
    source,
    block,
    receiver,
    row: tl.constexpr,
    receiving: tl.constexpr,
):
    """Wait for the flags of TOKENS tokens that a source sent as rows, from `first` on, and write out a block of each.

    Returns 0 if the exchange is aborted.
    """
    links, rows_per_rank = exchange.links, receiver.rows_per_rank
    TOKENS: tl.constexpr = receiving.TOKENS
    COLUMNS: tl.constexpr = row.COLUMNS
    group = tl.arange(0, row.GROUPS)
    word = block * receiving.BLOCK_WORDS + tl.arange(0, receiving.BLOCK_WORDS)
    base = links.bases[ranks.RANK]
    sent_row, pool_row = source * rows_per_rank + first, (first + tl.zeros([], tl.int64)) * ranks.R + source
    bits = _wait_for_flags(exchange, ranks, round_, base, first, TOKENS, present, source, sent_row)
    if bits >= 0:
        values, scales = tl.tuple([]), tl.tuple([])
        for t in tl.static_range(TOKENS):
            came = ((bits >> t) & 1) > 0
            part, scale = word, group
            if not receiving.POOLED:
                from_ptr = region(base, links, VALUES, tl.int32) + (pool_row + t * ranks.R) * row.VALUE_STRIDE
                part = tl.load(from_ptr + word, mask=(word < row.VALUE_WORDS) & came)
            if row.G > 0:
                scale_ptr = region(base, links, SCALES, batch.out_scale_ptr.dtype.element_ty)
                scale_ptr += (sent_row + t) * row.SCALE_STRIDE
                scale = tl.load(scale_ptr + group, mask=(group < row.G) & came)
            values, scales = values + tl.tuple([part]), scales + tl.tuple([scale])
        tl.debug_barrier()  # issues the long loads first: arithmetic on the entries would delay them
        index = tl.arange(0, TOKENS * COLUMNS)
        token, column = index // COLUMNS, index % COLUMNS
        entry_ptr = region(base, links, ENTRIES, tl.int32) + (sent_row + token) * row.ENTRY + column
        sent = (((bits >> token) & 1) > 0) & (column < row.K)
        entry = tl.load(entry_ptr, mask=sent, other=-1)
        weight = tl.load(entry_ptr + row.K, mask=sent, other=0).to(tl.float32, bitcast=True)
        mask = (first + token < present) & (block == 0)
        to_row = note_rows(
            exchange, ranks, entry, weight, mask, first_rows, pool_row, source, row, TOKENS, receiving.POOLED
        )
        for t in tl.static_range(TOKENS):
            if ((bits >> t) & 1) > 0:
                rows = tl.max(tl.reshape(tl.where(token == t, to_row, -1), [TOKENS, COLUMNS]), 0)
                to, leads = pool_row + t * ranks.R, block == 0
                copy_row(
                    batch, values[t], scales[t], rows, word, to, leads, receiver.height, row, receiving.POOLED, False
                )
    return (bits >= 0).to(tl.int32)


@triton.jit
def receive(exchange, ranks: tl.constexpr, round_, batch, receiver, row: tl.constexpr, receiving: tl.constexpr):
    """Wait for the headers of all ranks, compute the place of every row, and write out this program's share of rows.

    Rule: the numbers of tokens come from this round's headers; the combine reads their copies in the slot's state.
    """
    links, own, word_tokens = exchange.links, exchange.own, receiver.word_tokens
    R: tl.constexpr = ranks.R
    RANKS: tl.constexpr = ranks.RANKS
    SPAN: tl.constexpr = receiving.HEADER_SPAN
    BLOCKS: tl.constexpr = (row.VALUE_WORDS + receiving.BLOCK_WORDS - 1) // receiving.BLOCK_WORDS
    SPREAD_HEADERS: tl.constexpr = spread() if spread() > RANKS * SPAN else RANKS * SPAN
    leads = receiver.index == 0
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
        word_ptrs = headers_ptr + writer * header_stride(ranks.L) + place
        mask = (writer < R) & (place < num_experts + HEADER_WORDS) & is_active(round_.active, writer)
        arrived = wait_for_words(exchange, ranks, round_, DISPATCH, word_ptrs, mask, writer, leads)
    writes = leads & (arrived > 0)
    first_rows = place_experts(exchange, ranks, headers_ptr, receiver, writes, round_.active, receiving.BATCHED)
    status_ptrs = headers_ptr + source * header_stride(ranks.L) + STATUS
    statuses = payload_of(tl.load(status_ptrs, mask=source < R, other=0, volatile=True, cache_modifier=newest()))
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
                report_loss(exchange, ranks, round_.active)
            else:
                report(own, round_.number, verdict, suspect, value, make_word(round_.settings, round_.layer))
        if tl.load(own.state_ptr + BEGUN) != tl.load(own.state_ptr + DONE):
            wrong = tl.zeros([], tl.int32) + OUT_OF_ORDER
            report(own, round_.number, wrong, suspect * 0, value * 0, value * 0)
        add_waited(own.waited_ptr, R, RANKS)
        tl.debug_barrier()  # all warps have read the state
        tl.store(own.state_ptr + VERDICT, verdict)
        tl.store(own.state_ptr + SOURCE_TOKENS + source, tokens, mask=source < R)
        tl.store(own.state_ptr + RUNS, 0)
        tl.store(own.state_ptr + NUMBER, round_.number)
        tl.store(own.state_ptr + BEGUN, round_.epoch)
    if receiving.POOLED:
        fill_unused(exchange, ranks, tokens, receiver, row.K)
    alive = (verdict == FINE).to(tl.int32)
    UNIT: tl.constexpr = receiving.TOKENS if receiving.TAKE_ROWS else 1  # tokens that are taken together
    units = (tl.max(tokens, 0) + UNIT - 1) // UNIT
    for i in range(receiver.index, units * (R * BLOCKS), receiver.count):
        block, first = i % BLOCKS, i // (R * BLOCKS) * UNIT
        s = (ranks.RANK + i // BLOCKS) % R
        present = pick(tokens, s, RANKS)
        if (first < present) & (alive > 0):
            as_ll = not receiving.TAKE_ROWS
            if receiving.TAKE_LL and receiving.TAKE_ROWS:
                as_ll = present <= word_tokens
            if as_ll:
                if receiving.TAKE_LL:
                    for token in range(first, tl.minimum(first + UNIT, present)):
                        if alive > 0:
                            ll_row = (s * word_tokens.to(tl.int64) + token) * row.LL_STRIDE
                            alive = _take_ll(
                                exchange,
                                ranks,
                                round_,
                                batch,
                                region(base, links, LL_ROWS, tl.int64) + ll_row,
                                first_rows,
                                (token + tl.zeros([], tl.int64)) * R + s,
                                s,
                                block,
                                receiver.height,
                                row,
                                receiving,
                            )
            elif receiving.TAKE_ROWS:
                alive = _take_rows(
                    exchange, ranks, round_, batch, first_rows, first, present, s, block, receiver, row, receiving
                )
