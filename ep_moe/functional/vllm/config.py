"""vLLM's small types that its batched calls take or return, for users without vLLM. Its own objects serve as well."""

import dataclasses
import enum
import math

import torch

INTEGERS = torch.int8
FP8 = torch.float8_e4m3fn


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
        flags = {
            "use_fp8_w8a8": use_fp8_w8a8,
            "use_int8_w8a8": use_int8_w8a8,
            "use_int8_w8a16": use_int8_w8a16,
            "use_int4_w4a16": use_int4_w4a16,
        }
        used_flag(flags)
        dtype = FP8 if use_fp8_w8a8 else INTEGERS if use_int8_w8a8 else None
        return FusedMoEQuantConfig(dtype, per_act_token_quant, per_out_ch_quant, block_shape)


def used_flag(flags: dict[str, bool]) -> str | None:
    """The flag that is set, None if none is. Errors: ValueError for more than one. Local."""
    used = [name for name, value in flags.items() if value]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are both set, one at most describes the weights")
    return used[0] if used else None
