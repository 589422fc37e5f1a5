"""The loops of a warp group over K: 64 rows times two halves of 128 columns, or one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ep_moe.kernels.hopper.arguments import HALF_M, HALF_N

_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on


@gluon.constexpr_function
def sums_layout(ITEM_BITS):
    """The registers of a half tile's sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 256 // ITEM_BITS])


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
def multiply_chained(group: gl.constexpr, step, buffers, PIPE, LAYOUT: gl.constexpr):
    """16-bit products, summed in the tensor core's float32, or int8 in int32, which 131,071 columns cannot overflow.
    Returns both halves in float32 and the step after the last."""
    DTYPE: gl.constexpr = sums_dtype(buffers.w.dtype)
    sums = gl.zeros([HALF_M, HALF_N], DTYPE, LAYOUT)
    other_sums = gl.zeros([HALF_M, HALF_N], DTYPE, LAYOUT)
    for k in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        x = buffers.x.index(2 * stage + group)
        sums = warpgroup_mma(x, buffers.w.index(PIPE.HALVES * stage).permute((1, 0)), sums, is_async=True)
        if PIPE.HALVES == 2:
            w = buffers.w.index(2 * stage + 1).permute((1, 0))
            other_sums = warpgroup_mma(x, w, other_sums, is_async=True)
        sums, other_sums = warpgroup_mma_wait(PIPE.HALVES, deps=(sums, other_sums))  # of the step before
        mbarrier.arrive(buffers.empty.index((step + PIPE.STAGES - 1) % PIPE.STAGES), count=1, pred=k > 0)
        step += 1
    sums, other_sums = warpgroup_mma_wait(0, deps=(sums, other_sums))
    mbarrier.arrive(buffers.empty.index((step + PIPE.STAGES - 1) % PIPE.STAGES), count=1)
    return sums.to(gl.float32), other_sums.to(gl.float32), step


@gluon.jit
def multiply_float8(group: gl.constexpr, step, buffers, PIPE, LAYOUT: gl.constexpr):
    """fp8 products, added to float32 registers after each step of 128: Hopper sums fp8 in 14 bits."""
    sums = gl.zeros([HALF_M, HALF_N], gl.float32, LAYOUT)
    other_sums = gl.zeros([HALF_M, HALF_N], gl.float32, LAYOUT)
    zeros = gl.zeros([HALF_M, HALF_N], gl.float32, LAYOUT)
    for _ in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        x = buffers.x.index(2 * stage + group)
        w = buffers.w.index(PIPE.HALVES * stage).permute((1, 0))
        product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        sums += product
        if PIPE.HALVES == 2:
            w = buffers.w.index(2 * stage + 1).permute((1, 0))
            product = warpgroup_mma(x, w, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        if PIPE.HALVES == 2:
            other_sums += product
        step += 1
    return sums, other_sums, step


@gluon.jit
def multiply_scaled(
    group: gl.constexpr,
    step,
    buffers,
    scale_ptr,  # of the first half's rows of w: a scale for each step
    other_scale_ptr,
    PIPE,
    LAYOUT: gl.constexpr,
):
    """fp8 or int8 products times the scales of their rows of x and their block of w, added to float32 in each step.

    While one warp group scales, the tensor core multiplies for the other.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if _PUBLIC:
        x_scales = buffers.x_scale.reinterpret(gl.float32, [2 * PIPE.STAGES, HALF_M], FLAT)
    else:
        x_scales = buffers.x_scale._reinterpret(gl.float32, [2 * PIPE.STAGES, HALF_M], FLAT)
    sums = gl.zeros([HALF_M, HALF_N], gl.float32, LAYOUT)
    other_sums = gl.zeros([HALF_M, HALF_N], gl.float32, LAYOUT)
    zeros = gl.zeros([HALF_M, HALF_N], sums_dtype(buffers.w.dtype), LAYOUT)
    w_scale, other_w_scale = gl.load(scale_ptr), gl.load(other_scale_ptr)
    for k in range(PIPE.STEPS):
        stage = step % PIPE.STAGES
        mbarrier.wait(buffers.full.index(stage), (step // PIPE.STAGES) & 1)
        x = buffers.x.index(2 * stage + group)
        w = buffers.w.index(PIPE.HALVES * stage).permute((1, 0))
        product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
        x_scale = x_scales.index(2 * stage + group).load(BY_ROW)
        scale, other_scale = x_scale * w_scale, x_scale * other_w_scale
        following = gl.minimum(k + 1, PIPE.STEPS - 1)  # loaded a step ahead
        w_scale, other_w_scale = gl.load(scale_ptr + following), gl.load(other_scale_ptr + following)
        product = warpgroup_mma_wait(0, deps=(product,))
        sums += product.to(gl.float32) * scale[:, None]
        if PIPE.HALVES == 2:
            w = buffers.w.index(2 * stage + 1).permute((1, 0))
            product = warpgroup_mma(x, w, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        if PIPE.HALVES == 2:
            other_sums += product.to(gl.float32) * other_scale[:, None]
        step += 1
    return sums, other_sums, step
