"""SGLang's layers that route logits themselves, and the choice among all layers.

Letters: T tokens, H hidden.
"""

from typing import Any

import torch

from ep_moe.config import ActivationConfig
from ep_moe.functional.flashinfer import trtllm_fp4_block_scale_moe
from ep_moe.functional.sglang.layer import FusedMoE
from ep_moe.functional.sglang.layer_formats import as_mapping
from ep_moe.functional.sglang.routing import routing_config
from ep_moe.weights import ExpertWeights

_NONE = ("hidden_states_scale", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")


class FlashInferFusedMoE(FusedMoE):
    """`FusedMoE` that routes logits itself: it takes SGLang's or our `BypassedTopKOutput` alone.

    Errors: ValueError for an activation other than "silu", fused shared experts, routing without renormalization.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.moe_runner_config.activation != "silu" or self.num_fused_shared_experts:
            raise ValueError(
                f"activation ({self.moe_runner_config.activation!r}) must be 'silu' and num_fused_shared_experts "
                f"({self.num_fused_shared_experts}) 0 in {type(self).__name__}"
            )

    def forward(self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None) -> torch.Tensor:
        """`FusedMoE.forward` of logits; `topk_config.renormalize` is needed."""
        _require_logits(topk_output, type(self).__name__)
        if not topk_output.topk_config.renormalize:
            raise ValueError(f"topk_config.renormalize is False, {type(self).__name__} needs it")
        return super().forward(hidden_states, topk_output, pre_quant_input)


class FlashInferFP4MoE(FusedMoE):
    """`FusedMoE` over `trtllm_fp4_block_scale_moe`: NVFP4 weights of modelopt, and logits, which it routes itself.

    Rows of `w13_weight` are [up; gate], the order of FlashInfer. Tokens stay in bfloat16. The result is a new tensor.
    Errors: ValueError for other weights, biases, alpha, "gelu", `no_combine`, weights on the input.
    """

    up_first = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, name = self.moe_runner_config, type(self).__name__
        if self._format.scheme.name != "nvfp4":
            raise ValueError(f"quant_config gives scheme '{self._format.scheme.name}', {name} has modelopt's NVFP4")
        for option in ("apply_router_weight_on_input", "no_combine"):
            if getattr(config, option):
                raise ValueError(f"{option} ({getattr(config, option)}) is set, {name} has none")
        if self._activation != ActivationConfig() or "w13_weight_bias" in self._parts:
            needed = "'silu' without gemm1_alpha and limits, and with_bias False"
            raise ValueError(f"activation ({config.activation!r}) must be {needed}, in {name}")

    def _made(self) -> ExpertWeights:
        raise RuntimeError(f"{type(self).__name__} has no weights of the runtime's own, FlashInfer's call has")

    def process_weights_after_loading(self) -> None:
        """The parameters are used as they are."""

    def forward(self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None) -> torch.Tensor:
        """Route and compute [T, H] bfloat16. Errors: as of `trtllm_fp4_block_scale_moe`."""
        if pre_quant_input is not None:
            raise ValueError("pre_quant_input is given, tokens are quantized here")
        _require_logits(topk_output, type(self).__name__)
        options, factor = topk_output.topk_config, self.moe_runner_config.routed_scaling_factor
        for name in ("num_token_non_padded", "expert_location_dispatch_info"):
            if getattr(topk_output, name, None) is not None:
                raise ValueError(f"topk_output.{name} is given, {type(self).__name__} routes all logits as they are")
        if options.custom_routing_function is not None:
            raise ValueError(f"topk_config.custom_routing_function is given, {type(self).__name__} routes logits")
        method = routing_config(options, self.num_experts)
        if self.top_k is not None and options.top_k != self.top_k:
            raise ValueError(f"topk_config.top_k ({options.top_k}) is not the layer's ({self.top_k})")
        logits = topk_output.router_logits
        biased = method.method.value == 2
        if (method.group_best, method.scoring) != (2, "sigmoid"):
            raise ValueError(f"topk_config ({options}) has groups without a correction_bias, or softmax with one")
        tensors = self.tensors
        scales = tensors["w13_global_scale"]
        [y] = trtllm_fp4_block_scale_moe(
            routing_logits=logits if logits.dtype == torch.bfloat16 else logits.float(),
            routing_bias=options.correction_bias if biased else None,
            hidden_states=hidden_states,
            gemm1_weights=tensors["w13_values"],
            gemm1_weights_scale=tensors["w13_scale"],
            gemm2_weights=tensors["w2_values"],
            gemm2_weights_scale=tensors["w2_scale"],
            output1_scale_scalar=scales[:, 1].contiguous(),
            output1_scale_gate_scalar=scales[:, 0].contiguous(),
            output2_scale_scalar=tensors["w2_global_scale"],
            num_experts=self.num_experts,
            top_k=options.top_k,
            n_group=method.num_group if biased else None,
            topk_group=method.topk_group if biased else None,
            intermediate_size=self.intermediate_size_per_partition,
            local_expert_offset=self.start_expert_id,
            local_num_experts=self.num_local_experts,
            routed_scaling_factor=factor if biased else None,
            routing_method_type=method.method.value,
            norm_topk_prob=method.norm_topk_prob,
            **dict.fromkeys(_NONE),
        )
        if factor is not None and not biased:
            y = y * factor
        return self.reduced(y)


def _require_logits(topk_output: Any, name: str) -> None:
    if not hasattr(topk_output, "topk_config"):
        raise ValueError(f"topk_output ({type(topk_output).__name__}) has no topk_config: {name} routes logits itself")


def get_fused_moe_impl_class(quant_config: Any = None, moe_runner_backend: str = "auto") -> type[FusedMoE]:
    """The layer for weights in this format.

    Args:
        quant_config: as of `FusedMoE`.
        moe_runner_backend: SGLang's option: with "flashinfer_trtllm", layers that route logits themselves:
            `FlashInferFP4MoE` for modelopt's NVFP4, `FlashInferFusedMoE` for other quantized ones. Else `FusedMoE`.
    Errors: as of `FusedMoE`. Local.
    """
    if moe_runner_backend != "flashinfer_trtllm" or quant_config is None:
        return FusedMoE
    config = as_mapping(quant_config)
    nvfp4 = config.get("quant_method") in ("modelopt", "modelopt_fp4") and config.get("quant_algo") == "NVFP4"
    return FlashInferFP4MoE if nvfp4 else FlashInferFusedMoE
