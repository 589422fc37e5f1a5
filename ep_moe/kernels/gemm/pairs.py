"""Two 4-bit codes of a byte decoded at once to 16 bits, by PTX that works on both halves of a register.

Triton's own operations would decode them one by one, and convert each from float32. Its interpreter has no PTX: there,
and for dtypes that are not listed here, `ep_moe.kernels.gemm.weights` decodes. `Codes.PAIRS` says which.

Letters: G scales of a row of weights in a step over K.
"""

import triton
import triton.language as tl

# $2 is the byte, in the low bits of a register, v the result, $3 and $4 hold a number twice each.
# Integers: codes in the low bits of 128.0 (bfloat16) or 1024.0 (float16) are added to it; $3 is -(that + zero point).
_UINT4_BF16 = tl.constexpr(
    """
    {
    .reg .b32 v, c;
    mul.lo.u32 v, $2, 0x1001;
    lop3.b32 v, v, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 c, 0x3F803F80;
    fma.rn.bf16x2 v, v, c, $3;
    """
)
_UINT4_F16 = tl.constexpr(
    """
    {
    .reg .b32 v;
    mul.lo.u32 v, $2, 0x1001;
    lop3.b32 v, v, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 v, v, $3;
    """
)
# e2m1: sign, exponent and mantissa, moved to where bfloat16 has them, are the number times 2^-126; $3 is the scale.
_E2M1_BF16 = tl.constexpr(
    """
    {
    .reg .b32 v, w, c;
    mul.lo.u32 v, $2, 0x00040040;
    shl.b32 w, v, 6;
    and.b32 v, v, 0x01C001C0;
    lop3.b32 v, w, 0x80008000, v, 0xEA;
    mov.b32 c, 0x80008000;
    fma.rn.bf16x2 v, v, $3, c;
    """
)
_SCALE_BF16 = tl.constexpr(
    """
    mov.b32 c, 0x80008000;
    fma.rn.bf16x2 v, v, $4, c;
    """
)
_SCALE_F16 = tl.constexpr("mul.rn.f16x2 v, v, $4;")
_UNPACK = tl.constexpr("mov.b32 {$0, $1}, v; }")
# 2^126 times the largest scale of e8m0, or e4m3, would overflow: weights are decoded too small by these powers of two,
# and the sums are multiplied by them. e8m0 scales from 2^-60 to 2^63 are exact, smaller ones lose bits.
_E8M0_MISSING = tl.constexpr(2.0**64)
_E4M3_MISSING = tl.constexpr(2.0**10)


@triton.jit
def missing_factor(scale_dtype: tl.constexpr, CODES):
    """The power of two by which weights are decoded too small, for bytes of e8m0 (uint8) or for e4m3."""
    if CODES.KIND == "e2m1" and CODES.PAIRS:
        return _E8M0_MISSING if scale_dtype == tl.uint8 else _E4M3_MISSING
    else:
        return 1.0


@triton.jit
def _twice(x):
    """The bits of a float of 16 bits in both halves of an int32."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def scale_pairs(scale, real, CODES):
    """Stored scales as the decoding multiplies by them; real: the same as float32."""
    if CODES.KIND == "e2m1":
        power: tl.constexpr = 2.0**126 / missing_factor(scale.dtype, CODES)
        return _twice((real * power).to(tl.bfloat16))
    else:
        return _twice(scale)


@triton.jit
def zero_pairs(zero, dtype: tl.constexpr):
    """Zero points as the decoding adds them: -(128 + zero), or -(1024 + zero), twice."""
    if dtype == tl.bfloat16:
        return (zero.to(tl.int32) | 0xC300) * 0x10001
    else:
        return (zero.to(tl.int32) | 0xE400) * 0x10001


@triton.jit
def decode_pairs(stored, scale, zero, dtype: tl.constexpr, SCALES, CODES):
    """The first and the second numbers of bytes, in `dtype`; scale, if "fold", and zero as the functions above."""
    codes = stored.to(tl.int32)
    if CODES.KIND == "e2m1":
        return tl.inline_asm_elementwise(
            _E2M1_BF16 + _UNPACK,
            "=h,=h,r,r",
            [codes, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    elif SCALES.WEIGHT == "fold" and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UINT4_BF16 + _SCALE_BF16 + _UNPACK,
            "=h,=h,r,r,r",
            [codes, zero, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    elif SCALES.WEIGHT == "fold":
        return tl.inline_asm_elementwise(
            _UINT4_F16 + _SCALE_F16 + _UNPACK,
            "=h,=h,r,r,r",
            [codes, zero, scale],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UINT4_BF16 + _UNPACK,
            "=h,=h,r,r",
            [codes, zero],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            _UINT4_F16 + _UNPACK, "=h,=h,r,r", [codes, zero], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
