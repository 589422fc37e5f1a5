"""SGLang's calls of fused experts, by their names.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.library import custom_op

from ep_moe.functional.common import operator_arguments
from ep_moe.functional.sglang.experts import ExpertsCall, compute

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class MoeRunnerConfig:
    """The options of SGLang's class of this name; any object with these attributes serves.

    An attribute that an object of an older release lacks has the default value.
    """

    num_experts: int | None = None  # this one and those up to runner_backend are not read: tensors and layers say it
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    routing_method_type: Any = None
    runner_backend: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None  # 1 if given
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None  # not read
    use_tp_all_gather_activation: bool = False  # not read: how SGLang's runner of another GPU quantizes
    silu_mul_keep_fp32: bool = False  # without meaning: it is float32 here in any case


_DEFAULT_CONFIG = MoeRunnerConfig()
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(MoeRunnerConfig)}


def options_of(config: Any) -> MoeRunnerConfig:
    """The options of any object, whose other attributes are not read. Errors: ValueError for a beta other than 1."""
    if isinstance(config, MoeRunnerConfig):
        found = config
    else:
        found = MoeRunnerConfig(**{name: getattr(config, name, default) for name, default in _DEFAULTS.items()})
    if found.gemm1_beta not in (None, 1.0):
        raise ValueError(f"gemm1_beta ({found.gemm1_beta}) is not 1, which is added to the up half")
    return found


def _run(call: ExpertsCall) -> torch.Tensor:
    """Compute a call, as an operator under torch.compile."""
    if call.inplace and call.apart:
        name = "no_combine" if call.no_combine else "defer_sum"
        raise ValueError(f"{name} and inplace are both set: [T, K, H] does not fit into hidden_states")
    if call.inplace:
        if torch.compiler.is_compiling():
            _inplace_op(*call)
        else:
            compute(call, call.hidden_states)
        return call.hidden_states
    return _outplace_op(*call) if torch.compiler.is_compiling() else compute(call)


def _with_fields(*left_out: str) -> Callable[[Callable[[ExpertsCall], Result]], Callable[..., Result]]:
    """Turn a function of an `ExpertsCall` into one of its fields; those that are left out have their default value."""
    fields = inspect.signature(ExpertsCall).parameters
    taken = [name for name in fields if name not in left_out]
    defaults = [fields[name].default for name in taken if fields[name].default is not inspect.Parameter.empty]
    bound = collections.namedtuple("bound", taken, defaults=defaults)  # type: ignore[misc]

    def turn(function: Callable[[ExpertsCall], Result]) -> Callable[..., Result]:
        def call(*positional: Any, **named: Any) -> Result:
            return function(ExpertsCall(**dict(zip(taken, bound(*positional, **named), strict=True))))

        call.__name__, call.__qualname__, call.__doc__ = function.__name__, function.__name__, function.__doc__
        call.__module__ = function.__module__
        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [fields[name] for name in taken], return_annotation=returned
        )
        return call

    return turn


@_with_fields()
def fused_experts_impl(call: ExpertsCall) -> torch.Tensor:
    """Compute the experts of routed tokens, and sum their weighted outputs.

    Args:
        hidden_states: [T, H] float32, bfloat16 or float16. topk_weights, topk_ids: [T, K]; ids outside of [0, E), as
            -1, add nothing.
        w1, w2: [E, 2I, H], rows [gate; up], and [E, H, I]; two integers of 4 bits in a byte, the first in the low bits.
        b1, b2: [E, 2I] and [E, H]. inplace: the result is written into `hidden_states`, which is returned.
        activation: "silu", "gelu" (erf), "gelu_tanh" or "situ"; without `is_gated` "silu", "gelu" or "relu2", and then
            w1 and b1 have I rows.
        apply_router_weight_on_input: weights multiply tokens and not the experts' outputs.
        use_fp8_w8a8: e4m3 weights and tokens: by `block_shape` [n, k] with scales [E, 2I / n, H / k]; with
            `per_channel_quant`, scales [E, 2I]; else [E]. use_int8_w8a8: the same, but not the last.
        use_int8_w8a16, use_int4_w4a16: weights alone, `block_shape` [0, k] for groups of k columns: uint8 around zero
            points, or 128 and 8; without it int8, or uint8 around 8, with scales [E, 2I].
        w1_scale, w2_scale: of the weights. w1_zp, w2_zp: zero points of groups, of 4 bits those of two rows in a byte.
        a1_scale, a2_scale: static scales of tokens and intermediate, one number each, "fp8" without blocks.
        a1_q: the tokens in e4m3, with "fp8" in blocks, and `a1_scale` [T, H / k] float32; both may have more rows.
        no_combine: return each expert's output, [T, K, H], weighted if `no_combine_keep_router_weight`.
        defer_sum: return each expert's weighted output. routed_scaling_factor: multiplies the sum, and nothing else.
        gemm1_alpha, gemm1_limit: (clamp(up) + 1) * gate * sigmoid(alpha * gate), gate at most the limit, of rows of w1
            that alternate, gate first, or with `gate_up_interleaved` False of halves; the limit alone, of halves:
            min(gate * sigmoid(gate), limit) * clamp(up). Of "situ" alpha * tanh(gate / alpha) * sigmoid(gate) *
            limit * tanh(up / limit), 4 without an alpha, and up without a limit.
        swiglu_limit: gate * sigmoid(gate) * clamp(up) of halves, gate at most the limit.
        fuse_swiglu_interleaved: "silu" of rows of w1 that alternate, gate first.
        filter_expert: without meaning, ids of no expert are left out in any case.
    Returns: [T, H], or [T, K, H], in the dtype of `hidden_states`.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. With experts that are kernels no host sync, and safe in CUDA graphs after a call of
    the same kind; an operator under torch.compile.
    """
    return _run(call)


@_with_fields("inplace", "defer_sum")
def outplace_fused_experts(call: ExpertsCall) -> torch.Tensor:
    """`fused_experts_impl`, into a new tensor."""
    return _run(call)


@_with_fields("inplace", "no_combine", "defer_sum", "no_combine_keep_router_weight")
def inplace_fused_experts(call: ExpertsCall) -> None:
    """`fused_experts_impl`, into `hidden_states`."""
    _run(call._replace(inplace=True))


@_with_fields("inplace", "defer_sum")
def outplace_fused_experts_fake(call: ExpertsCall) -> torch.Tensor:
    """The shape and dtype of what `outplace_fused_experts` returns, without computing it."""
    return _empty(call)


@_with_fields("inplace", "no_combine", "defer_sum", "no_combine_keep_router_weight")
def inplace_fused_experts_fake(call: ExpertsCall) -> None:
    """What `inplace_fused_experts` returns, without computing it."""
    del call


def _empty(call: ExpertsCall) -> torch.Tensor:
    (num_tokens, hidden), num_topk = call.hidden_states.shape, call.topk_ids.shape[1]
    return call.hidden_states.new_empty((num_tokens, num_topk, hidden) if call.apart else (num_tokens, hidden))


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
    a1_q: torch.Tensor | None = None,
    fuse_swiglu_interleaved: bool = False,
) -> torch.Tensor:
    """`fused_experts_impl` with the routing and the options in objects.

    Args:
        topk_output: SGLang's or our `StandardTopKOutput`.
        moe_runner_config: SGLang's or our `MoeRunnerConfig`, of which `inplace` is True by default.
        The others, results and errors: as of `fused_experts_impl`.
    """
    topk_weights, topk_ids, _ = topk_output
    options = options_of(moe_runner_config)
    return _run(
        ExpertsCall(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            b1,
            b2,
            options.inplace,
            options.activation,
            options.is_gated,
            options.apply_router_weight_on_input,
            use_fp8_w8a8,
            use_int8_w8a8,
            use_int8_w8a16,
            use_int4_w4a16,
            per_channel_quant,
            w1_scale,
            w2_scale,
            w1_zp,
            w2_zp,
            a1_scale,
            a2_scale,
            block_shape,
            options.no_combine,
            options.routed_scaling_factor,
            options.gemm1_alpha,
            options.gemm1_clamp_limit,
            swiglu_limit=options.swiglu_limit,
            gate_up_interleaved=options.gate_up_interleaved,
            a1_q=a1_q,
            fuse_swiglu_interleaved=fuse_swiglu_interleaved,
            no_combine_keep_router_weight=options.no_combine_keep_router_weight,
        )
    )


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


def _outplace(*arguments: Any) -> torch.Tensor:
    return compute(ExpertsCall(*arguments))


def _inplace(*arguments: Any) -> None:
    compute(ExpertsCall(*arguments), arguments[0])


def _outplace_fake(*arguments: Any) -> torch.Tensor:
    return _empty(ExpertsCall(*arguments))


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
