"""SGLang's `triton_kernel_*` calls, by their names: fused experts with triton_kernels' routing data and weights.

Rows of pairs are results, which SGLang's runner sums.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import Any

import torch

from ep_moe.functional.sglang.calls import options_of, with_arguments
from ep_moe.functional.sglang.ragged_experts import OPERATION, RaggedCall


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


_ROUTING = "a_ragged_metadata gather_indx scatter_indx gate_scal n_expts_act"
_FORMAT = "use_fp8_w8a8 per_channel_quant global_num_experts expert_map w1_scale w2_scale a1_scale a2_scale block_shape"
_REST = f"apply_router_weight_on_input {_FORMAT}"
_WITH_BIAS = "hidden_states w1 w1_pcg b1 w2 w2_pcg b2"


def _run(call: RaggedCall, inplace: bool) -> torch.Tensor:
    if inplace:
        raise ValueError("inplace is set: the rows of pairs do not fit into hidden_states")
    return OPERATION(call)


@with_arguments(f"hidden_states w1 w2 {_ROUTING} inplace activation {_REST}", RaggedCall, inplace=False)
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
    f"{_WITH_BIAS} {_ROUTING} inplace activation {_REST} gemm1_alpha gemm1_clamp_limit", RaggedCall, inplace=False
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


@with_arguments(f"hidden_states w1 w2 topk_output moe_runner_config {_REST}", RaggedCall)
def triton_kernel_moe_forward(given: Any) -> torch.Tensor:
    """`triton_kernel_fused_experts` with the routing in a tuple and the activation of `moe_runner_config`.

    Args: topk_output: SGLang's or our `TritonKernelTopKOutput`. The others: as there.
    """
    x, w1, w2, topk_output, config, *rest = given
    activation = _activation_of(config, gemm1_alpha=None, gemm1_clamp_limit=None)
    return triton_kernel_fused_experts(x, w1, w2, *_routing_of(topk_output), False, activation, *rest)


@with_arguments(f"{_WITH_BIAS} topk_output moe_runner_config {_REST}", RaggedCall)
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
    """The activation of options. Errors: ValueError for options that a call does not have.

    Args: needed: values of options that no argument of the call takes.
    """
    options = options_of(config)
    for name, value in {"is_gated": True, "swiglu_limit": None, **needed}.items():
        if getattr(options, name) != value:
            raise ValueError(f"moe_runner_config.{name} ({getattr(options, name)}) is not {value}, as this call has it")
    return options.activation
