"""What we call or replace in SGLang."""

from ep_moe.engines.common.hooks import Hook

TESTED = ("0.5.17", "0.5.23")
_MOE = "sglang.srt.layers.moe"
_RUNNER_CONFIG = (
    "num_experts",
    "num_local_experts",
    "hidden_size",
    "intermediate_size_per_partition",
    "top_k",
    "num_fused_shared_experts",
    "params_dtype",
    "activation",
    "is_gated",
    "apply_router_weight_on_input",
    "no_combine",
    "routed_scaling_factor",
    "gemm1_alpha",
    "gemm1_clamp_limit",
    "swiglu_limit",
    "gate_up_interleaved",
)

HOOKS = tuple(
    Hook(module=module, path=path, parameters=parameters)
    for module, path, parameters in (
        ("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
        ("sglang.srt.plugins.hook_registry", "HookType.AROUND", ()),
        (f"{_MOE}.fused_moe_triton.layer", "FusedMoE.__init__", ("self", "num_experts", "prefix")),
        (f"{_MOE}.fused_moe_triton.layer", "FusedMoE.run_moe_core", ("self", "dispatch_output")),
        (f"{_MOE}.fused_moe_triton.layer", "create_moe_dispatcher", ("moe_runner_config",)),
        (f"{_MOE}.ep_moe.layer", "DeepEPMoE.__init__", ("self", "num_experts", "prefix")),
        (f"{_MOE}.ep_moe.layer", "DeepEPMoE.run_moe_core", ("self", "dispatch_output")),
        (
            "sglang.srt.layers.quantization.base_config",
            "FusedMoEMethodBase.apply",
            ("self", "layer", "dispatch_output"),
        ),
        (
            "sglang.srt.layers.quantization.base_config",
            "FusedMoEMethodBase.process_weights_after_loading",
            ("self", "layer"),
        ),
        (f"{_MOE}.token_dispatcher.base", "BaseDispatcher.dispatch", ("self", "hidden_states", "topk_output")),
        (f"{_MOE}.token_dispatcher.base", "BaseDispatcher.combine", ("self", "combine_input")),
        (f"{_MOE}.token_dispatcher.base", "DispatchOutputFormat.DEEPEP_NORMAL", ()),
        (f"{_MOE}.token_dispatcher.base", "CombineInputFormat.DEEPEP_NORMAL", ()),
        (f"{_MOE}.token_dispatcher.deepep", "DeepEPPDispatchHooks.register_hook", ("self", "hook_fun")),
        (f"{_MOE}.topk", "TopKOutputChecker.format_is_standard", ("topk_output",)),
        (f"{_MOE}.moe_runner.base", "MoeRunnerConfig", _RUNNER_CONFIG),
        (f"{_MOE}.moe_runner.runner", "MoeRunner.__init__", ("self", "runner_backend", "config")),
        (f"{_MOE}.utils", "get_moe_a2a_backend", ()),
        (f"{_MOE}.utils", "get_moe_runner_backend", ()),
        (f"{_MOE}.utils", "initialize_moe_config", ()),
        (f"{_MOE}.utils", "is_tbo_enabled", ()),
        (f"{_MOE}.utils", "MoeRunnerBackend.AUTO", ()),
        (
            "sglang.srt.batch_overlap.single_batch_overlap",
            "SboFlags.enable_combine_down_gemm_two_stream_overlap",
            (),
        ),
        ("sglang.srt.batch_overlap.single_batch_overlap", "SboFlags.enable_combine_shared_two_stream_overlap", ()),
        ("sglang.srt.distributed.parallel_state", "get_moe_ep_group", ()),
        ("sglang.srt.eplb.expert_distribution", "get_global_expert_distribution_recorder", ()),
        ("sglang.srt.layers.dp_attention", "get_dp_global_num_tokens", ()),
        ("sglang.srt.layers.dp_attention", "get_is_extend_in_batch", ()),
        ("sglang.srt.layers.dp_attention", "is_dp_attention_enabled", ()),
        ("sglang.srt.layers.dp_attention", "is_dp_max_padding", ()),
        ("sglang.srt.layers.dp_attention", "mask_dp_pad_moe_topk_ids", ("topk_ids",)),
        *(
            ("sglang.srt.runtime_context", name, ())
            for name in ("get_exec", "get_flags", "get_lora", "get_parallel", "get_schedule", "get_spec")
        ),
    )
)
