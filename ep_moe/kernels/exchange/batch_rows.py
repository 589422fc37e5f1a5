"""Where received tokens go: their rows of the batch, and what the slot and FLAT batches keep of them.

Letters: K top-k, G scale groups, R ranks, M max_tokens_per_rank, C rows that share a matrix of scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.exchange.round_state import pick
from ep_moe.kernels.exchange.wire_layout import expert_of, place_of

FILLED = tl.constexpr(256)  # pool rows that are filled at a time


class Batch(NamedTuple):
    """The tensors of a batch that a dispatch fills; the others are the slot's (`SlotState`)."""

    out_ptr: Any  # 32-bit words of the batch's values; if POOLED, the region of received rows itself
    out_scale_ptr: Any  # [experts, G, C]


@triton.jit
def note_rows(
    exchange,
    ranks: tl.constexpr,
    entry,  # [TOKENS * COLUMNS] int32, of consecutive tokens
    weight,  # the same in float32
    mask,  # which of them are noted
    first_rows,  # [RANKS * EXPERTS] int32
    pool_row,  # of the first token
    source,
    row: tl.constexpr,
    TOKENS: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Note the rows of the batch that tokens have. Returns them, -1 for none.

    Example: entry (expert 2, place 3) of a source whose first row for expert 2 is 64 is row 67.
    """
    own = exchange.own
    COLUMNS: tl.constexpr = row.COLUMNS
    index = tl.arange(0, TOKENS * COLUMNS)
    column, here = index % COLUMNS, entry >= 0
    first_row = tl.gather(first_rows, tl.where(here, source * ranks.EXPERTS + expert_of(entry), 0), 0)
    to_row = tl.where(here, first_row + place_of(entry), -1)
    pool_rows = pool_row + index // COLUMNS * ranks.R
    at = pool_rows * row.K
    mask = mask & (column < row.K)
    if POOLED:
        tl.store(own.token_to_row_ptr + at + column, to_row, mask=mask)
        tl.store(own.local_ids_ptr + at + column, tl.where(here, expert_of(entry), -1), mask=mask)
        tl.store(own.pooled_weights_ptr + at + column, weight, mask=mask)
        tl.store(own.row_index_ptr + to_row, pool_rows.to(tl.int32), mask=mask & here)
        any_row = tl.max(tl.reshape(to_row, [TOKENS, COLUMNS]), 1)  # whether there is one
        noted = tl.max(tl.reshape(mask.to(tl.int32), [TOKENS, COLUMNS]), 1) > 0
        tl.store(own.rows_ptr + (pool_row + tl.arange(0, TOKENS) * ranks.R) * row.K, any_row, mask=noted)
    else:  # columns without a row come last
        order = tl.reshape(tl.cumsum(tl.reshape(here.to(tl.int32), [TOKENS, COLUMNS]), 1), [TOKENS * COLUMNS]) - 1
        tl.store(own.rows_ptr + at + order, to_row, mask=mask & here)
        tl.store(own.weights_ptr + at + order, weight, mask=mask & here)
        count = tl.sum(tl.reshape(here.to(tl.int32), [TOKENS, COLUMNS]), 1)
        counts = tl.reshape(tl.broadcast_to(count[:, None], [TOKENS, COLUMNS]), [TOKENS * COLUMNS])
        tl.store(own.rows_ptr + at + column, tl.zeros_like(to_row) - 1, mask=mask & (column >= counts))
    return to_row


@triton.jit
def copy_row(
    batch,
    values,  # [WORDS] int32, a block of the row
    scale,  # [GROUPS]
    to_row,  # [COLUMNS] int32, the token's rows, -1 for none
    word,
    pool_row,
    leads,
    height,
    row: tl.constexpr,
    POOLED: tl.constexpr,
    COPY: tl.constexpr,  # copy the values if POOLED; else they are always copied
):
    """Write a block of a token to all of its rows.

    Rule: each warp reduces over the whole of `to_row`, of which it has all elements, and moves none to other warps
    (`dispatch_receive._take_ll`).
    """
    group = tl.arange(0, scale.shape[0])
    if POOLED:
        if COPY:
            tl.store(batch.out_ptr + pool_row * row.VALUE_STRIDE + word, values, mask=word < row.VALUE_WORDS)
        if row.G > 0:
            tl.store(batch.out_scale_ptr + group.to(tl.int64) * height + pool_row, scale, mask=(group < row.G) & leads)
    else:
        column, rows = tl.arange(0, row.COLUMNS), tl.tuple([])
        for j in tl.static_range(row.K):  # all before the first store: a reduction takes longer than a store
            rows = rows + tl.tuple([tl.max(tl.where(column == j, to_row, -1), 0)])
        for j in tl.static_range(row.K):
            if rows[j] >= 0:
                to = rows[j].to(tl.int64)
                tl.store(batch.out_ptr + to * row.VALUE_WORDS + word, values, mask=word < row.VALUE_WORDS)
                if row.G > 0:
                    scale_to = (to // height * row.G + group) * height + to % height
                    tl.store(batch.out_scale_ptr + scale_to, scale, mask=(group < row.G) & leads)


@triton.jit
def _mark_unused(own, index, nowhere, mask):
    """Mark (pool row, column) pairs without an expert. nowhere: -1 for each."""
    tl.store(own.token_to_row_ptr + index, nowhere, mask=mask)
    tl.store(own.local_ids_ptr + index, nowhere, mask=mask)
    tl.store(own.pooled_weights_ptr + index, tl.zeros_like(nowhere).to(tl.float32), mask=mask)


@triton.jit
def fill_unused(exchange, ranks: tl.constexpr, tokens, receiver, K: tl.constexpr):
    """Mark those of the first C pool rows that received no token as rows without experts."""
    own, pool_rows = exchange.own, receiver.height
    for first in range(receiver.index * FILLED, pool_rows, receiver.count * FILLED):
        pool_row = first + tl.arange(0, FILLED).to(tl.int64)
        present = tl.zeros([FILLED], tl.int32)
        for s in tl.static_range(ranks.R):
            present = tl.where(pool_row % ranks.R == s, pick(tokens, s, ranks.RANKS), present)
        unused = (pool_row < pool_rows) & (pool_row // ranks.R >= present)
        for k in range(K):
            _mark_unused(own, pool_row * K + k, tl.zeros([FILLED], tl.int32) - 1, unused)
