"""Microscaling formats, with a one-byte scale for each small group of neighbors: MXFP8, MXFP4 and NVFP4.

Activations and weights [N, K] are stored alike: groups lie in a row, whose last group may be short.

"mxfp8", of the OCP Microscaling Formats specification v1.0, sections 5.2 and 6.3: groups of 32, values e4m3, scale e8m0
(torch.float8_e8m0fnu: a byte b means 2^(b - 127), 255 NaN):
    scale = 2^(floor(log2(amax)) - 8), value = e4m3(clamp(x / scale, -448, 448))
where 8 is the exponent of 448. floor(log2(.)) is read from the bits of amax, which is exact. The smallest scale is
2^-127, also that of a group of zeros. A group whose amax is NaN or infinite gets the scale NaN.

"mxfp4", section 5.1 there: the same with values e2m1 (below) and 2, the exponent of 6, in place of 8; magnitudes above
6 * scale saturate. gpt-oss stores its experts so; tokens are in 16 bits or in MXFP8.

"nvfp4", after NVIDIA's description of its Blackwell format: groups of 16, values e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a
sign), two in a byte, the first in the low four bits, scale e4m3, and a global scale s in float32 that multiplies:
    scale = e4m3(min(amax / s / 6, 448)), value = e2m1(x / (scale * s)), real number = (value * scale) * s
where s of a weight is max(amax of the matrix [N, K], 1e-10) / 2688, so that the largest group has the largest scale,
448 (modelopt's `weight_scale_2`; compressed-tensors stores 1 / s). The intermediate between the GEMMs, which is not
sent, has an s of the same rule for each row (`round_trip`). A payload row carries no global scale: its s is 1. Its
error is the format's own if the amax of every group is in [6 * 2^-6, 2688], that is [0.094, 2688]. Below, scales are
subnormal and lose bits, and a group of amax <= 6 * 2^-10 (0.0059) becomes zeros; above, values saturate.
A group whose amax is NaN or infinite gets the scale NaN and values 0, since e2m1 has no NaN; s ignores such groups.

All rounding is to nearest, ties to even, all arithmetic float32.
Letters: W width of a row, G groups of a row, V stored values of a row.
"""

import dataclasses
import math

import torch
from torch.nn.functional import pad

from ep_moe.quant.base import QuantScheme, StoredMatrix, TensorFormat, as_bytes
from ep_moe.quant.integer import pack_nibbles, unpack_nibbles
from ep_moe.quant.scaled import LARGEST, MIN_AMAX, to_e4m3

_MXFP8 = TensorFormat(
    family="micro",
    dtype=torch.float8_e4m3fn,
    granularity="group",
    block=(1, 32),
    scale_dtype=torch.float8_e8m0fnu,
    power_of_two=True,
)
_MXFP4 = dataclasses.replace(_MXFP8, dtype=torch.uint8, packed=2)
_NVFP4_ROWS = dataclasses.replace(_MXFP4, block=(1, 16), scale_dtype=torch.float8_e4m3fn, power_of_two=False)
_NVFP4 = dataclasses.replace(_NVFP4_ROWS, global_scale="multiplier")
_NVFP4_DIVIDED = dataclasses.replace(_NVFP4_ROWS, global_scale="divisor")
MICRO_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        QuantScheme(name="mxfp8", payload=_MXFP8, activation=_MXFP8, weight=_MXFP8),
        QuantScheme(name="mxfp8_w8a16", weight=_MXFP8),
        QuantScheme(name="mxfp4_w4a16", weight=_MXFP4),
        QuantScheme(name="mxfp4_w4a8", payload=_MXFP8, activation=_MXFP8, weight=_MXFP4),
        QuantScheme(name="nvfp4", payload=_NVFP4_ROWS, activation=_NVFP4, weight=_NVFP4),
        QuantScheme(name="nvfp4_divisor", payload=_NVFP4_ROWS, activation=_NVFP4, weight=_NVFP4_DIVIDED),
        QuantScheme(name="nvfp4_w4a16", weight=_NVFP4),
        QuantScheme(name="nvfp4_w4a16_divisor", weight=_NVFP4_DIVIDED),
    )
}
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.uint8: 2}  # of the largest number, 448 and 6
E2M1_MAX = 6.0


def _group_amax(x: torch.Tensor, group: int) -> torch.Tensor:
    """The largest magnitude [..., G] of each group of x [..., W] float32; NaN if one of the group is NaN."""
    groups = math.ceil(x.shape[-1] / group)
    missing = groups * group - x.shape[-1]
    padded = pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], groups, group).abs().amax(dim=-1)


def _spread(scale: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """Scale [..., G] as float32 [..., W]."""
    return scale.float().repeat_interleave(group, dim=-1)[..., :width]


def _e8m0_scale(amax: torch.Tensor, max_exponent: int) -> torch.Tensor:
    """The group scale of MXFP8 and MXFP4. Example: for e4m3, amax 7 = 1.75 * 2^2 gives 2^(2 - 8), byte 121."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    byte = torch.where(exponent == 0xFF, exponent, (exponent - max_exponent).clamp(min=0))
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def _e4m3_scale(amax: torch.Tensor) -> torch.Tensor:
    """The group scale of NVFP4. Example: amax 6 gives 1."""
    # torch on CUDA divides by a Python number through its reciprocal, whose last bit may differ: divide by a tensor
    scale = (amax / torch.full_like(amax, E2M1_MAX)).clamp_(max=LARGEST[torch.float8_e4m3fn])
    return torch.where(amax.isfinite(), scale, math.nan).to(torch.float8_e4m3fn)


def _global_scale(amax: torch.Tensor, shared: tuple[int, ...]) -> torch.Tensor:
    """The global scale of NVFP4 for group maxima [..., G], reduced over the dimensions `shared`, which are kept as 1.

    Example: for maxima [672, 2688] it is 1, for zeros 1e-10 / 2688.
    """
    largest = torch.where(amax.isfinite(), amax, 0.0).amax(dim=shared, keepdim=True).clamp_(min=MIN_AMAX)
    return largest / torch.full_like(largest, E2M1_MAX * LARGEST[torch.float8_e4m3fn])


def _to_e2m1(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round x / scale to e2m1, two codes in a byte: [..., W] to [..., W / 2] uint8. Example: 2.5 gives 2, code 4."""
    x = torch.where(scale > 0, x / scale, 0.0)
    magnitude, code = x.abs(), x.signbit().to(torch.uint8) << 3
    for midpoint in (0.25, 1.25, 2.5, 5.0):  # ties go to the even code, here the lower one
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):  # and here the upper one
        code += magnitude >= midpoint
    return pack_nibbles(code)


def _from_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Unpack codes [..., W / 2] to float32 [..., W]; computed, since a lookup table would cost a copy to the device."""
    code = unpack_nibbles(packed)
    exponent, mantissa = (code >> 1) & 3, code & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent.clamp(min=1) - 1))
    magnitude = halves.float() * 0.5
    return torch.where(code >= 8, -magnitude, magnitude)


def _quantize(
    x: torch.Tensor, stored: TensorFormat, shared: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize the rows of x [..., W]: values [..., V], scale [..., G] and the multiplying global scale, if any.

    Args:
        shared: dimensions of x that share a global scale, in which it has size 1.
    """
    width, group = x.shape[-1], stored.block[1]
    x = x.float()
    amax = _group_amax(x, group)
    if stored.power_of_two:
        assert stored.dtype is not None
        scale, to_values = _e8m0_scale(amax, MAX_EXPONENT[stored.dtype]), to_e4m3 if stored.packed == 1 else _to_e2m1
        return to_values(x, _spread(scale, group, width)), scale, None
    if stored.global_scale == "none":
        scale = _e4m3_scale(amax)
        return _to_e2m1(x, _spread(scale, group, width)), scale, None
    global_scale = _global_scale(amax, shared)
    scale = _e4m3_scale(amax / global_scale)
    return _to_e2m1(x, _spread(scale, group, width) * global_scale), scale, global_scale


def quantize(
    x: torch.Tensor, stored: TensorFormat, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.quant.quantize` for x [T, H]: values and scale; these formats have no static scale."""
    assert static_scale is None
    values, scale, _ = _quantize(x, stored)
    columns = torch.empty(scale.shape[::-1], dtype=scale.dtype, device=scale.device)
    as_bytes(columns).copy_(as_bytes(scale).t())
    return values, columns.t()


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.dequantize_rows` for values [..., V], scale [..., G]."""
    real = values.float() if stored.packed == 1 else _from_e2m1(values)
    return real.mul_(_spread(scale, stored.block[1], real.shape[-1]))


def round_trip(x: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.round_trip` for x [T, W] in a format with a global scale, which here each row has."""
    values, scale, global_scale = _quantize(x, stored, shared=(-1,))
    assert global_scale is not None
    return dequantize_rows(values, scale, stored).mul_(global_scale)


def quantize_weight(weight: torch.Tensor, stored: TensorFormat) -> StoredMatrix:
    """`ep_moe.quant.quantize_weight` for weight [..., N, K]."""
    values, scale, global_scale = _quantize(weight, stored, shared=(-2, -1))
    if global_scale is not None:
        global_scale = global_scale[..., 0, 0]
        global_scale = global_scale.reciprocal() if stored.global_scale == "divisor" else global_scale
    return StoredMatrix(values, scale=scale, global_scale=global_scale)


def dequantize_weight(matrix: StoredMatrix, stored: TensorFormat) -> torch.Tensor:
    """`ep_moe.quant.dequantize_weight` for values [..., N, V], without the global scale."""
    assert matrix.scale is not None
    return dequantize_rows(matrix.values, matrix.scale, stored)
