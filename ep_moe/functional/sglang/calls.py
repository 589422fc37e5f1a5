"""SGLang's calls of fused experts, by their names.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from ep_moe.functional.common import operator_arguments
from ep_moe.functional.sglang.experts import ExpertsCall, compute


class StandardTopKOutput(NamedTuple):
    """The experts of each token, as SGLang's class of this name; any tuple in this order serves."""

    topk_weights: torch.Tensor  # [T, K]
    topk_ids: torch.Tensor  # [T, K]
    router_logits: torch.Tensor | None = None  # not read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoeRunnerConfig:
    """The options of SGLang's class of this name that fused experts read; any object with these attributes serves."""

    activation: str = "silu"
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None


_DEFAULT_CONFIG = MoeRunnerConfig()


def _run(call: ExpertsCall, inplace: bool) -> torch.Tensor:
    """Compute a call, as an operator under torch.compile."""
    if inplace and call.no_combine:
        raise ValueError("no_combine and inplace are both set: [T, K, H] does not fit into hidden_states")
    if inplace:
        if torch.compiler.is_compiling():
            _inplace_op(*call)
        else:
            compute(call, call.hidden_states)
        return call.hidden_states
    return _outplace_op(*call) if torch.compiler.is_compiling() else compute(call)


def inplace_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    routed_scaling_factor: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_limit: float | None = None,
) -> None:
    """`outplace_fused_experts`, written into `hidden_states`."""
    flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant
    scales = w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale
    tensors = hidden_states, w1, w2, topk_weights, topk_ids, b1, b2
    numbers = routed_scaling_factor, gemm1_alpha, gemm1_limit
    _run(
        ExpertsCall(*tensors, activation, apply_router_weight_on_input, *flags, *scales, block_shape, False, *numbers),
        True,
    )


def outplace_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    no_combine: bool = False,
    routed_scaling_factor: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_limit: float | None = None,
) -> torch.Tensor:
    """Compute the experts of routed tokens, and sum their weighted outputs.

    Args:
        hidden_states: [T, H] float32, bfloat16 or float16. topk_weights, topk_ids: [T, K]; ids outside of [0, E), as
            -1, add nothing.
        w1, w2: [E, 2I, H], rows [gate; up], and [E, H, I]; two integers of 4 bits in a byte, the first in the low bits.
        b1, b2: [E, 2I] and [E, H]. activation: "silu" or "gelu" (erf).
        apply_router_weight_on_input: weights multiply tokens and not the experts' outputs.
        use_fp8_w8a8: e4m3 weights and tokens: by `block_shape` [n, k] with scales [E, 2I / n, H / k]; with
            `per_channel_quant`, scales [E, 2I]; else [E]. use_int8_w8a8: the same, but not the last.
        use_int8_w8a16, use_int4_w4a16: weights alone, `block_shape` [0, k] for groups of k columns: uint8 around zero
            points, or 128 and 8; without it int8, or uint8 around 8, with scales [E, 2I].
        w1_scale, w2_scale: of the weights. w1_zp, w2_zp: zero points of groups, of 4 bits those of two rows in a byte.
        a1_scale, a2_scale: static scales of tokens and intermediate, one number each, "fp8" without blocks.
        no_combine: return each expert's weighted output, [T, K, H]. routed_scaling_factor: multiplies the sum.
        gemm1_alpha, gemm1_limit: (clamp(up) + 1) * gate * sigmoid(alpha * gate) of rows of w1 that alternate, gate
            first.
    Returns: [T, H], or [T, K, H], in the dtype of `hidden_states`.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. With experts that are kernels no host sync, and safe in CUDA graphs after a call of
    the same kind; an operator under torch.compile.
    """
    flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant
    scales = w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale
    tensors = hidden_states, w1, w2, topk_weights, topk_ids, b1, b2
    rest = no_combine, routed_scaling_factor, gemm1_alpha, gemm1_limit
    return _run(
        ExpertsCall(*tensors, activation, apply_router_weight_on_input, *flags, *scales, block_shape, *rest), False
    )


def fused_experts_impl(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    no_combine: bool = False,
    routed_scaling_factor: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_limit: float | None = None,
) -> torch.Tensor:
    """`outplace_fused_experts`, or, if `inplace`, `inplace_fused_experts`, which returns `hidden_states` here."""
    flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant
    scales = w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale
    tensors = hidden_states, w1, w2, topk_weights, topk_ids, b1, b2
    rest = no_combine, routed_scaling_factor, gemm1_alpha, gemm1_limit
    return _run(
        ExpertsCall(*tensors, activation, apply_router_weight_on_input, *flags, *scales, block_shape, *rest), inplace
    )


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`fused_experts_impl` with the routing and the options in objects.

    Args:
        topk_output: SGLang's or our `StandardTopKOutput`.
        moe_runner_config: SGLang's or our `MoeRunnerConfig`, of which `inplace` is True by default.
        The others, results and errors: as of `outplace_fused_experts`.
    """
    topk_weights, topk_ids, _ = topk_output
    config = moe_runner_config
    flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant
    scales = w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale
    tensors = hidden_states, w1, w2, topk_weights, topk_ids, b1, b2
    rest = config.no_combine, config.routed_scaling_factor, config.gemm1_alpha, config.gemm1_clamp_limit
    named = config.activation, config.apply_router_weight_on_input
    return _run(ExpertsCall(*tensors, *named, *flags, *scales, block_shape, *rest), config.inplace)


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any = _DEFAULT_CONFIG,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`fused_experts`, with default options."""
    flags = use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant
    scales = w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale
    return fused_experts(hidden_states, w1, w2, topk_output, moe_runner_config, b1, b2, *flags, *scales, block_shape)


def _fake_of(real: Callable[..., Any], returns: Callable[[inspect.BoundArguments], Any]) -> Callable[..., Any]:
    """A function with the signature of `real` that makes an empty result of the same shape."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def fake(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return returns(bound)

    fake.__name__ = f"{real.__name__}_fake"
    fake.__doc__ = f"The shape and dtype of what `{real.__name__}` returns, without computing it."
    return fake


def _empty(bound: inspect.BoundArguments) -> torch.Tensor:
    given = bound.arguments
    return _empty_like(given["hidden_states"], given["topk_ids"], given["no_combine"])


def _empty_like(hidden_states: torch.Tensor, topk_ids: torch.Tensor, no_combine: bool) -> torch.Tensor:
    num_tokens, hidden = hidden_states.shape
    return hidden_states.new_empty((num_tokens, topk_ids.shape[1], hidden) if no_combine else (num_tokens, hidden))


inplace_fused_experts_fake = _fake_of(inplace_fused_experts, lambda bound: None)
outplace_fused_experts_fake = _fake_of(outplace_fused_experts, _empty)


def _outplace(*arguments: Any) -> torch.Tensor:
    return compute(ExpertsCall(*arguments))


def _inplace(*arguments: Any) -> None:
    compute(ExpertsCall(*arguments), arguments[0])


def _outplace_fake(*arguments: Any) -> torch.Tensor:
    call = ExpertsCall(*arguments)
    return _empty_like(call.hidden_states, call.topk_ids, call.no_combine)


def _inplace_fake(*arguments: Any) -> None:
    """It returns nothing; the real call checks its arguments."""
    del arguments


_outplace_op = custom_op(
    "ep_moe::outplace_fused_experts",
    _outplace,
    mutates_args=(),
    schema=f"({operator_arguments(ExpertsCall)}) -> Tensor",
)
_inplace_op = custom_op(
    "ep_moe::inplace_fused_experts",
    _inplace,
    mutates_args=("hidden_states",),
    schema=f"({operator_arguments(ExpertsCall, 'hidden_states')}) -> ()",
)
_outplace_op.register_fake(_outplace_fake)
_inplace_op.register_fake(_inplace_fake)
