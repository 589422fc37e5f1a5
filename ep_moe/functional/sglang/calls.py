"""SGLang's calls of fused experts, by their names.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.functional.call import with_arguments
from ep_moe.functional.sglang.experts import ExpertsCall, new_result, run
from ep_moe.functional.sglang.ragged_experts import OPERATION, RaggedCall


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


_NAMES = ExpertsCall._fields
_SUMMED = " ".join(name for name in _NAMES if name not in ("inplace", "defer_sum") and "no_combine" not in name)
_OUTPLACE = " ".join(name for name in _NAMES if name not in ("inplace", "defer_sum"))
_FORMAT = " ".join(_NAMES[_NAMES.index("use_fp8_w8a8") : _NAMES.index("no_combine")])
_FUSED_MOE = f"hidden_states w1 w2 topk_output moe_runner_config b1 b2 {_FORMAT}"


@with_arguments(ExpertsCall)
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
    return run(call)


@with_arguments(ExpertsCall, _OUTPLACE)
def outplace_fused_experts(call: ExpertsCall) -> torch.Tensor:
    """`fused_experts_impl`, into a new tensor."""
    return run(call)


@with_arguments(ExpertsCall, _SUMMED, inplace=True)
def inplace_fused_experts(call: ExpertsCall) -> None:
    """`fused_experts_impl`, into `hidden_states`."""
    run(call)


@with_arguments(ExpertsCall, _OUTPLACE)
def outplace_fused_experts_fake(call: ExpertsCall) -> torch.Tensor:
    """The shape and dtype of what `outplace_fused_experts` returns, without computing it."""
    return new_result(call)


@with_arguments(ExpertsCall, _SUMMED)
def inplace_fused_experts_fake(call: ExpertsCall) -> None:
    """What `inplace_fused_experts` returns, without computing it."""
    del call


@with_arguments(ExpertsCall, f"{_FUSED_MOE} a1_q fuse_swiglu_interleaved")
def fused_experts(given: Any) -> torch.Tensor:
    """`fused_experts_impl` with the routing and the options in objects.

    Args:
        topk_output: SGLang's or our `StandardTopKOutput`.
        moe_runner_config: SGLang's or our `MoeRunnerConfig`, of which `inplace` is True by default.
        The others, results and errors: as of `fused_experts_impl`.
    """
    return _with_objects(given)


@with_arguments(ExpertsCall, _FUSED_MOE, moe_runner_config=_DEFAULT_CONFIG)
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


# triton_kernel_*, whose results are rows of pairs, which SGLang's runner sums


def _plain(weight: Any, name: str) -> torch.Tensor:
    """The memory of a weight or of scales: a tensor, or triton_kernels' class of a tensor that is not swizzled."""
    if isinstance(weight, torch.Tensor):
        return weight
    storage = getattr(weight, "storage", None)
    data, layout = getattr(storage, "data", None), type(getattr(storage, "layout", None)).__name__
    if not isinstance(data, torch.Tensor):
        raise ValueError(f"{name} is {type(weight).__name__}, which is no tensor and has none")
    if layout not in ("StridedLayout", "NoneType"):
        raise ValueError(f"{name} has layout {layout}, which is swizzled; StridedLayout is read")
    return data


_PAIRS = "a_ragged_metadata gather_indx scatter_indx gate_scal n_expts_act"
_RAGGED_FORMAT = (
    "use_fp8_w8a8 per_channel_quant global_num_experts expert_map w1_scale w2_scale a1_scale a2_scale block_shape"
)
_REST = f"apply_router_weight_on_input {_RAGGED_FORMAT}"
_WITH_BIAS = "hidden_states w1 w1_pcg b1 w2 w2_pcg b2"


def _run(call: RaggedCall, inplace: bool) -> torch.Tensor:
    if inplace:
        raise ValueError("inplace is set: the rows of pairs do not fit into hidden_states")
    return OPERATION(call)


@with_arguments(RaggedCall, f"hidden_states w1 w2 {_PAIRS} inplace activation {_REST}", inplace=False)
def triton_kernel_fused_experts(given: Any) -> torch.Tensor:
    """The weighted result of each pair of a token and an expert, of pairs that are sorted by expert.

    Args:
        hidden_states: [T, H]. w1, w2: [E, H, 2I], columns [gate; up], and [E, I, H].
        a_ragged_metadata: triton_kernels' or our `RaggedTensorMetadata`: pairs of each expert, whose places follow each
            other. Values are read as on a GPU, without checks.
        gather_indx: [G], the token of each place. scatter_indx: [G], the row of the result of each place, None for the
            place itself. gate_scal: [G], weights. Places behind the last expert's, indices of no token and of no row
            have no result. n_expts_act: K, G is T * K.
        inplace: refused. activation: "silu" or "gelu" (erf).
        apply_router_weight_on_input: weights multiply tokens and not the experts' outputs.
        use_fp8_w8a8, per_channel_quant, block_shape, scales: as of `fused_experts_impl`; scales of blocks lie as the
            weights, [E, H / k, 2I / n].
        global_num_experts: experts of a_ragged_metadata, -1 any. expert_map: [those], an expert of w1 each, -1 none.
    Returns: [G, H] in the dtype of `hidden_states`, not summed; rows that no place has are zeros.
    Errors, host sync, torch.compile: as of `fused_experts_impl`.
    """
    x, w1, w2, data, *pairs = given[:8]
    tensors = x, _plain(w1, "w1"), None, _plain(w2, "w2"), None, data.slice_sizes
    return _run(RaggedCall._make((*tensors, *pairs, *given[9:], None, None)), given.inplace)


@with_arguments(
    RaggedCall, f"{_WITH_BIAS} {_PAIRS} inplace activation {_REST} gemm1_alpha gemm1_clamp_limit", inplace=False
)
def triton_kernel_fused_experts_with_bias(given: Any) -> torch.Tensor:
    """`triton_kernel_fused_experts` with biases and gpt-oss's activation, of columns of w1 that alternate, gate first.

    Args:
        w1, w2: as there, or bytes of two MXFP4 elements, [E, H / 2, 2I] and [E, I / 2, H].
        w1_pcg, w2_pcg: triton_kernels' or our `PrecisionConfig`, whose `b_mx_scale` [E, H / 32, 2I] MXFP4 needs; else
            None.
        b1, b2: [E, 2I] and [E, H]. activation: "silu", whatever the alpha. apply_router_weight_on_input: without b1.
        gemm1_alpha, gemm1_clamp_limit: (clamp(up) + 1) * gate * sigmoid(alpha * gate); a limit of None does not clamp.
        The others, result and errors: as there. Weights, and scales of MXFP4, that are no transposed views of ours are
            copied in each call.
    """
    if given.activation != "silu":
        raise ValueError(
            f"activation ({given.activation!r}) is not 'silu', of which this call has the form with an alpha"
        )
    if given.gemm1_alpha is None:
        raise ValueError("gemm1_alpha (None) is missing, the activation needs it")
    scales = (
        scale if scale is not None or getattr(pcg, "b_mx_scale", None) is None else _plain(pcg.b_mx_scale, name)
        for scale, pcg, name in (
            (given.w1_scale, given.w1_pcg, "w1_pcg.b_mx_scale"),
            (given.w2_scale, given.w2_pcg, "w2_pcg.b_mx_scale"),
        )
    )
    x, w1, _, b1, w2, _, b2, data, *pairs = given[:12]
    tensors = x, _plain(w1, "w1"), b1, _plain(w2, "w2"), b2, data.slice_sizes
    first, last = given[13:19], given[21:24]
    numbers = float(given.gemm1_alpha), given.gemm1_clamp_limit
    return _run(RaggedCall._make((*tensors, *pairs, *first, *scales, *last, *numbers)), given.inplace)


@with_arguments(RaggedCall, f"hidden_states w1 w2 topk_output moe_runner_config {_REST}")
def triton_kernel_moe_forward(given: Any) -> torch.Tensor:
    """`triton_kernel_fused_experts` with the routing in a tuple and the activation of `moe_runner_config`.

    Args: topk_output: SGLang's or our `TritonKernelTopKOutput`. The others: as there.
    """
    x, w1, w2, topk_output, config, *rest = given
    activation = _activation_of(config, gemm1_alpha=None, gemm1_clamp_limit=None)
    return triton_kernel_fused_experts(x, w1, w2, *_routing_of(topk_output), False, activation, *rest)


@with_arguments(RaggedCall, f"{_WITH_BIAS} topk_output moe_runner_config {_REST}")
def triton_kernel_moe_with_bias_forward(given: Any) -> torch.Tensor:
    """`triton_kernel_fused_experts_with_bias` with routing, activation, alpha and limit in objects."""
    config, routing = given.moe_runner_config, _routing_of(given.topk_output)
    activation = _activation_of(config, gate_up_interleaved=True)
    rest = *given[9:], config.gemm1_alpha, config.gemm1_clamp_limit
    return triton_kernel_fused_experts_with_bias(*given[:7], *routing, False, activation, *rest)


def _routing_of(topk_output: Any) -> tuple[Any, Any, Any, Any, Any]:
    found = tuple(topk_output)
    if len(found) != 5 or not hasattr(found[0], "slice_sizes"):
        raise ValueError(
            f"topk_output ({type(topk_output).__name__}) is not (a_ragged_metadata, gather_indx, scatter_indx, "
            "gate_scal, n_expts_act)"
        )
    return found


def _activation_of(config: Any, **needed: Any) -> str:
    """The activation of options, of which those in `needed` must have these values. Errors: ValueError."""
    options = options_of(config)
    for name, value in {"is_gated": True, "swiglu_limit": None, **needed}.items():
        if getattr(options, name) != value:
            raise ValueError(f"moe_runner_config.{name} ({getattr(options, name)}) is not {value}, as this call has it")
    return options.activation
