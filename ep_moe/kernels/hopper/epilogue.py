"""What follows the sums of a tile: scales, bias, activation, rounding or requantization, store.

Letters: L local experts, K columns that a GEMM reduces over, N columns of its result, W rows of its weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ep_moe.kernels.gemm.activation import activate
from ep_moe.kernels.gemm.epilogue import add_bias, of_expert, scale_sums
from ep_moe.kernels.hopper.arguments import HALF_N
from ep_moe.kernels.numerics import absmax, divide_rows, quantize_to, round_to, scale_for, to_quantized

_async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # before Triton 3.8

# As numerics.tile_scale does it; written so, the loop over K does not spill (Triton 3.6.0 and 3.7.1).
_UP_TO_POWER_OF_TWO = gl.constexpr("""{
    .reg .u32 bits, rounded;
    .reg .pred finite;
    mov.b32 bits, $1;
    add.u32 rounded, bits, 0x7FFFFF;
    and.b32 rounded, rounded, 0x7F800000;
    setp.lt.u32 finite, bits, 0x7F800000;
    selp.b32 rounded, rounded, bits, finite;
    mov.b32 $0, rounded;
}""")


@gluon.jit
def finish_sums(sums, operands, x, tile, columns, output_scale_ptr, PIPE, SCALES, CODES):
    """`scale_sums`, with the bias."""
    sums = scale_sums(sums, operands, x, tile, columns, PIPE.W, output_scale_ptr, SCALES, CODES)
    if operands.bias is not None:
        sums = add_bias(sums, operands.bias + tile.expert.to(gl.int64) * PIPE.W + columns, tile.mask)
    return sums


@gluon.jit
def activate_sums(sums, other_sums, scalars, expert, PIPE, EPILOGUE):
    """The activation, with numbers of the expert in place of the shared ones."""
    alpha = of_expert(scalars.alpha, expert, PIPE.ALPHA)
    beta = of_expert(scalars.beta, expert, PIPE.BETA)
    limit = of_expert(scalars.limit, expert, PIPE.LIMIT)
    return activate(sums, other_sums, alpha, beta, limit, EPILOGUE)


@gluon.jit
def requantize(values, result, scalars, expert, row, column, PIPE, EPILOGUE):
    """Round half a tile [R, 128] to the dtype of the result; a group of 128 columns stores its scales [R]."""
    DTYPE: gl.constexpr = result.out.data.dtype.element_ty
    if EPILOGUE.REQUANTIZE == "group":
        if PIPE.N % HALF_N != 0:
            columns = column + gl.arange(0, HALF_N, gl.SliceLayout(0, values.type.layout))
            values = gl.where((columns < PIPE.N)[None, :], values, 0.0)
        scale = scale_for(absmax(values, 1), DTYPE)
        if EPILOGUE.POWER_OF_TWO:
            scale = gl.inline_asm_elementwise(_UP_TO_POWER_OF_TWO, "=f,f", [scale], gl.float32, is_pure=True, pack=1)
        rows = row + gl.arange(0, values.shape[0], gl.SliceLayout(1, values.type.layout))
        if column < PIPE.N:
            gl.store(result.out.scale + (column // HALF_N).to(gl.int64) * result.scale_stride + rows, scale)
        return to_quantized(divide_rows(values, scale), DTYPE)
    elif EPILOGUE.REQUANTIZE == "static":
        return quantize_to(values, gl.load(scalars.static_scale + expert), DTYPE)
    else:
        return round_to(values, DTYPE)


@gluon.jit
def store_half(values, buffer, result, row, column, left, PIPE):
    """Store half a tile: by TMA, or, if not all of its rows may be written, the first `left` by pointers."""
    buffer.store(values)
    if PIPE.FIRST:  # noqa: SIM114 - known when compiling, the next condition at run time
        fence_async_shared()
        _async_store(result.desc, [row, column], buffer)
    elif left >= values.shape[0]:
        fence_async_shared()
        _async_store(result.desc, [row, column], buffer)
    else:
        VEC: gl.constexpr = 128 // result.desc.dtype.primitive_bitwidth
        layout: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 4, 128 // VEC], [4, 1], [1, 0])
        rows = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, HALF_N, gl.SliceLayout(0, layout))
        ptrs = result.out.data + row.to(gl.int64) * PIPE.N + rows[:, None] * PIPE.N + columns[None, :]
        gl.store(ptrs, buffer.load(layout), mask=(rows < left)[:, None] & (columns < PIPE.N)[None, :])
