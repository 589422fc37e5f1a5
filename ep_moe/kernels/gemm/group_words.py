"""Scales, or zero points, of groups in a row of weights, loaded as words of four bytes.

Triton copies words to shared memory while earlier steps are computed, as it does the weights. From there a thread reads
the words that its own weights need, and takes their groups' numbers from them. Loaded by themselves, numbers of one or
two bytes are waited for, and then pass shared memory once more, to the threads that need them.

Letters: K columns that a GEMM reduces over, R rows of weights in a tile, S numbers of a row in a product: of each group
once, or twice.
"""

import triton
import triton.language as tl

from ep_moe.kernels.gemm.weights import repeat


@triton.jit
def _as_loaded(values, ptr, K):
    """The same int32 [N], as the result of a load that reads nothing: K > 0.

    Triton gives the left operand of a product its layout from the loads on that it comes from. After numbers of any
    other origin it moves the weights between threads instead. Pointers differ: loads by the same ones would be of the
    same numbers.
    """
    ptrs = ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, values.shape[0])
    return tl.load(ptrs, mask=tl.broadcast_to(K < 0, values.shape), other=values)


@triton.jit
def number_places(ptr, w, LOADS: tl.constexpr, CODES):
    """Where numbers are in words, in bits: of each group in a product [1, S], and of each row's first one [R, 1].

    Args:
        ptr: of the numbers. w: WeightRows. LOADS: as `Codes.SCALES`.
    """
    BYTES: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    groups = _as_loaded(8 * (BYTES * tl.arange(0, CODES.GROUPS) % 4), ptr, w.K)[None, :]
    rows = tl.zeros([1, 1], tl.int32)
    if LOADS == "shifted":
        rows = _as_loaded(8 * (w.offsets * BYTES % 4).to(tl.int32), ptr, w.K)[:, None]
        if CODES.GROUPS > 1:
            groups = repeat(groups, 2)
    return groups, rows


@triton.jit
def load_numbers(ptr, places, w, step, part: tl.constexpr, LOADS: tl.constexpr, TILE, SCALES, CODES):
    """The numbers of the groups of a product, as the lowest bits of int32 [R, S]; out of bounds zeros.

    Args:
        places: of `number_places`. w: WeightRows. step, part: the product begins at column step + part * BLOCK_K.
        LOADS: as `Codes.SCALES`.
    """
    BYTES: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    IN_PRODUCT: tl.constexpr = CODES.GROUPS * BYTES
    groups, rows = places
    end = tl.cdiv(w.K, SCALES.GROUP_K) * BYTES  # of a row
    first = (step + part * TILE.BLOCK_K) // SCALES.GROUP_K * BYTES
    words = ptr.to(tl.pointer_type(tl.int32)) + w.offsets * BYTES // 4
    if LOADS == "shifted":  # each number's word
        byte = BYTES * tl.arange(0, CODES.GROUPS)[None, :]
        place = (w.offsets * BYTES % 4).to(tl.int32)[:, None] + byte  # in words
        if IN_PRODUCT % 4 == 0:
            ptrs = words[:, None] + (place >> 2) + (first >> 2)
        else:
            ptrs = words[:, None] + (place + first >> 2)
        mask = byte < end - first
        if not TILE.EVEN_N:
            mask = mask & w.mask[:, None]
        loaded = tl.load(ptrs, mask=mask, other=0)
        if CODES.GROUPS > 1:  # repeated at once: else Triton computes the numbers before it moves them
            loaded = repeat(loaded, 2)
        shifts = groups + rows + 8 * (IN_PRODUCT * part % 4) & 31
    else:
        WORDS: tl.constexpr = max(IN_PRODUCT // 4, 1)
        if IN_PRODUCT < 4:  # a word is of several products
            first = step // SCALES.GROUP_K * BYTES
        word = tl.arange(0, WORDS)[None, :]
        if TILE.EVEN_N and TILE.EVEN_K:
            loaded = tl.load(words[:, None] + first // 4 + word)
        else:
            mask = w.mask[:, None] & (first + 4 * word < end)
            loaded = tl.load(words[:, None] + first // 4 + word, mask=mask, other=0)
        loaded = repeat(loaded, CODES.GROUPS // WORDS)
        shifts = groups + (8 * IN_PRODUCT * part if IN_PRODUCT < 4 else 0)
    return (loaded.to(tl.uint32) >> shifts.to(tl.uint32)).to(tl.int32)


@triton.jit
def as_bits(numbers):
    """Numbers of 8 or 16 bits as the lowest bits of int32."""
    if numbers.dtype.primitive_bitwidth == 8:
        return numbers.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        return numbers.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def from_bits(bits, dtype: tl.constexpr):
    """The inverse of `as_bits`, whatever the other bits are."""
    if dtype.primitive_bitwidth == 8:
        return bits.to(tl.uint8).to(dtype, bitcast=True)
    else:
        return bits.to(tl.int16).to(dtype, bitcast=True)
