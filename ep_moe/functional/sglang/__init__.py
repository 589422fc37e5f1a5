"""SGLang's fused experts, on any GPU and on a CPU.

Names, order and defaults of the parameters are SGLang's; docs/functional.md says for each what it does here.
"""

from ep_moe.functional.sglang.calls import (
    MoeRunnerConfig,
    StandardTopKOutput,
    fused_experts,
    fused_experts_impl,
    fused_moe,
    inplace_fused_experts,
    inplace_fused_experts_fake,
    outplace_fused_experts,
    outplace_fused_experts_fake,
)
from ep_moe.functional.sglang.pieces import (
    get_config_dtype_str,
    get_config_file_name,
    moe_align_block_size,
    moe_sum_reduce_torch_compile,
    moe_sum_reduce_triton,
    swiglu_with_alpha_and_limit,
)

__all__ = [
    "MoeRunnerConfig",
    "StandardTopKOutput",
    "fused_experts",
    "fused_experts_impl",
    "fused_moe",
    "get_config_dtype_str",
    "get_config_file_name",
    "inplace_fused_experts",
    "inplace_fused_experts_fake",
    "moe_align_block_size",
    "moe_sum_reduce_torch_compile",
    "moe_sum_reduce_triton",
    "outplace_fused_experts",
    "outplace_fused_experts_fake",
    "swiglu_with_alpha_and_limit",
]
