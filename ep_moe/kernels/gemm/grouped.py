"""The two GEMMs of all experts of a rank, as persistent kernels over the tile list.

Letters: L local experts, H hidden, I intermediate, K columns that a GEMM reduces over, N columns of its result,
G scale groups, Q row tiles of all experts.

Every program processes the tiles t = program, program + programs, ...; consecutive t share an expert's weights.

SWAP makes the weights the left operand: a tensor core's product has at least 64 rows, an expert may have fewer tokens.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.activation import activate
from ep_moe.kernels.gemm.requantize import _store_inner
from ep_moe.kernels.gemm.tile_list import _find_tile
from ep_moe.kernels.numerics import INTERPRET, round_to


@triton.jit
def _multiply(
    acc, x, w, x_scale, w_scale, SWAP: tl.constexpr, SCALED: tl.constexpr, VECTOR: tl.constexpr, FP8: tl.constexpr
):
    """Return acc plus the product of x [BLOCK_M, BLOCK_K] and w [BLOCK_N, BLOCK_K], times the scales of this block.

    acc is [BLOCK_M, BLOCK_N], or its transpose with SWAP. fp8 products are promoted to float32 accumulators after each
    step if they have block scales, else after 64 columns: Hopper's tensor cores accumulate fp8 with 14 bits
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    """
    if INTERPRET and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    if FP8 and x.shape[1] < 32:  # too narrow for an fp8 dot; float16 represents every e4m3 value
        x = x.to(tl.float16)
        w = w.to(tl.float16)
    if SWAP:
        left = w
        right = tl.trans(x)
    else:
        left = x
        right = tl.trans(w)
    if SCALED:
        product = tl.dot(left, right)
        if VECTOR:
            if SWAP:
                return acc + product * (w_scale[:, None] * x_scale[None, :])
            else:
                return acc + product * (x_scale[:, None] * w_scale[None, :])
        elif SWAP:
            return acc + product * (x_scale * w_scale)[None, :]
        else:
            return acc + product * (x_scale * w_scale)[:, None]
    elif FP8:
        PROMOTE: tl.constexpr = 64 if x.shape[1] >= 64 else x.shape[1]
        return tl.dot(left, right, acc, max_num_imprecise_acc=PROMOTE)
    else:
        return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _accumulate(
    x_ptrs,  # [BLOCK_M, 1]
    x_scale_ptrs,  # [BLOCK_M]
    row_mask,  # [BLOCK_M]
    w_ptrs,  # [BLOCK_N, 1]
    w_scale_ptrs,  # [BLOCK_N] if VECTOR, else scalar
    up_offset,  # from a gate row of w to its up row, in elements
    up_scale_ptrs,
    column_mask,  # [BLOCK_N]
    K,
    x_scale_stride_group,
    PAIR: tl.constexpr,  # gate and up half together
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    VECTOR: tl.constexpr,
    FP8: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Accumulate a tile over K. Returns two [BLOCK_M, BLOCK_N] float32: gate and up if PAIR, else the result twice."""
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    columns = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs += columns
    w_ptrs += columns
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=row_mask[:, None] & (columns < K - k), other=0.0)
        group = k // GROUP_K
        if SCALED:
            x_scale = tl.load(x_scale_ptrs + group * x_scale_stride_group, mask=row_mask, other=0.0)
        else:
            x_scale = 1.0
        w = _load_weight(w_ptrs, column_mask, columns, K - k, EVEN_N, EVEN_K)
        w_scale = _load_weight_scale(w_scale_ptrs + group, column_mask, SCALED, VECTOR)
        acc = _multiply(acc, x, w, x_scale, w_scale, SWAP, SCALED, VECTOR, FP8)
        if PAIR:
            up = _load_weight(w_ptrs + up_offset, column_mask, columns, K - k, EVEN_N, EVEN_K)
            up_scale = _load_weight_scale(up_scale_ptrs + group, column_mask, SCALED, VECTOR)
            up_acc = _multiply(up_acc, x, up, x_scale, up_scale, SWAP, SCALED, VECTOR, FP8)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if SWAP:
        acc = tl.trans(acc)
        up_acc = tl.trans(up_acc)
    if PAIR:
        return acc, up_acc
    else:
        return acc, acc


@triton.jit
def _load_weight(ptrs, column_mask, columns, columns_left, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load [BLOCK_N, BLOCK_K] weights, zeros out of bounds."""
    if EVEN_N and EVEN_K:
        return tl.load(ptrs)
    elif EVEN_K:
        return tl.load(ptrs, mask=column_mask[:, None], other=0.0)
    elif EVEN_N:
        return tl.load(ptrs, mask=columns < columns_left, other=0.0)
    else:
        return tl.load(ptrs, mask=column_mask[:, None] & (columns < columns_left), other=0.0)


@triton.jit
def _load_weight_scale(ptrs, column_mask, SCALED: tl.constexpr, VECTOR: tl.constexpr):
    """Load the weight scales of this step over K: one for each weight row if VECTOR, else a scalar."""
    if not SCALED:
        return 1.0
    elif VECTOR:
        return tl.load(ptrs, mask=column_mask, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _scale_rows_and_columns(
    acc, x_scale_ptrs, w_scale_ptr, expert, N, columns, row_mask, column_mask, WEIGHT_SCALE: tl.constexpr
):
    """Apply scales that do not vary along K: one per token, times one per channel or per tensor."""
    acc *= tl.load(x_scale_ptrs, mask=row_mask, other=0.0)[:, None]
    if WEIGHT_SCALE == "channel":
        return acc * tl.load(w_scale_ptr + expert.to(tl.int64) * N + columns, mask=column_mask, other=0.0)[None, :]
    else:
        return acc * tl.load(w_scale_ptr + expert)


@triton.jit
def _scale_pointers(
    w_scale_ptr,
    expert,
    first_column,
    columns,
    N,
    K,
    VECTOR: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
):
    """Pointers to the scales of these weight rows in [L, ceil(N / GROUP_N), ceil(K / GROUP_K)], at K = 0."""
    groups_k = (K + GROUP_K - 1) // GROUP_K
    base = w_scale_ptr + expert.to(tl.int64) * ((N + GROUP_N - 1) // GROUP_N) * groups_k
    if VECTOR:
        return base + columns // GROUP_N * groups_k
    else:
        return base + first_column // GROUP_N * groups_k


@triton.jit(do_not_specialize=["x_scale_height", "x_scale_stride_block", "x_scale_stride_group", "inner_scale_stride"])
def _first_gemm_kernel(
    x_ptr,  # pool of rows, K each
    x_scale_ptr,
    w13_ptr,  # [L, 2I or I, K]
    w13_scale_ptr,
    bias_ptr,  # [L, 2I or I]
    inner_ptr,  # [Q * BLOCK_M, I], out
    inner_scale_ptr,  # [ceil(I / GROUP_K), inner_scale_stride], out if REQUANTIZE is "group"
    static_scale_ptr,  # [L] if REQUANTIZE is "static"
    expert_row_start_ptr,
    expert_num_tokens_ptr,
    row_index_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    K,
    intermediate,
    x_stride,
    x_scale_height,  # rows per block of scales: row r is row r % height of block r // height
    x_scale_stride_block,
    x_scale_stride_row,
    x_scale_stride_group,
    inner_scale_stride,
    alpha,
    beta,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr,  # "none", "tensor", "channel" or "block"
    REQUANTIZE: tl.constexpr,  # "none", "group" or "static"
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    SWAP: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """inner = requantize(activation(w13 @ x + bias)), tile by tile."""
    num_columns = tl.cdiv(intermediate, BLOCK_N)
    total = tl.load(num_tiles_ptr) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = _find_tile(
            t, num_columns, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M, GROUP_M
        )
        token = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = token < num_tokens
        row = tl.load(expert_row_start_ptr + expert) + token
        if HAS_INDEX:
            row = tl.load(row_index_ptr + row, mask=row_mask, other=0)
        first_column = column_tile * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        column_mask = columns < intermediate
        halves = 2 if GATED else 1
        w_offset = (expert.to(tl.int64) * halves * intermediate + columns[:, None]) * K
        x_scale_ptrs = x_scale_ptr
        w_scale_ptrs = w13_scale_ptr
        up_scale_ptrs = w13_scale_ptr
        if WEIGHT_SCALE != "none":
            x_scale_ptrs = x_scale_ptr + (
                (row // x_scale_height).to(tl.int64) * x_scale_stride_block
                + (row % x_scale_height).to(tl.int64) * x_scale_stride_row
            )
        if WEIGHT_SCALE == "block":
            w_scale_ptrs = _scale_pointers(
                w13_scale_ptr, expert, first_column, columns, halves * intermediate, K, VECTOR, GROUP_N, GROUP_K
            )
            up_scale_ptrs = _scale_pointers(
                w13_scale_ptr,
                expert,
                first_column + intermediate,
                columns + intermediate,
                halves * intermediate,
                K,
                VECTOR,
                GROUP_N,
                GROUP_K,
            )
        gate, up = _accumulate(
            x_ptr + row.to(tl.int64)[:, None] * x_stride,
            x_scale_ptrs,
            row_mask,
            w13_ptr + w_offset,
            w_scale_ptrs,
            intermediate.to(tl.int64) * K,
            up_scale_ptrs,
            column_mask,
            K,
            x_scale_stride_group,
            GATED,
            SWAP,
            WEIGHT_SCALE == "block",
            VECTOR,
            WEIGHT_SCALE != "none",
            GROUP_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
        )
        bias_ptrs = bias_ptr + expert.to(tl.int64) * halves * intermediate + columns
        if WEIGHT_SCALE == "tensor" or WEIGHT_SCALE == "channel":
            gate = _scale_rows_and_columns(
                gate,
                x_scale_ptrs,
                w13_scale_ptr,
                expert,
                halves * intermediate,
                columns,
                row_mask,
                column_mask,
                WEIGHT_SCALE,
            )
            if GATED:
                up = _scale_rows_and_columns(
                    up,
                    x_scale_ptrs,
                    w13_scale_ptr,
                    expert,
                    halves * intermediate,
                    columns + intermediate,
                    row_mask,
                    column_mask,
                    WEIGHT_SCALE,
                )
        if HAS_BIAS:
            gate += tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_ptrs + intermediate, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        inner = activate(gate, up, KIND, alpha, beta, limit, LIMITED)
        _store_inner(
            inner,
            inner_ptr,
            inner_scale_ptr,
            static_scale_ptr,
            expert,
            (first_tile + row_tile) * BLOCK_M + tl.arange(0, BLOCK_M),
            columns,
            column_mask,
            intermediate,
            inner_scale_stride,
            REQUANTIZE,
            GROUP_K,
            BLOCK_M,
            BLOCK_N,
        )


@triton.jit(do_not_specialize=["inner_scale_stride"])
def _second_gemm_kernel(
    inner_ptr,  # [Q * BLOCK_M, K]
    inner_scale_ptr,  # [G, inner_scale_stride]; [L] if STATIC
    w2_ptr,  # [L, N, K]
    w2_scale_ptr,
    bias_ptr,  # [L, N]
    y_ptr,  # [rows, N], out
    expert_row_start_ptr,
    expert_num_tokens_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    K,
    N,
    inner_scale_stride,
    WEIGHT_SCALE: tl.constexpr,
    STATIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """y = w2 @ inner + bias, rounded once; rows of y that hold no token are not written."""
    num_columns = tl.cdiv(N, BLOCK_N)
    total = tl.load(num_tiles_ptr) * num_columns
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, num_tokens, row_tile, first_tile, column_tile = _find_tile(
            t, num_columns, expert_num_tokens_ptr, tile_expert_ptr, first_tile_ptr, BLOCK_M, GROUP_M
        )
        token = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = token < num_tokens
        inner_row = (first_tile + row_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        first_column = column_tile * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        column_mask = columns < N
        w_scale_ptrs = w2_scale_ptr
        if WEIGHT_SCALE == "block":
            w_scale_ptrs = _scale_pointers(w2_scale_ptr, expert, first_column, columns, N, K, VECTOR, GROUP_N, GROUP_K)
        if STATIC:
            inner_scale_ptrs = inner_scale_ptr + expert + tl.zeros([BLOCK_M], tl.int32)
        else:
            inner_scale_ptrs = inner_scale_ptr + inner_row
        y, _ = _accumulate(
            inner_ptr + inner_row.to(tl.int64)[:, None] * K,
            inner_scale_ptrs,
            row_mask,
            w2_ptr + (expert.to(tl.int64) * N + columns[:, None]) * K,
            w_scale_ptrs,
            0,
            w_scale_ptrs,
            column_mask,
            K,
            inner_scale_stride,
            False,
            SWAP,
            WEIGHT_SCALE == "block",
            VECTOR,
            WEIGHT_SCALE != "none",
            GROUP_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
        )
        if WEIGHT_SCALE == "tensor" or WEIGHT_SCALE == "channel":
            y = _scale_rows_and_columns(
                y, inner_scale_ptrs, w2_scale_ptr, expert, N, columns, row_mask, column_mask, WEIGHT_SCALE
            )
        if HAS_BIAS:
            bias_ptrs = bias_ptr + expert.to(tl.int64) * N + columns
            y += tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        row = tl.load(expert_row_start_ptr + expert) + token
        tl.store(
            y_ptr + row.to(tl.int64)[:, None] * N + columns[None, :],
            round_to(y, y_ptr.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )
