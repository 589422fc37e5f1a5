"""vLLM's batched experts and their prepare/finalize, on any GPU and on a CPU, with or without vLLM installed.

Names, order and defaults of the parameters are vLLM's; docs/functional.md says for each what it does here. The classes
on vLLM's own modular bases, which send tokens between ranks, are in `ep_moe.engines.vllm`.
"""

from ep_moe.functional.vllm.experts import BatchedTritonExperts, NaiveBatchedExperts
from ep_moe.functional.vllm.formats import FusedMoEActivationFormat, FusedMoEQuantConfig
from ep_moe.functional.vllm.gemm import invoke_moe_batched_triton_kernel
from ep_moe.functional.vllm.prepare_finalize import BatchedPrepareAndFinalize
from ep_moe.functional.vllm.quantize import batched_moe_kernel_quantize_input

__all__ = [
    "BatchedPrepareAndFinalize",
    "BatchedTritonExperts",
    "FusedMoEActivationFormat",
    "FusedMoEQuantConfig",
    "NaiveBatchedExperts",
    "batched_moe_kernel_quantize_input",
    "invoke_moe_batched_triton_kernel",
]
