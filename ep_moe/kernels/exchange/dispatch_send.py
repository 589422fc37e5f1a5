"""The sending half of a dispatch: a rank's tokens as rows or as LL words.

Letters: T tokens on this rank, K top-k, H hidden, G scale groups, R ranks, P physical experts, B blocks of tokens.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.count_ids import planned_id, planned_place
from ep_moe.kernels.exchange.headers import load_ids
from ep_moe.kernels.exchange.peers import (
    Peer,
    Piece,
    order_rows,
    put_rows,
    put_word,
    signal,
    stage,
    store_rows,
    store_word,
)
from ep_moe.kernels.exchange.round_state import is_active
from ep_moe.kernels.exchange.wire_layout import (
    ENTRIES,
    LL_ROWS,
    MOST_FLAGGED,
    SCALES,
    VALUES,
    ll_scales,
    ll_values,
    make_word,
    pack_entry,
    tokens_per_flag,
)
from ep_moe.kernels.numerics import (
    INT8_MAX,
    INTERPRET,
    absmax,
    divide_rows,
    e4m3_scale,
    tile_scale,
    to_e4m3,
    to_int8,
)

COMPARED_TOKENS = tl.constexpr(4 if INTERPRET else 128)  # whose ids a sender compares with its own token's at a time


class Tokens(NamedTuple):
    """The input of a rank to a round."""

    x_ptr: Any  # [T, H] to be quantized, else 32-bit words, rows `Strides.x` units of UNIT elements or words apart
    scale_ptr: Any  # [T, G] if x is quantized already, any strides
    ids_ptr: Any  # [T, K] int32 or int64
    weights_ptr: Any  # [T, K] float32
    num_tokens_ptr: Any  # [1] int32, if HAS_NUM_TOKENS
    block_counts_ptr: Any  # [B + 1, P + 1] int32 of `_sum_blocks_kernel`, if IDS_COUNTED, as the next two
    planned_ids_ptr: Any  # [T, K] int32 of `_count_block_kernel`
    planned_weights_ptr: Any  # [T, K] float32 of it


class Strides(NamedTuple):
    """Distances between the rows of `Tokens`, and between scales of a row, in elements or units."""

    x: Any
    scale_token: Any
    scale_group: Any
    ids: Any
    weights: Any


class Sender(NamedTuple):
    """A program that sends tokens."""

    index: Any
    count: Any  # of such programs
    present: Any  # tokens that are sent
    num_physical: Any  # P
    rows_per_rank: Any  # M
    word_tokens: Any  # rows of a rank in LL_ROWS


class Routed(NamedTuple):
    """The experts of a token."""

    ids: Any  # [COLUMNS] int32, -1 for repeats and none
    weights: Any  # [COLUMNS] float32, with those of repeats added
    place: Any  # [COLUMNS] int32, how many earlier tokens of this rank go to the expert


class RowPlaces(NamedTuple):
    """Where a token lies in a rank's memory."""

    token: Any
    pool_row: Any  # of VALUES
    sent_row: Any  # of SCALES and ENTRIES


class Block(NamedTuple):
    """A block of a token as LL words, and the places of these in its row."""

    index: Any
    word: Any  # [WORDS]
    words: Any  # [WORDS] of values
    group: Any  # [GROUPS]
    scales: Any  # [GROUPS] words
    scale_mask: Any
    first_scale: Any
    num_scales: Any


class Sending(NamedTuple):
    """Constants of the sending half."""

    H: tl.constexpr  # elements of a row of x if QUANTIZE, else its words
    GROUP: tl.constexpr  # elements that share a scale, if QUANTIZE
    QUANTIZE: tl.constexpr  # by the sender: "", "e4m3", "e4m3_power_of_two" or "int8"
    UNIT: tl.constexpr  # elements, or words, that the lengths of rows of x are multiples of
    ROW_WORDS: tl.constexpr  # of a row's values, rounded up
    LL_BLOCK: tl.constexpr  # 32-bit words of a token that one program sends at a time as LL words
    LL_GROUPS: tl.constexpr  # scales of those words if QUANTIZE, else of a row
    TOKENS: tl.constexpr  # of a block if IDS_COUNTED, else all, rounded up
    EXPERT_BLOCK: tl.constexpr  # experts whose rows an announcer counts at a time
    HAS_NUM_TOKENS: tl.constexpr  # the number of tokens is read from the device
    IDS_COUNTED: tl.constexpr  # block by block, by kernels before this one
    SEND_LL: tl.constexpr  # this rank may send LL words
    SEND_ROWS: tl.constexpr  # and rows


@triton.jit
def _find_ids(tokens, token, first, ids, strides, row: tl.constexpr, COMPARED: tl.constexpr):
    """Which of the COMPARED tokens from `first` on, if they come before `token`, have its ids: [COMPARED, COLUMNS]."""
    theirs = load_ids(tokens, first, token, strides.ids, row.K, COMPARED)
    hit = tl.zeros([COMPARED, row.COLUMNS], tl.int32)
    for k in tl.static_range(row.K):
        hit = hit | (theirs[k][:, None] == ids[None, :]).to(tl.int32)
    return hit


@triton.jit
def _read_routing(tokens, token, num_physical, strides, row: tl.constexpr, sending: tl.constexpr):
    """The experts of a token. Weights are added in column order, as in `ep_moe.layout.reference.merge_repeats`."""
    column = tl.arange(0, row.COLUMNS)
    own_ids_ptr, own_weights_ptr = tokens.ids_ptr + token * strides.ids, tokens.weights_ptr + token * strides.weights
    ids = tl.load(own_ids_ptr + column, mask=column < row.K, other=-1).to(tl.int32)
    weights = tl.load(own_weights_ptr + column, mask=column < row.K, other=0.0)
    repeated = tl.zeros([row.COLUMNS], tl.int32)
    for k in tl.static_range(row.K):
        same = ids == tl.load(own_ids_ptr + k).to(tl.int32)
        weights = tl.where(column < k, weights + tl.where(same, tl.load(own_weights_ptr + k), 0.0), weights)
        repeated += (same & (column > k)).to(tl.int32)
    if sending.TOKENS <= COMPARED_TOKENS:
        place = tl.sum(_find_ids(tokens, token, 0, ids, strides, row, sending.TOKENS), 0)
    else:
        hits = tl.zeros([COMPARED_TOKENS, row.COLUMNS], tl.int32)
        for first in range(0, token.to(tl.int32), COMPARED_TOKENS):
            hits += _find_ids(tokens, token, first, ids, strides, row, COMPARED_TOKENS)
        place = tl.sum(hits, 0)
    valid = (ids >= 0) & (ids < num_physical) & (repeated == 0)
    return Routed(tl.where(valid, ids, -1), weights, place)


@triton.jit
def _load_plan(tokens, token, mask, row: tl.constexpr):
    """Begin to load what `_count_block_kernel` wrote of a token: ids with places in their block, and weights."""
    column = tl.arange(0, row.COLUMNS)
    mask = (column < row.K) & mask
    planned = tl.load(tokens.planned_ids_ptr + token * row.K + column, mask=mask, other=-1)
    return planned, tl.load(tokens.planned_weights_ptr + token * row.K + column, mask=mask, other=0.0)


@triton.jit
def _load_before(tokens, token, planned, num_physical, TOKENS: tl.constexpr):
    """Begin to load how many rows the experts of a token get from the blocks of tokens before its own."""
    before_ptr = tokens.block_counts_ptr + token // TOKENS * (num_physical + 1)
    return tl.load(before_ptr + planned_id(planned), mask=planned >= 0, other=0)


@triton.jit
def _load_payload(
    tokens,
    token,
    block,
    mask,  # whether there is such a token
    x_stride,
    GROUPS: tl.constexpr,  # of one block if QUANTIZE
    WORDS: tl.constexpr,  # of one block
    row: tl.constexpr,
    sending: tl.constexpr,
):
    """Begin to load one block of a token: 32-bit words [WORDS], or elements [GROUPS, GROUP] if QUANTIZE."""
    row_ptr = tokens.x_ptr + token * x_stride * sending.UNIT
    if sending.QUANTIZE == "":
        word = block * WORDS + tl.arange(0, WORDS)
        loaded = tl.load(row_ptr + word, mask=(word < row.VALUE_WORDS) & mask)
    else:
        group = block * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * sending.GROUP + tl.arange(0, sending.GROUP)[None, :]
        loaded = tl.load(row_ptr + column, mask=(column < sending.H) & mask, other=0.0)
    return loaded


@triton.jit
def _make_payload(
    loaded,
    tokens,
    token,
    strides,
    GROUPS: tl.constexpr,  # of one block if QUANTIZE, else of a row
    WORDS: tl.constexpr,
    G: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Return the values of `_load_payload` as 32-bit words [WORDS], and their scales [GROUPS]."""
    if QUANTIZE == "":
        values, scale = loaded, tl.arange(0, GROUPS)
        if G > 0:
            scale_ptrs = tokens.scale_ptr + token * strides.scale_token + scale.to(tl.int64) * strides.scale_group
            scale = tl.load(scale_ptrs, mask=scale < G)
    else:
        x = loaded.to(tl.float32)
        if QUANTIZE == "int8":
            scale = tile_scale(absmax(x, 1), INT8_MAX)
            narrow = to_int8(divide_rows(x, scale))
        else:
            scale = e4m3_scale(absmax(x, 1), QUANTIZE == "e4m3_power_of_two")
            narrow = to_e4m3(divide_rows(x, scale))
        low, high = tl.split(tl.reshape(narrow.to(tl.uint8, bitcast=True).to(tl.int32), [2 * WORDS, 2]))
        low, high = tl.split(tl.reshape(low | high << 8, [WORDS, 2]))
        values = low | high << 16
    return values, scale


@triton.jit
def _is_needed(ids, active, r: tl.constexpr, STARTS: tl.constexpr):
    """Return which of a token's experts rank r owns, and whether there is one."""
    here = (ids >= STARTS[r]) & (ids < STARTS[r + 1]) & is_active(active, r)
    return here, tl.max(here.to(tl.int32), 0)


@triton.jit
def _deliver_row(
    exchange, ranks: tl.constexpr, round_, r: tl.constexpr, routed, values, scale, at, rows_per_rank, row: tl.constexpr
):
    """Store a token plainly at rank r if it is needed there; returns the rank's bit, or 0."""
    column, word, group = tl.arange(0, row.COLUMNS), tl.arange(0, values.shape[0]), tl.arange(0, row.GROUPS)
    here, needed = _is_needed(routed.ids, round_.active, r, ranks.STARTS)
    if (needed > 0) & round_.enabled:
        peer, mask = Peer(exchange.links.bases[r], r), column < row.K
        first = at.pool_row * row.VALUE_STRIDE
        piece = Piece(first, first, 0, row.VALUE_WORDS)
        put_rows(exchange, ranks, peer, VALUES, piece, word, values, word < row.VALUE_WORDS)
        if row.G > 0:
            first = at.sent_row * row.SCALE_STRIDE
            put_rows(exchange, ranks, peer, SCALES, Piece(first, first, 0, row.G), group, scale, group < row.G)
        entry = tl.where(here, pack_entry(routed.ids - ranks.STARTS[r], routed.place), -1)
        with_flag = Piece(at.sent_row * row.ENTRY, (r * rows_per_rank + at.token) * row.ENTRY)
        store_rows(exchange, ranks, peer, ENTRIES, with_flag, column, entry, mask)
        weight = tl.where(here, routed.weights, 0.0).to(tl.int32, bitcast=True)
        store_rows(exchange, ranks, peer, ENTRIES, with_flag, row.K + column, weight, mask)
    return needed << r


@triton.jit
def send_rows(exchange, ranks: tl.constexpr, round_, tokens, strides, sender, row: tl.constexpr, sending: tl.constexpr):
    """Store this program's groups of tokens as rows; after each group fence, then set its flag at every rank."""
    own = exchange.own
    senders, present = sender.count, sender.present
    num_physical, rows_per_rank = sender.num_physical, sender.rows_per_rank
    WORDS: tl.constexpr = sending.ROW_WORDS
    group = tokens_per_flag(present)
    index = tl.arange(0, MOST_FLAGGED)
    token = sender.index * group + tl.zeros([], tl.int64)
    loaded = _load_payload(tokens, token, 0, token < present, strides.x, row.GROUPS, WORDS, row, sending)
    if sending.IDS_COUNTED:
        planned, weights = _load_plan(tokens, token, token < present, row)
        next_token = _after(token, group, senders)
        next_planned, next_weights = _load_plan(tokens, next_token, next_token < present, row)
        before = _load_before(tokens, token, planned, num_physical, sending.TOKENS)
    for chunk in range(sender.index, (present + group - 1) // group, senders):
        bits = tl.zeros([MOST_FLAGGED], tl.int32)  # by token of the group, a bit for each rank that it was sent to
        for i in range(group):
            token = (chunk * group + i) + tl.zeros([], tl.int64)
            next_token = _after(token, group, senders)
            if sending.IDS_COUNTED:
                ids = tl.where(planned >= 0, planned_id(planned), -1)
                routed = Routed(ids, weights, before + planned_place(planned))
            else:
                tl.debug_barrier()  # the payload is on its way before the routing's arithmetic begins
                routed = _read_routing(tokens, token, num_physical, strides, row, sending)
            values, scale = _make_payload(loaded, tokens, token, strides, row.GROUPS, WORDS, row.G, sending.QUANTIZE)
            # what the next token needs is on its way before this one is stored
            loaded = _load_payload(
                tokens, next_token, 0, next_token < present, strides.x, row.GROUPS, WORDS, row, sending
            )
            if sending.IDS_COUNTED:
                planned, weights = next_planned, next_weights
                before = _load_before(tokens, next_token, planned, num_physical, sending.TOKENS)
                far_token = _after(next_token, group, senders)
                next_planned, next_weights = _load_plan(tokens, far_token, far_token < present, row)
            if token < present:
                dest_rank_mask = tl.zeros([], tl.int32)
                at = RowPlaces(token, token * ranks.R + ranks.RANK, ranks.RANK * rows_per_rank + token)
                word, scales = tl.arange(0, WORDS), tl.arange(0, row.GROUPS)
                stage(exchange, ranks, VALUES, at.pool_row * row.VALUE_STRIDE, word, values, word < row.VALUE_WORDS)
                if row.G > 0:
                    stage(exchange, ranks, SCALES, at.sent_row * row.SCALE_STRIDE, scales, scale, scales < row.G)
                for d in tl.static_range(ranks.R):  # each rank begins with another, so that not all store to one
                    dest_rank_mask = dest_rank_mask | _deliver_row(
                        exchange,
                        ranks,
                        round_,
                        (ranks.RANK + d) % ranks.R,
                        routed,
                        values,
                        scale,
                        at,
                        rows_per_rank,
                        row,
                    )
                tl.store(own.dest_rank_mask_ptr + token, dest_rank_mask)
                bits = tl.where(index == i, dest_rank_mask, bits)
        order_rows(ranks.PUTS)  # release: all rows are visible before the flag
        tokens_sent = tl.minimum(group, present - chunk * group)
        for d in tl.static_range(ranks.R):
            _signal_group(
                exchange,
                ranks,
                round_,
                (ranks.RANK + d) % ranks.R,
                bits,
                chunk * group,
                tokens_sent,
                rows_per_rank,
                row,
            )


@triton.jit
def _signal_group(
    exchange,
    ranks: tl.constexpr,
    round_,
    r: tl.constexpr,
    bits,  # [MOST_FLAGGED], of each token of the group, a bit for each rank
    token,  # the first
    num_tokens,
    rows_per_rank,
    row: tl.constexpr,
):
    """Set the flag of a group of tokens at rank r; by puts, the group's entries go with it."""
    sent = tl.sum(((bits >> r) & 1) << tl.arange(0, MOST_FLAGGED), 0)
    if round_.enabled & is_active(round_.active, r):
        first = ranks.RANK * rows_per_rank + token
        entries = Piece(first * row.ENTRY, (r * rows_per_rank + token) * row.ENTRY, 0, num_tokens * row.ENTRY)
        signal(exchange, ranks, Peer(exchange.links.bases[r], r), first, make_word(round_.epoch, sent), entries)


@triton.jit
def _after(token, group, senders):
    """The token that a sender takes after `token`: the next one of its group, or the first of its next group."""
    return tl.where(token % group == group - 1, token + 1 + (senders - 1) * group, token + 1)


@triton.jit
def _deliver_ll(
    exchange, ranks: tl.constexpr, round_, r: tl.constexpr, routed, block, first, token, word_tokens, row: tl.constexpr
):
    """Store a block of a token at rank r if it is needed there, and its entry in any case; returns the rank's bit.

    first: of the token in LL_ROWS.
    """
    WORDS: tl.constexpr = block.word.shape[0]
    column, peer = tl.arange(0, row.COLUMNS), Peer(exchange.links.bases[r], r)
    here, needed = _is_needed(routed.ids, round_.active, r, ranks.STARTS)
    if (needed > 0) & round_.enabled:
        first_word, word = block.index * WORDS, block.word
        piece = Piece(first, first, ll_values(row.K) + first_word, tl.minimum(row.VALUE_WORDS - first_word, WORDS))
        put_word(exchange, ranks, peer, LL_ROWS, piece, ll_values(row.K) + word, block.words, word < row.VALUE_WORDS)
        if row.G > 0:
            piece = Piece(first, first, ll_scales(row.K, row.VALUE_WORDS) + block.first_scale, block.num_scales)
            put_word(
                exchange,
                ranks,
                peer,
                LL_ROWS,
                piece,
                ll_scales(row.K, row.VALUE_WORDS) + block.group,
                block.scales,
                block.scale_mask,
            )
    if (block.index == 0) & round_.enabled & is_active(round_.active, r):
        entry = tl.where(here, pack_entry(routed.ids - ranks.STARTS[r], routed.place), -1)
        epochs = tl.zeros([row.COLUMNS], tl.int32) + round_.epoch
        theirs = (r * word_tokens.to(tl.int64) + token) * row.LL_STRIDE
        store_word(
            exchange, ranks, peer, LL_ROWS, Piece(first, theirs), column, make_word(epochs, entry), column < row.K
        )
        weight = tl.where(here, routed.weights, 0.0).to(tl.int32, bitcast=True)
        both = Piece(first, theirs, 0, 2 * row.K)
        store_word(exchange, ranks, peer, LL_ROWS, both, row.K + column, make_word(epochs, weight), column < row.K)
    return needed << r


@triton.jit
def send_ll(exchange, ranks: tl.constexpr, round_, tokens, strides, sender, row: tl.constexpr, sending: tl.constexpr):
    """Store this program's share of blocks of tokens as LL words, which need no flag."""
    word_tokens = sender.word_tokens
    WORDS: tl.constexpr = sending.LL_BLOCK
    GROUPS: tl.constexpr = sending.LL_GROUPS
    BLOCKS: tl.constexpr = (row.VALUE_WORDS + WORDS - 1) // WORDS
    for i in range(sender.index, sender.present * BLOCKS, sender.count):
        block, token = i % BLOCKS, (i // BLOCKS) + tl.zeros([], tl.int64)
        loaded = _load_payload(tokens, token, block, True, strides.x, GROUPS, WORDS, row, sending)
        routed = _read_routing(tokens, token, sender.num_physical, strides, row, sending)
        values, scale = _make_payload(loaded, tokens, token, strides, GROUPS, WORDS, row.G, sending.QUANTIZE)
        word, group = block * WORDS + tl.arange(0, WORDS), tl.arange(0, GROUPS)
        scale_mask = (group < row.G) & (block == 0)
        first_scale, num_scales = block * 0, tl.where(block == 0, row.G, 0)
        if sending.QUANTIZE != "":
            group += block * GROUPS
            scale_mask = group < row.G
            first_scale = block * GROUPS
            num_scales = tl.minimum(row.G - first_scale, GROUPS)
        scales = make_word(tl.zeros([GROUPS], tl.int32) + round_.epoch, scale.to(tl.int32, bitcast=True))
        first = (ranks.RANK * word_tokens.to(tl.int64) + token) * row.LL_STRIDE
        words = make_word(tl.zeros([WORDS], tl.int32) + round_.epoch, values)
        stage(exchange, ranks, LL_ROWS, first + ll_values(row.K), word, words, word < row.VALUE_WORDS)
        if row.G > 0:
            stage(exchange, ranks, LL_ROWS, first + ll_scales(row.K, row.VALUE_WORDS), group, scales, scale_mask)
        whole = Block(block, word, words, group, scales, scale_mask, first_scale, num_scales)
        dest_rank_mask = tl.zeros([], tl.int32)
        for d in tl.static_range(ranks.R):
            dest_rank_mask = dest_rank_mask | _deliver_ll(
                exchange, ranks, round_, (ranks.RANK + d) % ranks.R, routed, whole, first, token, word_tokens, row
            )
        if block == 0:
            tl.store(exchange.own.dest_rank_mask_ptr + token, dest_rank_mask)
