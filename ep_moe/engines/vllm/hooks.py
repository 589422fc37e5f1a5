"""What we call or replace in vLLM."""

from ep_moe.engines.common.plugin import Needs

NEEDS = Needs(
    "vLLM",
    ("0.26.0", "0.33.0"),
    """
vllm.model_executor.custom_op:
    op_registry_oot
vllm.model_executor.layers.fused_moe.routed_experts:
    RoutedExperts.register_oot
    RoutedExperts._get_quant_method(prefix, quant_config, moe_config)
    RoutedExperts.forward_modular(x, topk_weights, topk_ids, shared_experts, shared_experts_input)
vllm.model_executor.layers.fused_moe.fused_moe_method_base:
    FusedMoEMethodBase.apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
    FusedMoEMethodBase.process_weights_after_loading(layer)
    FusedMoEMethodBase.is_monolithic
    FusedMoEMethodBase.mk_can_overlap_shared_experts
    FusedMoEMethodBase.supports_internal_mk
    FusedMoEMethodBase.topk_indices_dtype
    FusedMoEMethodBase.maybe_roundup_sizes(hidden_size, intermediate_size_per_partition)
vllm.model_executor.layers.fused_moe.modular_kernel:
    FusedMoEPrepareAndFinalizeModular.prepare(
        a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
        defer_input_quant)
    FusedMoEPrepareAndFinalizeModular.prepare_async(
        a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
        defer_input_quant)
    FusedMoEPrepareAndFinalizeModular.finalize(
        output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
    FusedMoEPrepareAndFinalizeModular.finalize_async(
        output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
    FusedMoEExpertsModular.apply(
        output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
        a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input)
    FusedMoEExpertsModular.moe_problem_size(a1, w1, w2, topk_ids)
    ExpertTokensMetadata(expert_num_tokens, expert_num_tokens_cpu)
    FusedMoEKernel(prepare_finalize, fused_experts)
    FusedMoEKernel.apply(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map)
vllm.model_executor.layers.fused_moe.topk_weight_and_reduce:
    TopKWeightAndReduceDelegate
vllm.model_executor.layers.fused_moe.activation:
    MoEActivation
vllm.model_executor.layers.fused_moe.config:
    FUSED_MOE_UNQUANTIZED_CONFIG
vllm.envs:
    VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
vllm.platforms:
    current_platform
vllm.distributed:
    get_ep_group
vllm.forward_context:
    get_forward_context
    is_forward_context_available
vllm.v1.worker.ubatching:
    dbo_current_ubatch_id
""",
)
