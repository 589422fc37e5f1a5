"""The two GEMMs of all experts on Hopper with weights that are decoded in registers, as persistent kernels.

Letters: L local experts, K columns that a GEMM reduces over, N columns of its result, W rows of its weights, Q row
tiles of all experts, G numbers of groups of a row in a step.

A program has three partitions, as in `ep_moe.kernels.hopper.grouped`. Weights are the left operand: each warp group
decodes 64 of a tile's 128 rows of weights, eight of the gate and eight of the up half in turn, or of two neighboring
blocks of 64 columns. While the tensor core multiplies a step, the warp groups decode the next one; with few rows two
programs share an SM, and take turns.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ep_moe.kernels.gemm.arguments import TileColumns, TileRows
from ep_moe.kernels.gemm.pairs import decode_float8_words, decode_int8_words, decode_words, scale_pairs, zero_pairs
from ep_moe.kernels.hopper.epilogue import activate_sums, finish_sums
from ep_moe.kernels.hopper.tiles import allocate_tiles, draw_tile, next_tile, put_tile
from ep_moe.kernels.numerics import E4M3_MAX_EXPONENT, absmax, e4m3_value, e8m0_byte, e8m0_value, round_to, to_mxfp8

_async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.8 on
HALF = gl.constexpr(64)  # rows of weights in a half of a tile
_PART = gl.constexpr(32)  # of which a warp group decodes these
_MOVED_ROWS = gl.constexpr(64)  # of a result, that are moved between threads at a time
WORDS = gl.constexpr(16)  # of a row in a step


class DecodedPipeline(NamedTuple):
    """The constants of a GEMM. Sizes are among them, since a worker keeps its arguments in registers."""

    N: gl.constexpr
    W: gl.constexpr
    K: gl.constexpr
    BLOCK_K: gl.constexpr  # columns of a step over K: those of 16 words
    STEPS: gl.constexpr  # over K
    ROW_WORDS: gl.constexpr  # of a row of weights
    COLUMN_TILES: gl.constexpr  # of 64 columns of the gate and the up half, or of 128
    BLOCK_M: gl.constexpr
    GROUP_M: gl.constexpr  # row tiles that cover all columns before the next ones
    FIRST: gl.constexpr  # w13, not w2: reads prepared rows and stores the intermediate
    OUT_STRIDE: gl.constexpr  # between rows of the result; whole steps of the second GEMM if columns are ordered
    STAGES: gl.constexpr  # steps whose operands are loaded ahead
    AHEAD: gl.constexpr  # decode a step while the one before is multiplied; else programs that share an SM take turns
    WORKER_REGISTERS: gl.constexpr  # of a thread of the second warp group
    ALPHA: gl.constexpr  # of the activation of all experts, unless each has its own
    BETA: gl.constexpr
    LIMIT: gl.constexpr


class DecodedBuffers(NamedTuple):
    """Shared memory: the operands of STAGES steps, and barriers between who fills and who empties them."""

    x: Any  # [STAGES, BLOCK_M, BLOCK_K]
    w: Any  # [2 * STAGES, 64, 16] words
    full: Any  # [STAGES, 1]
    empty: Any  # [STAGES, 1]


@gluon.constexpr_function
def words_layout():
    """The registers of a warp group's 32 rows of words: a thread has four neighbors of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 16],
    )


@gluon.constexpr_function
def groups_layout(G):
    """`words_layout` with the words of each of G groups apart: [32, G, 16 / G]."""
    words = words_layout()
    bases = [
        [[row, word // (16 // G), word % (16 // G)] for row, word in of]
        for of in (words.reg_bases, words.lane_bases, words.warp_bases)
    ]
    return gl.DistributedLinearLayout(*bases, block_bases=[], shape=[32, G, 16 // G])


@gluon.constexpr_function
def sums_layout(BLOCK_M):
    """The registers of a warp group's sums, transposed: [64, BLOCK_M]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])


@gluon.constexpr_function
def _integer_of(dtype):
    return gl.int16 if dtype.primitive_bitwidth == 16 else gl.int8


@gluon.jit
def _load_tiles(x_desc, w_desc, rows, tiles, buffers, drawn, PIPE, EPILOGUE):
    """Load the operands of every tile that this program draws, until none is left; as `load_operands`."""
    X_BYTES: gl.constexpr = PIPE.BLOCK_M * PIPE.BLOCK_K * x_desc.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = 2 * HALF * WORDS * 4
    total = gl.load(tiles.num_tiles) * PIPE.COLUMN_TILES
    t = gl.program_id(0)
    step = 0
    number = 0
    while t < total:
        following, expert, left, listed, batch_row, column_tile = draw_tile(t, rows, tiles, PIPE)
        row = listed * PIPE.BLOCK_M
        put_tile(drawn, number, expert, left, row, row if PIPE.FIRST else batch_row, column_tile)
        number += 1
        w_row = column_tile * (HALF if EPILOGUE.GATED else 2 * HALF)
        if EPILOGUE.ALTERNATING:  # a row of the descriptor has a gate row and then the up row of the same column
            w_row += expert * PIPE.N
            other_w_row = w_row
        else:
            w_row += expert * PIPE.W
            other_w_row = w_row + (PIPE.N if EPILOGUE.GATED else HALF)
        for k in range(PIPE.STEPS):
            stage = step % PIPE.STAGES
            full = buffers.full.index(stage)
            mbarrier.wait(buffers.empty.index(stage), ((step // PIPE.STAGES) & 1) ^ 1)
            mbarrier.expect(full, X_BYTES + W_BYTES)
            word = k * WORDS
            _async_load(w_desc, [w_row, word], full, buffers.w.index(2 * stage))
            other_word = word + (PIPE.ROW_WORDS if EPILOGUE.ALTERNATING else 0)
            _async_load(w_desc, [other_w_row, other_word], full, buffers.w.index(2 * stage + 1))
            _async_load(x_desc, [row, k * PIPE.BLOCK_K], full, buffers.x.index(stage))
            step += 1
        t = following
    put_tile(drawn, number, 0, 0, 0, 0, 0)


@gluon.jit
def _numbers(ptr, offsets, k, PIPE, SCALES, CODES):
    """Scales, or zero points, of the step from column k on, as they are stored: int32 [32, G]; zeros beyond K."""
    IN_ROW: gl.constexpr = (PIPE.K + SCALES.GROUP_K - 1) // SCALES.GROUP_K
    LAYOUT: gl.constexpr = gl.SliceLayout(2, groups_layout(CODES.GROUPS))
    group = k // SCALES.GROUP_K + gl.arange(0, CODES.GROUPS, gl.SliceLayout(0, LAYOUT))
    bits = ptr.to(gl.pointer_type(_integer_of(ptr.dtype.element_ty)), bitcast=True)
    return gl.load(bits + offsets[:, None] + group[None, :], mask=(group < IN_ROW)[None, :], other=0).to(gl.int32)


@gluon.jit
def _offsets(expert, w_rows, PIPE, SCALES):
    """Of the first scale, or zero point, of these rows of weights."""
    IN_ROW: gl.constexpr = (PIPE.K + SCALES.GROUP_K - 1) // SCALES.GROUP_K
    BLOCKS: gl.constexpr = (PIPE.W + SCALES.GROUP_N - 1) // SCALES.GROUP_N
    block = gl.minimum(w_rows // SCALES.GROUP_N, BLOCKS - 1)  # of rows beyond W: any
    return expert.to(gl.int64) * (BLOCKS * IN_ROW) + block * IN_ROW


@gluon.jit
def _spread(numbers, CODES):
    """Each number for all words of its group: int32 [32, 16]."""
    zeros = gl.zeros([_PART, CODES.GROUPS, WORDS // CODES.GROUPS], gl.int32, groups_layout(CODES.GROUPS))
    wide = gl.reshape(numbers[:, :, None] + zeros, [_PART, WORDS])
    return gl.convert_layout(wide, words_layout(), assert_trivial=True)


@gluon.jit
def _decode_half(words, scale, zero, operands, DTYPE: gl.constexpr, SCALES, CODES):
    """A warp group's 32 rows of one half, from words: [4, 8, 4, 4] by warp, row of it, thread, word, and bits of the
    place in a word."""
    if SCALES.WEIGHT == "fold":
        scale = _spread(scale_pairs(scale, operands.w_scale.dtype.element_ty, DTYPE, CODES), CODES)
    if CODES.PACKED == 1:
        if CODES.KIND == "int8":
            values = decode_int8_words(words, DTYPE)
        else:
            values = decode_float8_words(words, scale)
        return gl.reshape(values, [4, 8, 4, 4, 2, 2])
    else:
        if CODES.ZERO:
            zero = _spread(zero_pairs(zero, DTYPE), CODES)
        else:
            zero = zero_pairs(gl.full([_PART, WORDS], 8, gl.int32, words_layout()), DTYPE)
        return gl.reshape(decode_words(words, scale, zero, DTYPE, SCALES, CODES), [4, 8, 4, 4, 2, 2, 2])


@gluon.jit
def _decode_step(group: gl.constexpr, step, buffers, numbers, operands, PIPE, SCALES, CODES):
    """The weights of a step, in the order of `order_columns`: [64, BLOCK_K], as an operand in registers."""
    stage = step % PIPE.STAGES
    mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
    DTYPE: gl.constexpr = buffers.x.dtype
    FRAGMENT: gl.constexpr = gl.DotOperandLayout(0, sums_layout(PIPE.BLOCK_M), 2)
    scale, other_scale, zero, other_zero = numbers
    words = buffers.w.index(2 * stage).slice(_PART * group, _PART, dim=0).load(words_layout())
    other_words = buffers.w.index(2 * stage + 1).slice(_PART * group, _PART, dim=0).load(words_layout())
    values = _decode_half(words, scale, zero, operands, DTYPE, SCALES, CODES)
    other_values = _decode_half(other_words, other_scale, other_zero, operands, DTYPE, SCALES, CODES)
    both = gl.join(values, other_values)
    if CODES.PACKED == 1:
        both = gl.permute(both, (0, 6, 1, 3, 5, 2, 4))
    else:
        both = gl.permute(both, (0, 7, 1, 3, 5, 6, 2, 4))
    weights = gl.reshape(both, [HALF, PIPE.BLOCK_K])
    return gl.convert_layout(weights, FRAGMENT, assert_trivial=True)


@gluon.jit
def _start_product(weights, step, buffers, sums, PIPE):
    """Add weights [64, BLOCK_K] times the rows of this step to the sums [64, BLOCK_M], which are on their way."""
    x = buffers.x.index(step % PIPE.STAGES).permute((1, 0))
    return warpgroup_mma(weights, x, sums, is_async=True)


@gluon.jit
def _finish_product(product, weights, step, buffers, PIPE):
    """The sums, once they are there; the step's buffers may be filled again."""
    sums = warpgroup_mma_wait(0, deps=(product,))
    # keeps their registers until here: the compiler does not know that products in flight read them
    gl.inline_asm_elementwise("", "=r,0", [weights], weights.dtype, False, 2)
    mbarrier.arrive(buffers.empty.index(step % PIPE.STAGES), count=1)
    return sums


@gluon.jit
def _load_numbers(operands, offsets, other_offsets, k, PIPE, SCALES, CODES):
    """Scales of both halves, and zero points of both; scalars that are not read in place of those that are absent."""
    scale, other_scale = 0, 0
    zero, other_zero = 0, 0
    if SCALES.WEIGHT == "fold":
        scale = _numbers(operands.w_scale, offsets, k, PIPE, SCALES, CODES)
        other_scale = _numbers(operands.w_scale, other_offsets, k, PIPE, SCALES, CODES)
    if CODES.ZERO:
        zero = _numbers(operands.w_zero, offsets, k, PIPE, SCALES, CODES)
        other_zero = _numbers(operands.w_zero, other_offsets, k, PIPE, SCALES, CODES)
    return scale, other_scale, zero, other_zero


@gluon.jit
def _multiply(
    group: gl.constexpr, step, buffers, operands, expert, w_row, TO_OTHER: gl.constexpr, PIPE, SCALES, CODES, EPILOGUE
):
    """Multiply a tile over K. Returns the sums, transposed [64, BLOCK_M], and the step after the last."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, groups_layout(CODES.GROUPS)))
    part = w_row + _PART * group + gl.arange(0, _PART, LAYOUT)
    if EPILOGUE.ALTERNATING:
        offsets = _offsets(expert, 2 * part, PIPE, SCALES)
        other_offsets = _offsets(expert, 2 * part + 1, PIPE, SCALES)
    else:
        offsets = _offsets(expert, part, PIPE, SCALES)
        other_offsets = _offsets(expert, part + TO_OTHER, PIPE, SCALES)
    sums = gl.zeros([HALF, PIPE.BLOCK_M], gl.float32, sums_layout(PIPE.BLOCK_M))
    numbers = _load_numbers(operands, offsets, other_offsets, 0, PIPE, SCALES, CODES)
    if PIPE.AHEAD:
        following = _load_numbers(operands, offsets, other_offsets, PIPE.BLOCK_K, PIPE, SCALES, CODES)
        weights = _decode_step(group, step, buffers, numbers, operands, PIPE, SCALES, CODES)
        for k in range(PIPE.STEPS - 1):
            product = _start_product(weights, step, buffers, sums, PIPE)
            numbers = following
            following = _load_numbers(operands, offsets, other_offsets, (k + 2) * PIPE.BLOCK_K, PIPE, SCALES, CODES)
            next_weights = _decode_step(group, step + 1, buffers, numbers, operands, PIPE, SCALES, CODES)
            sums = _finish_product(product, weights, step, buffers, PIPE)
            weights = next_weights
            step += 1
        product = _start_product(weights, step, buffers, sums, PIPE)
        sums = _finish_product(product, weights, step, buffers, PIPE)
        step += 1
    else:
        for k in range(PIPE.STEPS):
            weights = _decode_step(group, step, buffers, numbers, operands, PIPE, SCALES, CODES)
            product = _start_product(weights, step, buffers, sums, PIPE)
            numbers = _load_numbers(operands, offsets, other_offsets, (k + 1) * PIPE.BLOCK_K, PIPE, SCALES, CODES)
            sums = _finish_product(product, weights, step, buffers, PIPE)
            step += 1
    return sums, step


@gluon.jit
def _ordered_places(columns, PACKED: gl.constexpr):
    """Where these columns are in a row that is ordered by `order_columns`."""
    if PACKED == 1:
        place = columns % 4 // 2 * 8 + columns // 16 % 4 * 2 + columns % 2
        return columns // 64 * 64 + columns // 4 % 4 * 16 + place
    else:
        place = columns % 2 * 16 + columns // 2 % 2 * 8 + columns // 32 % 4 * 2 + columns // 4 % 2
        return columns // 128 * 128 + columns // 8 % 4 * 32 + place


@gluon.jit
def _store_columns(values, out, out_row, columns, left, PIPE, EPILOGUE):
    """Store the first `left` rows of values [BLOCK_M, 32] where they are: float32, or at the places of ordered columns,
    whose N columns zeros follow up to the stride."""
    if EPILOGUE.ORDER != 0:
        values = gl.where((columns < PIPE.N)[None, :], values, 0.0)
        places = _ordered_places(columns, EPILOGUE.ORDER)
        mask = columns < PIPE.OUT_STRIDE
    else:
        places = columns
        mask = columns < PIPE.N
    if EPILOGUE.REQUANTIZE == "mxfp8":
        byte = e8m0_byte(absmax(values, 1), E4M3_MAX_EXPONENT)[:, None]
        values = e4m3_value(to_mxfp8(values, byte)) * e8m0_value(byte)
    values = round_to(values, out.data.dtype.element_ty)
    row = gl.arange(0, PIPE.BLOCK_M, gl.SliceLayout(1, values.type.layout))
    ptrs = out.data + ((out_row.to(gl.int64) + row) * PIPE.OUT_STRIDE)[:, None] + places[None, :]
    gl.store(ptrs, values, mask=(row < left)[:, None] & mask[None, :])


@gluon.jit
def _store_rows(values, out, out_row, column, left, PIPE):
    """Store the first `left` rows of values [R, 32], 64 at a time, moved between threads so that each has neighbors."""
    ROWS: gl.constexpr = values.shape[0]
    if ROWS > _MOVED_ROWS:
        halves = gl.permute(gl.reshape(values, [2, ROWS // 2, _PART]), (1, 2, 0))
        upper, lower = gl.split(halves)
        _store_rows(upper, out, out_row, column, left, PIPE)
        _store_rows(lower, out, out_row + ROWS // 2, column, left - ROWS // 2, PIPE)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
        values = gl.convert_layout(round_to(values, out.data.dtype.element_ty), layout)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, _PART, gl.SliceLayout(0, layout))
        ptrs = out.data + ((out_row.to(gl.int64) + row) * PIPE.OUT_STRIDE)[:, None] + columns[None, :]
        gl.store(ptrs, values, mask=(row < left)[:, None] & (columns < PIPE.N)[None, :])


@gluon.jit
def _store(values, out, out_row, column, columns, left, PIPE, EPILOGUE):
    """Store the first `left` rows of values [BLOCK_M, 32], whose columns begin at `column`."""
    MOVES: gl.constexpr = EPILOGUE.ORDER == 0 and out.data.dtype.element_ty.primitive_bitwidth == 16
    if MOVES:
        _store_rows(values, out, out_row, column, left, PIPE)
    else:
        _store_columns(values, out, out_row, columns, left, PIPE, EPILOGUE)


@gluon.jit
def _compute_tiles(group: gl.constexpr, out, operands, scalars, buffers, drawn, PIPE, SCALES, CODES, EPILOGUE):
    """Warp group `group`: 32 of the 64 rows of each half of a tile's weights, times all of its rows."""
    WIDTH: gl.constexpr = HALF if EPILOGUE.GATED else 2 * HALF
    TO_OTHER: gl.constexpr = PIPE.N if EPILOGUE.GATED else HALF
    step = 0
    number = 0
    expert, left, in_row, out_row, column_tile = next_tile(drawn, number)
    while left > 0:
        column = column_tile * WIDTH
        sums, step = _multiply(group, step, buffers, operands, expert, column, TO_OTHER, PIPE, SCALES, CODES, EPILOGUE)
        turns = gl.reshape(gl.permute(sums, (1, 0)), [PIPE.BLOCK_M, 4, 2, 8])
        sums, other_sums = gl.split(gl.reshape(gl.permute(turns, (0, 1, 3, 2)), [PIPE.BLOCK_M, _PART, 2]))
        row = gl.arange(0, PIPE.BLOCK_M, gl.SliceLayout(1, sums.type.layout))
        columns = column + _PART * group + gl.arange(0, _PART, gl.SliceLayout(0, sums.type.layout))
        row_mask = row < left
        x_scale_ptrs = operands.x_scale
        if SCALES.X == "row":
            x_scale_ptrs += in_row + row
        x = TileRows(None, x_scale_ptrs, row_mask)
        w_rows = 2 * columns if EPILOGUE.ALTERNATING else columns
        other = w_rows + (1 if EPILOGUE.ALTERNATING else TO_OTHER)
        mask = columns < PIPE.N
        GATE_SCALE: gl.constexpr = EPILOGUE.GATED
        if GATE_SCALE:
            other_mask = mask
            scale_ptr = scalars.gate_output_scale
        else:
            other_mask = other < PIPE.N
            scale_ptr = scalars.output_scale
        tile = TileColumns(expert, None, columns, mask)
        sums = finish_sums(sums, operands, x, tile, w_rows, scale_ptr, PIPE, SCALES, CODES)
        tile = TileColumns(expert, None, columns, other_mask)
        other_sums = finish_sums(other_sums, operands, x, tile, other, scalars.output_scale, PIPE, SCALES, CODES)
        values = activate_sums(sums, other_sums, scalars, expert, PIPE, EPILOGUE)
        _store(values, out, out_row, column + _PART * group, columns, left, PIPE, EPILOGUE)
        if not EPILOGUE.GATED:
            values = activate_sums(other_sums, other_sums, scalars, expert, PIPE, EPILOGUE)
            _store(values, out, out_row, column + HALF + _PART * group, other, left, PIPE, EPILOGUE)
        number += 1
        expert, left, in_row, out_row, column_tile = next_tile(drawn, number)


@gluon.jit
def _decoded_gemm_kernel(
    x_desc,  # prepared rows, or the intermediate: [rows, >= K] in boxes of BLOCK_M x BLOCK_K
    w_desc,  # words [L * W, ROW_WORDS] in boxes of 64 x 16; [L * N, 2 * ROW_WORDS] if gate and up rows are interleaved
    operands,
    out,  # Stored
    scalars,
    rows,
    tiles,
    PIPE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """out = epilogue(w @ x), tile by tile."""
    x = gl.allocate_shared_memory(x_desc.dtype, [PIPE.STAGES, PIPE.BLOCK_M, PIPE.BLOCK_K], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [2 * PIPE.STAGES, HALF, WORDS], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [PIPE.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PIPE.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PIPE.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # one arrival of each warp group
    drawn = allocate_tiles()
    fence_async_shared()
    buffers = DecodedBuffers(x, w, full, empty)
    gl.warp_specialize(
        [
            (_compute_tiles, (0, out, operands, scalars, buffers, drawn, PIPE, SCALES, CODES, EPILOGUE)),
            (_compute_tiles, (1, out, operands, scalars, buffers, drawn, PIPE, SCALES, CODES, EPILOGUE)),
            (_load_tiles, (x_desc, w_desc, rows, tiles, buffers, drawn, PIPE, EPILOGUE)),
        ],
        [4, 1],
        [PIPE.WORKER_REGISTERS, 40],  # of the second and third partition; the first gets what is left
    )
