"""The two GEMMs of all experts of a rank on Hopper, as persistent kernels over the tile list.

Letters: L local experts, K columns that a GEMM reduces over, N columns of its result, W rows of its weights, G scale
groups, Q row tiles of all experts.

A program has three partitions: a warp that loads by TMA, and two warp groups with half of a tile's rows each. A tile
has 128 rows, or 32 or 64, and two halves of 128 columns: the gate and the up half of the same columns, or neighbors.
The tensor core multiplies 64 rows of its left operand at least: of fewer rows products are transposed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ep_moe.kernels.gemm.arguments import TileColumns, TileRows
from ep_moe.kernels.hopper.arguments import HALF_N, Buffers, Result, Source
from ep_moe.kernels.hopper.epilogue import activate_sums, finish_sums, requantize, store_half
from ep_moe.kernels.hopper.load import load_operands
from ep_moe.kernels.hopper.multiply import multiply_chained, multiply_float8, multiply_scaled, skip_steps
from ep_moe.kernels.hopper.overlap import arrive_stored
from ep_moe.kernels.hopper.tiles import allocate_tiles, next_tile


@gluon.jit
def _block_scales(operands, expert, first_row, PIPE):
    """Where the scales of the block with this row of w are, one for each step over K."""
    block = gl.minimum(first_row // HALF_N, PIPE.W_BLOCKS - 1)  # of a half tile beyond N: any
    return operands.w_scale + (expert * PIPE.W_BLOCKS + block) * PIPE.STEPS


@gluon.jit
def _accumulate(group: gl.constexpr, step, buffers, operands, expert, column, other_column, PIPE, SCALES):
    """Multiply a tile over K: both halves, of columns from `column` and from `other_column` of w on."""
    if SCALES.WEIGHT == "block":
        scale_ptr = _block_scales(operands, expert, column, PIPE)
        other_scale_ptr = _block_scales(operands, expert, other_column, PIPE)
        return multiply_scaled(group, step, buffers, scale_ptr, other_scale_ptr, PIPE)
    elif buffers.w.dtype == gl.float8e4nv:
        return multiply_float8(group, step, buffers, PIPE)
    else:
        return multiply_chained(group, step, buffers, PIPE)


@gluon.jit
def compute_tiles(
    group: gl.constexpr,
    result,  # Result
    operands,
    scalars,
    buffers,
    staging,  # [2 * OUT_BUFFERS, BLOCK_M / 2, 128]
    drawn,
    PIPE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """Warp group `group`: half of the rows of every tile that the loading warp draws."""
    HALF_M: gl.constexpr = PIPE.BLOCK_M // 2
    WIDTH: gl.constexpr = HALF_N if EPILOGUE.GATED else PIPE.HALVES * HALF_N
    NEIGHBORS: gl.constexpr = PIPE.HALVES == 2 and not EPILOGUE.GATED  # halves
    TO_OTHER: gl.constexpr = PIPE.N if EPILOGUE.GATED else HALF_N
    SIGNALS_STORED_TILES: gl.constexpr = PIPE.FIRST and PIPE.ARRIVALS > 0
    step = 0
    number = 0
    row_tile = -1  # whose result is on its way
    expert, left, in_row, out_row, column_tile = next_tile(drawn, number)
    while left > 0:
        left -= group * HALF_M
        column = column_tile * WIDTH
        if left > 0:
            sums, other_sums, step = _accumulate(
                group, step, buffers, operands, expert, column, column + TO_OTHER, PIPE, SCALES
            )
            BY_ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
            row = gl.arange(0, HALF_M, BY_ROW)
            row_mask = row < left
            x_scale_ptrs = operands.x_scale
            if SCALES.X == "row":
                if SCALES.STATIC:
                    x_scale_ptrs += expert + gl.zeros([HALF_M], gl.int32, BY_ROW)
                else:
                    x_scale_ptrs += in_row + group * HALF_M + row
            columns = column + gl.arange(0, HALF_N, gl.SliceLayout(0, sums.type.layout))
            GATE_SCALE: gl.constexpr = EPILOGUE.GATED
            if GATE_SCALE:
                scale_ptr = scalars.gate_output_scale
            else:
                scale_ptr = scalars.output_scale
            mask = columns < PIPE.N
            w_rows = 2 * columns if EPILOGUE.ALTERNATING else columns
            x = TileRows(None, x_scale_ptrs, row_mask)
            tile = TileColumns(expert, None, columns, mask)
            sums = finish_sums(sums, operands, x, tile, w_rows, scale_ptr, PIPE, SCALES, CODES)
            if PIPE.HALVES == 2:
                other = w_rows + (1 if EPILOGUE.ALTERNATING else TO_OTHER)
                other_mask = mask if EPILOGUE.GATED else other < PIPE.N
                tile = TileColumns(expert, None, columns, other_mask)
                other_sums = finish_sums(
                    other_sums, operands, x, tile, other, scalars.output_scale, PIPE, SCALES, CODES
                )
            if SIGNALS_STORED_TILES:
                arrive_stored(result.stored, row_tile)
                row_tile = out_row // PIPE.BLOCK_M
            else:
                tma.store_wait(0)  # the tile before has left the staging buffers
            out_row += group * HALF_M
            sums = activate_sums(sums, other_sums, scalars, expert, PIPE, EPILOGUE)
            values = requantize(sums, result, scalars, expert, out_row, column, PIPE, EPILOGUE)
            store_half(values, staging.index(PIPE.OUT_BUFFERS * group), result, out_row, column, left, PIPE)
            if NEIGHBORS:
                if PIPE.OUT_BUFFERS == 1:
                    tma.store_wait(0)
                other_sums = activate_sums(other_sums, other_sums, scalars, expert, PIPE, EPILOGUE)
                column += HALF_N
                values = requantize(other_sums, result, scalars, expert, out_row, column, PIPE, EPILOGUE)
                buffer = staging.index(PIPE.OUT_BUFFERS * group + PIPE.OUT_BUFFERS - 1)
                store_half(values, buffer, result, out_row, column, left, PIPE)
        else:
            step = skip_steps(step, buffers, PIPE)
            if SIGNALS_STORED_TILES:
                arrive_stored(result.stored, row_tile)
                row_tile = out_row // PIPE.BLOCK_M
        number += 1
        expert, left, in_row, out_row, column_tile = next_tile(drawn, number)
    if SIGNALS_STORED_TILES:
        arrive_stored(result.stored, row_tile)
    else:
        tma.store_wait(0)


@gluon.jit
def _hopper_gemm_kernel(
    x_desc,  # rows of the batch, or of the intermediate: [rows, K] in boxes of BLOCK_M / 2 x BLOCK_K
    w_desc,  # [L * W, K] in boxes of 128 x BLOCK_K; [L * N, 2 * K] if gate and up rows are interleaved
    x_scale_desc,  # [G or L * G, rows] float32 in boxes of 1 x BLOCK_M if groups of 128 columns have scales, else None
    out_desc,  # [rows, N] in boxes of BLOCK_M / 2 x 128
    operands,  # Operands, of which x, w and w_zero are None
    out,  # Stored
    scalars,
    rows,
    tiles,
    x_scale_stride,  # between groups
    scale_stride,  # of out.scale
    PIPE,
    SCALES,
    CODES,
    EPILOGUE,
):
    """out = epilogue(w @ x), tile by tile."""
    HALF_M: gl.constexpr = PIPE.BLOCK_M // 2
    x = gl.allocate_shared_memory(x_desc.dtype, [2 * PIPE.STAGES, HALF_M, PIPE.BLOCK_K], x_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, [PIPE.HALVES * PIPE.STAGES, HALF_N, PIPE.BLOCK_K], w_desc.layout)
    if x_scale_desc is not None:
        x_scale = gl.allocate_shared_memory(gl.float32, [PIPE.STAGES, 1, PIPE.BLOCK_M], x_scale_desc.layout)
    elif PIPE.COPIED_SCALES:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        x_scale = gl.allocate_shared_memory(gl.float32, [PIPE.STAGES, PIPE.BLOCK_M], flat)
    else:
        x_scale = None
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * PIPE.OUT_BUFFERS, HALF_M, HALF_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [PIPE.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PIPE.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PIPE.STAGES):
        mbarrier.init(full.index(i), count=33 if PIPE.COPIED_SCALES else 1)  # the threads of the loading warp
        mbarrier.init(empty.index(i), count=2)  # one arrival of each warp group
    drawn = allocate_tiles()
    fence_async_shared()
    buffers = Buffers(x, w, x_scale, full, empty)
    source = Source(x_desc, w_desc, x_scale_desc, operands.x_scale, x_scale_stride)
    result = Result(out_desc, out, scale_stride, tiles.stored if PIPE.FIRST else None)
    gl.warp_specialize(
        [
            (
                compute_tiles,
                (0, result, operands, scalars, buffers, staging, drawn, PIPE, SCALES, CODES, EPILOGUE),
            ),
            (
                compute_tiles,
                (1, result, operands, scalars, buffers, staging, drawn, PIPE, SCALES, CODES, EPILOGUE),
            ),
            (load_operands, (source, rows, tiles, buffers, drawn, PIPE, EPILOGUE)),
        ],
        [4, 1],
        [232, 40],  # registers of the second and third partition; the first gets what is left of 168 * 384, 232
    )
