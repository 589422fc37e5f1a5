"""Tiny random checkpoints of published families, and what transformers' eager model says of them.

Written once, by a process without any engine; the engines' processes read them. Every file has the keys of published
configs, some of which transformers does not save.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.quantized_layouts import bits_in_words
from prompts import VOCABULARY, prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

from ep_moe.quant import (
    QuantScheme,
    StoredMatrix,
    dequantize,
    dequantize_weight,
    get_scheme,
    quantize,
    quantize_weight,
    round_trip,
    unpack_nibbles,
)
from ep_moe.weights.writing import quantization_config, stored_parts

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the experts of a checkpoint are quantized.

    Args:
        scheme: ours for the same numbers. config: quantization_config; by default that of `ep-moe quantize`.
        ignored: its key for modules that are not quantized, "" if it names them already.
        static: scales of the activations of both GEMMs. more: other tensors of each weight, by the end of their names.
    """

    scheme: str
    config: dict[str, Any] | None = None
    ignored: str = "ignore"
    static: tuple[float, float] | None = None
    more: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


BLOCKS = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
RULES = {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "dynamic": RULES}
STATIC = GPTQ | {"desc_act": True, "static_groups": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}
MX_BLOCKS = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 is column AWQ_NIBBLES[i] of eight
TOKENS = {".input_global_scale": torch.ones(1)}
FORMS = {
    "fp8_block": Form(scheme="fp8_block", config={"quant_method": "fp8", **BLOCKS}, ignored="modules_to_not_convert"),
    "fp8_tensor": Form(
        scheme="fp8_tensor",
        config={"quant_method": "fp8", "activation_scheme": "static"},
        ignored="ignored_layers",
        static=(0.02, 0.01),
    ),
    "fp8_modelopt": Form(
        scheme="fp8_tensor", config={"quant_method": "modelopt", "quant_algo": "FP8"}, static=(0.02, 0.01)
    ),
    "fp8_token": Form(scheme="fp8_token"),
    "int8_block": Form(
        scheme="int8_block", config={"quant_method": "blockwise_int8", **BLOCKS}, ignored="ignored_layers"
    ),
    "int8_token": Form(scheme="int8_token"),
    "int4_group": Form(scheme="int4_w4a16_g32_f32"),
    "int4_channel": Form(scheme="int4_w4a16_f32"),
    "int4_zp": Form(scheme="int4_w4a16_g32_zp_f32"),
    "int8_packed": Form(scheme="int8_w8a16_g32"),
    "int8_packed_zp": Form(scheme="int8_w8a16_zp_f32"),
    "gptq": Form(scheme="int4_w4a16_g32_f16", config=GPTQ, ignored=""),
    "gptq_static": Form(scheme="int4_w4a16_g32_f16", config=STATIC, ignored=""),
    "gptq8": Form(scheme="int8_w8a16_zp_f16", config=STATIC | {"bits": 8, "group_size": -1}, ignored=""),
    "gptq_zp": Form(scheme="int4_w4a16_g32_zp_f16", config=GPTQ | {"sym": False}, ignored=""),
    "awq": Form(scheme="int4_w4a16_g32_zp_f16", config=AWQ, ignored=""),
    "nvfp4_w4a16": Form(scheme="nvfp4_w4a16_divisor"),
    "nvfp4": Form(scheme="nvfp4_divisor", more=TOKENS),
    "nvfp4_modelopt": Form(scheme="nvfp4", more={".input_scale": torch.tensor(1.0)}),
    "mxfp4": Form(scheme="mxfp4_w4a16"),
    "mxfp8": Form(scheme="mxfp8"),
    "mxfp8_modelopt": Form(scheme="mxfp8", config=MODELOPT),
    "mxfp8_inverse": Form(scheme="mxfp8", config=MX_BLOCKS, ignored="modules_to_not_convert"),
}


def stored_by(matrix: torch.Tensor, form: Form) -> StoredMatrix:
    """A matrix in a form's scheme; that of GPTQ in 8 bits is symmetric, with all zero points in the middle."""
    scheme = get_scheme(form.scheme)
    if form.config is None or form.config.get("bits") != 8:
        return quantize_weight(matrix, scheme)
    scale = (matrix.abs().amax(1) / 127).half()
    values = ((matrix / scale.float()[:, None]).round().clamp(-128, 127) + 128).to(torch.uint8)
    return StoredMatrix(values, scale=scale, zero=torch.full(scale.shape, 128, dtype=torch.uint8))


def parts_of(stored: StoredMatrix, form: Form, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a weight [N, K] by the end of their names; we write all layouts but those of GPTQ and AWQ."""
    kind = get_scheme(form.scheme).weight
    if config["quant_method"] not in ("gptq", "awq"):
        return stored_parts(stored, kind, config)
    bits = 8 // kind.packed
    codes = unpack_nibbles(stored.values) if kind.packed == 2 else stored.values
    assert stored.scale is not None
    scale = stored.scale.reshape(codes.shape[0], -1)
    zero = torch.full(scale.shape, 8) if stored.zero is None else stored.zero.reshape(scale.shape).long()
    parts = {".scales": scale.t().contiguous()}
    if config["quant_method"] == "awq":
        words = (bits_in_words(part.t().numpy(), 4, AWQ_NIBBLES) for part in (codes, zero))
        return parts | dict(zip((".qweight", ".qzeros"), words, strict=True))
    parts[".g_idx"] = (torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])).int()
    parts[".qzeros"] = bits_in_words((zero.t() - 1).numpy(), bits)
    return parts | {".qweight": bits_in_words(codes.numpy(), bits).t().contiguous()}


def rounded_experts(
    module: Any,
    scheme: QuantScheme,
    static: tuple[float, float] | None,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The scheme's oracle: the inputs of both GEMMs are rounded, those of NVFP4 with a second scale for each row."""
    first, second = (None, None) if static is None else (torch.tensor([scale]) for scale in static)
    result, tokens = torch.zeros_like(x), dequantize(quantize(x, scheme, static_scale=first))
    for token, row in enumerate(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            inner = round_trip(inner[None], scheme, static_scale=second)[0]
            result[token] += weight * (module.down_proj[expert] @ inner)
    return result


def half_of(part: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """One of several equal parts of the rows; a scale of the whole matrix."""
    return part.chunk(count)[index] if part.dim() else part


def write_quantized(folder: Path, plain: Path, model: Any, form: Form) -> None:
    """Write the model of `plain` with its experts in a form, and what the model computes with the dequantized weights.

    With a scale per tensor the half of w13 that has the smaller scale is rounded again with the larger, as vLLM does.
    """
    folder.mkdir()
    scheme = get_scheme(form.scheme)
    tensors = {name: t for name, t in load_file(plain / "model.safetensors").items() if ".experts." not in name}
    ignored = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ignored += [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    settings = form.config or quantization_config(scheme, gpt_oss=False, ignored=[])
    settings = settings | ({form.ignored: ignored} if form.ignored else {})

    for name, module in model.named_modules():
        if not name.endswith("mlp.experts"):
            continue
        for second, halves in enumerate((("gate_proj", "up_proj"), ("down_proj",))):
            weight = (module.gate_up_proj, module.down_proj)[second]
            scales = {} if form.static is None else {".input_scale": torch.tensor(form.static[second])}
            for expert, matrix in enumerate(weight.data):
                made = []
                whole = stored_by(matrix, form)  # both halves at once: they share NVFP4's second scale
                for index, half in enumerate(matrix.chunk(len(halves))):
                    rows = whole.map(functools.partial(half_of, index=index, count=len(halves)))
                    made.append(stored_by(half, form) if scheme.weight.granularity in ("tensor", "block") else rows)
                dense = torch.cat([dequantize_weight(half, scheme) for half in made])
                again = form.static is not None
                weight.data[expert] = dequantize_weight(stored_by(dense, form), scheme) if again else dense
                for half, stored in zip(halves, made, strict=True):
                    for end, tensor in (parts_of(stored, form, settings) | scales | form.more).items():
                        key = f"{name}.{expert}.{half}"
                        tensors[key + (end if end[:1] == "." else f".weight{end}")] = tensor.clone()
        if scheme.payload.quantized:
            module.forward = functools.partial(rounded_experts, module, scheme, form.static)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_reference(model, folder)


def write_mxfp4(folder: Path, plain: Path, model: Any) -> None:
    """gpt-oss as it is published: experts in MXFP4, and what the same model computes with their dequantized weights."""
    folder.mkdir()
    scheme, tensors = get_scheme("mxfp4_w4a16"), load_file(plain / "model.safetensors")
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = quantization_config(scheme, gpt_oss=True, ignored=ignored)
    for name, module in model.named_modules():
        for part in ("gate_up_proj", "down_proj") if name.endswith("mlp.experts") else ():
            weight = getattr(module, part)
            stored = quantize_weight(weight.data.transpose(1, 2).contiguous(), scheme)
            weight.data = dequantize_weight(stored, scheme).transpose(1, 2).contiguous()
            del tensors[f"{name}.{part}"]
            tensors |= {f"{name}.{part}{end}": t for end, t in stored_parts(stored, scheme.weight, settings).items()}
            rounded = getattr(module, f"{part}_bias").data.bfloat16()  # as engines keep biases beside MXFP4
            getattr(module, f"{part}_bias").data, tensors[f"{name}.{part}_bias"] = rounded.float(), rounded
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_reference(model, folder)


def main(folder: Path) -> None:
    """Write all checkpoints to a folder."""
    for family in FAMILIES:
        write(family, folder / family)
    for name, form in FORMS.items():
        write_quantized(folder / f"qwen3_moe_{name}", folder / "qwen3_moe_even", make("qwen3_moe_even")[0], form)
    write_mxfp4(folder / "gpt_oss_mxfp4", folder / "gpt_oss", make("gpt_oss")[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
