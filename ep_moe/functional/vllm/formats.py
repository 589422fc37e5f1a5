"""vLLM's types of formats, the schemes that its flags, block shapes and scales describe, and scales in our shapes.

Letters: E experts, C rows of an expert, G scale groups of a row, N and K rows and columns of a weight, n and k those of
a block.
"""

import dataclasses
import enum
import functools
import itertools
import math

import torch

from ep_moe.functional.formats import FLAGS, Flags, GivenWeight
from ep_moe.functional.formats import scheme_of as scheme_of_weights
from ep_moe.quant import SCHEMES, QuantScheme, TensorFormat, get_scheme
from ep_moe.quant.base import Granularity

_KINDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


class FusedMoEActivationFormat(enum.Enum):
    """How activations stand between the parts of vLLM's modular kernels."""

    Standard = ("standard",)  # [tokens, hidden]
    BatchedExperts = ("batched_experts",)  # [experts, max tokens, hidden]


@dataclasses.dataclass(frozen=True, slots=True)
class FusedMoEQuantConfig:
    """How activations are quantized, as vLLM's class of this name; any object with these attributes serves.

    Args:
        quant_dtype: torch.float8_e4m3fn, torch.int8, or None if activations are not quantized.
        per_act_token_quant: a scale for each token. per_out_ch_quant: a scale for each row of weights; not read here.
        block_shape: [rows, columns] of a block of weights; tokens then have a scale for each group of columns.
        Without either there is one scale for a tensor.
    Errors: ValueError for both.
    """

    quant_dtype: torch.dtype | None = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    block_shape: list[int] | None = None

    def __post_init__(self) -> None:
        if self.per_act_token_quant and self.block_shape is not None:
            raise ValueError(f"per_act_token_quant and block_shape ({self.block_shape}) are both set, one at most fits")

    @property
    def is_quantized(self) -> bool:
        """Whether activations are quantized."""
        return self.quant_dtype is not None

    @property
    def is_per_act_token(self) -> bool:
        """Whether each token has a scale."""
        return self.per_act_token_quant

    @property
    def is_block_quantized(self) -> bool:
        """Whether groups of columns have scales."""
        return self.block_shape is not None

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return not self.per_act_token_quant and self.block_shape is None

    def scale_shape(self, max_tokens: int, hidden_dim: int) -> tuple[int, int] | None:
        """The shape of the scales of [max_tokens, hidden_dim]; None if activations are not quantized. Local."""
        if not self.is_quantized:
            return None
        if self.block_shape is not None:
            return max_tokens, math.ceil(hidden_dim / self.block_shape[1])
        return max_tokens if self.per_act_token_quant else 1, 1

    def batched_scale_shape(self, num_experts: int, max_tokens: int, hidden_dim: int) -> tuple[int, int, int] | None:
        """`scale_shape` for each of `num_experts` experts. Local."""
        shape = self.scale_shape(max_tokens, hidden_dim)
        return None if shape is None else (num_experts, *shape)

    @staticmethod
    def make(
        use_fp8_w8a8: bool = False,
        use_int8_w8a8: bool = False,
        use_int8_w8a16: bool = False,
        use_int4_w4a16: bool = False,
        per_act_token_quant: bool = False,
        per_out_ch_quant: bool = False,
        block_shape: list[int] | None = None,
    ) -> "FusedMoEQuantConfig":
        """The config for the flags of a call, of which one at most may be set. Errors: ValueError. Local."""
        used_flag(dict(zip(FLAGS, (use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16), strict=True)))
        dtype = torch.float8_e4m3fn if use_fp8_w8a8 else torch.int8 if use_int8_w8a8 else None
        return FusedMoEQuantConfig(dtype, per_act_token_quant, per_out_ch_quant, block_shape)


def used_flag(flags: dict[str, bool]) -> str | None:
    """The flag that is set, None if none is. Errors: ValueError for more than one. Local."""
    used = [*itertools.compress(flags, flags.values())]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are both set, one at most describes the weights")
    return used[0] if used else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How activations are quantized: `dtype` None if they are not, else scales per "tensor", "token" or "group".

    `block` is [n, k] of the weights if scales are per group of k columns.
    """

    dtype: torch.dtype | None = None
    per: Granularity = "none"
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, per_token: bool, block_shape: list[int] | None) -> "RowFormat":
        """The format that three arguments of vLLM's calls describe. Errors: ValueError. Local."""
        if dtype is None:
            return cls()
        if dtype not in _KINDS:
            raise ValueError(f"the dtype of quantized activations ({dtype}) is not one of float8_e4m3fn, int8")
        if block_shape is None:
            return cls(dtype=dtype, per="token" if per_token else "tensor")
        if per_token:
            raise ValueError(f"per_act_token_quant and block_shape ({block_shape}) are both set, one at most fits")
        if len(block_shape) != 2 or min(block_shape) < 1:
            raise ValueError(f"block_shape ({block_shape}) is not [rows, columns], both at least 1")
        return cls(dtype=dtype, per="group", block=(block_shape[0], block_shape[1]))

    def groups(self, width: int) -> int:
        """Scales of a row of `width` columns."""
        return 1 if self.block is None else math.ceil(width / self.block[1])

    def scale_shape(self, experts: int, rows: int, width: int) -> tuple[int, int, int]:
        """The shape in which vLLM has the scales of [experts, rows, width]."""
        return experts, 1 if self.per == "tensor" else rows, self.groups(width)

    def scheme(self, weight: Granularity = "channel") -> QuantScheme:
        """The scheme of these rows, of the intermediate in the same format, and of weights with scales per `weight`."""
        assert self.dtype is not None
        return _scaled_scheme(_KINDS[self.dtype], self.per, weight, self.block)


@functools.cache
def _scaled_scheme(kind: str, rows: Granularity, weight: Granularity, block: tuple[int, int] | None) -> QuantScheme:
    if block is not None:
        return get_scheme(f"{kind}_block_{block[0]}x{block[1]}")
    like = get_scheme(f"{kind}_token")
    parts: dict[str, TensorFormat] = {
        "payload": dataclasses.replace(like.payload, granularity=rows),
        "activation": dataclasses.replace(like.activation, granularity=rows),
        "weight": dataclasses.replace(like.weight, granularity=weight),
    }
    named = (one for one in SCHEMES.values() if all(getattr(one, name) == part for name, part in parts.items()))
    return next(named, QuantScheme(name=f"{kind}_{rows}_{weight}", **parts))


def flags_of(flag: str | None, block_shape: list[int] | None) -> Flags:
    """The flags of a call with this use_* flag. Local."""
    return Flags(block_shape=block_shape, **({} if flag is None else {flag: True}))


def scheme_of(flag: str | None, rows: RowFormat, block_shape: list[int] | None, *weights: GivenWeight) -> QuantScheme:
    """The scheme of a call's weights and of its activations.

    Args: flag: the use_* flag that is set. weights: the one or two of the call.
    Errors: ValueError for scales that the flag lacks, or does not take. Local.
    """
    flags, first = flags_of(flag, block_shape), weights[0]
    if rows.dtype is None:
        found = scheme_of_weights(flags, weights)
        if flag == "use_int8_w8a16" and flags.group and first.values.dtype == torch.int8:  # around zero
            for given in weights:
                if given.zero is not None:
                    raise ValueError(f"{given.zero_name} is given, int8 values have none; uint8 values have")
            return get_scheme(f"int8_w8a16_g{flags.group}")
        return found
    for given in weights:
        if given.scale is None:
            raise ValueError(f"{given.scale_name} is missing, {flag} needs it")
        if given.zero is not None:
            raise ValueError(f"{given.zero_name} is given, {flag} takes none")
    assert first.scale is not None
    return rows.scheme("tensor" if first.scale.numel() == first.values.shape[0] else "channel")


def check_counts(expert_num_tokens: torch.Tensor, experts: int) -> None:
    """Raise ValueError unless there is a count for each expert. Local."""
    if expert_num_tokens.dim() != 1 or expert_num_tokens.shape[0] < experts:
        raise ValueError(f"expert_num_tokens is {tuple(expert_num_tokens.shape)}; at least [{experts}] needed")


def check_least(**numbers: tuple[int, int]) -> None:
    """Raise ValueError for a number that is less than the second of its pair. Local."""
    for name, (number, least) in numbers.items():
        if number < least:
            raise ValueError(f"{name} ({number}) must be at least {least}")


def row_scales(scale: torch.Tensor | None, name: str, needed: tuple[int, int, int], per: str) -> torch.Tensor:
    """Scales as [E, C, G], a view where it can be, of one number, one for each expert, or one for each row and group.

    Args: needed: E, C and G. per: as of `RowFormat`. Errors: ValueError. Local.
    """
    experts, rows, groups = needed
    if scale is None:
        raise ValueError(f"{name} is missing; scales per {per} {needed} needed")
    if scale.dtype != torch.float32:
        raise ValueError(f"{name} is {scale.dtype}; float32 needed")
    if per == "tensor" and scale.numel() in (1, experts):
        return scale.reshape(-1, 1, 1).expand(needed)
    if per == "tensor" or scale.numel() != experts * rows * groups or scale.dim() not in (2, 3):
        counts = "1 or E" if per == "tensor" else str(needed)
        raise ValueError(f"{name} is {tuple(scale.shape)}; {counts} numbers per {per} needed for {needed}")
    return scale.reshape(needed)
