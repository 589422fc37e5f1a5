"""The arguments of the Hopper kernels besides those of `ep_moe.kernels.gemm.arguments`.

Letters: L local experts, K columns that a GEMM reduces over, N columns of its result, W rows of its weights (2N if they
are the gate and the up half, else N), G scale groups.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(128)  # of a tile, half of them of each warp group
FEW_ROWS = (32, 64)  # of a tile whose products are transposed: weights are then their left operand
HALF_N = gl.constexpr(128)  # columns of a half tile


class Pipeline(NamedTuple):
    """The constants of a GEMM. Sizes are among them, since a worker keeps its arguments in registers."""

    N: gl.constexpr
    W: gl.constexpr
    BLOCK_K: gl.constexpr  # columns of a step over K
    STEPS: gl.constexpr  # over K
    HALVES: gl.constexpr  # 2; 1 if tiles of 128 columns of a second GEMM still leave SMs without one
    COLUMN_TILES: gl.constexpr  # of halves of 128 columns, or of the gate and the up half of the same 128
    W_BLOCKS: gl.constexpr  # of 128 of an expert's W rows
    BLOCK_M: gl.constexpr  # ROWS, or one of FEW_ROWS
    GROUP_M: gl.constexpr  # row tiles that cover all columns before the next ones
    FIRST: gl.constexpr  # w13, not w2: reads rows of the batch and stores the intermediate
    PACKED: gl.constexpr  # rows of x are in the order of the tile list
    COPIED_SCALES: gl.constexpr  # scales of groups of x begin anywhere, where TMA cannot: threads copy them
    SCALE_ROWS: gl.constexpr  # G if each expert has its own matrix of x scales, else 0
    STAGES: gl.constexpr  # steps whose operands are loaded ahead
    OUT_BUFFERS: gl.constexpr  # half tiles of a warp group that are stored at the same time
    ARRIVALS: gl.constexpr  # of threads that store a row tile of the intermediate; 0: the GEMMs do not overlap
    ALPHA: gl.constexpr  # of the activation of all experts, unless each has its own
    BETA: gl.constexpr
    LIMIT: gl.constexpr


class Source(NamedTuple):
    """The operands that the loading warp copies."""

    x_desc: Any  # [rows, K] in boxes of BLOCK_M / 2 x BLOCK_K
    w_desc: Any  # [L * W, K] in boxes of 128 x BLOCK_K; [L * N, 2 * K] if gate and up rows are interleaved
    x_scale_desc: Any  # [G or L * G, rows] float32 in boxes of 1 x BLOCK_M; None unless TMA copies scales of groups
    x_scale: Any
    x_scale_stride: Any  # between groups


class Result(NamedTuple):
    """The matrix that warp groups store."""

    desc: Any  # [rows, N] in boxes of BLOCK_M / 2 x 128
    out: Any  # Stored
    scale_stride: Any  # of out.scale
    stored: Any  # as in TileList, or None


class Buffers(NamedTuple):
    """Shared memory: the operands of STAGES steps, and barriers between who fills and who empties them."""

    x: Any  # [2 * STAGES, BLOCK_M / 2, BLOCK_K]
    w: Any  # [HALVES * STAGES, 128, BLOCK_K]
    x_scale: Any  # [STAGES, 1, BLOCK_M] or [STAGES, BLOCK_M]; None without scales of groups
    full: Any  # [STAGES, 1]
    empty: Any  # [STAGES, 1]


class Tiles(NamedTuple):
    """Shared memory: the tiles that the loading warp has drawn, for the warp groups."""

    tile: Any  # [DRAWN, 4] int32
    full: Any  # [DRAWN, 1]
    empty: Any  # [DRAWN, 1]
