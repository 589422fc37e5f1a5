"""The two GEMMs of all experts of a rank, as persistent kernels over the tile list.

Letters: L local experts, H hidden, I intermediate, K columns that a GEMM reduces over, N columns of its result,
W rows of its weights, V stored values of a row of weights, G scale groups, Q row tiles of all experts.

Every program processes the tiles t = program, program + programs, ...; consecutive t share an expert's weights. The
first GEMM reads the batch's rows and stores the intermediate's, in the order of the tile list; the second the reverse.

SWAP makes the weights the left operand: a tensor core's product has at least 64 rows, an expert may have fewer tokens.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.activation import activate
from ep_moe.kernels.gemm.decoded import accumulate_decoded
from ep_moe.kernels.gemm.epilogue import add_bias, of_expert, scale_sums, store_tile
from ep_moe.kernels.gemm.tile_list import find_tile
from ep_moe.kernels.gemm.tokens import load_rows
from ep_moe.kernels.gemm.weights import load_weight, scale_offsets
from ep_moe.kernels.numerics import INTERPRET


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
    if (FLOAT8 or x.dtype == tl.int8) and TILE.BLOCK_K < 32:  # too narrow; float16 represents all these numbers
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
        if SCALES.X != "group":
            if SCALES.VECTOR:
                return acc + product * (w_scale[:, None] if TILE.SWAP else w_scale[None, :])
            else:
                return acc + product * w_scale
        elif SCALES.VECTOR:
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
def _accumulate(
    operands,  # Operands
    x_ptrs,  # [BLOCK_M, 1]
    x_scale_ptrs,  # [BLOCK_M]
    row_mask,  # [BLOCK_M]
    w_ptrs,  # [BLOCK_N, 1]
    w_offsets,  # [BLOCK_N] if VECTOR, else scalar: of the scales, and zero points, of these rows of w
    up_offset,  # from a gate row of w to its up row, in stored values
    up_offsets,
    column_mask,  # [BLOCK_N]
    K,
    x_scale_stride_group,
    PAIR: tl.constexpr,  # gate and up half together
    TILE,
    SCALES,
    CODES,
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
    x_ptrs += tl.arange(0, TILE.BLOCK_K)[None, :]
    w_ptrs += tl.arange(0, TILE.BLOCK_K)[None, :]
    for k in range(0, K, TILE.BLOCK_K):
        x = load_rows(x_ptrs, row_mask, K - k, TILE)
        if SCALES.X == "group":
            x_scale = tl.load(x_scale_ptrs + k // SCALES.GROUP_K * x_scale_stride_group, mask=row_mask, other=0.0)
        else:
            x_scale = 1.0
        w, w_scale = load_weight(w_ptrs, operands, w_offsets, column_mask, k, K, TILE, SCALES, CODES)
        acc = _multiply(acc, x, w, x_scale, w_scale, TILE, SCALES)
        if PAIR:
            up_ptrs = w_ptrs + up_offset
            up, up_scale = load_weight(up_ptrs, operands, up_offsets, column_mask, k, K, TILE, SCALES, CODES)
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
    operands,  # Operands
    scalars,  # ExpertScalars
    x_ptrs,  # [BLOCK_M, 1], of the tile's rows of x
    x_scale_ptrs,  # [BLOCK_M]
    row_mask,  # [BLOCK_M]
    expert,
    first_column,
    columns,  # [BLOCK_N]
    column_mask,  # [BLOCK_N]
    K,
    N,
    w_stride,  # V
    x_scale_stride_group,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """Return a tile of w @ x + bias, [BLOCK_M, BLOCK_N] float32: of the gate and the up half if GATED, else twice."""
    halves = 2 if EPILOGUE.GATED else 1
    w_rows = 2 * columns if EPILOGUE.ALTERNATING else columns
    w_offsets = first_column
    up_offsets = first_column
    if SCALES.WEIGHT == "block" or SCALES.WEIGHT == "fold" or CODES.ZERO:
        w_offsets = scale_offsets(expert, first_column, w_rows, halves * N, K, SCALES)
        up_offsets = w_offsets
        if EPILOGUE.GATED:
            up_rows = w_rows + _to_up(N, EPILOGUE)
            up_offsets = scale_offsets(expert, first_column + N, up_rows, halves * N, K, SCALES)
    if CODES.KIND != "none":
        gate, up = accumulate_decoded(
            operands,
            x_ptrs,
            row_mask,
            expert,
            first_column,
            K,
            N,
            w_stride,
            EPILOGUE.GATED,
            EPILOGUE.ALTERNATING,
            TILE,
            SCALES,
            CODES,
        )
    else:
        gate, up = _accumulate(
            operands,
            x_ptrs,
            x_scale_ptrs,
            row_mask,
            operands.w + (expert.to(tl.int64) * halves * N + w_rows[:, None]) * w_stride,
            w_offsets,
            w_stride if EPILOGUE.ALTERNATING else N.to(tl.int64) * w_stride,
            up_offsets,
            column_mask,
            K,
            x_scale_stride_group,
            EPILOGUE.GATED,
            TILE,
            SCALES,
            CODES,
        )
    if EPILOGUE.GATED:
        gate = scale_sums(
            gate,
            operands,
            x_scale_ptrs,
            scalars.gate_output_scale,
            expert,
            halves * N,
            w_rows,
            row_mask,
            column_mask,
            SCALES,
            CODES,
        )
        up_rows = w_rows + _to_up(N, EPILOGUE)
        up = scale_sums(
            up,
            operands,
            x_scale_ptrs,
            scalars.output_scale,
            expert,
            halves * N,
            up_rows,
            row_mask,
            column_mask,
            SCALES,
            CODES,
        )
    else:
        gate = scale_sums(
            gate,
            operands,
            x_scale_ptrs,
            scalars.output_scale,
            expert,
            N,
            columns,
            row_mask,
            column_mask,
            SCALES,
            CODES,
        )
    if operands.bias is not None:
        bias_ptrs = operands.bias + expert.to(tl.int64) * halves * N + w_rows
        gate = add_bias(gate, bias_ptrs, column_mask)
        if EPILOGUE.GATED:
            up = add_bias(up, bias_ptrs + _to_up(N, EPILOGUE), column_mask)
    return gate, up


@triton.jit(do_not_specialize=["x_scale_height", "x_scale_stride_block", "x_scale_stride_group", "inner_scale_stride"])
def _first_gemm_kernel(
    operands,  # Operands: the batch's pool of rows, or the prepared ones if READY; w13 and its bias
    inner,  # Stored: [Q * BLOCK_M, inner_stride] and [ceil(N / GROUP_K), inner_scale_stride]
    scalars,
    rows,
    tiles,
    K,
    N,
    w_stride,  # V
    x_stride,
    x_scale_height,  # rows per block of scales: row r is row r % height of block r // height
    x_scale_stride_block,
    x_scale_stride_row,
    x_scale_stride_group,
    inner_scale_stride,
    inner_stride,  # N, or more if columns are ordered
    alpha,  # of all experts, unless `scalars` has one for each
    beta,
    limit,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """inner = requantize(activation(w13 @ x + bias)), tile by tile."""
    num_columns = tl.cdiv(inner_stride if EPILOGUE.ORDER != 0 else N, TILE.BLOCK_N)
    total = tl.load(tiles.num_tiles) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = find_tile(t, num_columns, rows, tiles, TILE)
        token = row_tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        row_mask = token < num_tokens
        listed = tl.load(rows.row_start + expert) + token
        row = listed
        if CODES.READY:
            row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        elif rows.row_index is not None:
            row = tl.load(rows.row_index + listed, mask=row_mask, other=0)
        first_column = column_tile * TILE.BLOCK_N
        columns = first_column + tl.arange(0, TILE.BLOCK_N)
        column_mask = columns < N
        reduced = K
        if EPILOGUE.ORDER != 0:  # whole tiles of zeros may follow
            reduced = tl.where(first_column < N, K, 0)
        x_scale_ptrs = operands.x_scale
        if SCALES.X != "none":
            block_offset = (row // x_scale_height).to(tl.int64) * x_scale_stride_block
            x_scale_ptrs += block_offset + (row % x_scale_height).to(tl.int64) * x_scale_stride_row
        gate, up = _compute_tile(
            operands,
            scalars,
            operands.x + row.to(tl.int64)[:, None] * x_stride,
            x_scale_ptrs,
            row_mask,
            expert,
            first_column,
            columns,
            column_mask,
            reduced,
            N,
            w_stride,
            x_scale_stride_group,
            TILE,
            SCALES,
            CODES,
            EPILOGUE,
        )
        own_alpha = of_expert(scalars.alpha, expert, alpha)
        own_beta = of_expert(scalars.beta, expert, beta)
        own_limit = of_expert(scalars.limit, expert, limit)
        values = activate(gate, up, own_alpha, own_beta, own_limit, EPILOGUE)
        out_row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        if rows.factor is not None:
            values *= tl.load(rows.factor + listed, mask=row_mask, other=0.0)[:, None]
        if rows.out_index is not None:
            out_row = tl.load(rows.out_index + listed, mask=row_mask, other=0)
        store_tile(
            values,
            inner,
            scalars,
            expert,
            out_row,
            row_mask if rows.out_index is not None else None,
            columns,
            column_mask,
            N,
            inner_stride,
            inner_scale_stride,
            TILE,
            SCALES,
            EPILOGUE,
        )


@triton.jit(do_not_specialize=["inner_scale_stride"])
def _second_gemm_kernel(
    operands,  # Operands: the intermediate [Q * BLOCK_M, inner_stride], w2, its bias; scales [G, inner_scale_stride]
    y,  # Stored: [rows, N], without scales
    scalars,
    rows,
    tiles,
    K,
    N,
    w_stride,  # V
    inner_scale_stride,
    inner_stride,
    TILE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """y = w2 @ inner + bias, rounded once; rows of y that hold no token are not written."""
    num_columns = tl.cdiv(N, TILE.BLOCK_N)
    total = tl.load(tiles.num_tiles) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = find_tile(t, num_columns, rows, tiles, TILE)
        token = row_tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        row_mask = token < num_tokens
        inner_row = (first_tile + row_tile) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        first_column = column_tile * TILE.BLOCK_N
        columns = first_column + tl.arange(0, TILE.BLOCK_N)
        column_mask = columns < N
        x_scale_ptrs = operands.x_scale
        if SCALES.STATIC:
            x_scale_ptrs += expert + tl.zeros([TILE.BLOCK_M], tl.int32)
        elif SCALES.X != "none":
            x_scale_ptrs += inner_row
        sums, _ = _compute_tile(
            operands,
            scalars,
            operands.x + inner_row.to(tl.int64)[:, None] * inner_stride,
            x_scale_ptrs,
            row_mask,
            expert,
            first_column,
            columns,
            column_mask,
            K,
            N,
            w_stride,
            inner_scale_stride,
            TILE,
            SCALES,
            CODES,
            EPILOGUE,
        )
        store_tile(
            sums,
            y,
            scalars,
            expert,
            tl.load(rows.row_start + expert) + token,
            row_mask,
            columns,
            column_mask,
            N,
            N,
            inner_scale_stride,
            TILE,
            SCALES,
            EPILOGUE,
        )
