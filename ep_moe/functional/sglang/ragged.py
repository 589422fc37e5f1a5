"""SGLang's `triton_kernel_*` calls, by their names: fused experts with triton_kernels' routing data and weights.

Rows of pairs are results, which SGLang's runner sums.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import Any

import torch
from torch.library import custom_op

from ep_moe.functional.common import operator_arguments
from ep_moe.functional.sglang.calls import options_of
from ep_moe.functional.sglang.ragged_experts import RaggedCall, compute


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


def _run(call: RaggedCall, inplace: bool) -> torch.Tensor:
    if inplace:
        raise ValueError("inplace is set: the rows of pairs do not fit into hidden_states")
    y: torch.Tensor = _op(*call) if torch.compiler.is_compiling() else compute(call)
    return y


def triton_kernel_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    a_ragged_metadata: Any,
    gather_indx: torch.Tensor,
    scatter_indx: torch.Tensor | None,
    gate_scal: torch.Tensor,
    n_expts_act: int,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
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
    call = RaggedCall(
        hidden_states,
        _plain(w1, "w1"),
        None,
        _plain(w2, "w2"),
        None,
        a_ragged_metadata.slice_sizes,
        gather_indx,
        scatter_indx,
        gate_scal,
        n_expts_act,
        activation,
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
        None,
        None,
    )
    return _run(call, inplace)


def triton_kernel_fused_experts_with_bias(
    hidden_states: torch.Tensor,
    w1: Any,
    w1_pcg: Any,
    b1: torch.Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: torch.Tensor | None,
    a_ragged_metadata: Any,
    gather_indx: torch.Tensor,
    scatter_indx: torch.Tensor | None,
    gate_scal: torch.Tensor,
    n_expts_act: int,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> torch.Tensor:
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
    if activation != "silu":
        raise ValueError(f"activation ({activation!r}) is not 'silu', of which this call has the form with an alpha")
    if gemm1_alpha is None:
        raise ValueError(f"gemm1_alpha ({gemm1_alpha}) is missing, the activation needs it")
    scales = [
        given if given is not None or getattr(pcg, "b_mx_scale", None) is None else _plain(pcg.b_mx_scale, name)
        for given, pcg, name in (
            (w1_scale, w1_pcg, "w1_pcg.b_mx_scale"),
            (w2_scale, w2_pcg, "w2_pcg.b_mx_scale"),
        )
    ]
    call = RaggedCall(
        hidden_states,
        _plain(w1, "w1"),
        b1,
        _plain(w2, "w2"),
        b2,
        a_ragged_metadata.slice_sizes,
        gather_indx,
        scatter_indx,
        gate_scal,
        n_expts_act,
        activation,
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        scales[0],
        scales[1],
        a1_scale,
        a2_scale,
        block_shape,
        float(gemm1_alpha),
        gemm1_clamp_limit,
    )
    return _run(call, inplace)


def triton_kernel_moe_forward(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`triton_kernel_fused_experts` with the routing in a tuple and the activation of `moe_runner_config`.

    Args: topk_output: SGLang's or our `TritonKernelTopKOutput`. The others: as there.
    """
    return triton_kernel_fused_experts(
        hidden_states,
        w1,
        w2,
        *_routing_of(topk_output),
        False,
        _activation_of(moe_runner_config, gemm1_alpha=None, gemm1_clamp_limit=None),
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
    )


def triton_kernel_moe_with_bias_forward(
    hidden_states: torch.Tensor,
    w1: Any,
    w1_pcg: Any,
    b1: torch.Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: torch.Tensor | None,
    topk_output: Any,
    moe_runner_config: Any,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`triton_kernel_fused_experts_with_bias` with routing, activation, alpha and limit in objects."""
    return triton_kernel_fused_experts_with_bias(
        hidden_states,
        w1,
        w1_pcg,
        b1,
        w2,
        w2_pcg,
        b2,
        *_routing_of(topk_output),
        False,
        _activation_of(moe_runner_config, gate_up_interleaved=True),
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
        moe_runner_config.gemm1_alpha,
        moe_runner_config.gemm1_clamp_limit,
    )


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


def _compute(*arguments: Any) -> torch.Tensor:
    return compute(RaggedCall(*arguments))


_op = custom_op(
    "ep_moe::triton_kernel_fused_experts",
    _compute,
    mutates_args=(),
    schema=f"({operator_arguments(RaggedCall)}) -> Tensor",
)


@_op.register_fake
def _fake(*arguments: Any) -> torch.Tensor:
    call = RaggedCall(*arguments)
    return call.hidden_states.new_empty(call.gather_indx.shape[0], call.hidden_states.shape[1])
