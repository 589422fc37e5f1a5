"""The MoE calls of other libraries, by their names and with their arguments, computed by `ep_moe.local_moe`.

`flashinfer` has FlashInfer's FP4 calls, `flashinfer_layouts` undoes its shuffling of weights. docs/functional.md lists
every parameter. The modules import each other's helpers from `fp4`; nothing is imported here.
"""
