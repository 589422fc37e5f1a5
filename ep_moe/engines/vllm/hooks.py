"""What we call or replace in vLLM."""

from ep_moe.engines.common.hooks import Hook

TESTED = ("0.26.0", "0.33.0")
_FUSED = "vllm.model_executor.layers.fused_moe"
_APPLY = ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
_PREPARE = (
    "a1",
    "topk_weights",
    "topk_ids",
    "num_experts",
    "expert_map",
    "apply_router_weight_on_input",
    "quant_config",
    "defer_input_quant",
)
_FINALIZE = (
    "output",
    "fused_expert_output",
    "topk_weights",
    "topk_ids",
    "apply_router_weight_on_input",
    "weight_and_reduce_impl",
)
_EXPERTS = (
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "global_num_experts",
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
    "apply_router_weight_on_input",
)
_KERNEL = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map")

HOOKS = tuple(
    Hook(module=module, path=path, parameters=parameters)
    for module, path, parameters in (
        ("vllm.model_executor.custom_op", "op_registry_oot", ()),
        (f"{_FUSED}.routed_experts", "RoutedExperts.register_oot", ()),
        (f"{_FUSED}.routed_experts", "RoutedExperts._get_quant_method", ("prefix", "quant_config", "moe_config")),
        (f"{_FUSED}.routed_experts", "RoutedExperts.forward_modular", _APPLY[1:]),
        (f"{_FUSED}.fused_moe_method_base", "FusedMoEMethodBase.apply", _APPLY),
        (f"{_FUSED}.fused_moe_method_base", "FusedMoEMethodBase.process_weights_after_loading", ("layer",)),
        (f"{_FUSED}.fused_moe_method_base", "FusedMoEMethodBase.is_monolithic", ()),
        (
            f"{_FUSED}.fused_moe_method_base",
            "FusedMoEMethodBase.maybe_roundup_sizes",
            ("hidden_size", "intermediate_size_per_partition"),
        ),
        (f"{_FUSED}.modular_kernel", "FusedMoEPrepareAndFinalizeModular.prepare", _PREPARE),
        (f"{_FUSED}.modular_kernel", "FusedMoEPrepareAndFinalizeModular.prepare_async", _PREPARE),
        (f"{_FUSED}.modular_kernel", "FusedMoEPrepareAndFinalizeModular.finalize", _FINALIZE),
        (f"{_FUSED}.modular_kernel", "FusedMoEPrepareAndFinalizeModular.finalize_async", _FINALIZE),
        (f"{_FUSED}.modular_kernel", "FusedMoEExpertsModular.apply", _EXPERTS),
        (f"{_FUSED}.modular_kernel", "FusedMoEExpertsModular.moe_problem_size", ("a1", "w1", "w2", "topk_ids")),
        (f"{_FUSED}.modular_kernel", "ExpertTokensMetadata", ("expert_num_tokens", "expert_num_tokens_cpu")),
        (f"{_FUSED}.modular_kernel", "FusedMoEKernel", ("prepare_finalize", "fused_experts")),
        (f"{_FUSED}.modular_kernel", "FusedMoEKernel.apply", _KERNEL),
        (f"{_FUSED}.topk_weight_and_reduce", "TopKWeightAndReduceDelegate", ()),
        (f"{_FUSED}.activation", "MoEActivation", ()),
        (f"{_FUSED}.config", "FUSED_MOE_UNQUANTIZED_CONFIG", ()),
        ("vllm.distributed", "get_ep_group", ()),
        ("vllm.forward_context", "get_forward_context", ()),
        ("vllm.forward_context", "is_forward_context_available", ()),
        ("vllm.v1.worker.ubatching", "dbo_current_ubatch_id", ()),
    )
)
