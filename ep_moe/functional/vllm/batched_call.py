"""What vLLM's batched experts compute.

Letters: E experts, C rows of an expert, T tokens, H hidden, I intermediate.
"""

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.library import custom_op

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.experts import Experts, ReferenceExperts
from ep_moe.functional.common import experts_for, kept_weights, operator_arguments
from ep_moe.functional.formats import is_view, matrix_of
from ep_moe.functional.plans import identities, kinds, multiples, plans_of
from ep_moe.functional.vllm.formats import RowFormat, flags_of, given_weight, row_scales, scheme_of
from ep_moe.layout import Batched
from ep_moe.quant import QuantScheme, TensorFormat
from ep_moe.weights import ExpertWeights

if TYPE_CHECKING:
    from ep_moe.functional.vllm.batched_plan import BatchedPlan


class BatchedCall(NamedTuple):
    """The arguments of the operator."""

    output: torch.Tensor
    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    activation: str
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w1_zp: torch.Tensor | None
    w2_zp: torch.Tensor | None
    a1q_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None
    expert_num_tokens: torch.Tensor
    flag: str | None
    per_act_token_quant: bool
    block_shape: list[int] | None
    naive: bool
    expected_rows: int


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


def _activation(name: str) -> ActivationConfig:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


@functools.cache
def _unrounded(scheme: QuantScheme) -> QuantScheme:
    """The scheme with an intermediate that is not quantized."""
    if not scheme.activation.quantized:
        return scheme
    return dataclasses.replace(scheme, name=f"{scheme.name}, intermediate as it is", activation=TensorFormat())


def _static(call: BatchedCall, rows: RowFormat, experts: int) -> torch.Tensor | None:
    """The static scale of the intermediate, for each expert."""
    scale = call.a2_scale
    if scale is None or call.naive:
        return None
    if rows.per != "tensor":
        what = call.flag or "no use_* flag"
        raise ValueError(f"a2_scale is given; {what} with scales per {rows.per} takes none")
    if scale.dtype != torch.float32 or scale.numel() not in (1, experts):
        raise ValueError(f"a2_scale is {tuple(scale.shape)} {scale.dtype}; 1 or {experts} float32 numbers needed")
    return scale.detach().reshape(-1).expand(experts).contiguous()


def weights_of(call: BatchedCall, rows: RowFormat, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked. Errors: ValueError. Local."""
    experts, hidden, halves = call.w1.shape[0], call.output.shape[2], 1 + _activation(call.activation).kind.gated
    intermediate, odd = divmod(call.w1.shape[1], halves)
    if odd or call.w1.dim() != 3:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}; [experts, {halves} * intermediate, hidden] needed")
    shapes = {"w1": (experts, halves * intermediate, hidden), "w2": (experts, hidden, intermediate)}
    flags, dtype = flags_of(call.flag, call.block_shape), call.output.dtype
    w13, w2 = (matrix_of(given_weight(call, name), scheme, flags, shape, dtype) for name, shape in shapes.items())
    static = _static(call, rows, experts)
    alternating = call.activation == _ALTERNATING
    return ExpertWeights(w13=w13, w2=w2, scheme=scheme, w2_input_scale=static, alternating=alternating)


def _weights_given(call: BatchedCall) -> tuple[torch.Tensor | None, ...]:
    """The tensors that belong to the weights."""
    return call.w1, call.w2, call.w1_scale, call.w2_scale, call.w1_zp, call.w2_zp, call.a2_scale


def _key_of(call: BatchedCall) -> tuple[object, ...]:
    """All that a plan depends on."""
    given = [call.output, call.hidden_states, call.expert_num_tokens]
    if call.a1q_scale is not None:
        given.append(call.a1q_scale)
    block = None if call.block_shape is None else (*call.block_shape,)
    numbers = call.activation, call.flag, call.per_act_token_quant, block, call.expected_rows
    return *numbers, *kinds(given), *identities(_weights_given(call))


def compute(call: BatchedCall) -> None:
    """The call. Errors: ValueError. Local."""
    if call.naive:
        _computed(call)
        return
    plans, key = plans_of("batched_experts", threading.get_ident()), _key_of(call)
    plan: BatchedPlan | None = plans.get(key)
    if plan is not None and plan.repeat(call):
        return
    plan = _computed(call)
    if plan is not None:
        plans.keep(key, plan, call.output.device, _weights_given(call))


def _computed(call: BatchedCall) -> "BatchedPlan | None":
    """Compute a call, checked; returns what repeats it, if anything does."""
    x, output = call.hidden_states, call.output
    experts = call.w1.shape[0]
    if output.dim() != 3 or output.shape[0] != experts or output.dtype not in DTYPES.values():
        found = f"{tuple(output.shape)} {output.dtype}"
        raise ValueError(f"output is {found}; [{experts}, rows, hidden] of {', '.join(DTYPES)} needed")
    if call.expert_num_tokens.dim() != 1 or call.expert_num_tokens.shape[0] < experts:
        raise ValueError(f"expert_num_tokens is {tuple(call.expert_num_tokens.shape)}; at least [{experts}] needed")
    scaled = {"use_fp8_w8a8": torch.float8_e4m3fn, "use_int8_w8a8": torch.int8}.get(call.flag or "")
    rows = RowFormat.of(scaled, call.per_act_token_quant and scaled is not None, call.block_shape)
    needed = rows.dtype or output.dtype
    if x.shape != output.shape or x.dtype != needed:
        what = call.flag or "no use_* flag"
        raise ValueError(
            f"hidden_states are {tuple(x.shape)} {x.dtype}; {tuple(output.shape)} {needed} needed with {what}"
        )
    height = x.shape[1]
    scale = None
    if scaled is not None:
        scale = row_scales(call.a1q_scale, "a1q_scale", (experts, height, rows.groups(x.shape[2])), rows.per)
    elif call.a1q_scale is not None:
        raise ValueError(f"a1q_scale is given, {call.flag or 'no use_* flag'} takes none")
    activation = _activation(call.activation)
    weights_given = given_weight(call, "w1"), given_weight(call, "w2")
    scheme = scheme_of(call.flag, rows, call.block_shape, *weights_given)
    scheme = _unrounded(scheme) if call.naive else scheme
    make = functools.partial(weights_of, call, rows, scheme)
    views = all(is_view(given, scheme) for given in weights_given)
    if call.a2_scale is None and views:
        tensors = call.w1, call.w1_scale, call.w2, call.w2_scale
        key = scheme.name, output.shape[2], output.dtype, call.activation, *identities(tensors)
        weights = kept_weights("vllm", threading.get_ident()).get(tensors, key, make)
    else:
        weights = make()
    batch = Batched(
        x=x,
        scale=scale,
        scheme=scheme,
        dtype=output.dtype,
        expert_row_start=multiples(height, experts, x.device),
        expert_num_tokens=call.expert_num_tokens[:experts].to(torch.int32),
        row_index=None,
        expected_rows=min(call.expected_rows, max(height, 1)),
    )
    own: Experts
    if call.naive:
        every_row = output.is_cuda and torch.cuda.is_current_stream_capturing()
        own = ReferenceExperts(activation, every_row=every_row)
    else:
        own = experts_for(activation, scheme, x.device)
    own(batch, weights, out=output)
    if call.naive or not views or isinstance(own, ReferenceExperts):
        return None
    from ep_moe.functional.vllm.batched_plan import BatchedPlan  # Triton exists only on Linux

    return BatchedPlan.of(call, batch, weights, own)


def _experts(*arguments: Any) -> None:
    compute(BatchedCall(*arguments))


def _experts_fake(*arguments: Any) -> None:
    """It returns nothing; the real call checks its arguments."""
    del arguments


experts_op = custom_op(
    "ep_moe::batched_experts",
    _experts,
    mutates_args=("output",),
    schema=f"({operator_arguments(BatchedCall, 'output')}) -> ()",
)
experts_op.register_fake(_experts_fake)
