"""Kernels of the collective transport: destination ranks of each token, headers, rows as bytes, and what ranks sent.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts, B blocks of TOKENS tokens each, G scale groups.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INT32_MIN, clamp_to_int32

# words of a header, as `ep_moe.transport.headers.Header` names them
ROWS = tl.constexpr(0)
NUM_TOKENS = tl.constexpr(1)
REFUSED = tl.constexpr(2)
BAD_IDS = tl.constexpr(3)
FINGERPRINT = tl.constexpr(4)
PAIRS = tl.constexpr(5)
BAD_ID = tl.constexpr(6)
LAYER = tl.constexpr(7)
SETTINGS = tl.constexpr(8)


class SentTokens(NamedTuple):
    """The tokens that are written to the send buffer."""

    x: Any  # [T, ROW] int32 words of values, rows `x_stride` units apart
    scale: Any  # [T, G], any Triton dtype, any strides
    ids: Any  # [T, K] int32 or int64, rows `ids_stride` apart
    weights: Any  # [T, K] float32, rows `weights_stride` apart


class Destinations(NamedTuple):
    """The ranks that tokens go to, and how their rows are counted: in blocks of tokens."""

    R: tl.constexpr
    RANKS: tl.constexpr  # R rounded up to a power of two
    TOKENS: tl.constexpr  # of a block


class WireRow(NamedTuple):
    """A row that is sent: values, scales padded to whole words, ids, weights."""

    UNITS: tl.constexpr  # of 16 bytes
    IDS: tl.constexpr  # the place of its ids, in words
    K: tl.constexpr
    COLUMNS: tl.constexpr  # K rounded up to a power of two


class Messages(NamedTuple):
    """The messages of a fixed size that ranks have sent each other."""

    OWN: tl.constexpr  # this rank
    R: tl.constexpr
    RANKS: tl.constexpr  # R + 1 rounded up to a power of two
    HEAD: tl.constexpr  # rows that a header takes


@triton.jit(do_not_specialize=["num_tokens", "num_physical", "ids_stride"])
def _find_destinations_kernel(
    ids_ptr,  # [T, K] int32 or int64, physical expert, rows `ids_stride` apart
    owner_ptr,  # [P] int32, the rank of each physical expert
    place_ptr,  # [T, R] int32, out: the token's index among those of its block that go to the rank, -1 none
    counts_ptr,  # [2 * B * R + 2 * B] int32, out: tokens and (token, expert) pairs [B, R], bad ids and one of them [B]
    live_ptr,  # [1] int32, how many rows are tokens; None for all T
    num_tokens,
    num_physical,
    ids_stride,
    R: tl.constexpr,
    RANKS: tl.constexpr,  # R rounded up to a power of two
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K rounded up to a power of two
    TOKENS: tl.constexpr,
):
    """Find the destination ranks of each token of a block, counting a rank and an expert once; skip bad ids."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    is_row = token < num_tokens
    is_token = is_row
    if live_ptr is not None:
        is_token = is_row & (token < tl.load(live_ptr))
    rank, column = tl.arange(0, RANKS)[None, :], tl.arange(0, COLUMNS)[None, :]
    inside = is_token[:, None] & (column < K)
    ids = tl.load(ids_ptr + token[:, None] * ids_stride + column, mask=inside, other=-1)
    bad = (ids < -1) | (ids >= num_physical)
    bad_id = tl.where(bad, clamp_to_int32(ids), INT32_MIN)
    ids = tl.where(bad, -1, ids).to(tl.int32)  # half the registers
    pairs = tl.zeros([TOKENS, RANKS], tl.int32)
    for k in range(K):
        expert = tl.load(ids_ptr + token * ids_stride + k, mask=is_token, other=-1)
        expert = tl.where((expert >= 0) & (expert < num_physical), expert, -1).to(tl.int32)
        repeated = tl.sum(((ids == expert[:, None]) & (column < k)).to(tl.int32), 1) > 0
        owner = tl.load(owner_ptr + expert, mask=(expert >= 0) & (repeated == 0), other=-1)
        pairs += (owner[:, None] == rank).to(tl.int32)
    goes = tl.minimum(pairs, 1)
    place = tl.where(goes > 0, tl.cumsum(goes, 0) - 1, -1)
    tl.store(place_ptr + token[:, None] * R + rank, place, mask=is_row[:, None] & (rank < R))
    to = tl.arange(0, RANKS)
    tl.store(counts_ptr + block * R + to, tl.sum(goes, 0), mask=to < R)
    tl.store(counts_ptr + (blocks + block) * R + to, tl.sum(pairs, 0), mask=to < R)
    bad_ptr = counts_ptr + blocks.to(tl.int64) * R * 2 + block
    tl.store(bad_ptr, tl.sum(tl.sum(bad.to(tl.int32), 1), 0))
    tl.store(bad_ptr + blocks, tl.max(tl.max(bad_id, 1), 0))


@triton.jit(do_not_specialize=["num_blocks", "num_tokens", "layer", "settings"])
def _write_header_kernel(
    counts_ptr,  # [2 * B * R + 2 * B] int32, as `_find_destinations_kernel` leaves it
    block_start_ptr,  # [B, R] int32, out: the first row of the send buffer that a block's tokens for a rank take
    header_ptr,  # [R, WORDS] int64, out: see above
    live_ptr,  # as in `_find_destinations_kernel`
    num_blocks,
    num_tokens,
    fingerprint: tl.int64,
    layer,
    settings,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks that are summed at a time
    WORDS: tl.constexpr,
):
    """Sum the counts of all blocks and write the header for each rank; a single program."""
    rank, index = tl.arange(0, RANKS), tl.arange(0, BLOCKS)
    bad_ptr = counts_ptr + num_blocks.to(tl.int64) * R * 2
    tokens = tl.zeros([RANKS], tl.int32)
    pairs = tl.zeros([RANKS], tl.int32)
    bad = tl.zeros([BLOCKS], tl.int32)
    bad_id = tl.zeros([BLOCKS], tl.int32) + INT32_MIN
    for start in range(0, num_blocks, BLOCKS):
        block = (start + index).to(tl.int64)
        inside = (block < num_blocks)[:, None] & (rank < R)[None, :]
        place = block[:, None] * R + rank[None, :]
        tokens += tl.sum(tl.load(counts_ptr + place, mask=inside, other=0), 0)
        pairs += tl.sum(tl.load(counts_ptr + num_blocks * R + place, mask=inside, other=0), 0)
        bad += tl.load(bad_ptr + block, mask=block < num_blocks, other=0)
        bad_id = tl.maximum(bad_id, tl.load(bad_ptr + num_blocks + block, mask=block < num_blocks, other=INT32_MIN))
    row = tl.cumsum(tokens, 0) - tokens
    for start in range(0, num_blocks, BLOCKS):
        block = (start + index).to(tl.int64)
        inside = (block < num_blocks)[:, None] & (rank < R)[None, :]
        place = block[:, None] * R + rank[None, :]
        count = tl.load(counts_ptr + place, mask=inside, other=0)
        tl.store(block_start_ptr + place, row[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        row += tl.sum(count, 0)
    word_ptr = header_ptr + rank * WORDS
    zero = tl.zeros([RANKS], tl.int64)
    refused, live = zero, num_tokens
    if live_ptr is not None:
        live = tl.load(live_ptr)
        refused = zero + ((live < 0) | (live > num_tokens)).to(tl.int64)
    tl.store(word_ptr + ROWS, tokens.to(tl.int64), mask=rank < R)
    tl.store(word_ptr + NUM_TOKENS, zero + live, mask=rank < R)
    tl.store(word_ptr + REFUSED, refused, mask=rank < R)
    tl.store(word_ptr + BAD_IDS, zero + tl.sum(bad, 0), mask=rank < R)
    tl.store(word_ptr + FINGERPRINT, zero + fingerprint, mask=rank < R)
    tl.store(word_ptr + PAIRS, pairs.to(tl.int64), mask=rank < R)
    tl.store(word_ptr + BAD_ID, zero + tl.where(tl.sum(bad, 0) > 0, tl.max(bad_id, 0), 0), mask=rank < R)
    tl.store(word_ptr + LAYER, zero + layer, mask=rank < R)
    tl.store(word_ptr + SETTINGS, zero + settings, mask=rank < R)


@triton.jit(do_not_specialize=["x_stride", "scale_token_stride", "scale_group_stride", "ids_stride", "weights_stride"])
def _write_rows_kernel(
    place_ptr,  # [T, R] int32
    block_start_ptr,  # [B, R] int32
    tokens,  # SentTokens
    out_ptr,  # [rows, 4 * UNITS] int32 words, out
    out_scale_ptr,  # the same memory, viewed in the dtype of scales
    token_to_row_ptr,  # [T, R] int32, out: the row of the send buffer that goes to the rank, -1 none
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    TO,  # Destinations
    WORDS,  # `permute.Words`; `x_stride` is in its units
    SCALES,  # `permute.ScaleGroups`
    ROW,  # WireRow
):
    """Copy BLOCK value words of a token to each of its rows; its first program also writes scales, ids and weights."""
    token = tl.program_id(0).to(tl.int64)
    rank, group, column = tl.arange(0, TO.RANKS), tl.arange(0, SCALES.GROUPS), tl.arange(0, ROW.COLUMNS)
    word = tl.program_id(1) * WORDS.BLOCK + tl.arange(0, WORDS.BLOCK)
    leads = tl.program_id(1) == 0
    SCALE_BYTES: tl.constexpr = out_scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    place = tl.load(place_ptr + token * TO.R + rank, mask=rank < TO.R, other=-1)
    row = tl.load(block_start_ptr + token // TO.TOKENS * TO.R + rank, mask=place >= 0, other=0)
    row = tl.where(place >= 0, row + place, -1)
    tl.store(token_to_row_ptr + token * TO.R + rank, row, mask=(rank < TO.R) & leads)
    values = tl.load(tokens.x + token * x_stride * WORDS.UNIT + word, mask=word < WORDS.ROW)
    if SCALES.G > 0:
        scale_ptrs = tokens.scale + token * scale_token_stride + group.to(tl.int64) * scale_group_stride
        scale = tl.load(scale_ptrs, mask=(group < SCALES.G) & leads)
    ids = tl.load(tokens.ids + token * ids_stride + column, mask=(column < ROW.K) & leads).to(tl.int32)
    weights = tl.load(tokens.weights + token * weights_stride + column, mask=(column < ROW.K) & leads)
    weights = weights.to(tl.int32, bitcast=True)
    for r in range(TO.R):
        to = tl.max(tl.where(rank == r, row, -1), 0).to(tl.int64)
        if to >= 0:
            row_ptr = out_ptr + to * (ROW.UNITS * 4)
            tl.store(row_ptr + word, values, mask=word < WORDS.ROW)
            if SCALES.G > 0:
                row_scale_ptr = out_scale_ptr + to * (ROW.UNITS * 16 // SCALE_BYTES) + WORDS.ROW * 4 // SCALE_BYTES
                tl.store(row_scale_ptr + group, scale, mask=(group < SCALES.G) & leads)
            tl.store(row_ptr + ROW.IDS + column, ids, mask=(column < ROW.K) & leads)
            tl.store(row_ptr + ROW.IDS + ROW.K + column, weights, mask=(column < ROW.K) & leads)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_physical"])
def _read_messages_kernel(
    messages_ptr,  # [R, HEAD + num_rows] rows of 4 * UNITS int32 words: a rank's header in HEAD rows, then its tokens
    headers_ptr,  # the same memory as int64 words
    token_to_row_ptr,  # [T] int32, a token's row in this rank's message, -1 none
    owner_ptr,  # [P] int32, the rank of each physical expert
    kept_ptr,  # [R + 1, WORDS] int64: the headers of the first bad round, and whether there is one
    ids_ptr,  # [R * (HEAD + num_rows), K] int32, out: physical ids of the rows that are tokens, else -1
    columns_ptr,  # [T, R + 1] int32, out: a token's rows in what comes back, -1 none; the last names the row of NaN
    nan_ptr,  # [HIDDEN], out: the row of NaN, if the round is bad
    num_rows,
    num_tokens,
    num_physical,
    FROM,  # Messages
    ROW,  # WireRow
    WORDS: tl.constexpr,  # of a header
    HIDDEN: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """Leave out rows that are no tokens, and all rows of a round whose headers do not go together, which gives NaN."""
    height = FROM.HEAD + num_rows
    block = tl.program_id(0).to(tl.int64) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    rank, column = tl.arange(0, FROM.RANKS), tl.arange(0, ROW.COLUMNS)
    is_rank = rank < FROM.R
    stride = height.to(tl.int64) * (ROW.UNITS * 2)
    word_ptr = headers_ptr + rank * stride
    own_ptr = headers_ptr + FROM.OWN * stride
    odd = tl.load(word_ptr + REFUSED, mask=is_rank, other=0) | tl.load(word_ptr + BAD_IDS, mask=is_rank, other=0)
    odd = (odd != 0) | (tl.load(word_ptr + FINGERPRINT, mask=is_rank, other=0) != tl.load(own_ptr + FINGERPRINT))
    odd |= tl.load(word_ptr + LAYER, mask=is_rank, other=0) != tl.load(own_ptr + LAYER)
    odd |= tl.load(word_ptr + SETTINGS, mask=is_rank, other=0) != tl.load(own_ptr + SETTINGS)
    bad = tl.max((odd & is_rank).to(tl.int32), 0)
    source, row = block // height, block % height
    count = tl.load(headers_ptr + source * stride + ROWS, mask=source < FROM.R, other=0)
    is_token = (row >= FROM.HEAD) & (row - FROM.HEAD < count) & (bad == 0)
    inside = (source < FROM.R)[:, None] & (column < ROW.K)[None, :]
    ids = tl.load(
        messages_ptr + block[:, None] * (ROW.UNITS * 4) + ROW.IDS + column[None, :],
        mask=inside & is_token[:, None],
        other=-1,
    )
    tl.store(ids_ptr + block[:, None] * ROW.K + column[None, :], ids, mask=inside)
    place = tl.load(token_to_row_ptr + block, mask=block < num_tokens, other=-1)
    own_row_ptr = messages_ptr + (FROM.OWN * height.to(tl.int64) + FROM.HEAD + place) * (ROW.UNITS * 4) + ROW.IDS
    has = tl.zeros([ROWS_AT_ONCE, FROM.RANKS], tl.int1)
    for k in range(ROW.K):
        expert = tl.load(own_row_ptr + k, mask=place >= 0, other=-1)
        owner = tl.load(owner_ptr + expert, mask=(expert >= 0) & (expert < num_physical), other=-1)
        has |= owner[:, None] == rank[None, :]
    rows = tl.where(has, rank[None, :] * height + FROM.HEAD + place[:, None], -1)
    rows = tl.where(rank[None, :] == FROM.R, tl.where(bad != 0, FROM.R * height, -1), rows)
    inside = (block < num_tokens)[:, None] & (rank <= FROM.R)[None, :]
    tl.store(columns_ptr + block[:, None] * (FROM.R + 1) + rank[None, :], rows, mask=inside)
    if (tl.program_id(0) == 0) & (bad != 0):
        for start in range(0, HIDDEN, 1024):
            value = start + tl.arange(0, 1024)
            tl.store(nan_ptr + value, float("nan"), mask=value < HIDDEN)
        if tl.load(kept_ptr + FROM.R * WORDS) == 0:
            for word in tl.static_range(WORDS):
                tl.store(kept_ptr + rank * WORDS + word, tl.load(word_ptr + word, mask=is_rank), mask=is_rank)
            tl.debug_barrier()  # every warp has seen that nothing was kept
            tl.store(kept_ptr + FROM.R * WORDS, 1)
