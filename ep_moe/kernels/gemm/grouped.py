"""The two GEMMs of all experts of a rank, as persistent kernels over the tile list.

Letters: L local experts, H hidden, I intermediate, K columns that a GEMM reduces over, N columns of its result,
W rows of its weights, V stored values of a row of weights, G scale groups, Q row tiles of all experts.

Every program processes the tiles t = program, program + programs, ...; consecutive t share an expert's weights. The
first GEMM reads the batch's rows and stores the intermediate's, in the order of the tile list; the second the reverse.

SWAP makes the weights the left operand: a tensor core's product has at least 64 rows, an expert may have fewer tokens.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
from ep_moe.kernels.gemm.activation import activate
from ep_moe.kernels.gemm.arguments import TileColumns, TileRows, WeightRows
from ep_moe.kernels.gemm.decoded import accumulate_decoded
from ep_moe.kernels.gemm.epilogue import add_bias, of_expert, scale_sums, store_tile
from ep_moe.kernels.gemm.tile_list import find_tile
from ep_moe.kernels.gemm.tokens import load_rows
from ep_moe.kernels.gemm.weights import load_stored, scale_offsets, scale_values
from ep_moe.kernels.numerics import INTERPRET, e4m3_half, has_e4m3


@triton.jit
def _multiply(acc, x, w, x_scale, w_scale, TILE, SCALES):
    """Return acc plus the product of x [BLOCK_M, BLOCK_K] and w [BLOCK_N, BLOCK_K], times the scales of this block.

    acc is [BLOCK_M, BLOCK_N], or its transpose with SWAP. fp8 products are promoted to float32 accumulators after each
    step: Hopper's tensor cores accumulate fp8 with 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    """
    if INTERPRET and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    FLOAT8: tl.constexpr = x.dtype == tl.float8e4nv
    # too narrow, or without such products; float16 represents all these numbers
    if FLOAT8 and (TILE.BLOCK_K < 32 or not has_e4m3()):
        x = e4m3_half(x)
        w = e4m3_half(w)
    elif x.dtype == tl.int8 and TILE.BLOCK_K < 32:
        x = x.to(tl.float16)
        w = w.to(tl.float16)
    if TILE.SWAP:
        left = w
        right = tl.trans(x)
    else:
        left = x
        right = tl.trans(w)
    if SCALES.WEIGHT == "block":
        product = tl.dot(left, right, input_precision="ieee").to(tl.float32)  # from int32, if x is int8
        if SCALES.VECTOR:
            if TILE.SWAP:
                return acc + product * (w_scale[:, None] * x_scale[None, :])
            else:
                return acc + product * (x_scale[:, None] * w_scale[None, :])
        elif TILE.SWAP:
            return acc + product * (x_scale * w_scale)[None, :]
        else:
            return acc + product * (x_scale * w_scale)[:, None]
    elif FLOAT8:
        return acc + tl.dot(left, right)
    else:
        return tl.dot(left, right, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def _load_weight(ptrs, operands, w, k, TILE, SCALES):
    """Load the weights [BLOCK_N, BLOCK_K] of the step over K that begins at k, and the scales of its sums, "block":
    [BLOCK_N] if VECTOR, else a scalar."""
    values = load_stored(ptrs, w.mask, tl.arange(0, TILE.BLOCK_K)[None, :] < w.K - k, TILE)
    scale = 1.0
    if SCALES.WEIGHT == "block":
        if SCALES.VECTOR:
            scale = tl.load(operands.w_scale + w.offsets + k // SCALES.GROUP_K, mask=w.mask, other=0.0)
        else:
            scale = tl.load(operands.w_scale + w.offsets + k // SCALES.GROUP_K)
        scale = scale_values(scale)
    return values, scale


@triton.jit
def _accumulate(
    operands,
    x_rows,  # TileRows
    w,  # WeightRows, of the gate if PAIR
    up_offset,  # from a gate row of w to its up row, in stored values
    up_offsets,  # `w.offsets` of the up rows
    x_scale_stride_group,
    PAIR: tl.constexpr,  # gate and up half together
    TILE,
    SCALES,
):
    """Accumulate a tile over K. Returns two [BLOCK_M, BLOCK_N] float32: gate and up if PAIR, else the result twice."""
    X_DTYPE: tl.constexpr = operands.x.dtype.element_ty
    INTEGERS: tl.constexpr = tl.int8 == X_DTYPE and SCALES.WEIGHT != "block" and TILE.BLOCK_K >= 32
    SUMS: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    if TILE.SWAP:
        acc = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_M], SUMS)
        up_acc = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_M], SUMS)
    else:
        acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_N], SUMS)
        up_acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_N], SUMS)
    up_rows = WeightRows(None, None, up_offsets, w.mask, w.K)
    x_ptrs = x_rows.ptrs + tl.arange(0, TILE.BLOCK_K)[None, :]
    w_ptrs = w.ptrs + tl.arange(0, TILE.BLOCK_K)[None, :]
    for k in range(0, w.K, TILE.BLOCK_K):
        x = load_rows(x_ptrs, x_rows.mask, w.K - k, TILE)
        if SCALES.X == "group":
            scale_ptrs = x_rows.scale_ptrs + k // SCALES.GROUP_K * x_scale_stride_group
            x_scale = tl.load(scale_ptrs, mask=x_rows.mask, other=0.0)
        else:
            x_scale = 1.0
        values, w_scale = _load_weight(w_ptrs, operands, w, k, TILE, SCALES)
        acc = _multiply(acc, x, values, x_scale, w_scale, TILE, SCALES)
        if PAIR:
            up, up_scale = _load_weight(w_ptrs + up_offset, operands, up_rows, k, TILE, SCALES)
            up_acc = _multiply(up_acc, x, up, x_scale, up_scale, TILE, SCALES)
        x_ptrs += TILE.BLOCK_K
        w_ptrs += TILE.BLOCK_K
    acc = acc.to(tl.float32)
    up_acc = up_acc.to(tl.float32)
    if TILE.SWAP:
        acc = tl.trans(acc)
        up_acc = tl.trans(up_acc)
    if PAIR:
        return acc, up_acc
    else:
        return acc, acc


@triton.jit
def _to_up(N, EPILOGUE):
    """From a gate row of w to its up row."""
    if EPILOGUE.ALTERNATING:
        return 1
    else:
        return N


@triton.jit
def _compute_tile(
    operands,
    scalars,
    x,  # TileRows
    tile,  # TileColumns
    K,
    sizes,
    x_scale_stride_group,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """Return a tile of w @ x + bias, [BLOCK_M, BLOCK_N] float32: of the gate and the up half if GATED, else twice."""
    N = sizes.N
    halves = 2 if EPILOGUE.GATED else 1
    w_rows = 2 * tile.columns if EPILOGUE.ALTERNATING else tile.columns
    if CODES.KIND != "none":
        gate, up = accumulate_decoded(operands, x, tile, K, sizes, TILE, SCALES, CODES, EPILOGUE)
    else:
        offsets = tile.first
        up_offsets = tile.first
        if SCALES.WEIGHT == "block":
            offsets = scale_offsets(tile.expert, tile.first, w_rows, halves * N, K, SCALES)
            up_offsets = offsets
            if EPILOGUE.GATED:
                up_rows = w_rows + _to_up(N, EPILOGUE)
                up_offsets = scale_offsets(tile.expert, tile.first + N, up_rows, halves * N, K, SCALES)
        w_ptrs = operands.w + (tile.expert.to(tl.int64) * halves * N + w_rows[:, None]) * sizes.w_stride
        w = WeightRows(w_ptrs, None, offsets, tile.mask, K)
        up_offset = sizes.w_stride if EPILOGUE.ALTERNATING else N.to(tl.int64) * sizes.w_stride
        gate, up = _accumulate(
            operands, x, w, up_offset, up_offsets, x_scale_stride_group, EPILOGUE.GATED, TILE, SCALES
        )
    if EPILOGUE.GATED:
        up_rows = w_rows + _to_up(N, EPILOGUE)
        gate = scale_sums(gate, operands, x, tile, w_rows, halves * N, scalars.gate_output_scale, SCALES, CODES)
        up = scale_sums(up, operands, x, tile, up_rows, halves * N, scalars.output_scale, SCALES, CODES)
    else:
        gate = scale_sums(gate, operands, x, tile, w_rows, N, scalars.output_scale, SCALES, CODES)
    if operands.bias is not None:
        bias_ptrs = operands.bias + tile.expert.to(tl.int64) * halves * N + w_rows
        gate = add_bias(gate, bias_ptrs, tile.mask)
        if EPILOGUE.GATED:
            up = add_bias(up, bias_ptrs + _to_up(N, EPILOGUE), tile.mask)
    return gate, up


@triton.jit(do_not_specialize=["x_scale_height", "x_scale_stride_block", "x_scale_stride_group", "inner_scale_stride"])
def _first_gemm_kernel(
    operands,  # Operands: the batch's pool of rows, or the prepared ones if ROWS_PREPARED; w13 and its bias
    inner,  # Stored: [Q * BLOCK_M, sizes.out_stride] and [ceil(N / GROUP_K), inner_scale_stride]
    scalars,
    rows,
    tiles,
    sizes,
    shared,
    x_scale_height,  # rows per block of scales: row r is row r % height of block r // height
    x_scale_stride_block,
    x_scale_stride_group,
    inner_scale_stride,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """inner = requantize(activation(w13 @ x + bias)), tile by tile."""
    start_early()
    N = sizes.N
    num_columns = tl.cdiv(sizes.out_stride if EPILOGUE.ORDER != 0 else N, TILE.BLOCK_N)
    total = tl.load(tiles.num_tiles) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = find_tile(t, num_columns, rows, tiles, TILE)
        token = row_tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        row_mask = token < num_tokens
        listed = tl.load(rows.row_start + expert) + token
        row = listed
        if CODES.ROWS_PREPARED:
            row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        elif rows.row_index is not None:
            row = tl.load(rows.row_index + listed, mask=row_mask, other=0)
        first_column = column_tile * TILE.BLOCK_N
        columns = first_column + tl.arange(0, TILE.BLOCK_N)
        tile = TileColumns(expert, first_column, columns, columns < N)
        reduced = sizes.K
        if EPILOGUE.ORDER != 0:  # whole tiles of zeros may follow
            reduced = tl.where(first_column < N, sizes.K, 0)
        x_scale_ptrs = operands.x_scale
        if SCALES.X != "none":
            block_offset = (row // x_scale_height).to(tl.int64) * x_scale_stride_block
            x_scale_ptrs += block_offset + (row % x_scale_height).to(tl.int64) * sizes.x_scale_stride_row
        x = TileRows(operands.x + row.to(tl.int64)[:, None] * sizes.x_stride, x_scale_ptrs, row_mask)
        gate, up = _compute_tile(
            operands, scalars, x, tile, reduced, sizes, x_scale_stride_group, TILE, SCALES, CODES, EPILOGUE
        )
        own_alpha = of_expert(scalars.alpha, expert, shared.alpha)
        own_beta = of_expert(scalars.beta, expert, shared.beta)
        own_limit = of_expert(scalars.limit, expert, shared.limit)
        values = activate(gate, up, own_alpha, own_beta, own_limit, EPILOGUE)
        out_row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        if rows.factor is not None:
            values *= tl.load(rows.factor + listed, mask=row_mask, other=0.0)[:, None]
        if rows.out_index is not None:
            out_row = tl.load(rows.out_index + listed, mask=row_mask, other=0)
        out_mask = row_mask if rows.out_index is not None else None
        strides = (sizes.out_stride, inner_scale_stride)
        store_tile(values, inner, scalars, tile, out_row, out_mask, N, strides, TILE, SCALES, EPILOGUE)


@triton.jit(do_not_specialize=["inner_scale_stride"])
def _second_gemm_kernel(
    operands,  # Operands: the intermediate [Q * BLOCK_M, x_stride], w2, its bias; scales [G, inner_scale_stride]
    y,  # Stored: [rows, N], without scales
    scalars,
    rows,
    tiles,
    sizes,
    inner_scale_stride,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """y = w2 @ inner + bias, rounded once; rows of y that hold no token are not written."""
    start_early()
    N = sizes.N
    num_columns = tl.cdiv(N, TILE.BLOCK_N)
    total = tl.load(tiles.num_tiles) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = find_tile(t, num_columns, rows, tiles, TILE)
        token = row_tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        row_mask = token < num_tokens
        inner_row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        first_column = column_tile * TILE.BLOCK_N
        columns = first_column + tl.arange(0, TILE.BLOCK_N)
        tile = TileColumns(expert, first_column, columns, columns < N)
        x_scale_ptrs = operands.x_scale
        if SCALES.STATIC:
            x_scale_ptrs += expert + tl.zeros([TILE.BLOCK_M], tl.int32)
        elif SCALES.X != "none":
            x_scale_ptrs += inner_row
        x = TileRows(operands.x + inner_row.to(tl.int64)[:, None] * sizes.x_stride, x_scale_ptrs, row_mask)
        sums, _ = _compute_tile(
            operands, scalars, x, tile, sizes.K, sizes, inner_scale_stride, TILE, SCALES, CODES, EPILOGUE
        )
        row = tl.load(rows.row_start + expert) + token
        store_tile(sums, y, scalars, tile, row, row_mask, N, (N, inner_scale_stride), TILE, SCALES, EPILOGUE)
