"""Weights as they are stored: loaded, and decoded in registers to the dtype of the rows that they multiply.

Letters: L local experts, K columns that a GEMM reduces over, W rows of its weights, V stored values of a row, S scales
of a row in a step over K: of each group once, or twice.

A format is a `KIND` of `Codes`: `decode` turns its stored values into real numbers.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import e2m1_value, e4m3_value, round_to

_ROUNDER_BITS = tl.constexpr(0x4B000000)  # of 2^23 in float32: an integer in its low bits is added to it
_ROUNDER = tl.constexpr(2.0**23)


@triton.jit
def scale_offsets(expert, first_column, columns, width, K, SCALES):
    """Offsets of the scales of these weight rows in [L, ceil(W / GROUP_N), ceil(K / GROUP_K)], at K = 0."""
    groups_k = tl.cdiv(K, SCALES.GROUP_K)
    base = expert.to(tl.int64) * tl.cdiv(width, SCALES.GROUP_N) * groups_k
    if SCALES.VECTOR:
        return base + columns // SCALES.GROUP_N * groups_k
    else:
        return base + first_column // SCALES.GROUP_N * groups_k


@triton.jit
def scale_values(scale):
    """Scales of any dtype as float32; bytes are powers of two (e8m0): b means 2^(b - 127), 255 NaN."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.uint32) << 23
        bits = tl.where(scale == 0, 0x00400000, tl.where(scale == 255, 0x7FC00000, bits))
        return bits.to(tl.uint32).to(tl.float32, bitcast=True)
    if scale.dtype == tl.float8e4nv:
        return e4m3_value(scale)
    return scale.to(tl.float32)


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """Each column of x [R, C] so many times: [R, C * TIMES]."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [rows, columns, TIMES]), [rows, columns * TIMES])


@triton.jit
def spread(groups, WIDTH: tl.constexpr):
    """Repeat each of [R, S] for its neighbors in a row: [R, WIDTH], or [R, 1] for one."""
    if groups.shape[1] == 1:
        return groups
    else:
        return repeat(groups, WIDTH // groups.shape[1])


@triton.jit
def _integers(codes, zero):
    """codes - zero as float32, for integer codes of at most 8 bits; exact, without a conversion instruction."""
    return (codes.to(tl.uint32) | _ROUNDER_BITS).to(tl.float32, bitcast=True) - (_ROUNDER + zero)


@triton.jit
def _finish(values, scale, dtype: tl.constexpr, SCALES):
    """Apply the scales, if they multiply the weights, and round."""
    if SCALES.WEIGHT == "fold":
        values = values * scale
    return round_to(values, dtype)


@triton.jit
def decode(stored, scale, zero, dtype: tl.constexpr, SCALES, CODES):
    """Turn stored values [BLOCK_N, BLOCK_K / PACKED] into weights [BLOCK_N, BLOCK_K] of `dtype`.

    Args:
        scale: [BLOCK_N, S] as they are stored, multiplied if "fold", else any. zero: the same, if ZERO.
    Example: the byte 0x2F of "uint4" with zero point 8 and scale 0.5 is 3.5 and -3.
    """
    width: tl.constexpr = stored.shape[1]
    if SCALES.WEIGHT == "fold":
        scale = spread(scale_values(scale), width)
    if CODES.ZERO:
        zero = spread(zero.to(tl.float32), width)
    else:
        zero = 8.0 if CODES.KIND == "uint4" else 128.0
    if CODES.KIND == "float8":
        # through float32: the instruction from float16 to bfloat16 has a sixteenth of the throughput
        return _finish(e4m3_value(stored), scale, dtype, SCALES)
    elif CODES.KIND == "int8":
        return _finish(_integers(stored.to(tl.uint8, bitcast=True) ^ 0x80, zero), scale, dtype, SCALES)
    elif CODES.KIND == "uint8":
        return _finish(_integers(stored, zero), scale, dtype, SCALES)
    else:
        if CODES.KIND == "uint4":
            low = _integers(stored & 15, zero)
            high = _integers(stored >> 4, zero)
        else:
            tl.static_assert(CODES.KIND == "e2m1", "unknown kind of codes")
            low = e2m1_value(stored & 15)
            high = e2m1_value(stored >> 4)
        pair = tl.join(_finish(low, scale, dtype, SCALES), _finish(high, scale, dtype, SCALES))
        return tl.reshape(pair, [stored.shape[0], 2 * width])


@triton.jit
def load_stored(ptrs, row_mask, place_mask, TILE):
    """Load the stored weights of a step, zeros out of bounds."""
    if TILE.EVEN_N and TILE.EVEN_K:
        return tl.load(ptrs)
    elif TILE.EVEN_K:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif TILE.EVEN_N:
        return tl.load(ptrs, mask=place_mask, other=0.0)
    else:
        return tl.load(ptrs, mask=row_mask[:, None] & place_mask, other=0.0)
