"""Cases of weight formats: of a loaded model, and of those that are not read."""

from types import SimpleNamespace
from typing import Any

import engine_cases
import pytest
import torch
from vllm.model_executor.model_loader import get_model_loader

from ep_moe.engines.vllm.parameters import format_of


def reloaded(made: Any) -> None:
    """Weights that vLLM loads once more give the same; so does a second look at them."""
    get_model_loader(made.config.load_config).load_weights(made.model, made.config.model_config)
    for _ in range(2):
        for layer in made.experts:
            layer.quant_method.process_weights_after_loading(layer)
    made.check()


def swaps_are_seen(made: Any) -> None:
    """`engine_cases.swaps_are_seen`."""
    engine_cases.swaps_are_seen(made, made.experts[0].quant_method.moe_kernel.fused_experts._weights.w13)


def formats_are_refused() -> None:
    """Packed weights that we do not read are named with the option that stands against it."""
    moe = SimpleNamespace(in_dtype=torch.bfloat16)
    ints = {"num_bits": 4, "symmetric": True, "actorder": None, "strategy": "group", "group_size": 128}
    gptq = {"weight_bits": 4, "is_sym": True, "desc_act": False, "group_size": 128, "full_config": {}}
    awq = {"weight_bits": 4, "zero_point": True, "group_size": 128}

    def method(name: str, **parts: Any) -> Any:
        made = type(name, (), {})()
        made.__dict__.update(parts, moe=moe)
        return made

    def packed(**changes: Any) -> Any:
        return method("CompressedTensorsWNA16MoEMethod", weight_quant=SimpleNamespace(**(ints | changes)))

    def gptq_with(**changes: Any) -> Any:
        return method("AutoGPTQMoEMethod", quant_config=SimpleNamespace(**(gptq | changes)))

    def awq_with(**changes: Any) -> Any:
        return method("AutoAWQMoEMethod", quant_config=SimpleNamespace(**(awq | changes)))

    def rows(ranks: int, **changes: Any) -> Any:
        settings = {"weight_bits": 4, "has_zp": True, "group_size": 32}
        sizes = {"hidden_dim": 64, "intermediate_size_per_partition": 96}
        made = method("MoeWNA16Method", quant_config=SimpleNamespace(**(settings | changes)))
        made.moe = SimpleNamespace(**vars(moe), **sizes, moe_parallel_config=SimpleNamespace(ep_size=ranks))
        return made

    for good, name in (
        (packed(), "int4_w4a16_g128"),
        (packed(num_bits=8, symmetric=False), "int8_w8a16_g128_zp"),
        (gptq_with(group_size=-1, desc_act=True), "int4_w4a16"),
        (gptq_with(weight_bits=8), "int8_w8a16_g128_zp"),
        (awq_with(), "int4_w4a16_g128_zp"),
        (rows(1), "int4_w4a16_g32_zp"),
        (rows(2, has_zp=False), "int4_w4a16_g32"),
    ):
        assert format_of(good, interleaved=False).scheme.name == name
    for bad, words in (
        (packed(num_bits=2), "num_bits 2"),
        (packed(actorder="group"), "actorder 'group'.*order of w13"),
        (packed(strategy="tensor"), "strategy 'tensor'"),
        (gptq_with(is_sym=False), "sym false"),
        (gptq_with(desc_act=True), "desc_act.*order of w13"),
        (awq_with(zero_point=False), "AWQ weights without zero points"),
        (rows(2), "several expert-parallel ranks"),
        (rows(1, group_size=64), r"groups of 64 do not divide intermediate \(96\)"),
        (method("CompressedTensorsW4A4Nvfp4MoEMethod"), "does not tell NVFP4 tokens"),
        (method("ModelOptNvFp4FusedMoE", use_a16=False, per_token_activation=True), "for each token"),
        (method("StrangeMethod"), "weights of StrangeMethod are not read here"),
    ):
        with pytest.raises(ValueError, match=words):
            format_of(bad, interleaved=False)
    with pytest.raises(ValueError, match="interleaved gate and up rows"):
        format_of(packed(), interleaved=True)
