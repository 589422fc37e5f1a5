"""Tiny random checkpoints of published families, and what transformers' eager model says of them.

Written once, by a process without any engine; the engines' processes read them. Every file has the keys of published
configs, some of which transformers does not save.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_checkpoints import PACKED, write_packed
from prompts import VOCABULARY, prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

from ep_moe.quant import dequantize_weight, get_scheme, quantize_weight, round_trip
from ep_moe.weights.writing import quantization_config

HIDDEN, INTERMEDIATE = 256, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def qwen3_moe(num_experts: int = 9) -> tuple[Any, dict[str, Any]]:
    """9 experts, which two ranks share unevenly; SGLang needs an even number."""
    config = Qwen3MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=num_experts,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=ROPE,
    )
    return config, {"decoder_sparse_step": 1, "mlp_only_layers": []}


def deepseek_v3() -> tuple[Any, dict[str, Any]]:
    """Groups, a bias that only chooses, a shared expert, and a first layer without experts."""
    config = DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        rope_parameters=ROPE,
    )
    published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}
    return config, published


def gpt_oss() -> tuple[Any, dict[str, Any]]:
    """Biases, clamps, rows of gate and up in turns, sinks and a sliding window."""
    config = GptOssConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    )
    return config, {}


FAMILIES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_even": functools.partial(qwen3_moe, 8),
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
}


def make(family: str) -> tuple[Any, dict[str, Any]]:
    """A random float32 model, and the keys of its published config that transformers does not save."""
    torch.manual_seed(11)
    config, published = FAMILIES[family]()
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "experts" in name or "correction_bias" in name or "sinks" in name or "router" in name or "gate" in name:
                tensor.normal_(std=0.5 if "bias" in name or "sinks" in name else 0.1)
    return model, published


def logits_of(model: Any) -> list[torch.Tensor]:
    """Logits [T, vocabulary] of each prompt."""
    with torch.no_grad():
        return [model(ids.unsqueeze(0)).logits[0] for ids in prompts()]


def save_reference(model: Any, folder: Path) -> None:
    """Write the logits of all prompts, and for each MoE block the rows [tokens, H] that it gets and returns."""
    blocks: dict[int, list[list[torch.Tensor]]] = {}

    def note(layer: int, given: tuple[Any, ...], returned: Any) -> None:
        returned = returned[0] if isinstance(returned, tuple) else returned
        rows = [tensor.reshape(-1, HIDDEN) for tensor in (given[0], returned)]
        for kept, found in zip(blocks.setdefault(layer, [[], []]), rows, strict=True):
            kept.append(found)

    for layer, decoder in enumerate(model.model.layers):
        if hasattr(decoder.mlp, "experts"):
            decoder.mlp.register_forward_hook(lambda _, given, returned, layer=layer: note(layer, given, returned))
    torch.save(logits_of(model), folder / "reference.pt")
    torch.save({layer: [torch.cat(rows) for rows in pair] for layer, pair in blocks.items()}, folder / "blocks.pt")


def write(family: str, folder: Path) -> None:
    """Write a checkpoint and its reference."""
    model, published = make(family)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | published | {"torch_dtype": "float32"}
    path.write_text(json.dumps(config))
    save_reference(model, folder)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
CHANNELS = quantization_config(get_scheme("fp8_token"), gpt_oss=False, ignored=[])
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
INT8_BLOCKS = BLOCKS | {"quant_method": "blockwise_int8"}
QUANTIZED: dict[str, tuple[str, dict[str, Any], str]] = {  # scheme, quantization_config, its key for what is not
    "fp8_block": ("fp8_block", BLOCKS, "modules_to_not_convert"),
    "fp8_tensor": ("fp8_tensor", TENSORS, "ignored_layers"),
    "fp8_modelopt": ("fp8_tensor", MODELOPT, "ignore"),
    "fp8_token": ("fp8_token", CHANNELS, "ignore"),
    "int8_block": ("int8_block", INT8_BLOCKS, "ignored_layers"),
    "int8_token": ("int8_token", quantization_config(get_scheme("int8_token"), gpt_oss=False, ignored=[]), "ignore"),
}
INPUT_SCALES = (0.02, 0.01)  # static, of the activations of both GEMMs


def write_quantized(folder: Path, plain: Path, model: Any, form: str) -> None:
    """The same model with its experts in fp8, and what the scheme's oracle computes.

    The oracle dequantizes the weights, and rounds the input of each GEMM to fp8 and back. With a scale per tensor it
    rounds the half of w13 that has the smaller scale again, with the larger one, as vLLM does.
    """
    folder.mkdir()
    name, settings, key = QUANTIZED[form]
    scheme = get_scheme(name)
    suffix = "_scale_inv" if form.endswith("_block") else "_scale"
    static = name == "fp8_tensor"
    tensors = load_file(plain / "model.safetensors")
    for weight in [weight for weight in tensors if ".experts." in weight]:
        stored = quantize_weight(tensors[weight], scheme)
        assert stored.scale is not None
        scale = stored.scale.unsqueeze(-1) if form.endswith("_token") else stored.scale
        tensors[weight], tensors[weight + suffix] = stored.values, scale.clone()
        if static:
            second = "down_proj" in weight
            tensors[weight.replace("weight", "input_scale")] = torch.tensor(INPUT_SCALES[second])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = [weight for weight, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ignored += [weight.removesuffix(".weight") for weight in tensors if weight.endswith("mlp.gate.weight")]
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = settings | {key: ignored}
    (folder / "config.json").write_text(json.dumps(config))

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([dequantize_weight(quantize_weight(one, scheme), scheme) for one in weight])

    def rounded_halves(weight: torch.Tensor) -> torch.Tensor:
        halves = [rounded(half) for half in weight.chunk(2, dim=1)]
        return torch.cat(halves, dim=1) if not static else rounded(torch.cat(halves, dim=1))

    def round_rows(x: torch.Tensor, second: bool) -> torch.Tensor:
        scale = torch.tensor([INPUT_SCALES[second]]) if static else None
        return round_trip(x[None], scheme, static_scale=scale)[0]

    def forward(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for token, row in enumerate(x):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                gate, up = (self.gate_up_proj[expert] @ round_rows(row, False)).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                result[token] += weight * (self.down_proj[expert] @ round_rows(inner, True))
        return result

    for module in model.modules():
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            module.gate_up_proj.data = rounded_halves(module.gate_up_proj.data)
            module.down_proj.data = rounded(module.down_proj.data)
            module.forward = forward.__get__(module)
    save_reference(model, folder)


def write_mxfp4(folder: Path, plain: Path, model: Any) -> None:
    """gpt-oss as it is published: experts in MXFP4, and what the same model computes with their dequantized weights."""
    folder.mkdir()
    scheme = get_scheme("mxfp4_w4a16")
    tensors = load_file(plain / "model.safetensors")
    experts = {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}
    for name, module in experts.items():
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(module, part)
            stored = quantize_weight(weight.data.transpose(1, 2).contiguous(), scheme)
            assert stored.scale is not None
            weight.data = dequantize_weight(stored, scheme).transpose(1, 2).contiguous()
            del tensors[f"{name}.{part}"]
            tensors[f"{name}.{part}_blocks"] = stored.values.unflatten(-1, (-1, 16)).contiguous()
            tensors[f"{name}.{part}_scales"] = stored.scale.view(torch.uint8)
            rounded = getattr(module, f"{part}_bias").data.bfloat16()  # as engines keep biases beside MXFP4
            getattr(module, f"{part}_bias").data, tensors[f"{name}.{part}_bias"] = rounded.float(), rounded
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (folder / "config.json").write_text(json.dumps(config))
    save_reference(model, folder)


def main(folder: Path) -> None:
    """Write all checkpoints to a folder."""
    for family in FAMILIES:
        write(family, folder / family)
    for form in QUANTIZED:
        write_quantized(folder / f"qwen3_moe_{form}", folder / "qwen3_moe_even", make("qwen3_moe_even")[0], form)
    for form in PACKED:
        model = make("qwen3_moe_even")[0]
        write_packed(folder / f"qwen3_moe_{form}", folder / "qwen3_moe_even", model, form)
        save_reference(model, folder / f"qwen3_moe_{form}")
    write_mxfp4(folder / "gpt_oss_mxfp4", folder / "gpt_oss", make("gpt_oss")[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
