"""SGLang's calls of fused experts, by their names.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import torch

from ep_moe.functional.sglang.experts import ExpertsCall, new_result, run

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


def with_arguments(
    names: str, fields: type, **defaults: Any
) -> Callable[[Callable[[Any], Result]], Callable[..., Result]]:
    """Turn a function of one named tuple into a function of arguments, with a signature of its own.

    Args:
        names: of the arguments, in their order. fields: a NamedTuple, whose fields give arguments of the same names
            their types and defaults. defaults: of the others.
    """
    known, types = inspect.signature(fields).parameters, get_type_hints(fields)
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=defaults.get(name, known[name].default if name in known else inspect.Parameter.empty),
            annotation=types.get(name, Any),
        )
        for name in names.split()
    ]
    values = [one.default for one in parameters if one.default is not inspect.Parameter.empty]

    def turn(function: Callable[[Any], Result]) -> Callable[..., Result]:
        arguments = collections.namedtuple(function.__name__, names, defaults=values)  # type: ignore[misc]

        def call(*positional: Any, **named: Any) -> Result:
            return function(arguments(*positional, **named))

        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(call, attribute, getattr(function, attribute))
        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return turn


_NAMES = ExpertsCall._fields
_SUMMED = " ".join(name for name in _NAMES if name not in ("inplace", "defer_sum") and "no_combine" not in name)
_OUTPLACE = " ".join(name for name in _NAMES if name not in ("inplace", "defer_sum"))
_FORMAT = " ".join(_NAMES[_NAMES.index("use_fp8_w8a8") : _NAMES.index("no_combine")])
_FUSED_MOE = f"hidden_states w1 w2 topk_output moe_runner_config b1 b2 {_FORMAT}"


def _call_of(given: Any, **more: Any) -> ExpertsCall:
    return ExpertsCall(**dict(zip(given._fields, given, strict=True)), **more)


@with_arguments(" ".join(_NAMES), ExpertsCall)
def fused_experts_impl(given: Any) -> torch.Tensor:
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
    return run(_call_of(given))


@with_arguments(_OUTPLACE, ExpertsCall)
def outplace_fused_experts(given: Any) -> torch.Tensor:
    """`fused_experts_impl`, into a new tensor."""
    return run(_call_of(given))


@with_arguments(_SUMMED, ExpertsCall)
def inplace_fused_experts(given: Any) -> None:
    """`fused_experts_impl`, into `hidden_states`."""
    run(_call_of(given, inplace=True))


@with_arguments(_OUTPLACE, ExpertsCall)
def outplace_fused_experts_fake(given: Any) -> torch.Tensor:
    """The shape and dtype of what `outplace_fused_experts` returns, without computing it."""
    return new_result(_call_of(given))


@with_arguments(_SUMMED, ExpertsCall)
def inplace_fused_experts_fake(given: Any) -> None:
    """What `inplace_fused_experts` returns, without computing it."""
    del given


@with_arguments(f"{_FUSED_MOE} a1_q fuse_swiglu_interleaved", ExpertsCall)
def fused_experts(given: Any) -> torch.Tensor:
    """`fused_experts_impl` with the routing and the options in objects.

    Args:
        topk_output: SGLang's or our `StandardTopKOutput`.
        moe_runner_config: SGLang's or our `MoeRunnerConfig`, of which `inplace` is True by default.
        The others, results and errors: as of `fused_experts_impl`.
    """
    return _with_objects(given)


@with_arguments(_FUSED_MOE, ExpertsCall, moe_runner_config=_DEFAULT_CONFIG)
def fused_moe(given: Any) -> torch.Tensor:
    """`fused_experts`, with default options."""
    return _with_objects((*given, None, False))


def _with_objects(given: Any) -> torch.Tensor:
    topk_weights, topk_ids, _ = given[3]
    options, (*stored, a1_q, interleaved) = options_of(given[4]), given[7:]
    tensors = *given[:3], topk_weights, topk_ids, *given[5:7]
    first = options.inplace, options.activation, options.is_gated, options.apply_router_weight_on_input
    numbers = options.no_combine, options.routed_scaling_factor, options.gemm1_alpha, options.gemm1_clamp_limit
    last = True, options.swiglu_limit, options.gate_up_interleaved, a1_q, interleaved, False
    keep = options.no_combine_keep_router_weight
    return run(ExpertsCall._make((*tensors, *first, *stored, *numbers, *last, keep)))
