"""The sending half of a combine: the weighted sums of a rank's experts, stored at the tokens' source ranks.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.peers import Peer, Piece, base_of, store_word
from ep_moe.kernels.exchange.round_state import pick
from ep_moe.kernels.exchange.wire_layout import RETURNED
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
def _item(i, tokens, ranks: tl.constexpr, BLOCKS: tl.constexpr):
    """Return an item's source rank, its token, the token's pool row, and whether the source has as many tokens."""
    token = i // (ranks.R * BLOCKS)
    source = (ranks.RANK + 1 + i // BLOCKS) % ranks.R  # this rank's own come last: they need no time on the wire
    pool_row = (token + tl.zeros([], tl.int64)) * ranks.R + source
    return source, token, pool_row, token < pick(tokens, source, ranks.RANKS)


@triton.jit
def _load_places(own, pool_row, mask, combining: tl.constexpr):
    """Begin to load the first ROWS_IN_FLIGHT rows of the batch that a received token has, -1 for none, and weights."""
    rows, weights = tl.tuple([]), tl.tuple([])
    for j in tl.static_range(combining.ROWS_IN_FLIGHT):
        at = pool_row * combining.K + j
        rows = rows + tl.tuple([tl.load(own.rows_ptr + at, mask=mask & (j < combining.K), other=-1)])
        if not (combining.SUMMED or combining.POISONED):
            weights = weights + tl.tuple([tl.load(own.weights_ptr + at, mask=mask & (j < combining.K), other=0.0)])
    return rows, weights


@triton.jit
def _load_part(y_ptr, row, column, combining: tl.constexpr):
    """Begin to load a block of a row of y, zeros if the row is -1."""
    row_ptr = y_ptr + row.to(tl.int64) * combining.H
    return tl.load(row_ptr + column, mask=(column < combining.H) & (row >= 0), other=0.0)


@triton.jit
def _add_weighted(total, part, row, weight):
    """Add a part of a row, zeros if the row is -1. Its weight is then one of an earlier round, which may be NaN."""
    return total + part.to(tl.float32) * tl.where(row >= 0, weight, 0.0)


@triton.jit
def _sum_rest(total, y_ptr, own, pool_row, column, combining: tl.constexpr):
    """Add the rows of a received token after the first ROWS_IN_FLIGHT to its sum."""
    for first in range(combining.ROWS_IN_FLIGHT, combining.K, combining.ROWS_IN_FLIGHT):
        for j in tl.static_range(combining.ROWS_IN_FLIGHT):
            exists, at = first + j < combining.K, pool_row * combining.K + first + j
            row = tl.load(own.rows_ptr + at, mask=exists, other=-1)
            weight = tl.load(own.weights_ptr + at, mask=exists & (row >= 0), other=0.0)
            total = total + _load_part(y_ptr, row, column, combining).to(tl.float32) * weight
    return total


@triton.jit
def return_rows(
    exchange,
    ranks: tl.constexpr,
    y_ptr,
    tokens,  # [RANKS] int32, of each rank
    rows_per_rank,
    sender,
    senders,
    combining: tl.constexpr,
):
    """Weight and sum the outputs of this rank's experts for each received token, and store them at its source rank.

    The bits are those of `ep_moe.layout.weighted_sum`: float32, column order, no fused multiply-add. ROWS_IN_FLIGHT
    rows of y are loaded at a time; which rows the next item has is read while this one's are summed.
    """
    own = exchange.own
    H: tl.constexpr = combining.H
    BLOCK: tl.constexpr = combining.SENT_BLOCK
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    FIRST: tl.constexpr = combining.ROWS_IN_FLIGHT
    HALF: tl.constexpr = FIRST // 2  # most tokens have no more rows
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    items = tl.max(tokens, 0) * (ranks.R * BLOCKS)
    source, token, pool_row, exists = _item(sender, tokens, ranks, BLOCKS)
    rows, weights = _load_places(own, pool_row, exists & (sender < items), combining)
    for i in range(sender, items, senders):
        column = i % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        parts = tl.tuple([])
        if combining.SUMMED and not combining.POISONED:
            row = tl.where(rows[0] >= 0, pool_row, -1)
            parts = parts + tl.tuple([_load_part(y_ptr, row, column, combining)])
        elif not combining.POISONED:
            for j in tl.static_range(FIRST):
                parts = parts + tl.tuple([_load_part(y_ptr, rows[j], column, combining)])
        next_source, next_token, next_row, exists = _item(i + senders, tokens, ranks, BLOCKS)
        next_rows, next_weights = _load_places(own, next_row, exists & (i + senders < items), combining)
        total = tl.zeros([BLOCK], tl.float32)
        if combining.POISONED:
            total += float("nan")
        elif combining.SUMMED:
            total += parts[0].to(tl.float32)
        else:
            for j in tl.static_range(HALF):
                total = _add_weighted(total, parts[j], rows[j], weights[j])
            if rows[HALF] >= 0:
                for j in tl.static_range(HALF, FIRST):
                    total = _add_weighted(total, parts[j], rows[j], weights[j])
            if combining.K > FIRST:
                if rows[FIRST - 1] >= 0:
                    total = _sum_rest(total, y_ptr, own, pool_row, column, combining)
        if rows[0] >= 0:
            first, mine = i % BLOCKS * BLOCK, (ranks.RANK * rows_per_rank + token) * H
            piece = Piece(mine, (source * rows_per_rank + token) * H, first, tl.minimum(H - first, BLOCK))
            peer = Peer(base_of(exchange.links, source, ranks.R), source)
            store_word(exchange, ranks, peer, RETURNED, piece, column, _clean(total, dtype), column < H)
        source, token, pool_row, rows, weights = next_source, next_token, next_row, next_rows, next_weights
