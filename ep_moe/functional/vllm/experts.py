"""vLLM's batched experts: `BatchedTritonExperts`, and `NaiveBatchedExperts`, which torch computes.

Letters: E experts, C rows of an expert, T tokens, H hidden, I intermediate, K top-k, G scale groups.
"""

import math

import torch

from ep_moe.functional.vllm.batched_call import BatchedCall, compute, experts_op
from ep_moe.functional.vllm.config import FusedMoEActivationFormat, FusedMoEQuantConfig, used_flag

Shape = tuple[int, ...]


class _BatchedExperts:
    """What both classes share; a call computes w2 @ act(w1 @ x) for every row of every expert."""

    _naive = False
    max_num_tokens: int
    num_dispatchers: int
    quant_config: FusedMoEQuantConfig

    def _set(
        self, max_num_tokens: int, num_dispatchers: int, flags: dict[str, bool], config: FusedMoEQuantConfig
    ) -> None:
        for name, number in (("max_num_tokens", max_num_tokens), ("num_dispatchers", num_dispatchers)):
            if number < 1:
                raise ValueError(f"{name} ({number}) must be at least 1")
        self.max_num_tokens, self.num_dispatchers, self.quant_config = max_num_tokens, num_dispatchers, config
        self._flag = used_flag(flags)
        for name, value in flags.items():
            setattr(self, name, value)

    @property
    def quant_dtype(self) -> torch.dtype | None:
        """The dtype of quantized activations."""
        return self.quant_config.quant_dtype

    @property
    def per_act_token_quant(self) -> bool:
        """Whether each token has a scale."""
        return self.quant_config.per_act_token_quant

    @property
    def block_shape(self) -> list[int] | None:
        """[rows, columns] of a block of weights."""
        return self.quant_config.block_shape

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        """BatchedExperts, of input and output."""
        return FusedMoEActivationFormat.BatchedExperts, FusedMoEActivationFormat.BatchedExperts

    def supports_chunking(self) -> bool:
        """False: rows of an expert lie `max_num_tokens` times `num_dispatchers` apart."""
        return False

    def supports_expert_map(self) -> bool:
        """True: `BatchedPrepareAndFinalize` applies the map, and rows come by local expert."""
        return True

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        w1_scale: torch.Tensor | None,
        w2_scale: torch.Tensor | None,
        w1_zp: torch.Tensor | None,
        w2_zp: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_num_tokens: torch.Tensor | None,
    ) -> None:
        """Compute all experts.

        Args:
            output: [E, C, H] float32, bfloat16 or float16, written; may lie in `workspace13`.
            hidden_states: [E, C, H] in the dtype of `output`, or as the flags say, with `a1q_scale`, as of
                `batched_moe_kernel_quantize_input`.
            w1, w2: [E, 2I, H], rows [gate; up], of "swigluoai" in turns, of "*_no_mul" [E, I, H]; and [E, H, I]; of 4
                bits two in a byte, the first in the low bits.
            topk_ids: [T, K], of which only the shape is read, with `global_num_experts`: the rows to expect.
            activation: "silu", "gelu" (erf), "gelu_tanh", "swigluoai", "swiglustep", or without a gate "silu_no_mul",
                "gelu_no_mul", "gelu_tanh_no_mul" or "relu2_no_mul"; or vLLM's `MoEActivation`.
            expert_map: not read, rows come by local expert.
            w1_scale, w2_scale, w1_zp, w2_zp: as B_scale and B_zp of `invoke_moe_batched_triton_kernel`.
            a2_scale: static scale of the intermediate, one number or one for each expert, if scales are per tensor.
            workspace13, workspace2: not read; kernels allocate what they need.
            expert_num_tokens: [>= E] integers; rows of `output` that are no token are not written.
        Errors: ValueError names the argument, its value and what is needed.
        Local, on the current stream. By kernels no host sync, and safe in CUDA graphs after a call of the same kind; an
        operator under torch.compile.
        """
        del expert_map, workspace13, workspace2
        if expert_num_tokens is None:
            raise ValueError(f"expert_num_tokens is None; [{w1.shape[0]}] integers needed")
        if global_num_experts < w1.shape[0]:
            raise ValueError(f"global_num_experts ({global_num_experts}) is less than the {w1.shape[0]} experts of w1")
        name: str = getattr(activation, "value", activation)
        rows = math.ceil(topk_ids.numel() * self.num_dispatchers / global_num_experts)
        call = BatchedCall(
            output,
            hidden_states,
            w1,
            w2,
            name,
            w1_scale,
            w2_scale,
            w1_zp,
            w2_zp,
            a1q_scale,
            a2_scale,
            expert_num_tokens,
            self._flag,
            self.per_act_token_quant,
            self.block_shape,
            self._naive,
            max(rows, 1),
        )
        if torch.compiler.is_compiling():
            experts_op(*call)
        else:
            compute(call)


class BatchedTritonExperts(_BatchedExperts):
    """Kernels on a GPU, torch on a CPU.

    Args:
        max_num_tokens: of a dispatcher. num_dispatchers: ranks whose tokens come.
        use_fp8_w8a8, use_int8_w8a8: both weights and tokens; scales by `block_shape` [n, k], per token and weight row
            with `per_act_token_quant`, else per tensor (weights also per row, if `w1_scale` is of rows).
        use_int8_w8a16, use_int4_w4a16: weights alone, per row, or with `block_shape` [0, k] in groups.
    Errors: ValueError for sizes below 1 and flags that do not go together.
    """

    def __init__(
        self,
        max_num_tokens: int,
        num_dispatchers: int,
        use_fp8_w8a8: bool = False,
        use_int8_w8a8: bool = False,
        use_int8_w8a16: bool = False,
        use_int4_w4a16: bool = False,
        per_act_token_quant: bool = False,
        block_shape: list[int] | None = None,
    ) -> None:
        flags = _flags(use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16)
        config = FusedMoEQuantConfig.make(**flags, per_act_token_quant=per_act_token_quant, block_shape=block_shape)
        self._set(max_num_tokens, num_dispatchers, flags, config)

    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,  # noqa: N803 - vLLM's names
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
    ) -> tuple[Shape, Shape, Shape, torch.dtype]:
        """vLLM's shapes of workspace13, workspace2 and the output, and their dtype; `apply` needs the output alone.

        Args: a: [T, H], for its dtype. N, K: 2I and H. The others are not read.
        Errors: ValueError for another `a`. Local.
        """
        del aq, M, topk, global_num_experts
        _check_tokens(a)
        rows = self.max_num_tokens * self.num_dispatchers
        output = (local_num_experts, rows, K)
        return (local_num_experts, rows, max(K, N)), (local_num_experts, rows, N // 2), output, a.dtype


class NaiveBatchedExperts(_BatchedExperts):
    """A reference, by torch everywhere: everything is dequantized, and the intermediate is not quantized.

    On a GPU it reads counts back to the host; while a CUDA graph is captured it computes all rows instead, and writes
    those that are no token too. Args and errors: as of `BatchedTritonExperts`, in another order.
    """

    _naive = True

    def __init__(
        self,
        max_num_tokens: int,
        num_dispatchers: int,
        use_fp8_w8a8: bool = False,
        use_int8_w8a8: bool = False,
        use_int8_w8a16: bool = False,
        use_int4_w4a16: bool = False,
        block_shape: list[int] | None = None,
        per_act_token_quant: bool = False,
    ) -> None:
        flags = _flags(use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16)
        config = FusedMoEQuantConfig.make(**flags, per_act_token_quant=per_act_token_quant, block_shape=block_shape)
        self._set(max_num_tokens, num_dispatchers, flags, config)

    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,  # noqa: N803 - vLLM's names
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
    ) -> tuple[Shape, Shape, Shape, torch.dtype]:
        """As of `BatchedTritonExperts`, with vLLM's shapes for this class."""
        del aq, M, topk, global_num_experts
        _check_tokens(a)
        rows = self.max_num_tokens * self.num_dispatchers
        output = (local_num_experts, rows, K)
        return output, (rows, N), output, a.dtype

    def dequant(self, t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """t [rows, columns] times its scales, float32: one for all, one for each row, or one for each block.

        Errors: ValueError if activations are not quantized. Local.
        """
        if not self.quant_config.is_quantized:
            raise ValueError(f"quant_dtype ({self.quant_dtype}) is None, so there is nothing to dequantize")
        if self.block_shape is not None:
            for axis, (size, block) in enumerate(zip(t.shape[-2:], self.block_shape, strict=True)):
                if scale.shape[axis - 2] not in (1, size):
                    scale = scale.repeat_interleave(block, dim=axis - 2).narrow(axis - 2, 0, size)
        return t.float() * scale


def _flags(use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool) -> dict[str, bool]:
    return {
        "use_fp8_w8a8": use_fp8_w8a8,
        "use_int8_w8a8": use_int8_w8a8,
        "use_int8_w8a16": use_int8_w8a16,
        "use_int4_w4a16": use_int4_w4a16,
    }


def _check_tokens(a: torch.Tensor) -> None:
    if a.dim() != 2:
        raise ValueError(f"a is {tuple(a.shape)}; [tokens, hidden] needed")
