"""Which layers run here; the others stay on vLLM's own path."""

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ep_moe.engines.common.engine_layer import LayerKind, eligible_kind
from ep_moe.engines.vllm.parameters import activation_of, format_of
from ep_moe.engines.vllm.step import share_of

# methods whose override means another computation, or other numbers of experts
_OWN_PATH = ("forward_modular", "get_expert_weights", "_map_global_expert_id_to_local_expert_id")


def kind_of_layer(layer: Any, method: Any, moe: Any) -> LayerKind:
    """What a RoutedExperts layer computes, if we can.

    Args:
        layer: as its constructor has made it so far, before its parameters. method: its quantization method.
        moe: its FusedMoEConfig.
    Errors: ValueError says why the layer is not eligible. Local.
    """
    parallel, engine = moe.moe_parallel_config, get_current_vllm_config().parallel_config
    if parallel.tp_size > 1:
        raise ValueError("its experts are sliced by tensor parallelism; --enable-expert-parallel keeps them whole")
    if parallel.pcp_size > 1:
        raise ValueError("prefill context parallelism is not supported here")
    if moe.is_lora_enabled:
        raise ValueError("LoRA is not supported here")
    if getattr(engine, "enable_elastic_ep", False):
        raise ValueError("elastic expert parallelism has groups without a common store")
    strategy = layer.expert_map_manager.placement_strategy
    if parallel.use_ep and strategy != "linear":
        raise ValueError(f"expert placement '{strategy}' is not linear")
    if getattr(moe, "skip_final_all_reduce", False):
        raise ValueError("its model sums partial outputs by itself")
    for name in _OWN_PATH:
        theirs = next(base for base in type(layer).__mro__ if name in vars(base))
        if theirs is not RoutedExperts:
            raise ValueError(f"{theirs.__name__} has a {name} of its own")
    loaded = format_of(method, interleaved=moe.activation is MoEActivation.SWIGLUOAI)
    activation = activation_of(
        moe.activation,
        alpha=getattr(layer, "swiglu_alpha", None),
        beta=getattr(layer, "swiglu_beta", None),
        limit=getattr(layer, "swiglu_limit", None),
    )
    if activation.kind.gated != moe.is_act_and_mul:
        raise ValueError(f"activation '{moe.activation.value}' does not fit is_act_and_mul ({moe.is_act_and_mul})")
    return eligible_kind(
        loaded,
        activation,
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        num_experts=moe.num_experts,
        num_topk=moe.experts_per_token,
        dtype=moe.in_dtype,
        max_num_tokens=share_of(parallel).most(moe.max_num_tokens),
        num_slots=2 if engine.use_ubatching else 1,
    )
