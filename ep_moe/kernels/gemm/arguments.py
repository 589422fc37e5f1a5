"""The arguments of the expert kernels, in groups that the kernels share.

A constant of a group is wrapped: `TileShape(BLOCK_M=tl.constexpr(16), ...)`; the launcher's `constants` does that. An
absent pointer is None, and then the code that reads it is not compiled. The compiler specializes every integer of a
group, which compiles a 1 into the kernel: integers that differ between calls of a layer stay outside of the groups.

Letters: L local experts, H hidden, I intermediate, Q row tiles of all experts, K columns that a GEMM reduces over,
N columns of its result, W rows of its weights (2I if they are the gate and the up half, else N), V stored values of a
row of weights, G scale groups.
"""

from typing import Any, NamedTuple

import triton.language as tl


class Operands(NamedTuple):
    """The tensors that a GEMM reads."""

    x: Any  # rows, K each
    x_scale: Any  # of the rows, float32, or uint8 if x will be decoded; [L] if it is one for each expert
    w: Any  # [L, W, V], V stored values of a row of K elements
    w_scale: Any
    w_zero: Any  # as w_scale: zero points of integers
    w_global_scale: Any  # [L] float32
    bias: Any  # [L, W]


class Stored(NamedTuple):
    """The tensors that a GEMM, or a requantizing kernel, writes."""

    data: Any  # rows, N each
    scale: Any  # [G, rows] float32, if values are quantized in groups


class ExpertScalars(NamedTuple):
    """Factors and limits of each expert, [L] float32."""

    static_scale: Any  # of the stored values, if EPILOGUE.REQUANTIZE is "static"
    output_scale: Any  # multiplies the sums before the bias: of the second half of the rows of w if GATED
    gate_output_scale: Any  # the same for the first half, which is the gate unless UP_FIRST
    alpha: Any  # of the activation, in place of the numbers that all experts share
    beta: Any
    limit: Any


class Sizes(NamedTuple):
    """Numbers of a GEMM."""

    K: Any
    N: Any
    w_stride: Any  # V
    x_stride: Any
    x_scale_stride_row: Any
    out_stride: Any  # N, or more if columns are ordered; None in the second GEMM


class Shared(NamedTuple):
    """Numbers of the activation of all experts, unless `ExpertScalars` has one for each."""

    alpha: Any
    beta: Any
    limit: Any


class TileRows(NamedTuple):
    """The rows of x of a tile."""

    ptrs: Any  # [BLOCK_M, 1]
    scale_ptrs: Any  # [BLOCK_M]
    mask: Any  # [BLOCK_M]


class TileColumns(NamedTuple):
    """The columns of the result of a tile."""

    expert: Any
    first: Any
    columns: Any  # [BLOCK_N]
    mask: Any  # [BLOCK_N]


class WeightRows(NamedTuple):
    """The R rows of weights of a tile."""

    ptrs: Any  # [R, 1]
    stride: Any  # V, or words of V
    offsets: Any  # [R], of their scales and zero points at K = 0; a scalar if all have the same
    mask: Any  # [R]
    K: Any  # columns that are reduced over


class Rows(NamedTuple):
    """Where the batch has the experts' rows: row i of expert e is row_start[e] + i, or row_index of that.

    The first GEMM stores it in the order of the tile list, or at out_index of row_start[e] + i, times factor of that.
    """

    row_start: Any  # [L] int32
    num_tokens: Any  # [L] int32
    row_index: Any  # [rows] int32
    out_index: Any = None  # [rows] int32
    factor: Any = None  # [rows] float32, with out_index


class TileList(NamedTuple):
    """The row tiles of all experts; `ep_moe.kernels.gemm.tile_list` makes them."""

    tile_expert: Any  # [>= Q] int32
    first_tile: Any  # [L] int32
    num_tiles: Any  # [1] int32, Q
    amax: Any  # [L] int32, zeros at first: the bits of the largest magnitude of each expert's rows; or None
    next_tile: Any  # [2] int32, zeros at first: tiles that programs of each GEMM have drawn; or None
    stored: Any = None  # [>= Q] int32, zeros at first: arrivals of threads that have stored their part of a row tile


class TileShape(NamedTuple):
    """The tiles of a GEMM."""

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr  # of a product
    GROUP_M: tl.constexpr  # row tiles that cover all columns before the next ones
    SWAP: tl.constexpr  # the weights are the left operand
    EVEN_N: tl.constexpr  # BLOCK_N divides N
    EVEN_K: tl.constexpr  # a step of BLOCK_K columns, or of several times as many, divides K


class Scales(NamedTuple):
    """The scales of a GEMM's operands.

    "tensor" and "channel" multiply the sums over K, "block" the sums of each step over K, "fold" the decoded weights.
    """

    X: tl.constexpr  # "none", "row" or "group": one for each row, or each GROUP_K columns of it
    WEIGHT: tl.constexpr  # "none", "tensor", "channel", "block" or "fold"
    VECTOR: tl.constexpr  # blocks of a tile differ by row of the weight
    GROUP_N: tl.constexpr  # rows of the weight in a block, and in one of zero points
    GROUP_K: tl.constexpr  # columns in a block; the first GEMM requantizes in groups of as many
    STATIC: tl.constexpr  # x has one scale for each expert, [L]


class Codes(NamedTuple):
    """How weights are stored that are decoded to the dtype of x before they are multiplied."""

    KIND: tl.constexpr  # "none": multiplied as stored; "float8", "int8", "uint8", "uint4" or "e2m1"
    PACKED: tl.constexpr  # elements in a stored value, the first in its lowest bits
    PAIRS: tl.constexpr  # SHUFFLED weights are decoded two at once to 16 bits, by PTX that the interpreter lacks
    ZERO: tl.constexpr  # zero points are stored
    GROUPS: tl.constexpr  # scales, and zero points, of a row in a step over K
    # "single": loaded by themselves; "words": with others in words; "shifted": these are not aligned
    SCALES: tl.constexpr
    ZEROS: tl.constexpr  # the same for zero points
    SHUFFLED: tl.constexpr  # x and weights are multiplied in another order of columns
    # rows of x are in the order of the tile list, decoded and, if SHUFFLED, ordered; zeros beyond K
    ROWS_PREPARED: tl.constexpr
    PARTS: tl.constexpr  # products of BLOCK_K columns in a step
    DIVIDE: tl.constexpr  # by the global scale, not multiply


class Epilogue(NamedTuple):
    """The operations on a tile's sums before they are stored; none by default."""

    ACTIVATION: tl.constexpr = "identity"  # the value of an `ActivationKind`
    UP_FIRST: tl.constexpr = False  # the first half is up, not the gate
    GATED: tl.constexpr = False  # the weights have a gate and an up half
    ALTERNATING: tl.constexpr = False  # and their rows are interleaved, gate first
    LIMITED: tl.constexpr = False  # the activation clamps its input
    REQUANTIZE: tl.constexpr = "none"  # or "group", "mxfp8" or "static"
    POWER_OF_TWO: tl.constexpr = False  # scales of groups are rounded up to powers of two
    ORDER: tl.constexpr = 0  # columns are stored as SHUFFLED weights of this PACKED are summed; 0: as they are


class RowGroups(NamedTuple):
    """The pieces of the intermediate that a requantizing kernel takes at a time."""

    BLOCK_M: tl.constexpr
    ROWS: tl.constexpr  # at a time; divides BLOCK_M
    BLOCK: tl.constexpr  # columns at a time, a power of two
