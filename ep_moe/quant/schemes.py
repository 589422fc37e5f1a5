"""The schemes by name.

Without "w8" or "w4" in the name, tokens and weights have values of the same dtype; "int4_w4a16" has weights of 4 bits
and tokens of 16 bits, in the model's own dtype.
"""

import dataclasses
import functools
import re

import torch

from ep_moe.quant import micro
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
        return QuantScheme(name=name, weight=weight if group is None else in_groups)
    weight = TensorFormat(
        family="integer",
        dtype=torch.uint8,
        packed=1 if match[1] == "int8_w8a16" else 2,
        granularity="channel" if group is None else "group",
        block=(1, group or 1),
        scale_dtype=_SCALE_DTYPES[match[4] or ""],
        zero_point=match[3] is not None,
    )
    rows = _FP8_ROWS if match[1] == "int4_w4a8" else TensorFormat()
    return QuantScheme(name=name, payload=rows, activation=rows, weight=weight)


@functools.cache
def _parse_blocks(name: str) -> QuantScheme | None:
    """Read "fp8_block_64x32" and the like; None for other names. Errors: as of `parse_block`.

    "fp8_block_128x128" is "fp8_block" itself, so equal formats are equal.
    """
    match = re.fullmatch(r"(fp8_block|int8_block|fp8_w8a16_block)_(\d+x\d+)", name)
    if match is None:
        return None
    plain, (rows, columns) = SCHEMES[match[1]], parse_block(name, match[2])
    if (rows, columns) == plain.weight.block:
        return plain
    payload = dataclasses.replace(plain.payload, block=(1, columns)) if plain.payload.quantized else plain.payload
    weight = dataclasses.replace(plain.weight, block=(rows, columns))
    return QuantScheme(name=f"{match[1]}_{rows}x{columns}", payload=payload, activation=payload, weight=weight)


SCHEMES: dict[str, QuantScheme] = {
    "none": QuantScheme(name="none"),
    **SCALED_SCHEMES,
    "fp8_w8a16": QuantScheme(name="fp8_w8a16", weight=SCALED_SCHEMES["fp8_token"].weight),
    "fp8_w8a16_tensor": QuantScheme(name="fp8_w8a16_tensor", weight=SCALED_SCHEMES["fp8_tensor"].weight),
    "fp8_w8a16_block": QuantScheme(name="fp8_w8a16_block", weight=SCALED_SCHEMES["fp8_block"].weight),
    **{name: found for name in ("int8_w8a16", "int4_w4a16", "int4_w4a8") if (found := _parse_integers(name))},
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
    scheme = SCHEMES.get(name) or _parse_blocks(name) or _parse_integers(name)
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
