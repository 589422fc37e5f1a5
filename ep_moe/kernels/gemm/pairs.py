"""Weights decoded two at once to 16 bits, by PTX that works on both halves of a register.

Triton's own operations decode them one by one, and convert each from float32: `ep_moe.kernels.gemm.weights` does so in
the interpreter, which has no PTX, and for tiles that do not read whole words. `Codes.PAIRS` chooses.

Letters: G scales of a row of weights in a step over K.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import e4m3_value, has_e4m3, to_bf16

# 2^126 times the largest scale of e8m0, or e4m3, would overflow: weights are decoded too small by these powers of two,
# and the sums are multiplied by them. e8m0 scales from 2^-60 to 2^63 are exact, smaller ones lose bits.
_E8M0_MISSING = tl.constexpr(2.0**64)
_E4M3_MISSING = tl.constexpr(2.0**10)
# Integers of 4 bits times bfloat16 scales are exact in float16 if scales are from 2^-21 to 2^8, with this factor.
_UINT4_MISSING = tl.constexpr(2.0**-4)
_BF16_AS_F16_PAIR = tl.constexpr(  # bfloat16 divided by _UINT4_MISSING, as float16 twice
    """
    {
    .reg .b32 bits;
    .reg .f32 real;
    shl.b32 bits, $1, 16;
    mov.b32 real, bits;
    mul.f32 real, real, 0f41800000;
    cvt.rn.f16x2.f32 $0, real, real;
    }
    """
)
_TWICE = tl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_E4M3_SCALE_FACTOR = tl.constexpr(2.0**126 / _E4M3_MISSING.value)
_E4M3_PAIR = tl.constexpr(  # e4m3 times 2^126 / _E4M3_MISSING, as bfloat16 twice
    """
    {
    .reg .b16 low, high;
    .reg .b32 both;
    .reg .f32 real;
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 both, low;
    mov.b32 {low, high}, both;
    cvt.f32.f16 real, low;
    mul.f32 real, real, 0f79800000;
    cvt.rn.bf16x2.f32 $0, real, real;
    }
    """
)


@triton.jit
def deferred_scale(scale_dtype: tl.constexpr, dtype: tl.constexpr, CODES):
    """The power of two by which weights are decoded too small to `dtype`; scales of e8m0 are uint8."""
    if CODES.KIND == "e2m1" and CODES.PAIRS:
        return _E8M0_MISSING if scale_dtype == tl.uint8 else _E4M3_MISSING
    elif CODES.KIND == "uint4" and CODES.PAIRS and scale_dtype != dtype:
        return _UINT4_MISSING
    else:
        return 1.0


@triton.jit
def scale_pairs(bits, scale_dtype: tl.constexpr, dtype: tl.constexpr, CODES):
    """Scales as the decoding to `dtype` multiplies by them, the same 16 bits twice.

    Args:
        bits: int32, whose lowest bits are scales as they are stored, in `scale_dtype`.
    """
    if CODES.KIND == "e2m1" and scale_dtype == tl.uint8:  # 2^(b - 127) times 2^62; NaN if that is above 2^128
        return tl.minimum((bits & 0xFF) * 128 + 62 * 128, 0x7FFF) * 0x10001
    elif CODES.KIND == "e2m1" and not has_e4m3():
        real = e4m3_value(bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)) * _E4M3_SCALE_FACTOR
        return to_bf16(real).to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001
    elif CODES.KIND == "e2m1":
        return tl.inline_asm_elementwise(_E4M3_PAIR, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
    elif CODES.KIND == "float8":  # e8m0
        byte = bits & 0xFF
        return (byte << 7 | tl.where((byte + 1 & 0xFE) == 0, 0x40, 0)) * 0x10001
    elif scale_dtype != dtype:
        return tl.inline_asm_elementwise(_BF16_AS_F16_PAIR, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_TWICE, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def zero_pairs(bits, dtype: tl.constexpr):
    """Zero points as the decoding adds them: -(128 + zero), or -(1024 + zero), twice; arguments as of `scale_pairs`."""
    return (bits & 0xFF | (0xC300 if dtype == tl.bfloat16 else 0xE400)) * 0x10001


# int8: the low 7 bits of a byte are added to 128.0 (bfloat16), from which 128 is subtracted, or 256 if the byte is
# negative; in float16 the byte plus 128 is added to 1024.0.
_INT8_BF16 = tl.constexpr(
    """
    {
    .reg .b32 v, w, c, m, n;
    mov.b32 c, 0x3F803F80;
    mov.b32 m, 0x43004300;
    mov.b32 n, 0xC300C300;
    prmt.b32 v, $4, 0, 0x4140;
    lop3.b32 w, v, 0x00800080, n, 0xEA;
    lop3.b32 v, v, 0x007F007F, m, 0xEA;
    fma.rn.bf16x2 v, v, c, w;
    mov.b32 {$0, $1}, v;
    prmt.b32 v, $4, 0, 0x4342;
    lop3.b32 w, v, 0x00800080, n, 0xEA;
    lop3.b32 v, v, 0x007F007F, m, 0xEA;
    fma.rn.bf16x2 v, v, c, w;
    mov.b32 {$2, $3}, v;
    }
    """
)
_INT8_F16 = tl.constexpr(
    """
    {
    .reg .b32 v, w, c;
    mov.b32 c, 0xE480E480;
    xor.b32 w, $4, 0x80808080;
    prmt.b32 v, w, 0x64646464, 0x4140;
    add.rn.f16x2 v, v, c;
    mov.b32 {$0, $1}, v;
    prmt.b32 v, w, 0x64646464, 0x4342;
    add.rn.f16x2 v, v, c;
    mov.b32 {$2, $3}, v;
    }
    """
)
_FOUR = tl.constexpr("=h,=h,=h,=h,r")


@triton.constexpr_function
def _times(dtype: tl.dtype, count: int) -> tuple[tl.dtype, ...]:
    """A tuple of dtypes. One that a kernel writes holds other objects from Triton 3.8 on."""
    return (dtype,) * count


@triton.jit
def decode_int8_words(words, dtype: tl.constexpr):
    """The numbers of the four signed bytes in each of words [R, W]: [R, W, 2, 2], by bits 0, 1 of the byte; exact."""
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    KINDS: tl.constexpr = _times(dtype, 4)
    PTX: tl.constexpr = _INT8_BF16 if IS_BF16 else _INT8_F16
    a, b, c, d = tl.inline_asm_elementwise(PTX, _FOUR, [words], dtype=KINDS, is_pure=True, pack=1)
    return tl.join(tl.join(a, b), tl.join(c, d))


def _float8_words(first: str, last: str) -> tl.constexpr:
    """PTX for the four e4m3 of a word, $4: `first` and `last` make v, pairs of float16, of its lower and upper two."""
    scaled = """
    mov.b32 {x, y}, v;
    cvt.f32.f16 f, x;
    cvt.f32.f16 g, y;
    cvt.rn.bf16x2.f32 v, g, f;
    fma.rn.bf16x2 v, v, $5, z;
    """
    return tl.constexpr(
        f"""
    {{
    .reg .b16 low, high, x, y;
    .reg .b32 v, z;
    .reg .f32 f, g;
    mov.b32 z, 0x80008000;
    mov.b32 {{low, high}}, $4;
    {first}
    {scaled}
    mov.b32 {{$0, $1}}, v;
    {last}
    {scaled}
    mov.b32 {{$2, $3}}, v;
    }}
    """
    )


def _float16_pair(places: str) -> str:
    """PTX for v by integers: the bits of e4m3 are those of a float16 256 times as small.

    The NaN of e4m3 would be 480: times 146 it overflows, and infinity times 0, which is added, is NaN.
    """
    return f"""
    {{
    .reg .b32 s, c;
    prmt.b32 v, $4, 0, {places};
    and.b32 s, v, 0x80008000;
    shr.u32 v, v, 1;
    lop3.b32 v, v, 0x3F803F80, s, 0xEA;
    mov.b32 c, 0x78907890;
    mul.rn.f16x2 s, v, c;
    mov.b32 c, 0;
    mul.rn.f16x2 s, s, c;
    mov.b32 c, 0x5C005C00;
    fma.rn.f16x2 v, v, c, s;
    }}
    """


_FLOAT8_WORDS = _float8_words("cvt.rn.f16x2.e4m3x2 v, low;", "cvt.rn.f16x2.e4m3x2 v, high;")
_FLOAT8_WORDS_BY_INTEGERS = _float8_words(_float16_pair("0x1404"), _float16_pair("0x3424"))


@triton.jit
def decode_float8_words(words, scale):
    """The four e4m3 in each of words [R, W] times scales, of `scale_pairs`: bfloat16, as `decode_int8_words`."""
    bf16: tl.constexpr = _times(tl.bfloat16, 4)
    PTX: tl.constexpr = _FLOAT8_WORDS if has_e4m3() else _FLOAT8_WORDS_BY_INTEGERS
    a, b, c, d = tl.inline_asm_elementwise(PTX, "=h,=h,=h,=h,r,r", [words, scale], dtype=bf16, is_pure=True, pack=1)
    return tl.join(tl.join(a, b), tl.join(c, d))


def _words(constants: str, codes: str, finish: str) -> tl.constexpr:
    """PTX for the eight codes of a word, $8: `codes` makes pairs v0 to v3, of code j and j + 4; `finish` ends each."""
    finished = "\n".join(finish.replace("V", f"v{j}") for j in range(4))
    stores = "\n".join(f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, v{j};" for j in range(4))
    return tl.constexpr(f"{{ .reg .b32 v0, v1, v2, v3, w, c, z;\n{constants}\n{codes}\n{finished}\n{stores} }}")


def _uint4_words(magic: str) -> str:
    """Codes in the low bits of 128.0 (bfloat16) or 1024.0 (float16), `magic`."""
    codes = [f"lop3.b32 v0, $8, 0x000F000F, {magic}, 0xEA;"]
    codes += [f"shr.b32 w, $8, {4 * j};\nlop3.b32 v{j}, w, 0x000F000F, {magic}, 0xEA;" for j in (1, 2, 3)]
    return "\n".join(codes)


def _e2m1_words() -> str:
    """Codes masked and multiplied: one copy has the sign at bit 15, another the magnitude at bits 6 to 8.

    In bfloat16 that is the number times 2^-126.
    """
    codes = ["shr.u32 w, $8, 8;"]
    for j in range(4):
        mask, factor = ("0x000F000F", "0x1040") if j % 2 == 0 else ("0x00F000F0", "0x0104")
        codes.append(f"and.b32 v{j}, {'$8' if j < 2 else 'w'}, {mask};\nmul.lo.u32 v{j}, v{j}, {factor};")
        codes.append(f"and.b32 v{j}, v{j}, 0x81C081C0;")
    return "\n".join(codes)


_ONES_AND_ZEROS = "mov.b32 c, 0x3F803F80;\nmov.b32 z, 0x80008000;"
_WORDS_UINT4_BF16 = _words(_ONES_AND_ZEROS, _uint4_words("0x43004300"), "fma.rn.bf16x2 V, V, c, $9;")
_WORDS_UINT4_BF16_SCALED = _words(
    _ONES_AND_ZEROS, _uint4_words("0x43004300"), "fma.rn.bf16x2 V, V, c, $9;\nfma.rn.bf16x2 V, V, $10, z;"
)
_WORDS_UINT4_F16 = _words("", _uint4_words("0x64006400"), "add.rn.f16x2 V, V, $9;")
_WORDS_UINT4_F16_SCALED = _words("", _uint4_words("0x64006400"), "add.rn.f16x2 V, V, $9;\nmul.rn.f16x2 V, V, $10;")
_WORDS_E2M1_BF16 = _words("mov.b32 z, 0x80008000;", _e2m1_words(), "fma.rn.bf16x2 V, V, $9, z;")
_EIGHT = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_EIGHT_SCALED = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")


@triton.jit
def _join_words(a, e, b, f, c, g, d, h):
    """Eight numbers of words [R, W], a to h in the order of their codes: [R, W, 2, 2, 2], by bits 2, 0, 1 of that."""
    return tl.join(tl.join(tl.join(a, e), tl.join(b, f)), tl.join(tl.join(c, g), tl.join(d, h)))


@triton.jit
def decode_words(words, scale, zero, dtype: tl.constexpr, SCALES, CODES):
    """The numbers of eight codes in each of words [R, W], as `_join_words`; scale, if "fold", and zero as above.

    Codes four apart are in the halves of one register, so that no byte has to be moved.
    """
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    KINDS: tl.constexpr = _times(dtype, 8)
    if CODES.KIND == "e2m1":
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            _WORDS_E2M1_BF16, _EIGHT, [words, scale], dtype=KINDS, is_pure=True, pack=1
        )
    elif SCALES.WEIGHT == "fold":
        SCALED: tl.constexpr = _WORDS_UINT4_BF16_SCALED if IS_BF16 else _WORDS_UINT4_F16_SCALED
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            SCALED, _EIGHT_SCALED, [words, zero, scale], dtype=KINDS, is_pure=True, pack=1
        )
    else:
        PTX: tl.constexpr = _WORDS_UINT4_BF16 if IS_BF16 else _WORDS_UINT4_F16
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            PTX, _EIGHT, [words, zero], dtype=KINDS, is_pure=True, pack=1
        )
    return _join_words(a, e, b, f, c, g, d, h)
