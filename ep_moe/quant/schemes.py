"""The schemes by name.

Without "w8" or "w4" in the name, tokens and weights have values of the same dtype; "int4_w4a16" has weights of 4 bits
and tokens of 16 bits, in the model's own dtype.
"""

import dataclasses
import functools
import re

import torch

from ep_moe.quant import micro, scaled
from ep_moe.quant.base import QuantScheme, TensorFormat
from ep_moe.quant.scaled import SCALED_SCHEMES, parse_block

_FP8_ROWS = SCALED_SCHEMES["fp8_token"].payload  # of "int4_w4a8"
_SCALE_DTYPES = {"": torch.bfloat16, "_f16": torch.float16, "_f32": torch.float32}
_PATTERNS = (
    "fp8_block_<n>x<k>",
    "int8_block_<n>x<k>",
    "fp8_w8a16_block_<n>x<k>",
    "int8_w8a16_g<k>",
    "int4_w4a16[_g<k>][_zp][_f16|_f32]",
    "int4_w4a8[_g<k>][_zp][_f16|_f32]",
    "int8_w8a16[_g<k>]_zp[_f16|_f32]",
)


def _weights_alone(name: str, weight: TensorFormat) -> QuantScheme:
    return QuantScheme(name=name, weight=weight)


def _integers(name: str, packed: int, group: int | None, zero_point: bool, scale_dtype: torch.dtype) -> QuantScheme:
    """Weights in the family "integer", per channel or in groups; "int4_w4a8" has fp8 tokens."""
    weight = TensorFormat(
        family="integer",
        dtype=torch.uint8,
        packed=packed,
        granularity="channel" if group is None else "group",
        block=(1, group or 1),
        scale_dtype=scale_dtype,
        zero_point=zero_point,
    )
    rows = _FP8_ROWS if name.startswith("int4_w4a8") else TensorFormat()
    return QuantScheme(name=name, payload=rows, activation=rows, weight=weight)


@functools.cache
def _parse_integers(name: str) -> QuantScheme | None:
    """Read "int4_w4a16_g128_zp_f16" and the like; None for other names. Errors: as of `parse_block`."""
    match = re.fullmatch(r"(int4_w4a16|int4_w4a8|int8_w8a16)(?:_g(\d+))?(_zp)?(_f16|_f32)?", name)
    if match is None:
        return None
    group = None if match[2] is None else parse_block(name, match[2])[1]
    if match[1] == "int8_w8a16" and match[3] is None:
        if match[4] is not None:
            return None
        weight = SCALED_SCHEMES["int8_token"].weight
        in_groups = dataclasses.replace(weight, granularity="group", block=(1, group or 1))
        return _weights_alone(name, weight if group is None else in_groups)
    packed = 1 if match[1] == "int8_w8a16" else 2
    return _integers(name, packed, group, match[3] is not None, _SCALE_DTYPES[match[4] or ""])


def _parse_fp8_weights(name: str) -> QuantScheme | None:
    """Read "fp8_w8a16_block_<n>x<k>", weights of "fp8_block_<n>x<k>" for tokens of 16 bits; None for other names."""
    match = re.fullmatch(r"fp8_w8a16(_block_\d+x\d+)", name)
    scheme = None if match is None else scaled.parse_block_scheme(f"fp8{match[1]}")
    if scheme is None:
        return None
    alone = f"fp8_w8a16{scheme.name.removeprefix('fp8')}"
    return SCHEMES.get(alone) or _weights_alone(alone, scheme.weight)


def _named(name: str) -> QuantScheme:
    found = _parse_integers(name)
    assert found is not None
    return found


SCHEMES: dict[str, QuantScheme] = {
    "none": QuantScheme(name="none"),
    **scaled.SCALED_SCHEMES,
    "fp8_w8a16": _weights_alone("fp8_w8a16", SCALED_SCHEMES["fp8_token"].weight),
    "fp8_w8a16_tensor": _weights_alone("fp8_w8a16_tensor", SCALED_SCHEMES["fp8_tensor"].weight),
    "fp8_w8a16_block": _weights_alone("fp8_w8a16_block", SCALED_SCHEMES["fp8_block"].weight),
    **{name: _named(name) for name in ("int8_w8a16", "int4_w4a16", "int4_w4a8")},
    **micro.MICRO_SCHEMES,
}


def get_scheme(name: str) -> QuantScheme:
    """Find a scheme by name: one of `SCHEMES`, or one with other block or group sizes, zero points or dtype of scales.

    "fp8_block_<n>x<k>", "int8_block_<n>x<k>" and "fp8_w8a16_block_<n>x<k>" have weight blocks of n rows and k columns,
    "int4_w4a16_g<k>", "int4_w4a8_g<k>" and "int8_w8a16_g<k>" groups of k columns. "_zp" after these adds zero points.
    The scales of 4-bit integers, and of those with zero points, are bfloat16; "_f16" and "_f32" name other dtypes.

    Example: "int4_w4a16_g128_zp_f16" is what GPTQ and AWQ checkpoints hold in float16.
    Errors: ValueError that lists the known names, or the valid n and k. Local.
    """
    scheme = SCHEMES.get(name) or scaled.parse_block_scheme(name) or _parse_integers(name) or _parse_fp8_weights(name)
    if scheme is None:
        raise ValueError(f"scheme ({name!r}) is not one of {', '.join((*SCHEMES, *_PATTERNS))}")
    return scheme


def with_block(scheme: QuantScheme, rows: int, columns: int) -> QuantScheme:
    """The scheme with weight blocks of other sizes. Example: "int8_block" with (64, 128) is "int8_block_64x128". Local.

    Errors: as of `get_scheme`; ValueError for a scheme with other scales, such as "fp8_block_ue8m0".
    """
    found = get_scheme(f"{scheme.name.partition('_block')[0]}_block_{rows}x{columns}")
    if found.weight != dataclasses.replace(scheme.weight, block=(rows, columns)):
        raise ValueError(f"scheme {scheme.name!r} has no form with blocks of {rows}x{columns}")
    return found
