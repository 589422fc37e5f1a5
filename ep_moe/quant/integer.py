"""Weights as unsigned integers of 4 or 8 bits, with a scale, and optionally a zero point, for each group or channel.

Real value = (stored - zero) * scale. Two integers of 4 bits share a byte, the first of a row in the low four bits.
Without stored zero points zero is the middle of the range (8, or 128), and with b bits
    scale = 2 * max(|x|) / (2^b - 1),  stored = clamp(round(x / scale) + 2^(b - 1), 0, 2^b - 1)
as in GPTQ, AWQ and compressed-tensors, so that the largest magnitude of a group is half a step off if it is positive.
With stored zero points, one for each scale (a byte each, not packed, since GPTQ's reach 16):
    low = min(x, 0), high = max(x, 0), scale = (high - low) / (2^b - 1), zero = round(-low / scale)
The scale is rounded to its dtype before values are computed with it, and lies between 1e-11 and the dtype's largest
number; float16's smallest is 2^-24. A group that has a NaN or an infinity gets the scale NaN. Rounding is to nearest,
ties to even, in float32 arithmetic. A group size that does not divide the row is an error.
Letters: N and K rows and columns of a weight, n and k those of a tile that shares a scale, b bits.
"""

import math

import torch

from ep_moe.quant.base import StoredMatrix, TensorFormat
from ep_moe.quant.scaled import spread, spread_part, tiles_of

_SMALLEST = {torch.float32: 1e-11, torch.bfloat16: 1e-11, torch.float16: 2.0**-24}


def _bits(stored: TensorFormat) -> int:
    return 8 // stored.packed


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Put neighbors of uint8 [..., K] below 16 in a byte each, the first in the low bits: [..., K / 2]. Local."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [..., K / 2] to [..., K]. Local."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _scale_of(span: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """span / (2^b - 1) in the scales' dtype; NaN stays, infinity becomes NaN."""
    # torch on CUDA divides by a Python number through its reciprocal, whose last bit may differ: divide by a tensor
    scale = span / torch.full_like(span, 2.0 ** _bits(stored) - 1)
    limits = _SMALLEST[stored.scale_dtype], torch.finfo(stored.scale_dtype).max
    return torch.where(span.isfinite(), scale.clamp(*limits), math.nan).to(stored.scale_dtype)


def quantize_weight(weight: torch.Tensor, stored: TensorFormat) -> StoredMatrix:
    """`ep_moe.quant.quantize_weight` for weight [..., N, K]."""
    weight = weight.float()
    rows, columns = weight.shape[-2:]
    shape, tile, largest = stored.scale_shape(tuple(weight.shape)), stored.tile(rows, columns), 2 ** _bits(stored) - 1
    tiles = tiles_of(weight, tile)
    zero = None
    if stored.zero_point:
        low, high = tiles.amin(dim=(-3, -1)).clamp(max=0), tiles.amax(dim=(-3, -1)).clamp(min=0)
        scale = _scale_of(high - low, stored)
        zero = (-low / scale.float()).round_().nan_to_num_(nan=0.0).clamp_(0, largest)
        shift = spread(zero, tile, rows, columns)
    else:
        scale = _scale_of(2 * tiles.abs().amax(dim=(-3, -1)), stored)
        shift = torch.full((), (largest + 1) / 2, dtype=torch.float32, device=weight.device)
    codes = (weight / spread(scale.float(), tile, rows, columns)).round_() + shift
    values = codes.nan_to_num_(nan=0.0).clamp_(0, largest).to(torch.uint8)
    return StoredMatrix(
        values if stored.packed == 1 else pack_nibbles(values),
        scale=scale.reshape(shape),
        zero=None if zero is None else zero.to(torch.uint8).reshape(shape),
    )


def dequantize_weight(matrix: StoredMatrix, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.dequantize_weight` for values [..., N, V]."""
    assert matrix.scale is not None
    codes = matrix.values if stored.packed == 1 else unpack_nibbles(matrix.values)
    if matrix.zero is None:
        shift = torch.full((), 2.0 ** (_bits(stored) - 1), dtype=torch.float32, device=codes.device)
    else:
        shift = spread_part(matrix.zero, stored, codes.shape)
    return codes.float().sub_(shift).mul_(spread_part(matrix.scale, stored, codes.shape))
