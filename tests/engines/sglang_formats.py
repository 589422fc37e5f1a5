"""Cases of weight formats: of a loaded model, and of those that are not read."""

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers.quantization import QUANTIZATION_METHODS

from ep_moe.engines.sglang import eligibility
from ep_moe.engines.sglang.parameters import format_of
from ep_moe.functional.sglang.layer_formats import LayerFormat, layer_format


def rows_in_turns(made: Any) -> None:
    """Rows of gate and up that a model says, after the layer is constructed, to stand in turns."""
    for layer in made.experts:
        layer.inference_moe_w13_interleaved = True
        for name in ("w13_weight", "w13_weight_scale"):
            data = getattr(layer, name).data.view(torch.uint8)
            data.copy_(torch.stack(data.chunk(2, dim=1), dim=2).flatten(1, 2))
    made.use(None)
    made.check()


def runner_is_needed(engine: Callable[[], Any]) -> None:
    """SGLang's refusal of a runner for an a2a backend stands if the layer is not ours."""
    refused = mock.patch.object(eligibility, "kind_of_layer", side_effect=ValueError("not here"))
    with refused, pytest.raises(NotImplementedError, match="requires a fused func"), engine():
        pass


def formats_are_refused() -> None:
    """Formats that we do not read are named with what stands against them."""
    parts = {"w13_scales": torch.empty(0, dtype=torch.half), "w13_weight_scale": torch.empty(0, dtype=torch.bfloat16)}
    gptq = {"is_sym": True, "weight_bits": 4, "group_size": 128, "desc_act": False, "full_config": {}}
    awq = {"weight_bits": 4, "group_size": 128, "zero_point": True}
    ints = {"num_bits": 4, "sym": True, "actorder": None, "strategy": "group", "group_size": 128}

    def made(name: str, **attributes: Any) -> Any:
        found = type(name, (), {"__module__": __name__})()
        found.__dict__.update(attributes)
        return found

    def read(holder: Any, *, of: str = "", ranks: int = 1, alpha: float | None = None) -> str:
        runner = types.SimpleNamespace(gemm1_alpha=alpha, gate_up_interleaved=alpha is not None)
        settings = {"scheme": holder, "moe_runner_config": runner, "moe_ep_size": ranks, "group_size": 32}
        layer = types.SimpleNamespace(**parts, **settings)
        return format_of(layer, made(of) if of else holder).scheme.name

    def gptq_of(**changes: Any) -> Any:
        return made("GPTQMarlinMoEScheme", quant_config=types.SimpleNamespace(**gptq | changes))

    def awq_of(**changes: Any) -> Any:
        return made("AWQMoEScheme", quant_config=types.SimpleNamespace(**awq | changes))

    def integers(**changes: Any) -> Any:
        return made("CompressedTensorsWNA16MoE", **ints | changes)

    def rows(**changes: Any) -> Any:
        settings = {"weight_bits": 4, "has_zp": True}
        return made("MoeWNA16Method", quant_config=types.SimpleNamespace(**settings | changes))

    compressed = "CompressedTensorsFusedMoEMethod"
    assert read(gptq_of(), of="GPTQMarlinMoEMethod") == "int4_w4a16_g128_f16"
    assert read(gptq_of(weight_bits=8, group_size=-1), of="GPTQMarlinMoEMethod") == "int8_w8a16_zp_f16"
    assert read(awq_of(), of="AWQMoEMethod") == "int4_w4a16_g128_zp_f16"
    assert read(integers(strategy="channel"), of=compressed) == "int4_w4a16"
    assert read(rows(has_zp=False), ranks=2) == "int4_w4a16_g32_f16"
    for holder, options, words in (
        (gptq_of(desc_act=True), {"of": "GPTQMarlinMoEMethod"}, "desc_act.*order of w13"),
        (gptq_of(is_sym=False), {"of": "GPTQMarlinMoEMethod"}, "GPTQ weights with zero points"),
        (awq_of(zero_point=False), {"of": "AWQMoEMethod"}, "AWQ weights without zero points"),
        (awq_of(), {"of": "AWQMoEMethod", "alpha": 1.7}, "interleaved gate and up rows"),
        (integers(sym=False), {"of": compressed}, "packed weights with zero points"),
        (integers(actorder="group"), {"of": compressed}, "actorder 'group'"),
        (rows(), {"ranks": 2}, "several expert-parallel ranks"),
        (rows(weight_bits=8), {}, "8 bits with zero points"),
        (made("StrangeMethod"), {}, "weights of StrangeMethod are not read here"),
    ):
        with pytest.raises(ValueError, match=words):
            read(holder, **options)


def config_objects() -> None:
    """Our own `FusedMoE` reads SGLang's config objects as the `quantization_config` that they are made of."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "dynamic": False,
    }
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:model.layers.2.mlp.*"],
    }
    blocks = {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
    bytes_ = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    skipping = awq | {"modules_to_not_convert": ["model.layers.2.mlp"]}
    for name, config, scheme in (
        ("gptq_marlin", gptq, "int4_w4a16_g32"),
        ("gptq", gptq, "int4_w4a16_g32_zp"),  # the object does not say that there are no zero points
        ("moe_wna16", gptq, "int4_w4a16_g32"),
        ("awq_marlin", skipping, "int4_w4a16_g64_zp"),
        ("awq", skipping, "int4_w4a16_g64_zp"),
        ("compressed-tensors", packed, "int4_w4a16_g128"),
        ("blockwise_int8", blocks, "int8_block_64x128"),
        ("mxfp8", bytes_, "mxfp8"),
    ):
        if name not in QUANTIZATION_METHODS:
            assert name == "gptq", name  # which 0.5.23 reads as gptq_marlin
            continue
        quantized = QUANTIZATION_METHODS[name].from_config(dict(config))
        found = layer_format(quantized, "model.layers.1.mlp.experts")
        assert found.scheme.name == scheme, f"{name}: {found.scheme.name}"
        said = config | {"sym": False} if name == "gptq" else config
        assert found == layer_format(said, ""), name
        plain = layer_format(quantized, "model.layers.2.mlp.experts") == LayerFormat()
        assert plain == ("model.layers.2" in str(config)), name
