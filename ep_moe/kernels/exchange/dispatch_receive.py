"""The receiving half of a dispatch: waits for all headers, and lays out tokens as they arrive.

Letters: K top-k, G scale groups, R ranks, M max_tokens_per_rank, L the most experts that a rank owns, C rows that share
a matrix of scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.round_state import (
    BAD_IDS,
    BEGUN,
    DONE,
    ENTRIES,
    FINE,
    FLAGS,
    HEADER_WORDS,
    HEADERS,
    LOST,
    MISMATCH,
    OTHER_LAYER,
    OUT_OF_ORDER,
    PLACE_BITS,
    PLACE_MASK,
    RUNS,
    SCALES,
    SOURCE_TOKENS,
    VALUES,
    VERDICT,
    WORD_ROWS,
    add_waited,
    is_active,
    pick,
    region,
    report,
)
from ep_moe.kernels.exchange.signals import (
    DISPATCH,
    LATE,
    OVER,
    SPREAD,
    TIMED_OUT,
    agree,
    clock,
    epoch_of,
    give_up,
    make_word,
    pause,
    payload_of,
    trouble,
    wait_for_flag,
    wait_for_words,
)

FILLED = tl.constexpr(256)  # slots that are filled at a time
WARP = tl.constexpr(32)  # threads


class Batch(NamedTuple):
    """What a dispatch fills, beside what a slot keeps."""

    out_ptr: Any  # 32-bit words of the batch's values; where POOLED, the region of received rows itself
    out_scale_ptr: Any  # [experts, G, C]


@triton.jit
def _judge(
    header_ptr,
    stride,
    fingerprint,
    layer,
    settings,
    is_source,
    R: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return a round's verdict (FINE, or why it fails), the rank that caused it, and the int64 that describes it.

    This rank's own mistake comes first: its host has raised it already. The number of a mismatch has a bit for each
    rank with another format; that of bad ids is one of them above their count; that of another layer is the
    other rank's `settings` above its `layer`.
    """
    source = tl.arange(0, RANKS)
    row_ptr, known = header_ptr + source * stride, source < R
    said = payload_of(tl.load(row_ptr, mask=known, other=0, volatile=True))
    formats = payload_of(tl.load(row_ptr + 1, mask=known, other=0, volatile=True))
    layers = payload_of(tl.load(row_ptr + 2, mask=known, other=0, volatile=True))
    others = payload_of(tl.load(row_ptr + 3, mask=known, other=0, volatile=True))
    kind = tl.where(is_source, (said >> 28) & 7, FINE)
    compared = is_source & (kind == FINE)
    odd = compared & (formats != fingerprint)
    kind = tl.where(odd, MISMATCH, kind)
    kind = tl.where(compared & ((layers != layer) | (others != settings)), OTHER_LAYER, kind)
    suspect = tl.where(pick(kind, RANK, RANKS) != FINE, RANK, tl.min(tl.where(kind != FINE, source, RANKS), 0))
    verdict, number = pick(kind, suspect, RANKS), pick(said & 0xFFFFFFF, suspect, RANKS)
    bad_id = pick(formats, suspect, RANKS).to(tl.int64) << 32
    number = tl.where(verdict == MISMATCH, tl.sum(odd.to(tl.int32) << source, 0), number).to(tl.int64)
    tag = make_word(pick(others, suspect, RANKS), pick(layers, suspect, RANKS))
    number = tl.where(verdict == BAD_IDS, number | bad_id, number)
    return verdict, suspect, tl.where(verdict == OTHER_LAYER, tag, number)


@triton.jit
def _place_experts(
    headers_ptr,
    own,
    num_experts,
    height,
    alignment,
    tells,
    active,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    L: tl.constexpr,
    EXPERTS: tl.constexpr,  # L rounded up
    BATCHED: tl.constexpr,
):
    """Return the first row of each expert for each source, [RANKS * EXPERTS]; with `tells` also write the counts.

    Example: two sources send expert 7, whose rows start at 64, 3 and 2 rows: they begin at 64 and at 67.
    """
    source, expert = tl.arange(0, RANKS), tl.arange(0, EXPERTS)
    inside = ((source < R) & is_active(active, source))[:, None] & (expert < num_experts)[None, :]
    count_ptrs = headers_ptr + source[:, None] * (L + HEADER_WORDS) + HEADER_WORDS + expert[None, :]
    count = tl.where(inside, payload_of(tl.load(count_ptrs, mask=inside, other=0, volatile=True)), 0)
    total = tl.sum(count, 0)
    if BATCHED:
        row_start = expert * height
    else:
        aligned = (total + alignment - 1) // alignment * alignment
        row_start = tl.cumsum(aligned, 0) - aligned
    if tells:
        mine = expert < num_experts
        tl.store(own.num_rows_ptr + expert, total, mask=mine)
        tl.store(own.row_start_ptr + expert, row_start.to(tl.int32), mask=mine)
        tl.store(own.rows_seen_ptr + expert, tl.load(own.rows_seen_ptr + expert, mask=mine) + total, mask=mine)
    first = row_start[None, :] + tl.cumsum(count, 0) - count
    return tl.reshape(first.to(tl.int32), [RANKS * EXPERTS])


@triton.jit
def _write_token(
    values,  # [WORDS] int32, a block of the row
    scale,  # [GROUPS]
    entry,  # [COLUMNS] int32
    weight,  # [COLUMNS] float32
    first_rows,  # [RANKS * EXPERTS] int32
    word,
    slot,
    source,
    leads,
    own,
    batch,
    height,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POOLED: tl.constexpr,
    COPY: tl.constexpr,  # of values, which where POOLED may lie where they are to be
):
    """Write a block of a token to all of its rows, and note the rows.

    Example: entry (expert 2, place 3) of a source whose first row for expert 2 is 64 is row 67.
    """
    column, group = tl.arange(0, COLUMNS), tl.arange(0, GROUPS)
    here = entry >= 0
    first = tl.gather(first_rows, tl.where(here, source * EXPERTS + (entry >> PLACE_BITS), 0), 0)
    row = tl.where(here, first + (entry & PLACE_MASK), -1)
    if POOLED:
        if leads:
            local = tl.where(here, entry >> PLACE_BITS, -1)
            tl.store(own.token_to_row_ptr + slot * K + column, row, mask=column < K)
            tl.store(own.local_ids_ptr + slot * K + column, local, mask=column < K)
            tl.store(own.pooled_weights_ptr + slot * K + column, weight, mask=column < K)
            tl.store(own.row_index_ptr + row, tl.zeros([COLUMNS], tl.int32) + slot.to(tl.int32), mask=here)
            tl.store(own.rows_ptr + slot * K, tl.max(row, 0))  # whether there is one
        if COPY:
            tl.store(batch.out_ptr + slot * VALUE_WORDS + word, values, mask=word < VALUE_WORDS)
        if G > 0:
            tl.store(batch.out_scale_ptr + group.to(tl.int64) * height + slot, scale, mask=(group < G) & leads)
    else:
        order = tl.cumsum(here.to(tl.int32), 0) - 1
        for j in range(tl.sum(here.to(tl.int32), 0)):
            to = tl.max(tl.where(here & (order == j), row, 0), 0).to(tl.int64)
            tl.store(batch.out_ptr + to * VALUE_WORDS + word, values, mask=word < VALUE_WORDS)
            if G > 0:
                scale_to = (to // height * G + group) * height + to % height
                tl.store(batch.out_scale_ptr + scale_to, scale, mask=(group < G) & leads)
        if leads:
            tl.store(own.rows_ptr + slot * K + order, row, mask=here)
            tl.store(own.weights_ptr + slot * K + order, weight, mask=here)
            left = (column > tl.max(order, 0)) & (column < K)
            tl.store(own.rows_ptr + slot * K + column, tl.zeros([COLUMNS], tl.int32) - 1, mask=left)


@triton.jit
def _take_words(
    row_ptr,  # words of the token
    links,
    own,
    batch,
    first_rows,
    slot,
    source,
    block,
    epoch,
    timeout_ns,
    height,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Wait for a block of a token that was sent as LL words, and write it out; returns 0 if the exchange is aborted.

    The words are used as the completing poll has read them: nothing is read twice.

    Rule: a warp uses only copies that it has checked itself, or has read after all warps agreed. Warps beyond the size
    of a short tensor hold copies of other warps' parts. Up to WARP elements every warp has all of them; above that
    scales are spread over all threads, and entries are read again.
    """
    SPREAD_GROUPS: tl.constexpr = SPREAD if WARP < GROUPS and GROUPS < SPREAD else GROUPS
    column, group = tl.arange(0, COLUMNS), tl.arange(0, SPREAD_GROUPS)
    word = block * WORDS + tl.arange(0, WORDS)
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting, here = tl.full([], LATE, tl.int32), tl.zeros([], tl.int32)
    while waiting > 0:
        entries = tl.load(row_ptr + column, mask=column < K, other=0, volatile=True)
        weights = tl.load(row_ptr + K + column, mask=column < K, other=0, volatile=True)
        values = tl.load(row_ptr + 2 * K + word, mask=word < VALUE_WORDS, other=0, volatile=True)
        entry = tl.where(column < K, payload_of(entries), -1)
        needed = tl.max(entry, 0) >= 0  # where no expert here wants the token, its entry alone has come
        late = (column < K) & ((epoch_of(entries) != epoch) | (epoch_of(weights) != epoch))
        missing = tl.max(late.to(tl.int32), 0)  # as this warp sees it, for all have their own entries
        scale = tl.zeros([SPREAD_GROUPS], batch.out_scale_ptr.dtype.element_ty)
        if G > 0:
            mask = (group < G) & (block == 0)
            scales = tl.load(row_ptr + 2 * K + VALUE_WORDS + group, mask=mask, other=0, volatile=True)
            missing += tl.max((needed & mask & (epoch_of(scales) != epoch)).to(tl.int32), 0)
            scale = payload_of(scales).to(batch.out_scale_ptr.dtype.element_ty, bitcast=True)
        late_values = needed & (word < VALUE_WORDS) & (epoch_of(values) != epoch)
        waiting = agree(late_values | (missing > 0), trouble(links, start, polls, timeout_ns))
        polls += 1
        if waiting == 0:
            if COLUMNS > WARP:
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
                slot,
                source,
                block == 0,
                own,
                batch,
                height,
                G,
                SPREAD_GROUPS,
                VALUE_WORDS,
                K,
                COLUMNS,
                EXPERTS,
                POOLED,
                True,
            )
            here += 1
        elif waiting >= OVER:
            if waiting >= TIMED_OUT:
                give_up(links, DISPATCH, epoch, source, R)
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
    slot,
    source,
    block,
    epoch,
    timeout_ns,
    height,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    ENTRY: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Wait for the flag of a token that was sent as a row, and write out a block of it; returns 0 if aborted."""
    column, group = tl.arange(0, COLUMNS), tl.arange(0, GROUPS)
    word = block * WORDS + tl.arange(0, WORDS)
    base = links.bases[RANK]
    flag_ptr = region(base, links, FLAGS, tl.int64) + slot
    present = wait_for_flag(flag_ptr, source, epoch, links, timeout_ns, DISPATCH, R)
    if present > 0:
        values, scale = word, group
        if not POOLED:
            from_ptr = region(base, links, VALUES, tl.int32) + slot * VALUE_WORDS
            values = tl.load(from_ptr + word, mask=word < VALUE_WORDS)
        if G > 0:
            scale_ptr = region(base, links, SCALES, batch.out_scale_ptr.dtype.element_ty) + slot * G
            scale = tl.load(scale_ptr + group, mask=group < G)
        tl.debug_barrier()  # the long loads are issued first: what is computed of the entry would hold them up
        entry_ptr = region(base, links, ENTRIES, tl.int32) + slot * ENTRY
        entry = tl.load(entry_ptr + column, mask=column < K, other=-1)
        weight = tl.load(entry_ptr + K + column, mask=column < K, other=0).to(tl.float32, bitcast=True)
        _write_token(
            values,
            scale,
            entry,
            weight,
            first_rows,
            word,
            slot,
            source,
            block == 0,
            own,
            batch,
            height,
            G,
            GROUPS,
            VALUE_WORDS,
            K,
            COLUMNS,
            EXPERTS,
            POOLED,
            False,
        )
    elif (present == 0) & (block == 0):
        nowhere = tl.zeros([COLUMNS], tl.int32) - 1
        tl.store(own.rows_ptr + slot * K, -1)
        if POOLED:
            tl.store(own.token_to_row_ptr + slot * K + column, nowhere, mask=column < K)
            tl.store(own.local_ids_ptr + slot * K + column, nowhere, mask=column < K)
            tl.store(own.pooled_weights_ptr + slot * K + column, tl.zeros([COLUMNS], tl.float32), mask=column < K)
    return (present >= 0).to(tl.int32)


@triton.jit
def _fill_unused(own, tokens, receiver, receivers, slots, R: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr):
    """Mark the pool rows that received no token as rows without experts."""
    for first in range(receiver * FILLED, R * slots, receivers * FILLED):
        slot = first + tl.arange(0, FILLED).to(tl.int64)
        present = tl.zeros([FILLED], tl.int32)
        for s in tl.static_range(R):
            present = tl.where(slot // slots == s, pick(tokens, s, RANKS), present)
        unused = (slot < R * slots) & (slot % slots >= present)
        for k in range(K):
            tl.store(own.token_to_row_ptr + slot * K + k, tl.zeros([FILLED], tl.int32) - 1, mask=unused)
            tl.store(own.local_ids_ptr + slot * K + k, tl.zeros([FILLED], tl.int32) - 1, mask=unused)
            tl.store(own.pooled_weights_ptr + slot * K + k, tl.zeros([FILLED], tl.float32), mask=unused)


@triton.jit
def receive(
    links,
    own,
    batch,
    receiver,
    receivers,
    slots,
    word_tokens,
    height,
    alignment,
    fingerprint,
    layer,
    settings,
    epoch,
    over,
    active,
    timeout_ns,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row that are moved at a time
    VALUE_WORDS: tl.constexpr,
    ENTRY: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    RANKS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    L: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEADER_SPAN: tl.constexpr,  # HEADER_WORDS + L rounded up
    BATCHED: tl.constexpr,
    POOLED: tl.constexpr,
    WORDY: tl.constexpr,  # words may travel
    TAKE_ROWS: tl.constexpr,  # and rows
):
    """Wait for the headers of all ranks, compute the place of every row, and write out this program's share of rows.

    Rule: the numbers of tokens come from this round's headers; the combine reads their copies in the slot's state.
    """
    BLOCKS: tl.constexpr = (VALUE_WORDS + WORDS - 1) // WORDS
    WIDTH: tl.constexpr = 2 * K + VALUE_WORDS + (G + 1) // 2 * 2
    SPREAD_HEADERS: tl.constexpr = SPREAD if RANKS * HEADER_SPAN < SPREAD else RANKS * HEADER_SPAN
    leads = receiver == 0
    source = tl.arange(0, RANKS)
    is_source = (source < R) & is_active(active, source)
    base = links.bases[RANK]
    num_experts = STARTS[RANK + 1] - STARTS[RANK]
    headers_ptr = region(base, links, HEADERS, tl.int64)
    if leads:
        tl.store(own.waited_ptr + source, tl.zeros([RANKS], tl.int64), mask=source < R)
    verdict, suspect, value = tl.zeros([], tl.int32) + LOST, tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    arrived = tl.zeros([], tl.int32)
    if over == 0:
        word = tl.arange(0, SPREAD_HEADERS)
        writer, place = word // HEADER_SPAN, word % HEADER_SPAN
        arrived = wait_for_words(
            headers_ptr + writer * (L + HEADER_WORDS) + place,
            (writer < R) & (place < num_experts + HEADER_WORDS) & is_active(active, writer),
            writer,
            epoch,
            links,
            timeout_ns,
            DISPATCH,
            own.waited_ptr,
            leads,
            R,
        )
    first_rows = _place_experts(
        headers_ptr, own, num_experts, height, alignment, leads & (arrived > 0), active, R, RANKS, L, EXPERTS, BATCHED
    )
    statuses = tl.load(headers_ptr + source * (L + HEADER_WORDS), mask=source < R, other=0, volatile=True)
    if arrived > 0:
        verdict, suspect, value = _judge(
            headers_ptr, L + HEADER_WORDS, fingerprint, layer, settings, is_source, R, RANK, RANKS
        )
    tokens = tl.where(is_source & (verdict == FINE), payload_of(statuses) & 0xFFFFFFF, 0)
    if leads:
        if verdict != FINE:
            expert = tl.arange(0, EXPERTS)
            tl.store(own.num_rows_ptr + expert, tl.zeros([EXPERTS], tl.int32), mask=expert < num_experts)
            tl.store(own.row_start_ptr + expert, tl.zeros([EXPERTS], tl.int32), mask=expert < num_experts)
            if verdict == LOST:
                value = payload_of(tl.load(links.abort_ptr, volatile=True)).to(tl.int64)
            report(own.report_ptr, epoch, verdict, suspect, value, make_word(settings, layer))
        if tl.load(own.state_ptr + BEGUN) != tl.load(own.state_ptr + DONE):
            report(own.report_ptr, epoch, tl.zeros([], tl.int32) + OUT_OF_ORDER, suspect * 0, value * 0, value * 0)
        add_waited(own.waited_ptr, R, RANKS)
        tl.debug_barrier()  # all warps have read the state
        tl.store(own.state_ptr + VERDICT, verdict)
        tl.store(own.state_ptr + SOURCE_TOKENS + source, tokens, mask=source < R)
        tl.store(own.state_ptr + RUNS, 0)
        tl.store(own.state_ptr + BEGUN, epoch)
    if POOLED:
        _fill_unused(own, tokens, receiver, receivers, slots, R, RANKS, K)
    alive = (verdict == FINE).to(tl.int32)
    for i in range(receiver, tl.max(tokens, 0) * (R * BLOCKS), receivers):
        block, token = i % BLOCKS, i // (R * BLOCKS)
        s = (RANK + i // BLOCKS) % R
        present = pick(tokens, s, RANKS)
        if (token < present) & (alive > 0):
            slot = s * slots + token
            wordy = not TAKE_ROWS
            if WORDY and TAKE_ROWS:
                wordy = present <= word_tokens
            if wordy:
                if WORDY:
                    row = (s * word_tokens.to(tl.int64) + token) * WIDTH
                    alive = _take_words(
                        region(base, links, WORD_ROWS, tl.int64) + row,
                        links,
                        own,
                        batch,
                        first_rows,
                        slot,
                        s,
                        block,
                        epoch,
                        timeout_ns,
                        height,
                        G,
                        GROUPS,
                        WORDS,
                        VALUE_WORDS,
                        R,
                        K,
                        COLUMNS,
                        EXPERTS,
                        POOLED,
                    )
            elif TAKE_ROWS:
                alive = _take_row(
                    links,
                    own,
                    batch,
                    first_rows,
                    slot,
                    s,
                    block,
                    epoch,
                    timeout_ns,
                    height,
                    G,
                    GROUPS,
                    WORDS,
                    VALUE_WORDS,
                    ENTRY,
                    R,
                    RANK,
                    K,
                    COLUMNS,
                    EXPERTS,
                    POOLED,
                )
