"""Quantization of activations, bitwise equal to `ep_moe.quant.scaled.quantize` and `ep_moe.quant.micro.quantize`.

Letters: T rows, H row width, G scale groups of a row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import (
    E4M3_MAX_EXPONENT,
    absmax,
    e4m3_group_scale,
    e4m3_value,
    e8m0_byte,
    pack_nibbles,
    quantize_e2m1,
    quantize_to,
    scale_for,
    to_mxfp8,
)


class Groups(NamedTuple):
    """The scale groups of a row."""

    H: tl.constexpr
    WIDTH: tl.constexpr  # columns that share a scale
    COLUMNS: tl.constexpr  # WIDTH rounded up to a power of two
    G: tl.constexpr
    BLOCK: tl.constexpr  # groups that one program quantizes


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(
    x_ptr,  # [T, H] float32, bfloat16 or float16, rows `x_stride` apart
    given_ptr,  # [1] float32, the scale if SCALE is "static", the largest magnitude if it is "tensor"; else None
    values_ptr,  # [T, H] e4m3 or int8, out
    scale_ptr,  # [G, T] float32, out
    num_tokens,
    x_stride,
    GROUPS,  # Groups
    SCALE: tl.constexpr,  # "own", "tensor" or "static"
    POWER_OF_TWO: tl.constexpr,  # round scales up to powers of two
):
    """Quantize BLOCK groups: group i is group i % G of row i // G; the last of a row may be short."""
    program = tl.program_id(0)
    quantize_rows(program, x_ptr, given_ptr, values_ptr, scale_ptr, num_tokens, x_stride, GROUPS, SCALE, POWER_OF_TWO)


@triton.jit
def quantize_rows(
    program,
    x_ptr,
    given_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    x_stride,
    GROUPS,
    SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """As `_quantize_rows_kernel`, one of its programs."""
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    index = program.to(tl.int64) * GROUPS.BLOCK + tl.arange(0, GROUPS.BLOCK)
    token, group = index // GROUPS.G, index % GROUPS.G
    column = tl.arange(0, GROUPS.COLUMNS)
    inside = (
        (token < num_tokens)[:, None]
        & (column < GROUPS.WIDTH)[None, :]
        & (group[:, None] * GROUPS.WIDTH + column[None, :] < GROUPS.H)
    )
    x_ptrs = x_ptr + (token * x_stride + group * GROUPS.WIDTH)[:, None] + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if SCALE == "static":
        scale = tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(given_ptr)
    elif SCALE == "tensor":
        scale = scale_for(tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(given_ptr), DTYPE, POWER_OF_TWO)
    else:
        scale = scale_for(absmax(x, 1), DTYPE, POWER_OF_TWO)
    values_ptrs = values_ptr + (token * GROUPS.H + group * GROUPS.WIDTH)[:, None] + column[None, :]
    tl.store(values_ptrs, quantize_to(x, scale[:, None], DTYPE), mask=inside)
    tl.store(scale_ptr + group * num_tokens + token, scale, mask=token < num_tokens)


class MicroTile(NamedTuple):
    """The tokens and columns of which a program quantizes whole groups."""

    H: tl.constexpr
    WIDTH: tl.constexpr  # columns that share a scale, 32 or 16
    TOKENS: tl.constexpr
    COLUMNS: tl.constexpr  # a power of two, at least WIDTH


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_micro_rows_kernel(
    x_ptr,  # [T, H] float32, bfloat16 or float16, rows `x_stride` apart
    given_ptr,  # None, as the other kernel takes a number
    values_ptr,  # out: [T, H] e4m3, or [T, H / 2] uint8, two codes of e2m1 in each
    scale_ptr,  # [G, T] uint8, out: e8m0 beside e4m3, e4m3 beside e2m1
    num_tokens,
    x_stride,
    TILE,  # MicroTile
):
    """Quantize TOKENS rows of COLUMNS columns to "mxfp8" or "nvfp4"; the last group of a row may be short."""
    quantize_micro_rows(tl.program_id(0), x_ptr, values_ptr, scale_ptr, num_tokens, x_stride, TILE)


@triton.jit
def quantize_micro_rows(program, x_ptr, values_ptr, scale_ptr, num_tokens, x_stride, TILE):
    """As `_quantize_micro_rows_kernel`, one of its programs."""
    PACKED: tl.constexpr = values_ptr.dtype.element_ty == tl.uint8
    GROUPS: tl.constexpr = TILE.COLUMNS // TILE.WIDTH
    pieces = tl.cdiv(TILE.H, TILE.COLUMNS)
    token = (program // pieces).to(tl.int64) * TILE.TOKENS + tl.arange(0, TILE.TOKENS)
    piece = program % pieces
    column = piece * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    is_token = (token < num_tokens)[:, None]
    x_ptrs = x_ptr + (token * x_stride)[:, None] + column[None, :]
    x = tl.load(x_ptrs, mask=is_token & (column < TILE.H)[None, :], other=0.0).to(tl.float32)
    grouped = tl.reshape(x, [TILE.TOKENS, GROUPS, TILE.WIDTH])
    amax = absmax(grouped, 2)
    if PACKED:
        scale = e4m3_group_scale(amax)
        codes = quantize_e2m1(grouped, e4m3_value(scale)[:, :, None])
        values = pack_nibbles(tl.reshape(codes, [TILE.TOKENS, TILE.COLUMNS]))
        column = piece * (TILE.COLUMNS // 2) + tl.arange(0, TILE.COLUMNS // 2)
        width = TILE.H // 2
    else:
        scale = e8m0_byte(amax, E4M3_MAX_EXPONENT)
        values = tl.reshape(to_mxfp8(grouped, scale[:, :, None]), [TILE.TOKENS, TILE.COLUMNS])
        width = TILE.H
    values_ptrs = values_ptr + (token * width)[:, None] + column[None, :]
    tl.store(values_ptrs, values, mask=is_token & (column < width)[None, :])
    group = piece * GROUPS + tl.arange(0, GROUPS)
    scale_ptrs = scale_ptr + group.to(tl.int64)[None, :] * num_tokens + token[:, None]
    if PACKED:
        scale = scale.to(tl.uint8, bitcast=True)
    else:
        scale = scale.to(tl.uint8)
    tl.store(scale_ptrs, scale, mask=is_token & (group < tl.cdiv(TILE.H, TILE.WIDTH))[None, :])
