"""`batched_moe_kernel_quantize_input`: rows of every expert as the next GEMM takes them.

Letters: E experts, C rows of an expert, W columns, G scale groups of a row.
"""

from typing import Any, NamedTuple

import torch

from ep_moe.config import DTYPES
from ep_moe.functional.call import Operation, with_arguments
from ep_moe.functional.vllm.formats import RowFormat, check_counts
from ep_moe.quant import quantize, quantize_weight
from ep_moe.quant.scaled import LARGEST


class QuantizeCall(NamedTuple):
    """The arguments that have a meaning here, checked."""

    A: torch.Tensor
    A_scale: torch.Tensor | None
    expert_num_tokens: torch.Tensor
    qtype: torch.dtype
    per_act_token_quant: bool
    block_shape: list[int] | None

    @property
    def rows(self) -> RowFormat:
        """The format of the quantized rows."""
        return RowFormat.of(self.qtype, self.per_act_token_quant, self.block_shape)


@with_arguments(
    QuantizeCall,
    "A A_scale num_tokens E N expert_num_tokens qtype per_act_token_quant block_shape",
    block_shape=None,
)
def batched_moe_kernel_quantize_input(given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize the tokens of every expert.

    Args:
        A: [E, C, W] float32, bfloat16 or float16; rows that are no token may hold anything.
        A_scale: static float32 scales in place of those of the data: one number, one for each expert, or with
            `per_act_token_quant` one for each row; None with `block_shape`.
        num_tokens: C. N: not read. expert_num_tokens: [>= E] integers, tokens of each expert, its first rows.
        qtype: torch.float8_e4m3fn, torch.int8 or None. per_act_token_quant, block_shape: as of `FusedMoEQuantConfig`.
    Returns: values [E, C, W] in `qtype`, undefined in rows that are no token; scales float32, [E, C, 1], [E, C, G] or
    [E, 1, 1], 0 where there is no token. With `qtype` None: A, and A_scale as three dimensions.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream; no host sync, safe in CUDA graphs, an operator under torch.compile.
    """
    A, A_scale, num_tokens, E, _, counts, *quantized = given  # noqa: N806 - vLLM's names
    rows = RowFormat.of(*quantized)
    if A.dim() != 3 or A.shape[0] != E or A.shape[1] != num_tokens:
        raise ValueError(f"A is {tuple(A.shape)}; [E ({E}), num_tokens ({num_tokens}), columns] needed")
    if rows.dtype is None:
        return A, None if A_scale is None else normalized(A_scale, "A_scale", E)
    if A.dtype not in DTYPES.values():
        raise ValueError(f"A is {A.dtype}, not one of {', '.join(DTYPES)}")
    check_counts(counts, E)
    if A_scale is not None and rows.per == "group":
        raise ValueError(f"A_scale is given, block_shape ({given.block_shape}) scales groups as they come")
    return _OPERATION(QuantizeCall._make((A, A_scale, counts, *quantized)))


def normalized(scale: torch.Tensor, name: str, experts: int) -> torch.Tensor:
    """Scales in three dimensions: those of each expert's rows, or one number for all. Errors: ValueError. Local."""
    if scale.dtype != torch.float32:
        raise ValueError(f"{name} is {scale.dtype}; float32 needed")
    if scale.dim() == 3:
        return scale
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).expand(experts, 1, 1)
    if scale.numel() % experts or (scale.dim() == 2 and scale.shape[0] % experts):
        raise ValueError(f"{name} is {tuple(scale.shape)}; one number, or rows of {experts} experts needed")
    return scale.reshape(experts, -1, scale.shape[-1] if scale.dim() == 2 else 1)


def no_token(expert_num_tokens: torch.Tensor, experts: int, rows: int) -> torch.Tensor:
    """A bool mask [E, C] of the rows that are no token. Local, no host sync."""
    place = torch.arange(rows, device=expert_num_tokens.device)
    return place >= expert_num_tokens[:experts, None]


def divided(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / scale, rounded to `dtype`; `scale` broadcasts against x. Local."""
    largest = LARGEST[dtype]
    numbers = (x.float() / scale).clamp_(-largest, largest)
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype)


def quantize_batched(call: QuantizeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`batched_moe_kernel_quantize_input` for arguments that are checked. Local."""
    A, A_scale, rows = call.A, call.A_scale, call.rows  # noqa: N806
    experts, height, width = A.shape
    shape = rows.scale_shape(experts, height, width)
    empty = no_token(call.expert_num_tokens, experts, height)
    without = empty.all(1)[:, None, None] if rows.per == "tensor" else empty.unsqueeze(2)
    if A_scale is not None:
        scale = normalized(A_scale, "A_scale", experts)
        if scale.shape[2] != 1 or scale.shape[1] not in (1, shape[1]):
            raise ValueError(f"A_scale is {tuple(A_scale.shape)}; one number, or {shape} needed")
        values = divided(A, scale, call.qtype)
    elif rows.per == "tensor":
        stored = quantize_weight(A.masked_fill(empty.unsqueeze(2), 0), rows.scheme("tensor"))
        assert stored.scale is not None
        values, scale = stored.values, stored.scale.reshape(shape)
    else:
        found = quantize(A.reshape(-1, width), rows.scheme())
        values, scale = found.values.view(A.shape), found.scale.reshape(shape)
    return values, scale.expand(shape).masked_fill(without, 0).contiguous()


def _new_rows(call: QuantizeCall) -> tuple[torch.Tensor, torch.Tensor]:
    scale = call.A.new_empty(call.rows.scale_shape(*call.A.shape), dtype=torch.float32)
    return torch.empty_like(call.A, dtype=call.qtype, memory_format=torch.contiguous_format), scale


_OPERATION: Operation[QuantizeCall, tuple[torch.Tensor, torch.Tensor]] = Operation(
    "batched_quantize", QuantizeCall, quantize_batched, new=_new_rows, num_results=2
)
