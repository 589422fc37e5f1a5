"""The MoE calls of other libraries, by their names and with their arguments, computed by `ep_moe.local_moe`.

`flashinfer` has FlashInfer's FP4 calls, `sglang` SGLang's calls and layer, `vllm` vLLM's batched experts.
docs/functional.md lists every parameter.
"""
