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
from ep_moe.kernels.rows.permute import place_few, row_of


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
def _quantize_groups(
    program, tensors, num_tokens, x_stride, GROUPS, SCALING, height, placed, sizes, IDS, FEW: tl.constexpr
):
    """Quantize BLOCK groups: group i is group i % G of row i // G, or of one row if FEW; the last may be short."""
    DTYPE: tl.constexpr = tensors.data.dtype.element_ty
    index = tl.arange(0, GROUPS.BLOCK)
    if FEW:
        pieces: tl.constexpr = (GROUPS.G + GROUPS.BLOCK - 1) // GROUPS.BLOCK
        token, group = (program // pieces).to(tl.int64), program % pieces * GROUPS.BLOCK + index
        is_token = group < GROUPS.G
    else:
        index += program.to(tl.int64) * GROUPS.BLOCK
        token, group = index // GROUPS.G, index % GROUPS.G
        is_token = token < num_tokens
    column = tl.arange(0, GROUPS.COLUMNS)
    inside = (
        is_token[:, None]
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
    values = quantize_to(x, scale[:, None], DTYPE)
    if FEW:
        rows = place_few(token, program % pieces == 0, placed, sizes, IDS)
        for k in tl.static_range(IDS.K):
            row = row_of(rows, k)
            _store_groups(
                tensors, row, group, values, scale, inside & (row >= 0), is_token & (row >= 0), height, GROUPS
            )
    else:
        _store_groups(tensors, token, group, values, scale, inside, is_token, height, GROUPS)


@triton.jit
def _store_groups(tensors, row, group, values, scale, inside, is_row, height, GROUPS):
    """Store groups [BLOCK] of their rows, or of one row."""
    values_ptrs = tensors.data + (row * GROUPS.H + group * GROUPS.WIDTH)[:, None]
    tl.store(values_ptrs + tl.arange(0, GROUPS.COLUMNS)[None, :], values, mask=inside)
    tl.store(tensors.scale + group.to(tl.int64) * height + row, scale, mask=is_row)


@triton.jit
def _quantize_micro_groups(program, tensors, num_tokens, x_stride, TILE, height, placed, sizes, IDS, FEW: tl.constexpr):
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
        scale = scale.to(tl.uint8, bitcast=True)
    else:
        scale = e8m0_byte(amax, E4M3_MAX_EXPONENT)
        values = tl.reshape(to_mxfp8(grouped, scale[:, :, None]), [TILE.TOKENS, TILE.COLUMNS])
        scale = scale.to(tl.uint8)
    if FEW:
        rows = place_few(program // pieces, piece == 0, placed, sizes, IDS)
        for k in tl.static_range(IDS.K):
            row = row_of(rows, k) + tl.zeros([1, 1], tl.int64)
            _store_micro_groups(tensors, row, piece, values, scale, row >= 0, height, TILE)
    else:
        _store_micro_groups(tensors, token[:, None], piece, values, scale, is_token, height, TILE)


@triton.jit
def _store_micro_groups(tensors, row, piece, values, scale, is_row, height, TILE):
    """Store a piece of rows [TOKENS, 1] with the scales of its groups."""
    COLUMNS: tl.constexpr = values.shape[1]
    width: tl.constexpr = TILE.H * COLUMNS // TILE.COLUMNS  # of a row, two columns in each of "nvfp4"
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(tensors.data + row * width + column[None, :], values, mask=is_row & (column < width)[None, :])
    group = piece * scale.shape[1] + tl.arange(0, scale.shape[1])
    scale_ptrs = tensors.scale + group.to(tl.int64)[None, :] * height + row
    tl.store(scale_ptrs, scale, mask=is_row & (group < tl.cdiv(TILE.H, TILE.WIDTH))[None, :])


@triton.jit
def quantize_rows(
    program,
    tensors,  # Quantizing
    num_tokens,
    x_stride,
    GROUPS,  # Groups, or MicroTile if MICRO
    SCALING,  # Scaling
    height,  # rows of `tensors.scale`
    placed,  # Placed, with `sizes` and `IDS`, if FEW; else None
    sizes,
    IDS,
    FEW: tl.constexpr,  # tokens, which are stored as rows of experts
):
    """A program's share of the rows."""
    if SCALING.MICRO:
        _quantize_micro_groups(program, tensors, num_tokens, x_stride, GROUPS, height, placed, sizes, IDS, FEW)
    else:
        _quantize_groups(program, tensors, num_tokens, x_stride, GROUPS, SCALING, height, placed, sizes, IDS, FEW)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_rows_kernel(x, given, data, scale, num_tokens, x_stride, GROUPS, SCALING):
    """Quantize tokens; the first four are the fields of `Quantizing`."""
    start_early()
    tensors = Quantizing(x, given, data, scale)
    quantize_rows(tl.program_id(0), tensors, num_tokens, x_stride, GROUPS, SCALING, num_tokens, None, None, None, False)
