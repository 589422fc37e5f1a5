"""Arithmetic that is bitwise equal on a GPU, in Triton's interpreter and in `ep_moe.quant`.

The interpreter represents bfloat16 by its bits, so that arithmetic and dots on it are wrong, and its casts to bfloat16
and float8 truncate: such casts are written out here. GPUs without instructions for e4m3 use the same arithmetic.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
E4M3_MAX = tl.constexpr(448.0)  # with INT8_MAX and MIN_AMAX as LARGEST and MIN_AMAX of ep_moe.quant.scaled
INT8_MAX = tl.constexpr(127.0)
E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX_EXPONENT = tl.constexpr(8)  # of 448
MIN_AMAX = tl.constexpr(1e-10)
INT32_MIN, INT32_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
INTEGER_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # the spacing of float32 here is 1: adding and subtracting it rounds
E4M3_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)  # of 2^-6 in float32
E4M3_SUBNORMAL_ROUNDER = tl.constexpr(1.5 * 2.0**14)  # the spacing of float32 here is 2^-9, that of e4m3 near 0


@triton.jit
def clamp_to_int32(x):
    """Clamp an int32 or int64 to the range of int32."""
    return tl.minimum(tl.maximum(x, INT32_MIN), INT32_MAX).to(tl.int32)


@triton.jit
def to_bf16(x):
    """Round float32 to bfloat16, to nearest, ties to even. NaN stays NaN."""
    if not INTERPRET:
        return x.to(tl.bfloat16)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    kept = tl.where(x == x, rounded, (bits >> 16) | 0x40)
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 to float32, float16 or bfloat16."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    return x.to(dtype)


@triton.constexpr_function
def has_e4m3():
    """Whether kernels use instructions that convert and multiply e4m3; else, as in the interpreter, integers."""
    return not INTERPRET.value and cuda_capability_geq(8, 9)


@triton.jit
def to_e4m3(x):
    """Round float32 to float8 e4m3, to nearest, ties to even; beyond 448 it saturates, NaN stays NaN."""
    x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    if has_e4m3():
        return x.to(tl.float8e4nv)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) + E4M3_SUBNORMAL_ROUNDER).to(tl.int32, bitcast=True) & 0xF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 8 * (127 - 7)  # the difference of both biases
    code = tl.where(magnitude < E4M3_MIN_NORMAL_BITS, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN if any element is NaN, as in torch."""
    if INTERPRET:  # its maximum ignores NaN, and a custom reduction would run once for each element
        largest = tl.max(tl.abs(x), axis)
        return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), largest)
    return tl.reduce(tl.abs(x), axis, _larger)


@triton.jit
def tile_scale(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr = False):
    """The scale for a largest magnitude: max(amax, 1e-10) / LARGEST, with IEEE division.

    With POWER_OF_TWO rounded up to the next one, by its bits; inf and NaN stay. Example: 0.75 gives 1.0.
    """
    scale = tl.div_rn(tl.maximum(amax, MIN_AMAX, propagate_nan=tl.PropagateNan.ALL), LARGEST)
    if POWER_OF_TWO:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        return tl.where(scale < float("inf"), exponent.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def e4m3_scale(amax, POWER_OF_TWO: tl.constexpr = False):
    """`tile_scale` for e4m3."""
    return tile_scale(amax, E4M3_MAX, POWER_OF_TWO)


@triton.jit
def scale_for(amax, dtype: tl.constexpr, POWER_OF_TWO: tl.constexpr = False):
    """`tile_scale` for values of `dtype`, int8 or e4m3."""
    LARGEST: tl.constexpr = INT8_MAX if dtype == tl.int8 else E4M3_MAX
    return tile_scale(amax, LARGEST, POWER_OF_TWO)


@triton.jit
def e8m0_byte(amax, MAX_EXPONENT: tl.constexpr):
    """The scale of an MX group, as int32; MAX_EXPONENT is that of the largest number. Example: amax 7, 8 gives 121."""
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return tl.where(exponent == 0xFF, exponent, tl.maximum(exponent - MAX_EXPONENT, 0))


@triton.jit
def e8m0_value(byte):
    """The float32 of an e8m0 byte, as int32: 2^(byte - 127), NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)  # 2^-127 is subnormal
    return tl.where(byte == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_mxfp8(x, byte):
    """x divided by the scale of its group, an e8m0 byte as int32 that broadcasts against x, as e4m3; exact."""
    reciprocal = tl.where(byte == 0xFF, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    return to_e4m3(x * reciprocal)


@triton.jit
def e4m3_group_scale(amax):
    """The scale of an NVFP4 group, rounded to e4m3: NaN if amax is not finite. Example: amax 6 gives 1."""
    scale = to_e4m3(tl.div_rn(amax, E2M1_MAX)).to(tl.uint8, bitcast=True)
    finite = amax < float("inf")
    return tl.where(finite, scale, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def e4m3_value(x):
    """The float32 that an e4m3 number stands for: without instructions, its bits as those of 2^-120 times as much."""
    if has_e4m3():
        return x.to(tl.float32)
    code = x.to(tl.uint8, bitcast=True).to(tl.uint32)
    value = ((code & 0x80) << 24 | (code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e4m3_half(x):
    """The float16 that an e4m3 number stands for, as `e4m3_value`; exact."""
    if has_e4m3():
        return x.to(tl.float16)
    code = x.to(tl.uint8, bitcast=True).to(tl.uint16)
    value = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def divide_rows(x, scale):
    """x [N, C] / scale [N], bitwise IEEE division if no quotient overflows or is subnormal.

    One correctly rounded reciprocal for each row and one correction of the quotient by its remainder, exact under fused
    multiply-add (P. Markstein, 1990); for a scale that is not finite, x times its reciprocal.
    """
    if INTERPRET:
        return tl.div_rn(x, scale[:, None])
    reciprocal = tl.div_rn(1.0, scale)[:, None]
    quotient = x * reciprocal
    remainder = tl.fma(-quotient, scale[:, None], x)
    return tl.where(reciprocal > 0, tl.fma(remainder, reciprocal, quotient), quotient)


@triton.jit
def to_int8(x):
    """Round float32 to int8 within +-127, to nearest, ties to even; NaN is 0."""
    x = tl.clamp(x, -INT8_MAX, INT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    rounded = (x + INTEGER_ROUNDER) - INTEGER_ROUNDER
    return tl.where(x == x, rounded, 0.0).to(tl.int8)


@triton.jit
def to_quantized(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, int8 or e4m3, as `to_int8` and `to_e4m3` do."""
    return to_int8(x) if dtype == tl.int8 else to_e4m3(x)


@triton.jit
def quantize_to(x, scale, dtype: tl.constexpr):
    """x / scale as `dtype`, int8 or e4m3. Example: x = 1.0, scale = 2 / 448 is 224 in e4m3."""
    return to_quantized(tl.div_rn(x, scale), dtype)


@triton.jit
def to_e2m1(x):
    """Round float32 to the 4-bit code of e2m1, as uint8, to nearest, ties to even; beyond 6 it saturates.

    Example: 2.5 gives 2, code 4; -0.1 gives -0, code 8.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) * 2 + INTEGER_ROUNDER).to(tl.int32, bitcast=True) & 7
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252  # the exponent and a bit of the mantissa
    code = tl.minimum(tl.where(magnitude < 0x3F800000, small, normal), 7)
    return (code | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """The float32 that a code of e2m1 stands for: its bits moved to those of a number 2^126 times as small."""
    bits = code.to(tl.uint32)
    bits = ((bits & 8) << 28) | ((bits & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def quantize_e2m1(x, scale):
    """x / scale as the code of e2m1, 0 unless scale > 0: as `ep_moe.quant.micro`."""
    return to_e2m1(tl.where(scale > 0, tl.div_rn(x, scale), 0.0))


@triton.jit
def pack_nibbles(codes):
    """Put neighbors of uint8 [N, K] below 16 in a byte each, the first in the low bits: [N, K / 2]."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)
