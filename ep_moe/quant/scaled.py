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

import dataclasses
import math

import torch
from torch.nn.functional import pad

from ep_moe.quant.base import Granularity, QuantScheme, StoredMatrix, TensorFormat

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
MIN_AMAX = 1e-10
BLOCK_MULTIPLE = 16

Tile = tuple[int, int]  # rows and columns that share a scale


def _scheme(
    name: str,
    tokens: Granularity,
    weight: Granularity,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    block: Tile = (1, 1),
    power_of_two: bool = False,
) -> QuantScheme:
    """A scheme whose activations share a scale as `tokens`, in groups of block[1], and whose weights as `weight`."""
    rows = TensorFormat(
        family="scaled", dtype=dtype, granularity=tokens, block=(1, block[1]), power_of_two=power_of_two
    )
    matrix = dataclasses.replace(rows, granularity=weight, block=block)
    return QuantScheme(name=name, payload=rows, activation=rows, weight=matrix)


SCALED_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _scheme("fp8_tensor", "tensor", "tensor"),
        _scheme("fp8_token", "token", "channel"),
        _scheme("fp8_block", "group", "block", block=(128, 128)),
        _scheme("fp8_block_ue8m0", "group", "block", block=(128, 128), power_of_two=True),
        _scheme("fp8_tensor_channel", "tensor", "channel"),
        _scheme("int8_token", "token", "channel", torch.int8),
        _scheme("int8_block", "group", "block", torch.int8, block=(128, 128)),
    )
}


def parse_block(name: str, size: str) -> Tile:
    """Read a block "<n>x<k>" of n rows and k columns, or a group "<k>", in the name of a scheme. Example: "64x32".

    Errors: ValueError if n or k is not a positive multiple of 16. Local.
    """
    found = [int(part) for part in size.split("x")]
    for number in found:
        if number <= 0 or number % BLOCK_MULTIPLE != 0:
            raise ValueError(f"scheme {name!r}: block size ({number}) must be a positive multiple of {BLOCK_MULTIPLE}")
    return (found[0] if len(found) == 2 else 1), found[-1]


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round normal numbers > 0 up to a power of two, by their bits; inf and NaN stay. Example: 0.75 gives 1.0."""
    exponent = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), exponent.view(torch.float32), scale)


def tiles_of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Cut x [..., N, K] into tiles of (n, k): [..., ceil(N/n), n, ceil(K/k), k], zeros where a tile is short. Local."""
    (rows, columns), (n, k) = x.shape[-2:], tile
    row_tiles, column_tiles = math.ceil(rows / n), math.ceil(columns / k)
    missing_rows, missing_columns = row_tiles * n - rows, column_tiles * k - columns
    if missing_rows or missing_columns:
        x = pad(x, (0, missing_columns, 0, missing_rows))
    return x.reshape(*x.shape[:-2], row_tiles, n, column_tiles, k)


def _tile_scale(x: torch.Tensor, tile: Tile, stored: TensorFormat) -> torch.Tensor:
    """Scale [..., ceil(N/n), ceil(K/k)] of the tiles of x [..., N, K] float32."""
    assert stored.dtype is not None
    amax = tiles_of(x, tile).abs().amax(dim=(-3, -1)).clamp_(min=MIN_AMAX)
    # torch on CUDA divides by a Python number through its reciprocal, whose last bit may differ: divide by a tensor
    scale = amax / torch.full_like(amax, LARGEST[stored.dtype])
    return _round_up(scale) if stored.power_of_two else scale


def spread(scale: torch.Tensor, tile: Tile, rows: int, columns: int) -> torch.Tensor:
    """Repeat scale [..., ceil(N/n), ceil(K/k)] so that it broadcasts against [..., N, K]. Local."""
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(tile[1], dim=-1)[..., :columns]
    if scale.shape[-2] > 1 and tile[0] > 1:
        scale = scale.repeat_interleave(tile[0], dim=-2)[..., :rows, :]
    return scale


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round x / scale to e4m3; clamped first, since torch's cast may turn values above 448 into NaN. Local."""
    limit = LARGEST[torch.float8_e4m3fn]
    return (x / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn)


def _store(x: torch.Tensor, scale: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """Round x / scale to the format's dtype. int8 has no NaN: it stores 0, and the scale is not finite."""
    if stored.dtype == torch.float8_e4m3fn:
        return to_e4m3(x, scale)
    limit = LARGEST[torch.int8]
    return (x / scale).round_().clamp_(-limit, limit).nan_to_num_(nan=0.0).to(torch.int8)


def quantize(
    x: torch.Tensor, stored: TensorFormat, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.quant.quantize` for x [T, H]: values and scale."""
    x = x.float()
    rows, width = x.shape
    tile = stored.tile(rows, width)
    tiles = _tile_scale(x, tile, stored) if static_scale is None else static_scale.float().reshape(1, 1)
    values = _store(x, spread(tiles, tile, rows, width), stored)
    groups = stored.num_groups(width)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    return values, scale.copy_(tiles.expand(rows, groups))


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.dequantize_rows` for values [..., H], scale [..., G]."""
    width = values.shape[-1]
    if stored.granularity == "group" and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(stored.block[1], dim=-1)[..., :width]
    return values.float().mul_(scale)


def quantize_weight(weight: torch.Tensor, stored: TensorFormat) -> StoredMatrix:
    """`ep_moe.quant.quantize_weight` for weight [..., N, K]; these formats have no global scale."""
    weight = weight.float()
    rows, columns = weight.shape[-2:]
    tile = stored.tile(rows, columns)
    tiles = _tile_scale(weight, tile, stored)
    values = _store(weight, spread(tiles, tile, rows, columns), stored)
    return StoredMatrix(values, scale=tiles.reshape(stored.scale_shape(tuple(weight.shape))))


def spread_part(part: torch.Tensor, stored: TensorFormat, shape: torch.Size) -> torch.Tensor:
    """Repeat a part of a weight of `shape` [..., N, K], one number for each tile, so that it broadcasts: float32."""
    *lead, rows, columns = shape
    tile = stored.tile(rows, columns)
    tiles = part.float().reshape(*lead, math.ceil(rows / tile[0]), math.ceil(columns / tile[1]))
    return spread(tiles, tile, rows, columns)


def dequantize_weight(matrix: StoredMatrix, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.dequantize_weight` for values [..., N, K]."""
    assert matrix.scale is not None
    return matrix.values.float().mul_(spread_part(matrix.scale, stored, matrix.values.shape))
