"""The sending half of a dispatch: a rank's header, and its tokens as rows or as LL words.

Letters: T tokens on this rank, K top-k, H hidden, G scale groups, R ranks, P physical experts, B blocks of tokens.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.round_state import (
    BAD_IDS,
    ENTRIES,
    FINE,
    FLAGS,
    HEADER_WORDS,
    HEADERS,
    OWN_TOKENS,
    PLACE_BITS,
    REFUSED,
    SCALES,
    SENT,
    TOO_MANY,
    VALUES,
    WORD_ROWS,
    is_active,
    region,
)
from ep_moe.kernels.exchange.signals import fence, make_word
from ep_moe.kernels.numerics import (
    INT8_MAX,
    INT32_MIN,
    absmax,
    clamp_to_int32,
    divide_rows,
    e4m3_scale,
    tile_scale,
    to_e4m3,
    to_int8,
)


class Tokens(NamedTuple):
    """What a rank brings to a round."""

    x_ptr: Any  # [T, H] to be quantized, else 32-bit words, rows `x_stride` units of UNIT numbers or words apart
    scale_ptr: Any  # [T, G] where it is quantized already, any strides
    ids_ptr: Any  # [T, K] int32 or int64, rows `ids_stride` apart
    weights_ptr: Any  # [T, K] float32, rows `weights_stride` apart
    num_tokens_ptr: Any  # [1] int32, where COUNTED
    block_counts_ptr: Any  # [B + 1, P + 1] int32 of `_sum_blocks_kernel`, where PLANNED


@triton.jit
def _find_bad_id(tokens, present, num_physical, ids_stride, K: tl.constexpr, TOKENS: tl.constexpr):
    """The largest of the ids that no rank owns, cut to int32."""
    found = tl.zeros([TOKENS], tl.int32) + INT32_MIN
    for first in range(0, present, TOKENS):
        token = first + tl.arange(0, TOKENS).to(tl.int64)
        for k in tl.static_range(K):
            ids = tl.load(tokens.ids_ptr + token * ids_stride + k, mask=token < present, other=-1)
            bad = (ids < -1) | (ids >= num_physical)
            found = tl.maximum(found, tl.where(bad, clamp_to_int32(ids), INT32_MIN))
    return tl.max(found, 0)


@triton.jit
def announce(
    links,
    own,
    tokens,
    announcer,
    announcers,
    present,
    num_tokens,
    max_tokens,
    num_blocks,
    num_physical,
    ids_stride,
    epoch,
    enabled,
    active,
    fingerprint,
    layer,
    settings,
    refusal,
    R: tl.constexpr,
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    TOKENS: tl.constexpr,  # all of them, rounded up, where not PLANNED
    EXPERTS: tl.constexpr,  # that are announced at a time
    PLANNED: tl.constexpr,
):
    """Send every rank this rank's header: status, format, layer and counts.

    Rule: all of it is sent in every round, also with a status that refuses the round, since receivers wait for all.
    """
    token = tl.arange(0, TOKENS)
    totals_ptr = tokens.block_counts_ptr + num_blocks.to(tl.int64) * (num_physical + 1)
    for first in range(announcer * EXPERTS, num_physical, announcers * EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        if PLANNED:
            count = tl.load(totals_ptr + expert, mask=expert < num_physical, other=0)
        else:
            hit = tl.zeros([TOKENS, EXPERTS], tl.int32)
            for k in tl.static_range(K):
                theirs = tl.load(tokens.ids_ptr + token * ids_stride + k, mask=token < present, other=-1)
                hit = hit | (theirs[:, None] == expert[None, :]).to(tl.int32)
            count = tl.sum(hit, 0)
        word = make_word(tl.zeros([EXPERTS], tl.int32) + epoch, count)
        for r in tl.static_range(R):
            to = region(links.bases[r], links, HEADERS, tl.int64) + RANK * (L + HEADER_WORDS)
            to += HEADER_WORDS + expert - STARTS[r]
            theirs = (expert >= STARTS[r]) & (expert < STARTS[r + 1])
            tl.store(to, word, mask=theirs & enabled & is_active(active, r))
    if announcer == 0:
        if PLANNED:
            bad = tl.load(totals_ptr + num_physical)
        else:
            found = tl.zeros([TOKENS], tl.int32)
            for k in tl.static_range(K):
                theirs = tl.load(tokens.ids_ptr + token * ids_stride + k, mask=token < present, other=-1)
                found += ((theirs < -1) | (theirs >= num_physical)).to(tl.int32)
            bad = tl.sum(found, 0)
        wrong_count = (num_tokens > max_tokens) | (num_tokens < 0)
        kind = tl.where(wrong_count, TOO_MANY, tl.where(bad > 0, BAD_IDS, FINE))
        kind = tl.where(refusal > 0, REFUSED, kind)
        value = tl.minimum(tl.where(kind == BAD_IDS, bad, num_tokens) & 0x7FFFFFFF, 0xFFFFFFF)  # of 28 bits
        status = make_word(epoch, kind << 28 | value)
        if kind == BAD_IDS:  # there is no payload: its place takes one of the ids
            fingerprint = _find_bad_id(tokens, present, num_physical, ids_stride, K, TOKENS)
        for r in tl.static_range(R):
            if enabled & is_active(active, r):
                to = region(links.bases[r], links, HEADERS, tl.int64) + RANK * (L + HEADER_WORDS)
                tl.store(to, status)
                tl.store(to + 1, make_word(epoch, fingerprint))
                tl.store(to + 2, make_word(epoch, layer))
                tl.store(to + 3, make_word(epoch, settings))
        tl.store(own.state_ptr + OWN_TOKENS, tl.where(wrong_count, max_tokens, num_tokens))
        tl.store(own.state_ptr + SENT, epoch)  # also where the round is off: a settlement must not begin with it


@triton.jit
def _read_routing(
    tokens,
    token,
    num_physical,
    ids_stride,
    weights_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Return a token's experts [COLUMNS] (-1 for repeats and none), their weights with repeats added, and their places.

    The place is how many earlier tokens of this rank go to the expert. Weights are added in column order, as in
    `ep_moe.layout.reference.merge_repeats`.
    """
    column = tl.arange(0, COLUMNS)
    own_ids_ptr, own_weights_ptr = tokens.ids_ptr + token * ids_stride, tokens.weights_ptr + token * weights_stride
    ids = tl.load(own_ids_ptr + column, mask=column < K, other=-1).to(tl.int32)
    weights = tl.load(own_weights_ptr + column, mask=column < K, other=0.0)
    repeated = tl.zeros([COLUMNS], tl.int32)
    for k in tl.static_range(K):
        same = ids == tl.load(own_ids_ptr + k).to(tl.int32)
        weights = tl.where(column < k, weights + tl.where(same, tl.load(own_weights_ptr + k), 0.0), weights)
        repeated += (same & (column > k)).to(tl.int32)
    other = token // TOKENS * TOKENS + tl.arange(0, TOKENS)
    hit = tl.zeros([TOKENS, COLUMNS], tl.int32)
    for k in tl.static_range(K):
        theirs = tl.load(tokens.ids_ptr + other * ids_stride + k, mask=other < token, other=-1).to(tl.int32)
        hit = hit | (theirs[:, None] == ids[None, :]).to(tl.int32)
    place = tl.sum(hit, 0)
    valid = (ids >= 0) & (ids < num_physical) & (repeated == 0)
    if PLANNED:
        before_ptr = tokens.block_counts_ptr + token // TOKENS * (num_physical + 1)
        place += tl.load(before_ptr + ids, mask=valid, other=0)
    return tl.where(valid, ids, -1), weights, place


@triton.jit
def _load_payload(
    tokens,
    token,
    block,
    x_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # numbers that share a scale
    GROUPS: tl.constexpr,  # of one block where quantized here, else of a row
    WORDS: tl.constexpr,  # of one block
    VALUE_WORDS: tl.constexpr,
    UNIT: tl.constexpr,  # numbers, or words, that the lengths of rows of x are multiples of
    QUANTIZE: tl.constexpr,  # "", "e4m3", "e4m3_power_of_two" or "int8"
):
    """Begin to load one block of a token: 32-bit words [WORDS], or numbers [GROUPS, GROUP] where QUANTIZE."""
    row_ptr = tokens.x_ptr + token * x_stride * UNIT
    if QUANTIZE == "":
        word = block * WORDS + tl.arange(0, WORDS)
        loaded = tl.load(row_ptr + word, mask=word < VALUE_WORDS)
    else:
        group = block * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        loaded = tl.load(row_ptr + column, mask=column < H, other=0.0)
    return loaded


@triton.jit
def _make_payload(
    loaded,
    tokens,
    token,
    scale_token_stride,
    scale_group_stride,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Return the values of `_load_payload` as 32-bit words [WORDS], and their scales [GROUPS]."""
    if QUANTIZE == "":
        values, scale = loaded, tl.arange(0, GROUPS)
        if G > 0:
            scale_ptrs = tokens.scale_ptr + token * scale_token_stride + scale.to(tl.int64) * scale_group_stride
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
def _deliver_row(
    base,
    links,
    ids,
    weights,
    place,
    values,
    scale,
    slot,
    enabled,
    active,
    r: tl.constexpr,
    FIRST: tl.constexpr,  # expert of rank r
    LAST: tl.constexpr,  # and the next rank's first
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    ENTRY: tl.constexpr,  # int32 of an entry
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a token plainly at rank r if it is needed there; returns the rank's bit, or 0."""
    column, word, group = tl.arange(0, COLUMNS), tl.arange(0, WORDS), tl.arange(0, GROUPS)
    here = (ids >= FIRST) & (ids < LAST) & is_active(active, r)
    needed = tl.max(here.to(tl.int32), 0)
    if (needed > 0) & enabled:
        to = region(base, links, VALUES, tl.int32) + slot * VALUE_WORDS
        tl.store(to + word, values, mask=word < VALUE_WORDS)
        if G > 0:
            scale_to = region(base, links, SCALES, scale.dtype) + slot * G
            tl.store(scale_to + group, scale, mask=group < G)
        entry_to = region(base, links, ENTRIES, tl.int32) + slot * ENTRY
        entry = tl.where(here, ((ids - FIRST) << PLACE_BITS) | place, -1)
        tl.store(entry_to + column, entry, mask=column < K)
        weight = tl.where(here, weights, 0.0).to(tl.int32, bitcast=True)
        tl.store(entry_to + K + column, weight, mask=column < K)
    return needed << r


@triton.jit
def send_rows(
    links,
    own,
    tokens,
    sender,
    senders,
    present,
    num_physical,
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    slots,
    epoch,
    enabled,
    active,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    ENTRY: tl.constexpr,
    TOKENS_PER_FENCE: tl.constexpr,  # tokens between two fences
    R: tl.constexpr,
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Store this program's share of the tokens as rows; fence; then set each token's flag at every rank."""
    index = tl.arange(0, TOKENS_PER_FENCE)
    for chunk in range(sender, (present + TOKENS_PER_FENCE - 1) // TOKENS_PER_FENCE, senders):
        went = tl.zeros([TOKENS_PER_FENCE], tl.int32)
        for i in range(TOKENS_PER_FENCE):
            token = (chunk * TOKENS_PER_FENCE + i) + tl.zeros([], tl.int64)
            if token < present:
                loaded = _load_payload(tokens, token, 0, x_stride, H, GROUP, GROUPS, WORDS, VALUE_WORDS, UNIT, QUANTIZE)
                tl.debug_barrier()  # the payload is on its way before the routing's arithmetic begins
                ids, weights, place = _read_routing(
                    tokens, token, num_physical, ids_stride, weights_stride, K, COLUMNS, TOKENS, PLANNED
                )
                values, scale = _make_payload(
                    loaded, tokens, token, scale_token_stride, scale_group_stride, G, GROUPS, WORDS, QUANTIZE
                )
                dest_rank_mask = tl.zeros([], tl.int32)
                for d in tl.static_range(R):  # each rank begins with another, so that not all store to one
                    dest_rank_mask = dest_rank_mask | _deliver_row(
                        links.bases[(RANK + d) % R],
                        links,
                        ids,
                        weights,
                        place,
                        values,
                        scale,
                        RANK * slots + token,
                        enabled,
                        active,
                        (RANK + d) % R,
                        STARTS[(RANK + d) % R],
                        STARTS[(RANK + d) % R + 1],
                        G,
                        GROUPS,
                        WORDS,
                        VALUE_WORDS,
                        ENTRY,
                        K,
                        COLUMNS,
                    )
                tl.store(own.dest_rank_mask_ptr + token, dest_rank_mask)
                went = tl.where(index == i, dest_rank_mask, went)
        fence()  # release: the rows first, everywhere, then the words that say so
        slot = RANK * slots + chunk * TOKENS_PER_FENCE + index
        sent = (chunk * TOKENS_PER_FENCE + index < present) & enabled
        for d in tl.static_range(R):
            flag_to = region(links.bases[(RANK + d) % R], links, FLAGS, tl.int64) + slot
            word = make_word(tl.zeros([TOKENS_PER_FENCE], tl.int32) + epoch, (went >> ((RANK + d) % R)) & 1)
            tl.store(flag_to, word, mask=sent & is_active(active, (RANK + d) % R))


@triton.jit
def _deliver_words(
    row_ptr,
    links,
    ids,
    weights,
    place,
    values,
    scales,
    word,
    group,
    scale_mask,
    epoch,
    block,
    enabled,
    active,
    r: tl.constexpr,
    FIRST: tl.constexpr,  # expert of rank r
    LAST: tl.constexpr,  # and the next rank's first
    G: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a block of a token at rank r if it is needed there, and its entry in any case; returns the rank's bit."""
    column = tl.arange(0, COLUMNS)
    here = (ids >= FIRST) & (ids < LAST) & is_active(active, r)
    needed = tl.max(here.to(tl.int32), 0)
    if (needed > 0) & enabled:
        tl.store(row_ptr + 2 * K + word, values, mask=word < VALUE_WORDS)
        if G > 0:
            tl.store(row_ptr + 2 * K + VALUE_WORDS + group, scales, mask=scale_mask)
    if (block == 0) & enabled & is_active(active, r):
        entry = tl.where(here, ((ids - FIRST) << PLACE_BITS) | place, -1)
        epochs = tl.zeros([COLUMNS], tl.int32) + epoch
        tl.store(row_ptr + column, make_word(epochs, entry), mask=column < K)
        weight = tl.where(here, weights, 0.0).to(tl.int32, bitcast=True)
        tl.store(row_ptr + K + column, make_word(epochs, weight), mask=column < K)
    return needed << r


@triton.jit
def send_words(
    links,
    own,
    tokens,
    sender,
    senders,
    present,
    num_physical,
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    word_tokens,
    epoch,
    enabled,
    active,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,  # of one block where quantized here, else of a row
    WORDS: tl.constexpr,  # of one block
    VALUE_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Store this program's share of blocks of tokens as LL words, which need no flag."""
    BLOCKS: tl.constexpr = (VALUE_WORDS + WORDS - 1) // WORDS
    WIDTH: tl.constexpr = 2 * K + VALUE_WORDS + (G + 1) // 2 * 2  # even, so that pairs of words are aligned
    for i in range(sender, present * BLOCKS, senders):
        block, token = i % BLOCKS, (i // BLOCKS) + tl.zeros([], tl.int64)
        loaded = _load_payload(tokens, token, block, x_stride, H, GROUP, GROUPS, WORDS, VALUE_WORDS, UNIT, QUANTIZE)
        ids, weights, place = _read_routing(
            tokens, token, num_physical, ids_stride, weights_stride, K, COLUMNS, TOKENS, PLANNED
        )
        values, scale = _make_payload(
            loaded, tokens, token, scale_token_stride, scale_group_stride, G, GROUPS, WORDS, QUANTIZE
        )
        word, group = block * WORDS + tl.arange(0, WORDS), tl.arange(0, GROUPS)
        scale_mask = (group < G) & (block == 0)
        if QUANTIZE != "":
            group += block * GROUPS
            scale_mask = group < G
        scales = make_word(tl.zeros([GROUPS], tl.int32) + epoch, scale.to(tl.int32, bitcast=True))
        row = (RANK * word_tokens.to(tl.int64) + token) * WIDTH
        dest_rank_mask = tl.zeros([], tl.int32)
        for d in tl.static_range(R):
            dest_rank_mask = dest_rank_mask | _deliver_words(
                region(links.bases[(RANK + d) % R], links, WORD_ROWS, tl.int64) + row,
                links,
                ids,
                weights,
                place,
                make_word(tl.zeros([WORDS], tl.int32) + epoch, values),
                scales,
                word,
                group,
                scale_mask,
                epoch,
                block,
                enabled,
                active,
                (RANK + d) % R,
                STARTS[(RANK + d) % R],
                STARTS[(RANK + d) % R + 1],
                G,
                VALUE_WORDS,
                K,
                COLUMNS,
            )
        if block == 0:
            tl.store(own.dest_rank_mask_ptr + token, dest_rank_mask)
