"""The loading warp: it draws tiles and fills the operands' buffers by TMA, step by step over all of its tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from ep_moe.kernels.hopper.arguments import HALF_N
from ep_moe.kernels.hopper.overlap import let_dependents_start, wait_for_kernel_before, wait_until_stored
from ep_moe.kernels.hopper.tiles import draw_tile, put_tile

# the latter before Triton 3.8, and of those that are no TMA before 3.9
_async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_async_gather = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _load_weights(w_desc, rows, k, step, both, pred, buffers, PIPE, ALTERNATING: gl.constexpr, OTHERS: gl.constexpr):
    """Load a tile's weights for step k over K, from both `rows`, into the buffers of `step`, once these are empty.

    The barrier then expects these, half or all rows of tokens, and OTHERS bytes. Nothing happens unless `pred`.
    """
    stage = step % PIPE.STAGES
    full, column = buffers.full.index(stage), k * PIPE.BLOCK_K
    X_BYTES: gl.constexpr = PIPE.BLOCK_M // 2 * PIPE.BLOCK_K * buffers.x.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = PIPE.HALVES * HALF_N * PIPE.BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    mbarrier.wait(buffers.empty.index(stage), ((step // PIPE.STAGES) & 1) ^ 1, pred=pred)
    mbarrier.expect(full, X_BYTES + W_BYTES + OTHERS, pred=pred & (not both))
    mbarrier.expect(full, 2 * X_BYTES + W_BYTES + OTHERS, pred=pred & both)
    _async_load(w_desc, [rows[0], column], full, buffers.w.index(PIPE.HALVES * stage), pred=pred)
    if PIPE.HALVES == 2:
        other_column = column + (PIPE.STEPS * PIPE.BLOCK_K if ALTERNATING else 0)
        _async_load(w_desc, [rows[1], other_column], full, buffers.w.index(2 * stage + 1), pred=pred)


@gluon.jit
def load_operands(source, rows, tiles, buffers, drawn, PIPE, EPILOGUE):
    """Load the operands of every tile that this program draws, until none is left.

    Every partition counts steps alike, so that all agree on stages and phases. A barrier expects the bytes of all
    copies of its step: another number would hang the program.
    """
    x_desc, w_desc, x_scale_desc, x_scale, x_scale_stride = source
    SCALE_BYTES: gl.constexpr = 0 if x_scale_desc is None else PIPE.BLOCK_M * 4
    BY_LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    OVERLAPS: gl.constexpr = PIPE.ARRIVALS > 0
    if PIPE.FIRST or not OVERLAPS:
        wait_for_kernel_before()
    if OVERLAPS and PIPE.FIRST:
        let_dependents_start()
    total = gl.load(tiles.num_tiles) * PIPE.COLUMN_TILES
    t = gl.program_id(0)
    step = 0
    number = 0
    while t < total:
        following, expert, left, listed, batch_row, column_tile = draw_tile(t, rows, tiles, PIPE)
        listed_row = listed * PIPE.BLOCK_M
        row = listed_row if PIPE.PACKED else batch_row
        put_tile(drawn, number, expert, left, row, listed_row if PIPE.FIRST else batch_row, column_tile)
        number += 1
        if PIPE.COPIED_SCALES:
            scale_ptrs = x_scale + row + gl.arange(0, PIPE.BLOCK_M, BY_LANE)
            if PIPE.SCALE_ROWS:  # the experts' matrices of scales are x_scale_stride * G elements apart
                scale_ptrs += expert.to(gl.int64) * (PIPE.SCALE_ROWS - 1) * x_scale_stride
            scale_mask = gl.arange(0, PIPE.BLOCK_M, BY_LANE) < left
        both = left > PIPE.BLOCK_M // 2  # else no warp group reads the lower half
        w_row = column_tile * (HALF_N if EPILOGUE.GATED else PIPE.HALVES * HALF_N)
        other_w_row = w_row
        if EPILOGUE.ALTERNATING:  # a row of the descriptor has a gate row and then the up row of the same column
            w_row += expert * PIPE.N
            other_w_row += expert * PIPE.N
        else:
            w_row += expert * PIPE.W
            other_w_row += expert * PIPE.W + (PIPE.N if EPILOGUE.GATED else HALF_N)
        w_rows = w_row, other_w_row
        ahead = 0
        if OVERLAPS and not PIPE.FIRST:
            if number == 1:  # the weights of the first tile arrive while the first GEMM ends
                ahead = PIPE.STAGES if PIPE.STAGES < PIPE.STEPS else PIPE.STEPS
                for k in range(ahead):
                    _load_weights(w_desc, w_rows, k, k, both, True, buffers, PIPE, EPILOGUE.ALTERNATING, SCALE_BYTES)
            wait_until_stored(tiles.stored, listed, PIPE.ARRIVALS)
        for k in range(PIPE.STEPS):
            late = k >= ahead
            _load_weights(w_desc, w_rows, k, step, both, late, buffers, PIPE, EPILOGUE.ALTERNATING, SCALE_BYTES)
            stage = step % PIPE.STAGES
            full, column = buffers.full.index(stage), k * PIPE.BLOCK_K
            _async_load(x_desc, [row, column], full, buffers.x.index(2 * stage))
            if x_scale_desc is not None:
                _async_load(x_scale_desc, [k, row], full, buffers.x_scale.index(stage))
            elif PIPE.COPIED_SCALES:
                _async_gather(buffers.x_scale.index(stage), scale_ptrs, mask=scale_mask)
                async_copy.mbarrier_arrive(full, increment_count=False)  # each thread arrives, once its copies have
                scale_ptrs += x_scale_stride
            x_other = buffers.x.index(2 * stage + 1)
            _async_load(x_desc, [row + PIPE.BLOCK_M // 2, column], full, x_other, pred=both)
            step += 1
        t = following
    put_tile(drawn, number, 0, 0, 0, 0, 0)
    if OVERLAPS and not PIPE.FIRST:
        wait_for_kernel_before()  # so that the next kernel in the stream follows both
