"""vLLM's batched experts: `BatchedTritonExperts`, and `NaiveBatchedExperts`, which torch computes.

Letters: E experts, C rows of an expert, T tokens, H hidden, I intermediate, K top-k, G scale groups.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.experts import Experts, ReferenceExperts
from ep_moe.functional.call import Operation, Weight, Written, with_arguments
from ep_moe.functional.common import experts_for
from ep_moe.functional.formats import FLAGS, GivenWeight, is_view, matrix_of
from ep_moe.functional.plans import CopiedScale, capturing, multiples
from ep_moe.functional.vllm.formats import (
    FusedMoEActivationFormat,
    FusedMoEQuantConfig,
    RowFormat,
    check_counts,
    check_least,
    flags_of,
    row_scales,
    scheme_of,
    used_flag,
)
from ep_moe.layout import Batched, ExpertBatch
from ep_moe.quant import QuantScheme, TensorFormat
from ep_moe.weights import ExpertWeights

if TYPE_CHECKING:
    from ep_moe.experts.kernels import RepeatedCall

Shape = tuple[int, ...]
_ALTERNATING = "swigluoai"  # rows of w1 take turns, gate first
_ACTIVATIONS = {  # by vLLM's names, with the numbers that it fixes
    "silu": ActivationConfig(),
    "gelu": ActivationConfig(kind=ActivationKind.GELU),
    "gelu_tanh": ActivationConfig(kind=ActivationKind.GELU_TANH),
    "gelu_pytorch_tanh": ActivationConfig(kind=ActivationKind.GELU_TANH),
    _ALTERNATING: ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0),
    "swiglustep": ActivationConfig(kind=ActivationKind.SWIGLU_STEP, limit=7.0),
    "silu_no_mul": ActivationConfig(kind=ActivationKind.SILU_NO_MUL),
    "gelu_no_mul": ActivationConfig(kind=ActivationKind.GELU_NO_MUL),
    "gelu_tanh_no_mul": ActivationConfig(kind=ActivationKind.GELU_TANH_NO_MUL),
    "relu2_no_mul": ActivationConfig(kind=ActivationKind.RELU2),
}


class BatchedCall(NamedTuple):
    """The arguments of `apply` that have a meaning here, and those of the constructor."""

    output: Written
    hidden_states: torch.Tensor
    w1: Weight
    w2: Weight
    activation: str
    w1_scale: Weight | None
    w2_scale: Weight | None
    w1_zp: Weight | None
    w2_zp: Weight | None
    a1q_scale: torch.Tensor | None
    a2_scale: Weight | None
    expert_num_tokens: torch.Tensor
    flag: str | None
    per_act_token_quant: bool
    block_shape: list[int] | None
    naive: bool
    expected_rows: int

    @property
    def kind(self) -> str:
        """The flag, in errors."""
        return self.flag or "no use_* flag"

    @property
    def between(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: ValueError for another name."""
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation ({self.activation!r}) is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[self.activation]


_APPLY = (
    "self output hidden_states w1 w2 topk_ids activation global_num_experts expert_map w1_scale w2_scale w1_zp w2_zp "
    "a1q_scale a2_scale workspace13 workspace2 expert_num_tokens"
)


class _BatchedExperts:
    """Both classes: a call computes w2 @ act(w1 @ x) for every row of every expert."""

    activation_formats = (FusedMoEActivationFormat.BatchedExperts,) * 2  # of input and output
    _naive = False

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
        check_least(max_num_tokens=(max_num_tokens, 1), num_dispatchers=(num_dispatchers, 1))
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers
        flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16
        self.use_fp8_w8a8, self.use_int8_w8a8, self.use_int8_w8a16, self.use_int4_w4a16 = flags
        self.quant_config = FusedMoEQuantConfig.make(*flags, per_act_token_quant, block_shape=block_shape)
        self.quant_dtype = self.quant_config.quant_dtype
        self.per_act_token_quant, self.block_shape = per_act_token_quant, block_shape
        self._flag = used_flag(dict(zip(FLAGS, flags, strict=True)))

    def supports_chunking(self) -> bool:
        """False: rows of an expert lie `max_num_tokens` times `num_dispatchers` apart."""
        return False

    def supports_expert_map(self) -> bool:
        """True: `BatchedPrepareAndFinalize` applies the map, and rows come by local expert."""
        return True

    @with_arguments(BatchedCall, _APPLY)
    def apply(given: Any) -> None:  # noqa: N805 - of all arguments, self among them
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
        made, total, experts = given.self, given.global_num_experts, given.w1.shape[0]
        if given.expert_num_tokens is None:
            raise ValueError(f"expert_num_tokens is None; [{experts}] integers needed")
        if total < experts:
            raise ValueError(f"global_num_experts ({total}) is less than the {experts} experts of w1")
        rows = math.ceil(given.topk_ids.numel() * made.num_dispatchers / total)
        name = getattr(given.activation, "value", given.activation)
        of_class = made._flag, made.per_act_token_quant, made.block_shape, made._naive, max(rows, 1)
        _OPERATION(BatchedCall._make((*given[1:5], name, *given[9:15], given.expert_num_tokens, *of_class)))

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

        Args: a: [T, H], for its dtype. N, K: 2I and H. The others are not read. Errors: ValueError for another `a`.
        """
        del aq, M, topk, global_num_experts
        if a.dim() != 2:
            raise ValueError(f"a is {tuple(a.shape)}; [tokens, hidden] needed")
        rows = self.max_num_tokens * self.num_dispatchers
        output = (local_num_experts, rows, K)
        if self._naive:
            return output, (rows, N), output, a.dtype
        return (local_num_experts, rows, max(K, N)), (local_num_experts, rows, N // 2), output, a.dtype


class BatchedTritonExperts(_BatchedExperts):
    """Kernels on a GPU, torch on a CPU.

    Args:
        max_num_tokens: of a dispatcher. num_dispatchers: ranks whose tokens come.
        use_fp8_w8a8, use_int8_w8a8: both weights and tokens; scales by `block_shape` [n, k], per token and weight row
            with `per_act_token_quant`, else per tensor (weights also per row, if `w1_scale` is of rows).
        use_int8_w8a16, use_int4_w4a16: weights alone, per row, or with `block_shape` [0, k] in groups.
    Errors: ValueError for sizes below 1 and flags that do not go together.
    """


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
        flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16
        super().__init__(max_num_tokens, num_dispatchers, *flags, per_act_token_quant, block_shape)

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


@functools.cache
def _unrounded(scheme: QuantScheme) -> QuantScheme:
    """The scheme with an intermediate that is not quantized."""
    if not scheme.activation.quantized:
        return scheme
    return dataclasses.replace(scheme, name=f"{scheme.name}, intermediate as it is", activation=TensorFormat())


def _static(call: BatchedCall, rows: RowFormat, experts: int) -> torch.Tensor | None:
    """The static scale of the intermediate, of each expert."""
    scale = call.a2_scale
    if scale is None or call.naive:
        return None
    if rows.per != "tensor":
        raise ValueError(f"a2_scale is given; {call.kind} with scales per {rows.per} takes none")
    if scale.dtype != torch.float32 or scale.numel() not in (1, experts):
        raise ValueError(f"a2_scale is {tuple(scale.shape)} {scale.dtype}; 1 or {experts} float32 numbers needed")
    return scale.detach().reshape(-1).expand(experts).contiguous()


def _weights(call: BatchedCall, rows: RowFormat, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked. Errors: ValueError. Local."""
    experts, hidden, halves = call.w1.shape[0], call.output.shape[2], 1 + call.between.kind.gated
    intermediate, odd = divmod(call.w1.shape[1], halves)
    if odd or call.w1.dim() != 3:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}; [experts, {halves} * intermediate, hidden] needed")
    shapes = {"w1": (experts, halves * intermediate, hidden), "w2": (experts, hidden, intermediate)}
    flags, dtype = flags_of(call.flag, call.block_shape), call.output.dtype
    w13, w2 = (matrix_of(GivenWeight.of(call, name), scheme, flags, shape, dtype) for name, shape in shapes.items())
    static = _static(call, rows, experts)
    alternating = call.activation == _ALTERNATING
    return ExpertWeights(w13=w13, w2=w2, scheme=scheme, w2_input_scale=static, alternating=alternating)


class _Plan:
    """The launches of a call that has returned, for calls that differ from it in addresses and values alone."""

    def __init__(
        self, call: "RepeatedCall", weights: ExpertWeights, row_start: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        self._sequence, self._weights, self._kept = call.sequence, call.weights, weights
        self._row_start, self._scale = row_start, CopiedScale(weights.w2_input_scale, scale)

    @classmethod
    def of(cls, call: BatchedCall, batch: ExpertBatch, weights: ExpertWeights, experts: Experts) -> "_Plan | None":
        """The plan of a call that has returned; None if its launches copied tensors, or are not loaded. Local."""
        from ep_moe.experts.kernels import signature_of  # Triton exists only on Linux
        from ep_moe.local_moe.joined import repeated_experts

        scale, given = batch.scale, call.a1q_scale
        in_place = scale is None or (given is not None and scale.data_ptr() == given.data_ptr())
        if not in_place or not call.output.is_contiguous() or call.expert_num_tokens.stride(0) != 1:
            return None
        repeated = repeated_experts(experts, signature_of(batch), weights)
        return None if repeated is None else cls(repeated, weights, batch.expert_row_start, call.a2_scale)

    def launch(self, call: BatchedCall) -> torch.Tensor | None:
        """The output of a later call; None, with nothing launched, if a tensor is not aligned to 16 bytes."""
        counts = call.expert_num_tokens
        if counts.dtype != torch.int32:
            counts = counts.to(torch.int32)
        if not self._scale.update(call.a2_scale):
            return None
        tensors: list[Any] = [call.hidden_states, call.a1q_scale, self._row_start, counts, call.output, *self._weights]
        addresses = [each.data_ptr() for each in tensors if each is not None]
        return None if self._sequence.repeat(addresses) is None else call.output


def _first(call: BatchedCall) -> tuple[torch.Tensor, _Plan | None]:
    """The call, checked. Errors: ValueError. Local."""
    x, output, num_experts = call.hidden_states, call.output, call.w1.shape[0]
    if output.dim() != 3 or output.shape[0] != num_experts or output.dtype not in DTYPES.values():
        found = f"{tuple(output.shape)} {output.dtype}"
        raise ValueError(f"output is {found}; [{num_experts}, rows, hidden] of {', '.join(DTYPES)} needed")
    check_counts(call.expert_num_tokens, num_experts)
    scaled = {"use_fp8_w8a8": torch.float8_e4m3fn, "use_int8_w8a8": torch.int8}.get(call.flag or "")
    rows = RowFormat.of(scaled, call.per_act_token_quant and scaled is not None, call.block_shape)
    needed = rows.dtype or output.dtype
    if x.shape != output.shape or x.dtype != needed:
        found = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(f"hidden_states are {found}; {tuple(output.shape)} {needed} needed with {call.kind}")
    height, scale = x.shape[1], None
    if scaled is not None:
        scale = row_scales(call.a1q_scale, "a1q_scale", (num_experts, height, rows.groups(x.shape[2])), rows.per)
    elif call.a1q_scale is not None:
        raise ValueError(f"a1q_scale is given, {call.kind} takes none")
    activation, stored = call.between, (GivenWeight.of(call, "w1"), GivenWeight.of(call, "w2"))
    scheme = scheme_of(call.flag, rows, call.block_shape, *stored)
    scheme = _unrounded(scheme) if call.naive else scheme
    make = functools.partial(_weights, call, rows, scheme)
    views = all(is_view(given, scheme) for given in stored)
    if call.a2_scale is None and views:
        weights = _OPERATION.made(call, make, scheme.name, output.shape[2], output.dtype, call.activation)
    else:
        weights = make()
    batch = Batched(
        x=x,
        scale=scale,
        scheme=scheme,
        dtype=output.dtype,
        expert_row_start=multiples(height, num_experts, x.device),
        expert_num_tokens=call.expert_num_tokens[:num_experts].to(torch.int32),
        row_index=None,
        expected_rows=min(call.expected_rows, max(height, 1)),
    )
    if call.naive:
        ReferenceExperts(activation, every_row=capturing(output.device))(batch, weights, out=output)
        return output, None
    experts = experts_for(activation, scheme, x.device)
    experts(batch, weights, out=output)
    reference = not views or isinstance(experts, ReferenceExperts)
    return output, None if reference else _Plan.of(call, batch, weights, experts)


_OPERATION = Operation("batched_experts", BatchedCall, _first, launch=_Plan.launch, result="output")
