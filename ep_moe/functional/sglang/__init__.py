"""SGLang's fused experts, the calls beneath them and the layer above, on any GPU and on a CPU.

Names, order and defaults of the parameters are SGLang's; docs/functional.md says for each what it does here.
"""

from ep_moe.functional.sglang.calls import (
    MoeRunnerConfig,
    fused_experts,
    fused_experts_impl,
    fused_moe,
    inplace_fused_experts,
    inplace_fused_experts_fake,
    outplace_fused_experts,
    outplace_fused_experts_fake,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
    triton_kernel_moe_forward,
    triton_kernel_moe_with_bias_forward,
)
from ep_moe.functional.sglang.configs import (
    get_config,
    get_config_dtype_str,
    get_config_file_name,
    get_default_config,
    get_moe_configs,
    override_config,
    try_get_optimal_moe_config,
)
from ep_moe.functional.sglang.experts import (
    swiglu_gpt_oss_sigmoid_alpha,
    swiglu_no_interleaved_with_alpha_and_limit,
)
from ep_moe.functional.sglang.gemm import invoke_fused_moe_kernel
from ep_moe.functional.sglang.layer import FusedMoE
from ep_moe.functional.sglang.layer_flashinfer import FlashInferFP4MoE, FlashInferFusedMoE, get_fused_moe_impl_class
from ep_moe.functional.sglang.layer_loading import MoeParallel
from ep_moe.functional.sglang.pairs import moe_align_block_size, moe_sum_reduce_torch_compile, moe_sum_reduce_triton
from ep_moe.functional.sglang.ragged_experts import InFlexData, PrecisionConfig, quantize
from ep_moe.functional.sglang.routing import (
    BypassedTopKOutput,
    RaggedTensorMetadata,
    SharedExpertsConfig,
    StandardTopKOutput,
    TopKConfig,
    TritonKernelTopKOutput,
    routing_from_topk,
)

__all__ = [
    "BypassedTopKOutput",
    "FlashInferFP4MoE",
    "FlashInferFusedMoE",
    "FusedMoE",
    "InFlexData",
    "MoeParallel",
    "MoeRunnerConfig",
    "PrecisionConfig",
    "RaggedTensorMetadata",
    "SharedExpertsConfig",
    "StandardTopKOutput",
    "TopKConfig",
    "TritonKernelTopKOutput",
    "fused_experts",
    "fused_experts_impl",
    "fused_moe",
    "get_config",
    "get_config_dtype_str",
    "get_config_file_name",
    "get_default_config",
    "get_fused_moe_impl_class",
    "get_moe_configs",
    "inplace_fused_experts",
    "inplace_fused_experts_fake",
    "invoke_fused_moe_kernel",
    "moe_align_block_size",
    "moe_sum_reduce_torch_compile",
    "moe_sum_reduce_triton",
    "outplace_fused_experts",
    "outplace_fused_experts_fake",
    "override_config",
    "quantize",
    "routing_from_topk",
    "swiglu_gpt_oss_sigmoid_alpha",
    "swiglu_no_interleaved_with_alpha_and_limit",
    "triton_kernel_fused_experts",
    "triton_kernel_fused_experts_with_bias",
    "triton_kernel_moe_forward",
    "triton_kernel_moe_with_bias_forward",
    "try_get_optimal_moe_config",
]
