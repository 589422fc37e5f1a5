"""Formats with float32 scales: fp8 e4m3 (torch.float8_e4m3fn) and int8.

A scale belongs to a tile of the last two dimensions: a whole matrix, a row, or a block; the last blocks are short if
the block does not divide the matrix. Activations and weights follow the same rule:
    amax = max(|x| in the tile, 1e-10), scale = amax / LARGEST, value = rounded(clamp(x / scale, -LARGEST, LARGEST))
with float32 arithmetic, IEEE division and rounding to nearest, ties to even; LARGEST is 448 for e4m3 (the 1x128 and
128x128 recipe of DeepSeek-V3, arXiv 2412.19437, section 3.3.3; the lower bound of amax is vLLM's) and 127 for int8,
symmetric, so that -128 is never stored. If scales are powers of two, amax / LARGEST is rounded up to the next one:
2^ceil(log2(amax / 448)), DeepEP's `round_scale` and DeepGEMM's UE8M0, here kept in float32.
Letters: T rows, H row width, G scale groups of a row, N and K rows and columns of a weight.
"""

import functools
import math
import re

import torch
from torch.nn.functional import pad

from ep_moe.quant.base import ActivationGranularity, Quantized, QuantScheme, WeightGranularity

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
MIN_AMAX = 1e-10
BLOCK_MULTIPLE = 16

Tile = tuple[int, int]  # rows and columns that share a scale


def _fp8(
    name: str,
    activation: ActivationGranularity,
    weight: WeightGranularity,
    block: Tile = (128, 128),
    *,
    power_of_two: bool = False,
) -> QuantScheme:
    dtype = torch.float8_e4m3fn
    return QuantScheme(
        name=name, dtype=dtype, activation=activation, weight=weight, block=block, power_of_two=power_of_two
    )


SCALED_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _fp8("fp8_tensor", "tensor", "tensor"),
        _fp8("fp8_token", "token", "channel"),
        _fp8("fp8_block", "group", "block"),
        _fp8("fp8_block_ue8m0", "group", "block", power_of_two=True),
        QuantScheme(name="int8_token", dtype=torch.int8, activation="token", weight="channel"),
    )
}


@functools.cache
def parse_block_scheme(name: str) -> QuantScheme | None:
    """Read "fp8_block_<n>x<k>", the block scheme with weight blocks of n rows and k columns; None for other names.

    Args:
        name: for example "fp8_block_64x32". "fp8_block_128x128" is "fp8_block" itself, so equal formats are equal.
    Errors: ValueError if n or k is not a positive multiple of 16. Local.
    """
    match = re.fullmatch(r"fp8_block_(\d+)x(\d+)", name)
    if match is None:
        return None
    block = (int(match[1]), int(match[2]))
    for size in block:
        if size <= 0 or size % BLOCK_MULTIPLE != 0:
            raise ValueError(f"scheme {name!r}: block size ({size}) must be a positive multiple of {BLOCK_MULTIPLE}")
    if block == SCALED_SCHEMES["fp8_block"].block:
        return SCALED_SCHEMES["fp8_block"]
    return _fp8(f"fp8_block_{block[0]}x{block[1]}", "group", "block", block)


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round normal numbers > 0 up to a power of two, by their bits; inf and NaN stay. Example: 0.75 gives 1.0."""
    exponent = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), exponent.view(torch.float32), scale)


def _tile_scale(x: torch.Tensor, tile: Tile, scheme: QuantScheme) -> torch.Tensor:
    """Scale [..., ceil(N/n), ceil(K/k)] of the tiles of x [..., N, K] float32."""
    assert scheme.dtype is not None
    (rows, columns), (n, k) = x.shape[-2:], tile
    row_tiles, column_tiles = math.ceil(rows / n), math.ceil(columns / k)
    missing_rows, missing_columns = row_tiles * n - rows, column_tiles * k - columns
    if missing_rows or missing_columns:
        x = pad(x, (0, missing_columns, 0, missing_rows))
    tiles = x.reshape(*x.shape[:-2], row_tiles, n, column_tiles, k)
    amax = tiles.abs().amax(dim=(-3, -1)).clamp_(min=MIN_AMAX)
    # torch on CUDA divides by a Python number through its reciprocal, whose last bit may differ: divide by a tensor
    scale = amax / torch.full_like(amax, LARGEST[scheme.dtype])
    return _round_up(scale) if scheme.power_of_two else scale


def _spread(scale: torch.Tensor, tile: Tile, rows: int, columns: int) -> torch.Tensor:
    """Repeat scale [..., ceil(N/n), ceil(K/k)] so that it broadcasts against [..., N, K]."""
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(tile[1], dim=-1)[..., :columns]
    if scale.shape[-2] > 1 and tile[0] > 1:
        scale = scale.repeat_interleave(tile[0], dim=-2)[..., :rows, :]
    return scale


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round x / scale to e4m3; clamped first, since torch's cast may turn values above 448 into NaN. Local."""
    limit = LARGEST[torch.float8_e4m3fn]
    return (x / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn)


def _store(x: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Round x / scale to the scheme's dtype. int8 has no NaN: it stores 0, and the scale is not finite."""
    if scheme.dtype == torch.float8_e4m3fn:
        return to_e4m3(x, scale)
    limit = LARGEST[torch.int8]
    return (x / scale).round_().clamp_(-limit, limit).nan_to_num_(nan=0.0).to(torch.int8)


def _activation_tile(scheme: QuantScheme, rows: int, width: int) -> Tile:
    if scheme.activation == "tensor":
        return max(rows, 1), max(width, 1)
    return 1, scheme.block[1] if scheme.activation == "group" else max(width, 1)


def _weight_tile(scheme: QuantScheme, rows: int, columns: int) -> Tile:
    if scheme.weight == "block":
        return scheme.block
    return 1 if scheme.weight == "channel" else max(rows, 1), max(columns, 1)


def quantize(x: torch.Tensor, scheme: QuantScheme, static_scale: torch.Tensor | None) -> Quantized:
    """`ep_moe.quant.quantize` for x [T, H] and one of `SCALED_SCHEMES` or a block scheme."""
    x = x.float()
    rows, width = x.shape
    tile = _activation_tile(scheme, rows, width)
    tiles = _tile_scale(x, tile, scheme) if static_scale is None else static_scale.float().reshape(1, 1)
    values = _store(x, _spread(tiles, tile, rows, width), scheme)
    groups = scheme.num_groups(width)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    scale.copy_(tiles.expand(rows, groups))
    return Quantized(values=values, scale=scale, scheme=scheme)


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """`ep_moe.quant.dequantize_rows` for values [..., H], scale [..., G]."""
    width = values.shape[-1]
    if scheme.activation == "group" and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(scheme.block[1], dim=-1)[..., :width]
    return values.float().mul_(scale)


def quantize_weight(weight: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor, None]:
    """`ep_moe.quant.quantize_weight` for weight [..., N, K]; these schemes have no global scale."""
    weight = weight.float()
    rows, columns = weight.shape[-2:]
    tile = _weight_tile(scheme, rows, columns)
    tiles = _tile_scale(weight, tile, scheme)
    values = _store(weight, _spread(tiles, tile, rows, columns), scheme)
    return values, tiles.reshape(scheme.weight_scale_shape(tuple(weight.shape))), None


def dequantize_weight(values: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """`ep_moe.quant.dequantize_weight` for values [..., N, K]."""
    *lead, rows, columns = values.shape
    tile = _weight_tile(scheme, rows, columns)
    tiles = scale.reshape(*lead, math.ceil(rows / tile[0]), math.ceil(columns / tile[1]))
    return values.float().mul_(_spread(tiles, tile, rows, columns))
