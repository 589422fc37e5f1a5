"""The number formats that flags, block shapes and dtypes of scales describe in SGLang's and vLLM's calls.

Letters: E experts, N and C rows and columns of a weight, n and k those of a block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_moe.functional.common import check_like
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme, unpack_nibbles

FLAGS = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
_SUFFIXES = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}  # by dtype of scales
_ONE_BYTE = (torch.uint8,)


class Flags(NamedTuple):
    """The flags of a call that say how weights and tokens are stored."""

    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    block_shape: Sequence[int] | None = None

    @property
    def group(self) -> int:
        """Columns that share a scale of weights alone, 0 for one scale per row."""
        if self.block_shape is None:
            return 0
        rows, columns = self.block_shape
        if rows != 0 or columns < 0:
            raise ValueError(
                f"block_shape ({list(self.block_shape)}) is not [0, columns of a group], for weights alone"
            )
        return columns


class GivenWeight(NamedTuple):
    """A weight as a call has it, and the names of these arguments."""

    name: str
    values: torch.Tensor
    scale_name: str
    scale: torch.Tensor | None
    zero_name: str
    zero: torch.Tensor | None
    static_name: str
    static: torch.Tensor | None  # scale of the rows that it multiplies

    @classmethod
    def of(cls, call: Any, name: str, static_name: str = "", static: torch.Tensor | None = None) -> "GivenWeight":
        """The weight in a call's fields `name`, `name`_scale and `name`_zp. Local."""
        scale, zero = f"{name}_scale", f"{name}_zp"
        return cls(
            name, getattr(call, name), scale, getattr(call, scale), zero, getattr(call, zero), static_name, static
        )

    def argument(self, part: str) -> str:
        """The name of the argument that is the scale, the zero point or the static scale."""
        return str(getattr(self, f"{part}_name"))


def scheme_of(flags: Flags, weights: Sequence[GivenWeight]) -> QuantScheme:
    """The scheme that flags, block shape and dtypes of scales describe. Errors: ValueError for those without one."""
    used = [flag for flag in FLAGS if getattr(flags, flag)]
    block = flags.block_shape
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are both set, one at most describes the weights")
    if block is not None and len(block) != 2:
        raise ValueError(f"block_shape ({list(block)}) is not [rows, columns]")
    if not used:
        _refuse(weights, ("scale", "zero", "static"), "no use_* flag")
        if block is not None:
            raise ValueError("block_shape is given, no use_* flag takes none")
        return get_scheme("none")
    for weight in weights:
        if weight.scale is None:
            raise ValueError(f"{weight.scale_name} is missing, {used[0]} needs it")
    if used[0] in ("use_int8_w8a16", "use_int4_w4a16"):
        _refuse(weights, ("static",), used[0])
        return _weights_alone(flags, weights)
    _refuse(weights, ("zero",), used[0])
    kind = used[0].removeprefix("use_").removesuffix("_w8a8")
    if block is not None:
        _refuse(weights, ("static",), f"{used[0]} with a block_shape, which scales tokens in groups,")
        return get_scheme(f"{kind}_block_{block[0]}x{block[1]}")
    if kind == "int8":
        _refuse(weights, ("static",), used[0])
        if not flags.per_channel_quant:
            raise ValueError("use_int8_w8a8 needs per_channel_quant or a block_shape")
        return get_scheme("int8_token")
    if not flags.per_channel_quant:
        return get_scheme("fp8_tensor")
    static = _all_or_none(weights, "static", " in use_fp8_w8a8 with per_channel_quant")
    return get_scheme("fp8_tensor_channel" if static else "fp8_token")


def _refuse(weights: Sequence[GivenWeight], parts: tuple[str, ...], where: str) -> None:
    for part in parts:
        for weight in weights:
            if getattr(weight, part) is not None:
                raise ValueError(f"{weight.argument(part)} is given, {where} takes none")


def _all_or_none(weights: Sequence[GivenWeight], part: str, where: str = "") -> bool:
    """Whether the weights have a part. Errors: ValueError if only some have."""
    given = {getattr(weight, part) is not None for weight in weights}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(weight.argument(part) for weight in weights)} go together{where}")
    return True in given


def _weights_alone(flags: Flags, weights: Sequence[GivenWeight]) -> QuantScheme:
    """int8_w8a16 and int4_w4a16, of which SGLang stores groups as unsigned integers around 128 or 8."""
    group, scale = flags.group, weights[0].scale
    assert scale is not None
    zero = _all_or_none(weights, "zero")
    if scale.dtype not in _SUFFIXES:
        raise ValueError(f"{weights[0].scale_name} is {scale.dtype}; one of {', '.join(map(str, _SUFFIXES))} needed")
    groups = f"_g{group}" if group else ""
    suffix = _SUFFIXES[scale.dtype]
    if flags.use_int4_w4a16:
        return get_scheme(f"int4_w4a16{groups}{'_zp' if zero else ''}{suffix}")
    if not group:
        _refuse(weights, ("zero",), "use_int8_w8a16 without groups")
        return get_scheme("int8_w8a16")
    return get_scheme(f"int8_w8a16{groups}_zp{suffix}")


def _scale(given: GivenWeight, scheme: QuantScheme, shape: tuple[int, int, int]) -> torch.Tensor:
    """Scales of a weight [E, N, C] in our shape; SGLang's may have trailing dimensions of 1."""
    assert given.scale is not None
    scale = given.scale.detach()
    needed, dtype = scheme.weight.scale_shape(shape), scheme.weight.scale_dtype
    if scale.numel() != torch.Size(needed).numel() or [n for n in scale.shape if n > 1] != [n for n in needed if n > 1]:
        raise ValueError(f"{given.scale_name} is {tuple(scale.shape)}; {needed} needed for scheme '{scheme.name}'")
    if scale.dtype not in (dtype, *_SUFFIXES, torch.float8_e8m0fnu):
        kinds = ", ".join(map(str, _SUFFIXES))
        raise ValueError(f"{given.scale_name} is {scale.dtype}; one of {kinds}, torch.float8_e8m0fnu needed")
    return scale.to(dtype).reshape(needed) if scale.dtype != dtype else scale.reshape(needed)


def _zero(given: GivenWeight, scheme: QuantScheme, shape: tuple[int, int, int], flags: Flags) -> torch.Tensor | None:
    """Zero points of a weight [E, N, C] in a byte each, if the scheme has them. SGLang packs those of two rows."""
    if not scheme.weight.zero_point:
        return None
    needed, zero = scheme.weight.scale_shape(shape), given.zero
    if zero is None:
        return torch.full(needed, 128, dtype=torch.uint8, device=given.values.device)
    if flags.use_int8_w8a16:
        check_like(zero, given.zero_name, needed, _ONE_BYTE)
        return zero.detach()
    packed = (needed[0], needed[1] // 2, *needed[2:])
    if zero.numel() == torch.Size(packed).numel():
        zero = zero.reshape(packed)
    check_like(zero, given.zero_name, packed, _ONE_BYTE)
    return unpack_nibbles(zero.reshape(*packed[:2], -1).transpose(1, 2)).transpose(1, 2).reshape(needed).contiguous()


def matrix_of(
    given: GivenWeight, scheme: QuantScheme, flags: Flags, shape: tuple[int, int, int], dtype: torch.dtype
) -> StoredMatrix:
    """A weight [E, N, C] as the runtime has it, views where `is_view` says so. Errors: ValueError. Local."""
    values, stored = given.values, scheme.weight
    kind = stored.dtype or dtype
    needed = (*shape[:2], stored.row_values(shape[2]))
    if tuple(values.shape) != needed or values.dtype != kind:
        raise ValueError(
            f"{given.name} is {tuple(values.shape)} {values.dtype}; {needed} {kind} needed for scheme '{scheme.name}'"
        )
    values = values.detach()  # unlike other views, it does not keep the caller's tensor alive
    if not stored.quantized:
        return StoredMatrix(values)
    return StoredMatrix(values, scale=_scale(given, scheme, shape), zero=_zero(given, scheme, shape, flags))


def is_view(given: GivenWeight, scheme: QuantScheme) -> bool:
    """Whether `matrix_of` makes views alone, which see later writes to the caller's tensors."""
    return scale_is_view(given, scheme) and not scheme.weight.zero_point


def scale_is_view(given: GivenWeight, scheme: QuantScheme) -> bool:
    """Whether `matrix_of` makes a view of the scale, or there is none."""
    scale = given.scale
    return scale is None or (scale.dtype == scheme.weight.scale_dtype and scale.is_contiguous())
