"""SGLang's `triton_kernel_*` calls, by their names: fused experts with triton_kernels' routing data and weights.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import Any

import torch
from torch.library import custom_op

from ep_moe.functional.common import operator_arguments
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
    if not torch.compiler.is_compiling():
        return compute(call, call.hidden_states if inplace else None)
    y: torch.Tensor = _op(*call)
    return call.hidden_states.copy_(y) if inplace else y


def triton_kernel_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    routing_data: Any,
    gather_indx: Any,
    scatter_indx: Any,
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
    """The weighted sum of each token's experts, of pairs that are sorted by expert.

    Args:
        hidden_states: [T, H]. w1, w2: [E, H, 2I], columns [gate; up], and [E, I, H].
        routing_data, gather_indx, scatter_indx: triton_kernels' or ours; they are read as on a GPU, without checks of
            their values.
        inplace: the result is written into `hidden_states`. activation: "silu" or "gelu" (erf).
        apply_router_weight_on_input: weights multiply tokens and not the experts' outputs.
        use_fp8_w8a8, per_channel_quant, block_shape, scales: as of `outplace_fused_experts`; scales of blocks lie as
            the weights, [E, H / k, 2I / n].
        global_num_experts: experts of the routing data, -1 any. expert_map: [those], an expert of w1 each, -1 none.
    Returns: [T, H] in the dtype of `hidden_states`.
    Errors, host sync, torch.compile: as of `outplace_fused_experts`.
    """
    call = RaggedCall(
        hidden_states,
        _plain(w1, "w1"),
        None,
        _plain(w2, "w2"),
        None,
        routing_data.gate_scal,
        routing_data.expt_hist,
        gather_indx.src_indx,
        scatter_indx.dst_indx,
        routing_data.n_expts_act,
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
    routing_data: Any,
    gather_indx: Any,
    scatter_indx: Any,
    inplace: bool = False,
    activation: str = "silu",
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
        w1_pcg, w2_pcg: triton_kernels' PrecisionConfig, whose `weight_scale` [E, H / 32, 2I] MXFP4 needs; else None.
        b1, b2: [E, 2I] and [E, H]. activation: "silu", whatever the alpha.
        gemm1_alpha, gemm1_clamp_limit: (clamp(up) + 1) * gate * sigmoid(alpha * gate); a limit of None does not clamp.
        The others, result and errors: as there. Weights, and scales of MXFP4, that are no transposed views of ours are
            copied in each call.
    """
    if activation != "silu":
        raise ValueError(f"activation ({activation!r}) is not 'silu', of which this call has the form with an alpha")
    if gemm1_alpha is None:
        raise ValueError(f"gemm1_alpha ({gemm1_alpha}) is missing, the activation needs it")
    scales = [
        given if given is not None or getattr(pcg, "weight_scale", None) is None else _plain(pcg.weight_scale, name)
        for given, pcg, name in (
            (w1_scale, w1_pcg, "w1_pcg.weight_scale"),
            (w2_scale, w2_pcg, "w2_pcg.weight_scale"),
        )
    ]
    call = RaggedCall(
        hidden_states,
        _plain(w1, "w1"),
        b1,
        _plain(w2, "w2"),
        b2,
        routing_data.gate_scal,
        routing_data.expt_hist,
        gather_indx.src_indx,
        scatter_indx.dst_indx,
        routing_data.n_expts_act,
        activation,
        False,
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
        moe_runner_config.activation,
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
        moe_runner_config.activation,
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


def _routing_of(topk_output: Any) -> tuple[Any, Any, Any]:
    found = tuple(topk_output)
    if len(found) != 3 or not hasattr(found[0], "expt_hist"):
        raise ValueError(f"topk_output ({type(topk_output).__name__}) is not (routing_data, gather_indx, scatter_indx)")
    return found


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
    return torch.empty_like(arguments[0])
