"""Weights as calls of SGLang and vLLM take them: their format by flags and scales, and the checked `StoredMatrix`.

Letters: E experts, N and C rows and columns of a weight, k columns of a group.
"""

from typing import NamedTuple

import torch

from ep_moe.functional.common import check_like
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme, unpack_nibbles

_SUFFIXES = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}  # by dtype of scales
_ONE_BYTE = (torch.uint8,)


class GivenMatrix(NamedTuple):
    """A weight [E, N, C] with what describes it; errors call the last two `name`_scale and `name`_zp."""

    name: str
    values: torch.Tensor
    scale: torch.Tensor | None = None  # as `TensorFormat.scale_shape`, but for dimensions of 1
    zero: torch.Tensor | None = None  # zero points: 8 bits as the scale, 4 bits with those of two rows in a byte


def columns_of_group(block_shape: list[int] | None) -> int:
    """Columns that share a scale of weights alone, 0 for one scale per row. Errors: ValueError for blocks of rows."""
    if block_shape is None:
        return 0
    rows, columns = block_shape
    if rows != 0 or columns < 0:
        raise ValueError(f"block_shape ({block_shape}) is not [0, columns of a group], for weights alone")
    return columns


def integer_scheme(first: GivenMatrix, second: GivenMatrix | None, bits: int, group: int) -> QuantScheme:
    """The scheme of a layer's weights of 8 or 4 bits for tokens that are not quantized.

    Unsigned integers in groups, or of 4 bits, lie around their zero points, else 128 or 8; torch.int8 around zero.

    Args: first, second: the weights; zero points go together. group: columns that share a scale, 0 for whole rows.
    Errors: ValueError. Local.
    """
    scale, zero = first.scale, first.zero
    if second is not None and (zero is None) != (second.zero is None):
        raise ValueError(f"{first.name}_zp and {second.name}_zp go together")
    if scale is None or scale.dtype not in _SUFFIXES:
        found = None if scale is None else scale.dtype
        raise ValueError(f"{first.name}_scale is {found}; one of {', '.join(map(str, _SUFFIXES))} needed")
    groups = f"_g{group}" if group else ""
    suffix = _SUFFIXES[scale.dtype]
    if bits == 4:
        return get_scheme(f"int4_w4a16{groups}{'' if zero is None else '_zp'}{suffix}")
    if not group or first.values.dtype == torch.int8:
        if zero is not None:
            what = "int8 values" if group else "weights of 8 bits without groups"
            raise ValueError(f"{first.name}_zp is given, {what} have none")
        return get_scheme(f"int8_w8a16{groups}")
    return get_scheme(f"int8_w8a16{groups}_zp{suffix}")


def stored_matrix(
    given: GivenMatrix, scheme: QuantScheme, shape: tuple[int | None, int | None, int], dtype: torch.dtype
) -> StoredMatrix:
    """A weight in the scheme's format: views, unless scales are converted or zero points unpacked.

    Args: shape: E, N and C, None for any. dtype: of values that are not quantized.
    Errors: ValueError names the argument, its value and what is needed. Local.
    """
    values, stored = given.values, scheme.weight
    if values.dim() != 3:
        raise ValueError(f"{given.name} is {tuple(values.shape)}; [experts, rows, columns] needed")
    dtype = stored.dtype or dtype
    num_experts, num_rows = (
        found if size is None else size for found, size in zip(values.shape[:2], shape[:2], strict=True)
    )
    needed = (num_experts, num_rows, stored.row_values(shape[2]))
    if tuple(values.shape) != needed or values.dtype != dtype:
        raise ValueError(
            f"{given.name} is {tuple(values.shape)} {values.dtype}; {needed} {dtype} needed for scheme '{scheme.name}'"
        )
    values = values.view_as(values)  # an object of its own: what is kept may not keep the caller's alive
    if not stored.quantized:
        return StoredMatrix(values)
    full = (num_experts, num_rows, shape[2])
    return StoredMatrix(values, scale=_scale(given, scheme, full), zero=_zero(given, scheme, full))


def _scale(given: GivenMatrix, scheme: QuantScheme, shape: tuple[int, int, int]) -> torch.Tensor:
    """Scales in our shape; the caller's may have other dimensions of 1."""
    needed, dtype, scale = scheme.weight.scale_shape(shape), scheme.weight.scale_dtype, given.scale
    if scale is None:
        raise ValueError(f"{given.name}_scale is missing; {needed} needed for scheme '{scheme.name}'")
    if scale.numel() != torch.Size(needed).numel() or [n for n in scale.shape if n > 1] != [n for n in needed if n > 1]:
        raise ValueError(f"{given.name}_scale is {tuple(scale.shape)}; {needed} needed for scheme '{scheme.name}'")
    return scale.to(dtype).reshape(needed) if scale.dtype != dtype else scale.reshape(needed)


def _zero(given: GivenMatrix, scheme: QuantScheme, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """Zero points in a byte each, if the scheme has them."""
    if not scheme.weight.zero_point:
        return None
    needed, zero, name = scheme.weight.scale_shape(shape), given.zero, f"{given.name}_zp"
    if zero is None:
        return torch.full(needed, 128, dtype=torch.uint8, device=given.values.device)
    if scheme.weight.packed == 1:
        check_like(zero, name, needed, _ONE_BYTE)
        return zero
    packed = (needed[0], needed[1] // 2, *needed[2:])
    if zero.numel() == torch.Size(packed).numel():
        zero = zero.reshape(packed)
    check_like(zero, name, packed, _ONE_BYTE)
    return unpack_nibbles(zero.reshape(*packed[:2], -1).transpose(1, 2)).transpose(1, 2).reshape(needed)
