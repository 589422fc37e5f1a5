"""Quantization of activations, bitwise equal to `ep_moe.quant.scaled.quantize` and `ep_moe.quant.micro.quantize`.

Letters: T rows, H row width, G scale groups of a row.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
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


class Quantizing(NamedTuple):
    """The tensors of a quantization; all None if there is none."""

    x: Any  # [T, H] float32, bfloat16 or float16, rows `x_stride` apart
    given: Any  # [1] float32, the scale if SCALE is "static", the largest magnitude if it is "tensor"; else None
    data: Any  # out: [T, H] e4m3 or int8, or [T, H / 2] uint8, two codes of e2m1 in each; `values` is a tuple's own
    scale: Any  # [G, T] out: float32, or if MICRO uint8: e8m0 beside e4m3, e4m3 beside e2m1


class Groups(NamedTuple):
    """The scale groups of a row."""

    H: tl.constexpr
    WIDTH: tl.constexpr  # columns that share a scale
    COLUMNS: tl.constexpr  # WIDTH rounded up to a power of two
    G: tl.constexpr
    BLOCK: tl.constexpr  # groups that one program quantizes


class MicroTile(NamedTuple):
    """The tokens and columns of which a program quantizes whole groups."""

    H: tl.constexpr
    WIDTH: tl.constexpr  # columns that share a scale, 32 or 16
    TOKENS: tl.constexpr
    COLUMNS: tl.constexpr  # a power of two, at least WIDTH


class Scaling(NamedTuple):
    """How scales follow from rows."""

    MICRO: tl.constexpr = False
    SCALE: tl.constexpr = "own"  # or "tensor" or "static"
    POWER_OF_TWO: tl.constexpr = False  # round scales up to powers of two


@triton.jit
def _quantize_groups(program, tensors, num_tokens, x_stride, GROUPS, SCALING):
    """Quantize BLOCK groups: group i is group i % G of row i // G; the last of a row may be short."""
    DTYPE: tl.constexpr = tensors.data.dtype.element_ty
    index = program.to(tl.int64) * GROUPS.BLOCK + tl.arange(0, GROUPS.BLOCK)
    token, group = index // GROUPS.G, index % GROUPS.G
    column = tl.arange(0, GROUPS.COLUMNS)
    inside = (
        (token < num_tokens)[:, None]
        & (column < GROUPS.WIDTH)[None, :]
        & (group[:, None] * GROUPS.WIDTH + column[None, :] < GROUPS.H)
    )
    x_ptrs = tensors.x + (token * x_stride + group * GROUPS.WIDTH)[:, None] + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if SCALING.SCALE == "static":
        scale = tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(tensors.given)
    elif SCALING.SCALE == "tensor":
        scale = scale_for(tl.zeros([GROUPS.BLOCK], tl.float32) + tl.load(tensors.given), DTYPE, SCALING.POWER_OF_TWO)
    else:
        scale = scale_for(absmax(x, 1), DTYPE, SCALING.POWER_OF_TWO)
    values_ptrs = tensors.data + (token * GROUPS.H + group * GROUPS.WIDTH)[:, None] + column[None, :]
    tl.store(values_ptrs, quantize_to(x, scale[:, None], DTYPE), mask=inside)
    tl.store(tensors.scale + group * num_tokens + token, scale, mask=token < num_tokens)


@triton.jit
def _quantize_micro_groups(program, tensors, num_tokens, x_stride, TILE):
    """Quantize TOKENS rows of COLUMNS columns to "mxfp8" or "nvfp4"; the last group of a row may be short."""
    PACKED: tl.constexpr = tensors.data.dtype.element_ty == tl.uint8
    GROUPS: tl.constexpr = TILE.COLUMNS // TILE.WIDTH
    pieces = tl.cdiv(TILE.H, TILE.COLUMNS)
    token = (program // pieces).to(tl.int64) * TILE.TOKENS + tl.arange(0, TILE.TOKENS)
    piece = program % pieces
    column = piece * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    is_token = (token < num_tokens)[:, None]
    x_ptrs = tensors.x + (token * x_stride)[:, None] + column[None, :]
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
    values_ptrs = tensors.data + (token * width)[:, None] + column[None, :]
    tl.store(values_ptrs, values, mask=is_token & (column < width)[None, :])
    group = piece * GROUPS + tl.arange(0, GROUPS)
    scale_ptrs = tensors.scale + group.to(tl.int64)[None, :] * num_tokens + token[:, None]
    if PACKED:
        scale = scale.to(tl.uint8, bitcast=True)
    else:
        scale = scale.to(tl.uint8)
    tl.store(scale_ptrs, scale, mask=is_token & (group < tl.cdiv(TILE.H, TILE.WIDTH))[None, :])


@triton.jit
def quantize_rows(
    program,
    tensors,  # Quantizing
    num_tokens,
    x_stride,
    GROUPS,  # Groups, or MicroTile if MICRO
    SCALING,  # Scaling
):
    """A program's share of the rows."""
    if SCALING.MICRO:
        _quantize_micro_groups(program, tensors, num_tokens, x_stride, GROUPS)
    else:
        _quantize_groups(program, tensors, num_tokens, x_stride, GROUPS, SCALING)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(x, given, data, scale, num_tokens, x_stride, GROUPS, SCALING):
    """Quantize tokens; the first four are the fields of `Quantizing`."""
    start_early()
    quantize_rows(tl.program_id(0), Quantizing(x, given, data, scale), num_tokens, x_stride, GROUPS, SCALING)
