"""Kernels of the collective transport: destination ranks of each token, headers, rows as bytes, and what ranks sent.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts, B blocks of TOKENS tokens each, G scale groups.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INT32_MIN, clamp_to_int32
from ep_moe.kernels.rows.permute import merge_and_place

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


class Message(NamedTuple):
    """A message of a fixed size, out."""

    words: Any  # int32
    scales: Any  # the same memory, in the dtype of scales
    header: Any  # the same memory, int64
    live: Any  # [1] int32, how many rows of x are tokens; None for all T


class ReadMessages(NamedTuple):
    """The messages that ranks have sent each other, and what reading them writes."""

    words: Any  # [R, HEAD + num_rows] rows of 4 * UNITS int32 words: a rank's header in HEAD rows, then its tokens
    headers: Any  # the same memory as int64 words
    owner: Any  # [P] int32, the rank of each physical expert
    kept: Any  # [R + 1, WORDS] int64: the headers of the first bad round, and whether there is one
    ids: Any  # [R * (HEAD + num_rows), K] int32, out: physical ids of the rows that are tokens, else -1
    columns: Any  # [T, R + 1] int32, out: a token's rows in what comes back, -1 none; the last names the row of NaN
    nan: Any  # [HIDDEN], out: the row of NaN, if the round is bad


class MessageShape(NamedTuple):
    """How the messages of all ranks are read."""

    OWN: tl.constexpr  # this rank
    R: tl.constexpr
    RANKS: tl.constexpr  # R + 1 rounded up to a power of two
    HEAD: tl.constexpr  # rows that a header takes
    WORDS: tl.constexpr  # of a header
    HIDDEN: tl.constexpr
    ROWS_AT_ONCE: tl.constexpr


class Lists(NamedTuple):
    """How the rows of experts are counted: see `permute.merge_and_place`."""

    EXPERTS: tl.constexpr
    BLOCKS: tl.constexpr
    BATCHED: tl.constexpr


@triton.jit(do_not_specialize=["num_tokens", "num_physical", "ids_stride"])
def _find_destinations_kernel(
    ids_ptr,  # [T, K] int32 or int64, physical expert, rows `ids_stride` apart
    owner_ptr,  # [P] int32, the rank of each physical expert
    place_ptr,  # [T, R] int32, out: the token's index among those of its block that go to the rank, -1 none
    counts_ptr,  # [2 * B * R + 2 * B] int32, out: tokens and (token, expert) pairs [B, R], bad ids and one of them [B]
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
    is_token = token < num_tokens
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
    tl.store(place_ptr + token[:, None] * R + rank, place, mask=is_token[:, None] & (rank < R))
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
    tl.store(word_ptr + ROWS, tokens.to(tl.int64), mask=rank < R)
    tl.store(word_ptr + NUM_TOKENS, zero + num_tokens, mask=rank < R)
    tl.store(word_ptr + REFUSED, zero, mask=rank < R)
    tl.store(word_ptr + BAD_IDS, zero + tl.sum(bad, 0), mask=rank < R)
    tl.store(word_ptr + FINGERPRINT, zero + fingerprint, mask=rank < R)
    tl.store(word_ptr + PAIRS, pairs.to(tl.int64), mask=rank < R)
    tl.store(word_ptr + BAD_ID, zero + tl.where(tl.sum(bad, 0) > 0, tl.max(bad_id, 0), 0), mask=rank < R)
    tl.store(word_ptr + LAYER, zero + layer, mask=rank < R)
    tl.store(word_ptr + SETTINGS, zero + settings, mask=rank < R)


@triton.jit
def _load_token(tokens, token, strides, WORDS, SCALES, ROW):
    """Return BLOCK value words of a token; in its first program also its scales, ids and weights, as words."""
    x_stride, scale_token_stride, scale_group_stride, ids_stride, weights_stride = strides
    group, column = tl.arange(0, SCALES.GROUPS), tl.arange(0, ROW.COLUMNS)
    word = tl.program_id(1) * WORDS.BLOCK + tl.arange(0, WORDS.BLOCK)
    leads = tl.program_id(1) == 0
    values = tl.load(tokens.x + token * x_stride * WORDS.UNIT + word, mask=word < WORDS.ROW)
    scale = values  # not stored unless there are scales
    if SCALES.G > 0:
        scale_ptrs = tokens.scale + token * scale_token_stride + group.to(tl.int64) * scale_group_stride
        scale = tl.load(scale_ptrs, mask=(group < SCALES.G) & leads)
    ids = tl.load(tokens.ids + token * ids_stride + column, mask=(column < ROW.K) & leads).to(tl.int32)
    weights = tl.load(tokens.weights + token * weights_stride + column, mask=(column < ROW.K) & leads)
    return values, scale, ids, weights.to(tl.int32, bitcast=True)


@triton.jit
def _store_token(out_ptr, out_scale_ptr, row, parts, WORDS, SCALES, ROW):
    """Store the parts of a token, as `_load_token` returns them, in its row."""
    values, scale, ids, weights = parts
    group, column = tl.arange(0, SCALES.GROUPS), tl.arange(0, ROW.COLUMNS)
    word = tl.program_id(1) * WORDS.BLOCK + tl.arange(0, WORDS.BLOCK)
    leads = tl.program_id(1) == 0
    SCALE_BYTES: tl.constexpr = out_scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    row_ptr = out_ptr + row * (ROW.UNITS * 4)
    tl.store(row_ptr + word, values, mask=word < WORDS.ROW)
    if SCALES.G > 0:
        row_scale_ptr = out_scale_ptr + row * (ROW.UNITS * 16 // SCALE_BYTES) + WORDS.ROW * 4 // SCALE_BYTES
        tl.store(row_scale_ptr + group, scale, mask=(group < SCALES.G) & leads)
    tl.store(row_ptr + ROW.IDS + column, ids, mask=(column < ROW.K) & leads)
    tl.store(row_ptr + ROW.IDS + ROW.K + column, weights, mask=(column < ROW.K) & leads)


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
    token, rank = tl.program_id(0).to(tl.int64), tl.arange(0, TO.RANKS)
    place = tl.load(place_ptr + token * TO.R + rank, mask=rank < TO.R, other=-1)
    row = tl.load(block_start_ptr + token // TO.TOKENS * TO.R + rank, mask=place >= 0, other=0)
    row = tl.where(place >= 0, row + place, -1)
    leads = tl.program_id(1) == 0
    tl.store(token_to_row_ptr + token * TO.R + rank, row, mask=(rank < TO.R) & leads)
    strides = x_stride, scale_token_stride, scale_group_stride, ids_stride, weights_stride
    parts = _load_token(tokens, token, strides, WORDS, SCALES, ROW)
    for r in range(TO.R):
        to = tl.max(tl.where(rank == r, row, -1), 0).to(tl.int64)
        if to >= 0:
            _store_token(out_ptr, out_scale_ptr, to, parts, WORDS, SCALES, ROW)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_physical",
        "layer",
        "settings",
        "x_stride",
        "scale_token_stride",
        "scale_group_stride",
        "ids_stride",
        "weights_stride",
    ]
)
def _write_message_kernel(
    tokens,  # SentTokens
    message,  # Message, out
    num_rows,  # T
    num_physical,
    fingerprint: tl.int64,
    layer,
    settings,
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    WORDS,  # `permute.Words`; `x_stride` is in its units
    SCALES,  # `permute.ScaleGroups`
    ROW,  # WireRow
    HEAD: tl.constexpr,  # rows that the header takes
):
    """Copy BLOCK value words of a token to its row; its first program also writes scales, ids and weights.

    Token t is row HEAD + t, also one without an expert: its ids say so. The program behind those of the last token
    counts bad ids and writes the header.
    """
    token, live = tl.program_id(0).to(tl.int64), num_rows
    if message.live is not None:
        live = tl.load(message.live)
    if token < num_rows:
        if token < live:
            strides = x_stride, scale_token_stride, scale_group_stride, ids_stride, weights_stride
            parts = _load_token(tokens, token, strides, WORDS, SCALES, ROW)
            _store_token(message.words, message.scales, HEAD + token, parts, WORDS, SCALES, ROW)
    elif tl.program_id(1) == 0:
        index, column = tl.arange(0, 64)[:, None], tl.arange(0, ROW.COLUMNS)[None, :]
        bad = tl.zeros([64, ROW.COLUMNS], tl.int32)
        bad_id = tl.zeros([64, ROW.COLUMNS], tl.int32) + INT32_MIN
        for start in range(0, num_rows, 64):
            row = (start + index).to(tl.int64)
            inside = (row < num_rows) & (row < live) & (column < ROW.K)
            ids = tl.load(tokens.ids + row * ids_stride + column, mask=inside, other=-1)
            odd = (ids < -1) | (ids >= num_physical)
            bad += odd.to(tl.int32)
            bad_id = tl.maximum(bad_id, tl.where(odd, clamp_to_int32(ids), INT32_MIN))
        num_bad = tl.sum(tl.sum(bad, 1), 0)
        worst, zero = tl.max(tl.max(bad_id, 1), 0), tl.full([], 0, tl.int64)
        tl.store(message.header + ROWS, zero + live)
        tl.store(message.header + NUM_TOKENS, zero + live)
        tl.store(message.header + REFUSED, zero + ((live < 0) | (live > num_rows)).to(tl.int64))
        tl.store(message.header + BAD_IDS, zero + num_bad)
        tl.store(message.header + FINGERPRINT, zero + fingerprint)
        tl.store(message.header + PAIRS, zero)
        tl.store(message.header + BAD_ID, zero + tl.where(num_bad > 0, worst, 0))
        tl.store(message.header + LAYER, zero + layer)
        tl.store(message.header + SETTINGS, zero + settings)


@triton.jit
def _find_bad_round(read, stride, FROM):
    """Return whether the headers of all ranks, `stride` int64 words apart, do not go together; by 1 or 0."""
    rank = tl.arange(0, FROM.RANKS)
    is_rank = rank < FROM.R
    word_ptr, own_ptr = read.headers + rank * stride, read.headers + FROM.OWN * stride
    odd = tl.load(word_ptr + REFUSED, mask=is_rank, other=0) | tl.load(word_ptr + BAD_IDS, mask=is_rank, other=0)
    odd = (odd != 0) | (tl.load(word_ptr + FINGERPRINT, mask=is_rank, other=0) != tl.load(own_ptr + FINGERPRINT))
    odd |= tl.load(word_ptr + LAYER, mask=is_rank, other=0) != tl.load(own_ptr + LAYER)
    odd |= tl.load(word_ptr + SETTINGS, mask=is_rank, other=0) != tl.load(own_ptr + SETTINGS)
    return tl.max((odd & is_rank).to(tl.int32), 0)


@triton.jit
def _keep_bad_round(read, stride, FROM):
    """Make the row of NaN, and keep the headers unless those of another round are kept. By one program."""
    rank = tl.arange(0, FROM.RANKS)
    is_rank, word_ptr = rank < FROM.R, read.headers + rank * stride
    for start in range(0, FROM.HIDDEN, 1024):
        value = start + tl.arange(0, 1024)
        tl.store(read.nan + value, float("nan"), mask=value < FROM.HIDDEN)
    if tl.load(read.kept + FROM.R * FROM.WORDS) == 0:
        for word in tl.static_range(FROM.WORDS):
            tl.store(read.kept + rank * FROM.WORDS + word, tl.load(word_ptr + word, mask=is_rank), mask=is_rank)
        tl.debug_barrier()  # every warp has seen that nothing was kept
        tl.store(read.kept + FROM.R * FROM.WORDS, 1)


@triton.jit
def _read_rows(read, block, bad, height, num_tokens, num_physical, FROM, ROW):
    """Store the ids of rows `block` of all messages, and the columns of the tokens of these numbers."""
    rank, column = tl.arange(0, FROM.RANKS), tl.arange(0, ROW.COLUMNS)
    stride = height.to(tl.int64) * (ROW.UNITS * 2)
    source, row = block // height, block % height
    count = tl.load(read.headers + source * stride + ROWS, mask=source < FROM.R, other=0)
    is_token = (row >= FROM.HEAD) & (row - FROM.HEAD < count) & (bad == 0)
    inside = (source < FROM.R)[:, None] & (column < ROW.K)[None, :]
    ids_ptr = read.words + block[:, None] * (ROW.UNITS * 4) + ROW.IDS + column[None, :]
    ids = tl.load(ids_ptr, mask=inside & is_token[:, None], other=-1)
    tl.store(read.ids + block[:, None] * ROW.K + column[None, :], ids, mask=inside)
    first = FROM.OWN * height.to(tl.int64) + FROM.HEAD
    sent = (block < num_tokens) & (block < tl.load(read.headers + FROM.OWN * stride + ROWS))
    own_row_ptr = read.words + (first + block) * (ROW.UNITS * 4) + ROW.IDS
    has = tl.zeros([FROM.ROWS_AT_ONCE, FROM.RANKS], tl.int1)
    for k in range(ROW.K):
        expert = tl.load(own_row_ptr + k, mask=sent, other=-1)
        owner = tl.load(read.owner + expert, mask=(expert >= 0) & (expert < num_physical), other=-1)
        has |= owner[:, None] == rank[None, :]
    rows = tl.where(has, rank[None, :] * height + FROM.HEAD + block[:, None], -1)
    rows = tl.where(rank[None, :] == FROM.R, tl.where(bad != 0, FROM.R * height, -1), rows)
    inside = (block < num_tokens)[:, None] & (rank <= FROM.R)[None, :]
    tl.store(read.columns + block[:, None] * (FROM.R + 1) + rank[None, :], rows, mask=inside)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "num_physical",
        "first",
        "last",
        "weights_stride",
        "capacity",
        "alignment",
    ]
)
def _read_messages_kernel(
    read,  # ReadMessages
    placed,  # `permute.Placed`, whose ids are those of `read`; all None to read only
    num_rows,  # of a message, behind its header
    num_tokens,
    num_physical,
    first,
    last,
    weights_stride,
    capacity,
    alignment,
    FROM,  # MessageShape
    ROW,  # WireRow
    IDS,  # `permute.Ids`
    LISTS,  # Lists
):
    """Leave out rows that are no tokens, and all rows of a round whose headers do not go together, which gives NaN.

    With `placed` also what `permute._merge_and_place_kernel` stores, by one program.
    """
    height = FROM.HEAD + num_rows
    stride = height.to(tl.int64) * (ROW.UNITS * 2)
    bad = _find_bad_round(read, stride, FROM)
    if (tl.program_id(0) == 0) & (bad != 0):
        _keep_bad_round(read, stride, FROM)
    index = tl.arange(0, FROM.ROWS_AT_ONCE)
    if placed.ids is None:
        block = tl.program_id(0).to(tl.int64) * FROM.ROWS_AT_ONCE + index
        _read_rows(read, block, bad, height, num_tokens, num_physical, FROM, ROW)
    else:
        for start in range(0, height * FROM.R, FROM.ROWS_AT_ONCE):
            _read_rows(read, (start + index).to(tl.int64), bad, height, num_tokens, num_physical, FROM, ROW)
        tl.debug_barrier()  # ids of a row are read by other threads
        sizes = height * FROM.R, first, last, ROW.K, weights_stride
        merge_and_place(placed, sizes, capacity, alignment, IDS, LISTS.EXPERTS, LISTS.BLOCKS, LISTS.BATCHED)
