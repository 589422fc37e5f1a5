"""Rows of tokens to rows of experts and back: merging repeats, a stable counting sort, copying rows, the weighted sum.

Letters: N token rows, K top-k, H hidden, G scale groups, L local experts, B blocks of TOKENS tokens each.

The sort takes two launches. The first counts the rows of every expert in every block of tokens, the second computes
prefix sums of the counts over the blocks. The index of a row is then the start of its expert, plus the expert's rows in
earlier blocks, plus those of earlier tokens of its own block, which the copying program counts. Example: starts
[0, 16], 3 rows of expert 1 precede block 1, whose first two tokens both chose expert 1: the second has row 16 + 3 + 1.

Rows of any dtype are copied as 32-bit words; strides count units, of four words if 16 bytes divide a row, so that the
compiler knows that accesses of four words are aligned.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
from ep_moe.kernels.numerics import round_to


class Ids(NamedTuple):
    """How the ids of tokens are read."""

    L: tl.constexpr
    K: tl.constexpr
    COLUMNS: tl.constexpr  # K rounded up to a power of two
    TOKENS: tl.constexpr  # of a block


class Words(NamedTuple):
    """How the values of a row are copied, in 32-bit words."""

    ROW: tl.constexpr  # of a row
    UNIT: tl.constexpr  # in a unit of strides
    BLOCK: tl.constexpr  # that one program copies


class Placed(NamedTuple):
    """What merging repeats and placing rows read and write; what is not stored is absent."""

    ids: Any  # [N, K] int32 or int64, rows `ids_stride` apart
    weights: Any  # [N, K] float32, rows `weights_stride` apart
    local_ids: Any  # [N, K] int32, out
    local_weights: Any  # [N, K] float32, out
    before: Any  # [B, L] int32, out: rows of each expert in earlier blocks
    expert_num_tokens: Any  # [L] int32, out
    expert_row_start: Any  # [L] int32, out
    token_to_row: Any = None  # [N, K] int32, out


class Places(NamedTuple):
    """Where rows go, as earlier launches have found it."""

    ids: Any  # [N, K] int32, local expert, -1 none; an expert at most once in a row
    before: Any  # [B, L] int32, rows of each expert in earlier blocks
    expert_row_start: Any  # [L] int32


class ScaleGroups(NamedTuple):
    """The scales of a row."""

    G: tl.constexpr
    GROUPS: tl.constexpr  # G rounded up to a power of two


@triton.jit
def _merge_repeats(placed, token, sizes, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the local ids and merged weights of tokens [TOKENS] int64, as `_merge_repeats_kernel`; return the ids."""
    num_tokens, first, last, ids_stride, weights_stride = sizes
    column = tl.arange(0, COLUMNS)[None, :]
    is_token = token < num_tokens
    inside = is_token[:, None] & (column < K)
    ids = tl.load(placed.ids + token[:, None] * ids_stride + column, mask=inside, other=-1)
    weights = tl.load(placed.weights + token[:, None] * weights_stride + column, mask=inside, other=0.0)
    here = (ids >= 0) & (ids >= first) & (ids < last)
    repeated = tl.zeros(ids.shape, tl.int32)
    for k in range(K):
        other_id = tl.load(placed.ids + token * ids_stride + k, mask=is_token, other=-1)[:, None]
        other_weight = tl.load(placed.weights + token * weights_stride + k, mask=is_token, other=0.0)[:, None]
        same = ids == other_id
        weights = tl.where(column < k, weights + tl.where(same, other_weight, 0.0), weights)
        repeated += (same & (column > k)).to(tl.int32)
    keep = here & (repeated == 0)
    local_ids = tl.where(keep, ids - first, -1).to(tl.int32)
    place = token[:, None] * K + column
    tl.store(placed.local_ids + place, local_ids, mask=inside)
    tl.store(placed.local_weights + place, tl.where(keep, weights, 0.0), mask=inside)
    return local_ids


@triton.jit(do_not_specialize=["num_tokens", "first", "last", "ids_stride", "weights_stride"])
def _merge_repeats_kernel(
    placed,  # Placed, its first four
    num_tokens,
    first,
    last,
    ids_stride,
    weights_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K rounded up to a power of two
    TOKENS: tl.constexpr,
):
    """Make ids of [first, last) local, others -1, and sum the weights of repeats in the column of the first.

    To each weight, those of all later columns are added in order, zero for another expert: the same additions, in the
    same order, as `ep_moe.layout.reference.merge_repeats`.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    _merge_repeats(placed, token, (num_tokens, first, last, ids_stride, weights_stride), K, COLUMNS)


@triton.jit(do_not_specialize=["num_tokens"])
def _count_rows_kernel(
    ids_ptr,  # [N, K] int32, local expert, -1 none
    counts_ptr,  # [B, L] int32, out
    num_tokens,
    IDS,  # Ids
    EXPERTS: tl.constexpr,  # experts that one program counts
):
    """Count the rows of EXPERTS experts in one block of tokens."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, IDS.TOKENS * IDS.COLUMNS)
    token, column = block * IDS.TOKENS + place // IDS.COLUMNS, place % IDS.COLUMNS
    ids = tl.load(ids_ptr + token * IDS.K + column, mask=(token < num_tokens) & (column < IDS.K), other=-1)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * IDS.L + expert, count, mask=expert < IDS.L)


@triton.jit
def _store_starts(counts_ptr, starts_ptr, total, is_expert, capacity, alignment, BATCHED: tl.constexpr):
    """Store the counts of all experts and the first row of each."""
    expert = tl.arange(0, total.shape[0])
    if BATCHED:
        row_start = expert * capacity
    else:
        aligned = (total + alignment - 1) // alignment * alignment
        row_start = tl.cumsum(aligned, 0) - aligned
    tl.store(counts_ptr + expert, total, mask=is_expert)
    tl.store(starts_ptr + expert, row_start.to(tl.int32), mask=is_expert)


@triton.jit(do_not_specialize=["num_blocks", "capacity", "alignment"])
def _sum_counts_kernel(
    counts_ptr,  # [B, L] int32, in: rows of the block; out: rows of the blocks before it
    expert_num_tokens_ptr,  # [L] int32, out
    expert_row_start_ptr,  # [L] int32, out
    num_blocks,
    capacity,  # rows of an expert if BATCHED
    alignment,  # of starts if not BATCHED
    L: tl.constexpr,
    EXPERTS: tl.constexpr,  # L rounded up to a power of two
    BLOCKS: tl.constexpr,  # blocks that are summed at a time
    BATCHED: tl.constexpr,
):
    """Exclusive prefix sums of the counts over blocks; one program, since starts need the totals of all experts."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < L
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = (start + tl.arange(0, BLOCKS)).to(tl.int64)
        pointers = counts_ptr + block[:, None] * L + expert[None, :]
        inside = (block < num_blocks)[:, None] & is_expert[None, :]
        counts = tl.load(pointers, mask=inside, other=0)
        tl.store(pointers, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    _store_starts(expert_num_tokens_ptr, expert_row_start_ptr, total, is_expert, capacity, alignment, BATCHED)


@triton.jit
def merge_and_place(
    placed, sizes, capacity, alignment, IDS, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, BATCHED: tl.constexpr
):
    """As `_merge_and_place_kernel`, by one program; returns the counts of experts [EXPERTS].

    Example: L = 3 and local ids [[0, 2], [-1, 0]] are the bins 0, 2, 3, 0 of a histogram: counts [2, 0, 1].
    """
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < IDS.L
    total = tl.zeros([EXPERTS], tl.int32)
    for block in range(BLOCKS):
        token = (tl.arange(0, IDS.TOKENS) + block * IDS.TOKENS).to(tl.int64)
        ids = _merge_repeats(placed, token, sizes, IDS.K, IDS.COLUMNS)
        nowhere = tl.zeros(ids.shape, tl.int32) + IDS.L
        counted = tl.where((ids >= 0) & (tl.arange(0, IDS.COLUMNS) < IDS.K)[None, :], ids, nowhere)
        count = tl.histogram(tl.reshape(counted, [IDS.TOKENS * IDS.COLUMNS]), EXPERTS)
        if placed.before is not None:
            tl.store(placed.before + expert + block * IDS.L, total, mask=is_expert)
        total += tl.where(is_expert, count, 0)
    _store_starts(placed.expert_num_tokens, placed.expert_row_start, total, is_expert, capacity, alignment, BATCHED)
    return total


@triton.jit(
    do_not_specialize=["num_tokens", "first", "last", "ids_stride", "weights_stride", "capacity", "alignment"],
)
def _merge_and_place_kernel(
    placed,  # Placed
    num_tokens,
    first,
    last,
    ids_stride,
    weights_stride,
    capacity,  # rows of an expert if BATCHED
    alignment,  # of starts if not BATCHED
    IDS,  # Ids
    EXPERTS: tl.constexpr,  # L + 1 rounded up to a power of two
    BLOCKS: tl.constexpr,  # B
    BATCHED: tl.constexpr,
):
    """What the three kernels above store, for tokens of a few blocks: one program, in one launch."""
    start_early()
    sizes = num_tokens, first, last, ids_stride, weights_stride
    merge_and_place(placed, sizes, capacity, alignment, IDS, EXPERTS, BLOCKS, BATCHED)


@triton.jit
def place_few(token, leads, placed, sizes, IDS):
    """Return the row [COLUMNS] in COMPACT of each of a token's experts, -1 none; store them if `leads`.

    A program compares the token's pairs with those of all tokens, and so waits for no other program.
    Example: ids [[1, 0], [1, -1]] have the rows [[1, 0], [2, -1]].
    """
    num_tokens, first, last, ids_stride, _ = sizes
    each, column = tl.arange(0, IDS.TOKENS), tl.arange(0, IDS.COLUMNS)
    inside = (each < num_tokens)[:, None] & (column < IDS.K)[None, :]
    ids = tl.load(placed.ids + each[:, None] * ids_stride + column[None, :], mask=inside, other=-1)
    repeated = (ids[:, :, None] == ids[:, None, :]) & (column[None, :] < column[:, None])[None, :, :]
    here = (ids >= 0) & (ids >= first) & (ids < last) & (tl.sum(repeated.to(tl.int32), 2) == 0)
    ids = tl.where(here, ids, -1)
    mine = tl.max(tl.where((each == token)[:, None], ids, -1), 0)
    other, own = ids[:, :, None], mine[None, None, :]
    before = (other >= 0) & ((other < own) | ((other == own) & (each < token)[:, None, None]))
    row = tl.where(mine >= 0, tl.sum(tl.sum(before.to(tl.int32), 0), 0), -1)
    tl.store(placed.token_to_row + token * IDS.K + column, row, mask=(column < IDS.K) & leads)
    return row


@triton.jit
def row_of(rows, k):
    """The k-th of a token's rows [COLUMNS], int64."""
    return tl.max(tl.where(tl.arange(0, rows.shape[0]) == k, rows, -1), 0).to(tl.int64)


@triton.jit
def copy_few(program, x_ptr, out_ptr, x_stride, placed, sizes, IDS, WORDS):
    """Copy BLOCK words of one token of [N, ROW] to each of its rows of [rows, ROW]."""
    pieces = tl.cdiv(WORDS.ROW, WORDS.BLOCK)
    token, piece = (program // pieces).to(tl.int64), program % pieces
    word = piece * WORDS.BLOCK + tl.arange(0, WORDS.BLOCK)
    values = tl.load(x_ptr + token * x_stride * WORDS.UNIT + word, mask=word < WORDS.ROW)
    rows = place_few(token, piece == 0, placed, sizes, IDS)
    for k in tl.static_range(IDS.K):
        row = row_of(rows, k)
        tl.store(out_ptr + row * WORDS.ROW + word, values, mask=(word < WORDS.ROW) & (row >= 0))


@triton.jit
def _rows_of_token(places, token, IDS):
    """Return the row [COLUMNS] of each of a token's experts, -1 none."""
    column = tl.arange(0, IDS.COLUMNS)
    mine = tl.load(places.ids + token * IDS.K + column, mask=column < IDS.K, other=-1)
    block = token // IDS.TOKENS
    place = tl.arange(0, IDS.TOKENS * IDS.COLUMNS)
    other, other_column = block * IDS.TOKENS + place // IDS.COLUMNS, place % IDS.COLUMNS
    theirs = tl.load(places.ids + other * IDS.K + other_column, mask=(other < token) & (other_column < IDS.K), other=-1)
    row = tl.sum((theirs[:, None] == mine[None, :]).to(tl.int32), 0)
    row += tl.load(places.before + block * IDS.L + mine, mask=mine >= 0, other=0)
    row += tl.load(places.expert_row_start + mine, mask=mine >= 0, other=0)
    return tl.where(mine >= 0, row, -1)


@triton.jit(do_not_specialize=["height", "out_rows", "x_stride", "scale_token_stride", "scale_group_stride"])
def _pack_rows_kernel(
    places,  # Places
    x_ptr,  # [N, ROW] int32 words, rows `x_stride` units apart; None leaves the values where they are
    scale_ptr,  # [N, G], any Triton dtype, any strides; or None
    token_to_row_ptr,  # [N, K] int32, out
    row_index_ptr,  # [rows] int32, out: rows keep their order, and this maps an expert's rows to them; or None
    out_ptr,  # [rows, ROW] int32 words, out; [N, ROW] with `row_index_ptr`; or None
    out_scale_ptr,  # [experts, G, height], out; or None
    height,  # rows that share a matrix of scales
    out_rows,  # capacity in rows; rows beyond it are dropped
    x_stride,
    scale_token_stride,
    scale_group_stride,
    IDS,  # Ids
    WORDS,  # Words; `x_stride` is in its units
    SCALES,  # ScaleGroups
):
    """Copy BLOCK words of one token to each of its rows; its first program also writes scales and row indices."""
    start_early()
    token = tl.program_id(0).to(tl.int64)
    column, group = tl.arange(0, IDS.COLUMNS), tl.arange(0, SCALES.GROUPS)
    word = tl.program_id(1) * WORDS.BLOCK + tl.arange(0, WORDS.BLOCK)
    is_word = word < WORDS.ROW
    leads = tl.program_id(1) == 0
    is_group = (group < SCALES.G) & leads
    row = _rows_of_token(places, token, IDS)
    row = tl.where(row < out_rows, row, -1)
    tl.store(token_to_row_ptr + token * IDS.K + column, row, mask=(column < IDS.K) & leads)
    if x_ptr is not None:
        values = tl.load(x_ptr + token * x_stride * WORDS.UNIT + word, mask=is_word)
    if scale_ptr is not None:
        scale_ptrs = scale_ptr + token * scale_token_stride + group.to(tl.int64) * scale_group_stride
        scale = tl.load(scale_ptrs, mask=is_group)
    if row_index_ptr is not None:
        tl.store(row_index_ptr + row, tl.zeros([IDS.COLUMNS], tl.int32) + token.to(tl.int32), mask=(row >= 0) & leads)
        if x_ptr is not None:
            tl.store(out_ptr + token * WORDS.ROW + word, values, mask=is_word)
        if scale_ptr is not None:
            tl.store(out_scale_ptr + group.to(tl.int64) * height + token, scale, mask=is_group)
    else:
        for k in range(IDS.K):
            to = tl.max(tl.where(column == k, row, -1), 0).to(tl.int64)
            if to >= 0:
                tl.store(out_ptr + to * WORDS.ROW + word, values, mask=is_word)
                if scale_ptr is not None:
                    place = (to // height * SCALES.G + group) * height + to % height
                    tl.store(out_scale_ptr + place, scale, mask=is_group)


@triton.jit
def _weighted_sum_kernel(
    y_ptr,  # [rows, H]
    token_to_row_ptr,  # [N, K] int32, -1 none
    weights_ptr,  # [N, K] float32; None is ones
    shared_ptr,  # [N, H], rows `shared_stride` apart; or None
    out_ptr,  # [N, H], rows `out_stride` apart
    shared_stride,
    out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
):
    """Sum a token's rows in float32, in column order, add `shared`, round once.

    A missing row adds zero, which does not change a sum that starts at zero. Launch with enable_fp_fusion=False, so
    that product and sum are rounded separately, as in the reference.
    """
    start_early()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(token_to_row_ptr + token * K + k).to(tl.int64)
        part = tl.load(y_ptr + row * H + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            part = part * tl.load(weights_ptr + token * K + k, mask=row >= 0, other=0.0)
        total = total + part
    if shared_ptr is not None:
        total = total + tl.load(shared_ptr + token * shared_stride + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + token * out_stride + column, round_to(total, out_ptr.dtype.element_ty), mask=inside)
