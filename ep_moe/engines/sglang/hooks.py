"""What we call or replace in SGLang."""

from ep_moe.engines.common.plugin import Needs

NEEDS = Needs(
    "SGLang",
    ("0.5.17", "0.5.23"),
    """
sglang.srt.plugins.hook_registry:
    HookRegistry.register(target, hook, hook_type)
    HookType.AROUND
sglang.srt.layers.moe.fused_moe_triton.layer:
    FusedMoE.__init__(self, num_experts, prefix)
    FusedMoE.run_moe_core(self, dispatch_output)
    create_moe_dispatcher(moe_runner_config)
sglang.srt.layers.moe.ep_moe.layer:
    DeepEPMoE.__init__(self, num_experts, prefix)
    DeepEPMoE.run_moe_core(self, dispatch_output)
sglang.srt.layers.quantization.base_config:
    FusedMoEMethodBase.apply(self, layer, dispatch_output)
    FusedMoEMethodBase.process_weights_after_loading(self, layer)
sglang.srt.layers.moe.token_dispatcher.base:
    BaseDispatcher.dispatch(self, hidden_states, topk_output)
    BaseDispatcher.combine(self, combine_input)
    DispatchOutputFormat.DEEPEP_NORMAL
    CombineInputFormat.DEEPEP_NORMAL
sglang.srt.layers.moe.token_dispatcher.deepep:
    DeepEPConfig.__init__(self)
    DeepEPPDispatchHooks.register_hook(self, hook_fun)
sglang.srt.layers.moe.topk:
    TopKOutputChecker.format_is_standard(topk_output)
sglang.srt.layers.moe.moe_runner.base:
    MoeRunnerConfig(
        num_experts, num_local_experts, hidden_size, intermediate_size_per_partition, top_k, num_fused_shared_experts,
        params_dtype, activation, is_gated, apply_router_weight_on_input, no_combine, routed_scaling_factor,
        gemm1_alpha, gemm1_clamp_limit, swiglu_limit, gate_up_interleaved)
sglang.srt.layers.moe.moe_runner.runner:
    MoeRunner.__init__(self, runner_backend, config)
sglang.srt.layers.moe.utils:
    get_deepep_config
    get_moe_a2a_backend
    get_moe_runner_backend
    initialize_moe_config
    is_tbo_enabled
    MoeRunnerBackend.AUTO
sglang.srt.batch_overlap.two_batch_overlap:
    execute_overlapped_operations(inputs_arr, operations_arr, delta_stages)
sglang.srt.batch_overlap.single_batch_overlap:
    SboFlags.enable_combine_down_gemm_two_stream_overlap
    SboFlags.enable_combine_shared_two_stream_overlap
    SboFlags.enable_dispatch_shared_one_stream_overlap
sglang.srt.distributed.parallel_state:
    get_moe_ep_group
sglang.srt.eplb.expert_distribution:
    get_global_expert_distribution_recorder
sglang.srt.layers.dp_attention:
    get_dp_global_num_tokens
    get_is_extend_in_batch
    is_dp_attention_enabled
    is_dp_max_padding
    mask_dp_pad_moe_topk_ids(topk_ids)
sglang.srt.runtime_context:
    get_exec
    get_flags
    get_lora
    get_model
    get_parallel
    get_schedule
    get_spec
""",
)
