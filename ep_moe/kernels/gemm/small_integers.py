"""Integers of 4 bits, minus their zero points, as e4m3.

The byte of e4m3 for m * 2^-9 is m itself, for m from 0 to 16, and its highest bit is the sign: four integers in a
32-bit register become numbers by integer operations on all of them. What they multiply is 2^9 = `UNIT` times too small.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INTERPRET

UNIT = tl.constexpr(512.0)
_AROUND_8 = tl.constexpr("""{
.reg .b32 shifted, negative, magnitude;
shr.u32 shifted, $2, 3;
not.b32 shifted, shifted;
and.b32 negative, shifted, 0x01010101;
mul.lo.u32 magnitude, negative, 7;
xor.b32 magnitude, magnitude, $2;
and.b32 magnitude, magnitude, 0x07070707;
mad.lo.u32 $0, negative, 0x81, magnitude;
shr.u32 shifted, $2, 7;
not.b32 shifted, shifted;
and.b32 negative, shifted, 0x01010101;
mul.lo.u32 magnitude, negative, 7;
shr.u32 shifted, $2, 4;
xor.b32 magnitude, magnitude, shifted;
and.b32 magnitude, magnitude, 0x07070707;
mad.lo.u32 $1, negative, 0x81, magnitude;
}""")
_AROUND_ZERO_POINT = tl.constexpr("""{
.reg .b32 code, difference, negative;
and.b32 code, $2, 0x0F0F0F0F;
or.b32 code, code, 0x80808080;
sub.u32 difference, code, $3;
not.b32 code, difference;
shr.u32 code, code, 7;
and.b32 negative, code, 0x01010101;
mul.lo.u32 code, negative, 0x7F;
xor.b32 difference, difference, code;
and.b32 difference, difference, 0x7F7F7F7F;
mad.lo.u32 $0, negative, 0x81, difference;
shr.u32 code, $2, 4;
and.b32 code, code, 0x0F0F0F0F;
or.b32 code, code, 0x80808080;
sub.u32 difference, code, $3;
not.b32 code, difference;
shr.u32 code, code, 7;
and.b32 negative, code, 0x01010101;
mul.lo.u32 code, negative, 0x7F;
xor.b32 difference, difference, code;
and.b32 difference, difference, 0x7F7F7F7F;
mad.lo.u32 $1, negative, 0x81, difference;
}""")


@triton.jit
def decode_small_integers(stored, zero, ZERO: tl.constexpr):
    """Two codes in each byte [N, V] as e4m3 [N, 2 V], minus zero points uint8 up to 16 that broadcast, or minus 8.

    Example: the byte 0x2F minus 8 is 7 and -6, here the bytes 0x07 and 0x86.
    """
    if INTERPRET:
        shift = zero if ZERO else tl.full([1, 1], 8, tl.uint8)
        low = ((stored & 15) | 0x80) - shift
        low = tl.where(low < 0x80, (0x80 - low) | 0x80, low & 0x7F).to(tl.uint8)
        high = ((stored >> 4) | 0x80) - shift
        high = tl.where(high < 0x80, (0x80 - high) | 0x80, high & 0x7F).to(tl.uint8)
    elif ZERO:
        zeros = tl.broadcast_to(zero, [stored.shape[0], stored.shape[1]])
        low, high = tl.inline_asm_elementwise(
            _AROUND_ZERO_POINT, "=r,=r,r,r", [stored, zeros], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _AROUND_8, "=r,=r,r", [stored], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    pair = tl.reshape(tl.join(low, high), [stored.shape[0], 2 * stored.shape[1]])
    return pair.to(tl.float8e4nv, bitcast=True)
