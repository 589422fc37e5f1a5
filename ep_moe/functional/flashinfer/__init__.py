"""FlashInfer's FP4 calls, on any GPU and on a CPU.

Names, order and defaults of the parameters are FlashInfer's; docs/functional.md says for each what it does here.
Weights are rows in order, [up; gate] if the activation is gated; `unshuffle_weight`, `unshuffle_rows` and
`untile_scales` turn back those that are shuffled for Blackwell kernels.
"""

from ep_moe.functional.flashinfer.b12x import b12x_fused_moe
from ep_moe.functional.flashinfer.formats import unshuffle_rows, unshuffle_weight, untile_scales
from ep_moe.functional.flashinfer.trtllm import trtllm_fp4_block_scale_moe

__all__ = [
    "b12x_fused_moe",
    "trtllm_fp4_block_scale_moe",
    "unshuffle_rows",
    "unshuffle_weight",
    "untile_scales",
]
