"""The loops of a warp group over K: half of a tile's rows times two halves of 128 columns, or one.

Sums of few rows are transposed in the loop, [128, R] in place of [R, 128].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ep_moe.kernels.hopper.arguments import HALF_N, ROWS

_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on


@gluon.constexpr_function
def _sums_layout(ITEM_BITS, BLOCK_M):
    """The registers of a half tile's sums."""
    columns = HALF_N.value if ROWS.value == BLOCK_M else BLOCK_M // 2
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // ITEM_BITS])


@gluon.constexpr_function
def sums_dtype(item_dtype):
    """What the tensor core sums in: int8 in int32, all others in float32."""
    return gl.int32 if item_dtype == gl.int8 else gl.float32


@gluon.jit
def skip_steps(step, buffers, PIPE):
    """Empty the buffers of a tile in which this warp group has no rows."""
    for _ in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _zeros(DTYPE: gl.constexpr, buffers, PIPE):
    """Sums of a half tile before the first step."""
    LAYOUT: gl.constexpr = _sums_layout(buffers.w.dtype.primitive_bitwidth, PIPE.BLOCK_M)
    if PIPE.BLOCK_M == ROWS:
        return gl.zeros([ROWS // 2, HALF_N], DTYPE, LAYOUT)
    else:
        return gl.zeros([HALF_N, PIPE.BLOCK_M // 2], DTYPE, LAYOUT)


@gluon.jit
def _start(group: gl.constexpr, half: gl.constexpr, step, buffers, sums, ADD: gl.constexpr, PIPE):
    """The products of a step and one half, added to `sums` or in place of them, which are on their way."""
    stage = step % PIPE.STAGES
    x = buffers.x.index(2 * stage + group)
    w = buffers.w.index(PIPE.HALVES * stage + half)
    if PIPE.BLOCK_M == ROWS:
        return warpgroup_mma(x, w.permute((1, 0)), sums, use_acc=ADD, is_async=True)
    else:
        return warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=ADD, is_async=True)


@gluon.jit
def _in_order(sums, PIPE):
    """Sums as [R, 128], float32."""
    sums = sums.to(gl.float32)
    return sums if PIPE.BLOCK_M == ROWS else sums.permute((1, 0))


@gluon.jit
def multiply_chained(group: gl.constexpr, step, buffers, PIPE):
    """16-bit products, summed in the tensor core's float32, or int8 in int32, which 131,071 columns cannot overflow.
    Returns both halves in float32 and the step after the last."""
    sums = _zeros(sums_dtype(buffers.w.dtype), buffers, PIPE)
    other_sums = _zeros(sums_dtype(buffers.w.dtype), buffers, PIPE)
    for k in range(PIPE.STEPS):
        mbarrier.wait(buffers.full.index(step % PIPE.STAGES), (step // PIPE.STAGES) & 1)
        sums = _start(group, 0, step, buffers, sums, True, PIPE)
        if PIPE.HALVES == 2:
            other_sums = _start(group, 1, step, buffers, other_sums, True, PIPE)
        sums, other_sums = warpgroup_mma_wait(PIPE.HALVES, deps=(sums, other_sums))  # of the step before
        mbarrier.arrive(buffers.empty.index((step + PIPE.STAGES - 1) % PIPE.STAGES), count=1, pred=k > 0)
        step += 1
    sums, other_sums = warpgroup_mma_wait(0, deps=(sums, other_sums))
    mbarrier.arrive(buffers.empty.index((step + PIPE.STAGES - 1) % PIPE.STAGES), count=1)
    return _in_order(sums, PIPE), _in_order(other_sums, PIPE), step


@gluon.jit
def multiply_float8(group: gl.constexpr, step, buffers, PIPE):
    """fp8 products, added to float32 registers after each step of 128: Hopper sums fp8 in 14 bits."""
    sums = _zeros(gl.float32, buffers, PIPE)
    other_sums = _zeros(gl.float32, buffers, PIPE)
    zeros = _zeros(gl.float32, buffers, PIPE)
    for _ in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        product = _start(group, 0, step, buffers, zeros, False, PIPE)
        product = warpgroup_mma_wait(0, deps=(product,))
        sums += product
        if PIPE.HALVES == 2:
            product = _start(group, 1, step, buffers, product, False, PIPE)
            product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        if PIPE.HALVES == 2:
            other_sums += product
        step += 1
    return _in_order(sums, PIPE), _in_order(other_sums, PIPE), step


@gluon.jit
def multiply_scaled(
    group: gl.constexpr,
    step,
    buffers,
    scale_ptr,  # of the first half's rows of w: a scale for each step
    other_scale_ptr,
    PIPE,
):
    """fp8 or int8 products times the scales of their rows of x and their block of w, added to float32 in each step.

    While one warp group scales, the tensor core multiplies for the other.
    """
    HALF_M: gl.constexpr = PIPE.BLOCK_M // 2
    FEW: gl.constexpr = PIPE.BLOCK_M != ROWS
    ROW_AXIS: gl.constexpr = 1 if FEW else 0
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if _PUBLIC:
        x_scales = buffers.x_scale.reinterpret(gl.float32, [2 * PIPE.STAGES, HALF_M], FLAT)
    else:
        x_scales = buffers.x_scale._reinterpret(gl.float32, [2 * PIPE.STAGES, HALF_M], FLAT)
    sums = _zeros(gl.float32, buffers, PIPE)
    other_sums = _zeros(gl.float32, buffers, PIPE)
    zeros = _zeros(sums_dtype(buffers.w.dtype), buffers, PIPE)
    w_scale, other_w_scale = gl.load(scale_ptr), gl.load(other_scale_ptr)
    for k in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        product = _start(group, 0, step, buffers, zeros, False, PIPE)
        x_scale = x_scales.index(2 * stage + group).load(gl.SliceLayout(1 - ROW_AXIS, sums.type.layout))
        scale = gl.expand_dims(x_scale * w_scale, 1 - ROW_AXIS)
        other_scale = gl.expand_dims(x_scale * other_w_scale, 1 - ROW_AXIS)
        following = gl.minimum(k + 1, PIPE.STEPS - 1)  # loaded a step ahead
        w_scale, other_w_scale = gl.load(scale_ptr + following), gl.load(other_scale_ptr + following)
        if FEW:  # registers hold both products
            other = product
            if PIPE.HALVES == 2:
                other = _start(group, 1, step, buffers, zeros, False, PIPE)
            product, other = warpgroup_mma_wait(0, deps=(product, other))
            mbarrier.arrive(buffers.empty.index(stage), count=1)
            sums += product.to(gl.float32) * scale
            if PIPE.HALVES == 2:
                other_sums += other.to(gl.float32) * other_scale
        else:
            product = warpgroup_mma_wait(0, deps=(product,))
            sums += product.to(gl.float32) * scale
            if PIPE.HALVES == 2:
                product = _start(group, 1, step, buffers, product, False, PIPE)
                product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(buffers.empty.index(stage), count=1)
            if PIPE.HALVES == 2:
                other_sums += product.to(gl.float32) * other_scale
        step += 1
    return _in_order(sums, PIPE), _in_order(other_sums, PIPE), step
