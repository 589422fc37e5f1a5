"""The sums of a tile whose weights are stored narrower than the rows of x, and decoded in registers.

Letters: K columns that a GEMM reduces over, N columns of its result, W rows of its weights, V stored values of a row, G
scales of a row in a step over K, R rows of weights in a tile: 2 * BLOCK_N if they are of a gate and an up half.

With SWAP decoded weights stay in registers: they are the left operand of the tensor core's product. Its fragments give
a thread two neighbors in a row, and two more eight columns further: single bytes, which it would read from shared
memory one by one, and from the same banks as its neighbors. If SHUFFLED, K is summed in another order, in which a
thread's weights are 16 neighboring bytes.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_hip

from ep_moe.kernels.device import prefetch, use
from ep_moe.kernels.gemm.arguments import WeightRows
from ep_moe.kernels.gemm.group_words import as_bits, from_bits, load_numbers, number_places
from ep_moe.kernels.gemm.pairs import (
    decode_float8_words,
    decode_int8_words,
    decode_words,
    scale_pairs,
    zero_pairs,
)
from ep_moe.kernels.gemm.tokens import load_rows, order_columns
from ep_moe.kernels.gemm.weights import decode, load_stored, scale_offsets, scale_values, spread
from ep_moe.kernels.numerics import INTERPRET

_FEW_ROWS = tl.constexpr(32)  # of a tile: its products are short, and their sums take few registers
_SECTOR = tl.constexpr(32)  # bytes


@triton.jit
def _load_group(ptr, w, k, SCALES, CODES):
    """Load scales, or zero points, for the weights of the step over K that begins at k: [R, G]; zeros out of bounds."""
    group = k // SCALES.GROUP_K
    groups_k = tl.cdiv(w.K, SCALES.GROUP_K)
    if CODES.GROUPS == 1:  # one for each row: as a column it would fix the layout of the weights
        return tl.load(ptr + w.offsets + group, mask=w.mask & (group < groups_k), other=0.0)[:, None]
    else:
        groups = group + tl.arange(0, CODES.GROUPS)[None, :]
        mask = w.mask[:, None] & (groups < groups_k)
        return tl.load(ptr + w.offsets[:, None] + groups, mask=mask, other=0.0)


@triton.jit
def _prefetch(ptr, w, SCALES):
    """Bring the scales, or zero points, of rows of weights into the L2 cache: each step reads a few bytes of them."""
    groups_k = tl.cdiv(w.K, SCALES.GROUP_K)
    first = ptr + tl.where(w.mask, w.offsets, 0)
    for group in range(0, groups_k, _SECTOR // (ptr.dtype.element_ty.primitive_bitwidth // 8)):
        prefetch(first + group)


@triton.jit
def _load_numbers(
    ptr, places, w, step, part: tl.constexpr, LOADS: tl.constexpr, AS_BITS: tl.constexpr, TILE, SCALES, CODES
):
    """Load scales, or zero points, of the product that begins at column step + part * BLOCK_K: [R, S], as they are
    stored, or AS_BITS, the lowest ones of int32.

    Args:
        places: of `number_places`. LOADS: as `Codes.SCALES`.
    """
    if LOADS == "single":
        numbers = _load_group(ptr, w, step + part * TILE.BLOCK_K, SCALES, CODES)
        return as_bits(numbers) if AS_BITS else numbers
    else:
        bits = load_numbers(ptr, places, w, step, part, LOADS, TILE, SCALES, CODES)
        return bits if AS_BITS else from_bits(bits, ptr.dtype.element_ty)


@triton.jit
def _load_groups(operands, places, w, step, part: tl.constexpr, dtype: tl.constexpr, TILE, SCALES, CODES):
    """Load what decodes the weights of a product, as `_load_numbers`: scales, if "fold", and zero points, if ZERO.

    Returns: [R, S] each, prepared for `_decode`; each in place of the other if that is not needed, or 1.0.
    """
    scale_ptr = operands.w_scale
    if SCALES.WEIGHT == "fold":
        scale = _load_numbers(scale_ptr, places[0], w, step, part, CODES.SCALES, CODES.PAIRS, TILE, SCALES, CODES)
        if CODES.PAIRS:
            scale = scale_pairs(scale, scale_ptr.dtype.element_ty, dtype, CODES)
    if CODES.ZERO:
        zero = _load_numbers(operands.w_zero, places[1], w, step, part, CODES.ZEROS, CODES.PAIRS, TILE, SCALES, CODES)
        if CODES.PAIRS:
            zero = zero_pairs(zero, dtype)
    if SCALES.WEIGHT == "fold" and CODES.ZERO:
        return scale, zero
    elif SCALES.WEIGHT == "fold":
        return scale, scale
    elif CODES.ZERO:
        return zero, zero
    else:
        return 1.0, 1.0


@triton.jit
def _number_places(operands, w, CODES):
    """`number_places` of the scales and of the zero points; any of those that are not loaded in words."""
    scale_places = 0, 0
    zero_places = 0, 0
    if CODES.SCALES != "single":
        scale_places = number_places(operands.w_scale, w, CODES.SCALES, CODES)
    if CODES.ZEROS != "single":
        zero_places = number_places(operands.w_zero, w, CODES.ZEROS, CODES)
    return scale_places, zero_places


@triton.jit
def _decode(stored, scale, zero, dtype: tl.constexpr, TILE, SCALES, CODES):
    """Weights [R, BLOCK_K] in `dtype`, in the order of `order_columns` if SHUFFLED; stored are words if PAIRS."""
    rows: tl.constexpr = stored.shape[0]
    width: tl.constexpr = stored.shape[1]
    if CODES.PAIRS and CODES.PACKED == 1:
        if CODES.KIND == "int8":
            numbers = decode_int8_words(stored, dtype)
        else:
            numbers = decode_float8_words(stored, spread(scale, width))
        blocks = tl.reshape(numbers, [rows, TILE.BLOCK_K // 64, 4, 4, 2, 2])  # thread, word, byte: bits 0, 1
        return tl.reshape(tl.permute(blocks, 0, 1, 3, 5, 2, 4), [rows, TILE.BLOCK_K])
    elif CODES.PAIRS:
        if SCALES.WEIGHT == "fold":
            scale = spread(scale, width)
        if CODES.ZERO:
            zero = spread(zero, width)
        else:
            zero = zero_pairs(tl.full([1, 1], 8, tl.int32), dtype)
        w = decode_words(stored, scale, zero, dtype, SCALES, CODES)
        blocks = tl.reshape(w, [rows, TILE.BLOCK_K // 128, 4, 4, 2, 2, 2])  # thread, word, code: bits 2, 0, 1
        return tl.reshape(tl.permute(blocks, 0, 1, 3, 5, 6, 2, 4), [rows, TILE.BLOCK_K])
    else:
        w = decode(stored, scale, zero, dtype, SCALES, CODES)
        return order_columns(w, CODES.PACKED) if CODES.SHUFFLED else w


@triton.jit
def _add_product(acc, x, w, TILE):
    """acc plus the product of x [BLOCK_M, BLOCK_K] and w [R, BLOCK_K]: [BLOCK_M, R], or its transpose with SWAP."""
    if INTERPRET and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    if TILE.SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _wait_for(acc, TILE):
    """acc, after the product that it is the result of has been computed.

    Triton would leave the products of a step running on Hopper while the next step's weights are decoded into registers
    that they still read (triton-lang/triton issue 9433, and 11781 for the assembler). A use of their sums, which this
    is, makes it wait. On later chips sums are not in registers, and on earlier ones no product is left running.
    """
    if INTERPRET or not TILE.SWAP or cuda_capability_geq(10) or is_hip():
        return acc
    else:
        return use(acc)


@triton.jit
def _accumulate(operands, x_rows, w, ROWS: tl.constexpr, TILE, SCALES, CODES):
    """Sum over K, of TileRows and WeightRows: [BLOCK_M, ROWS] float32, or its transpose with SWAP."""
    dtype: tl.constexpr = operands.x.dtype.element_ty
    FEW: tl.constexpr = TILE.BLOCK_M <= _FEW_ROWS
    # read a step ahead: a step's groups are too small for asynchronous copies
    EARLY: tl.constexpr = not CODES.SHUFFLED and (SCALES.WEIGHT == "fold" or CODES.ZERO)
    if TILE.SWAP:
        acc = tl.zeros([ROWS, TILE.BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([TILE.BLOCK_M, ROWS], tl.float32)
    x_ptrs = x_rows.ptrs + tl.arange(0, TILE.BLOCK_K)[None, :]
    IN_WORD: tl.constexpr = 4 if CODES.PAIRS else 1
    PLACES: tl.constexpr = TILE.BLOCK_K // CODES.PACKED // IN_WORD
    place = tl.arange(0, PLACES)[None, :]
    w_ptrs = w.ptrs + place
    places = _number_places(operands, w, CODES)
    if EARLY:
        groups = _load_groups(operands, places, w, 0, 0, dtype, TILE, SCALES, CODES)
    if CODES.SHUFFLED and not INTERPRET:  # words are copied early enough
        if (SCALES.WEIGHT == "fold" or SCALES.WEIGHT == "block") and CODES.SCALES == "single":
            _prefetch(operands.w_scale, w, SCALES)
        if CODES.ZERO and CODES.ZEROS == "single":
            _prefetch(operands.w_zero, w, SCALES)
    for step in range(0, w.K, CODES.PARTS * TILE.BLOCK_K):
        for part in tl.static_range(CODES.PARTS):
            k = step + part * TILE.BLOCK_K
            if CODES.ROWS_PREPARED:
                x = tl.load(x_ptrs)
            else:
                x = load_rows(x_ptrs, x_rows.mask, w.K - k, TILE)
                if CODES.SHUFFLED:
                    x = order_columns(x, CODES.PACKED)
            stored = load_stored(w_ptrs, w.mask, place < w.stride - k // (CODES.PACKED * IN_WORD), TILE)
            if EARLY:
                scale, zero = groups
                groups = _load_groups(operands, places, w, step, part + 1, dtype, TILE, SCALES, CODES)
            else:
                scale, zero = _load_groups(operands, places, w, step, part, dtype, TILE, SCALES, CODES)
            values = _decode(stored, scale, zero, dtype, TILE, SCALES, CODES)
            if SCALES.WEIGHT == "block":
                product = _add_product(tl.zeros_like(acc), x, values, TILE)
                w_scale = _load_numbers(
                    operands.w_scale, places[0], w, step, part, CODES.SCALES, False, TILE, SCALES, CODES
                )
                w_scale = scale_values(w_scale)
                acc += product * (w_scale if TILE.SWAP else tl.trans(w_scale))
            elif CODES.SHUFFLED and FEW:  # else Triton synchronizes each instruction of a product, as for a sum of both
                if part == 0:
                    product = _add_product(tl.zeros_like(acc), x, values, TILE)
                else:
                    product = _add_product(product, x, values, TILE)
                if part == CODES.PARTS - 1:
                    acc = tl.fma(product, tl.full(acc.shape, 1.0, tl.float32), acc)
            else:
                acc = _wait_for(_add_product(acc, x, values, TILE), TILE)
            x_ptrs += TILE.BLOCK_K
            w_ptrs += PLACES
    return acc


@triton.jit
def accumulate_decoded(
    operands,  # x has no scales of groups
    x_rows,  # TileRows
    tile,  # TileColumns
    K,
    sizes,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """The sums over K of a tile, [BLOCK_M, BLOCK_N] float32: of the gate and the up half if GATED, else twice.

    Eight rows of the gate half and eight of the up half alternate in one product: in its result a thread has both of a
    pair, and every warp of a large tile decodes its own rows.
    """
    N = sizes.N
    w_stride = sizes.w_stride
    halves = 2 if EPILOGUE.GATED else 1
    ROWS: tl.constexpr = TILE.BLOCK_N * (2 if EPILOGUE.GATED else 1)
    row = tl.arange(0, ROWS)
    if EPILOGUE.GATED:
        columns = tile.first + row // 16 * 8 + row % 8
        if EPILOGUE.ALTERNATING:
            row = 2 * columns + row // 8 % 2
        else:
            row = columns + row // 8 % 2 * N
    else:
        columns = tile.first + row
        row = columns
    w_ptr = operands.w
    if CODES.PAIRS:  # words of four or eight codes
        w_ptr = tl.multiple_of(w_ptr.to(tl.pointer_type(tl.int32)), 16)
        w_stride = w_stride // 4
    offsets = scale_offsets(tile.expert, tile.first, row, halves * N, K, SCALES)
    w_ptrs = w_ptr + (tile.expert.to(tl.int64) * halves * N + row[:, None]) * w_stride
    w = WeightRows(w_ptrs, w_stride, offsets, columns < N, K)
    acc = _accumulate(operands, x_rows, w, ROWS, TILE, SCALES, CODES)
    if TILE.SWAP:
        acc = tl.trans(acc)
    if EPILOGUE.GATED:
        turns = tl.reshape(acc, [TILE.BLOCK_M, TILE.BLOCK_N // 8, 2, 8])
        pairs = tl.reshape(tl.permute(turns, 0, 1, 3, 2), [TILE.BLOCK_M, TILE.BLOCK_N, 2])
        return tl.split(pairs)
    else:
        return acc, acc
