"""Models of published sizes with random weights, for engines that are run whole: their configs, and what fills them.

`releases.entry_points` names `register_vllm` and `register_sglang`: engines call them in each of their processes.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import types
import zlib
from pathlib import Path
from typing import Any

import torch

STACKS_AT = "EP_MOE_SERVE_STACKS_AT"  # seconds since 1970
FP8_STD, FP8_SCALES = 64.0, (2e-4, 4e-4)  # about 0.02 when multiplied
DRAWN = 1 << 26  # numbers at once
PACKED_SCALE = 119  # 2^-8 in MXFP4, whose values go up to 6: with 2^-7, 24 layers turn noise into other tokens
WEIGHT_STD, EMBEDDING_STD = 0.02, 0.5  # tokens then differ more than layers add to them, so that noise stays small

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    },
    "deepseek-v3-4-layers": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,  # 3 as published: one dense layer and three of experts stand for 3 and 58
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


MOST_EXPERTS = 1 << 20  # of a model whose config does not say


def write_model(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the config of a model, with fewer layers if wanted, and return its folder.

    Errors: ValueError if the model has no such number of layers.
    """
    config = dict(MODELS[name])
    most = config["num_hidden_layers"]
    if layers is not None:
        if not 2 <= layers <= most:
            raise ValueError(f"layers ({layers}) are not from 2 to {most}, which {name} has")
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def fill(model: torch.nn.Module, rank: int = 0) -> None:
    """Random weights of a trained model's size, the same in every run: engines' own dummy weights are smaller than
    what the experts' output needs to be seen in a token, have negative scales, and leave packed bytes as they are.

    Every expert has other weights, and a load balancer's copies, which engines number behind the model's experts, have
    those of the first experts.

    Args:
        rank: of those that have as many experts each, in order. What is no expert is the same on every rank.
    """
    count = num_experts(getattr(model, "config", None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta" or parameter.numel() == 1:  # single numbers are scales of caches
                continue
            if ".experts." in name and parameter.dim() > 1:
                first = rank * len(parameter)
                parts = [(part, (first + i) % (count or MOST_EXPERTS)) for i, part in enumerate(parameter.data)]
            else:
                parts = [(parameter.data, 0)]
            for part, expert in parts:
                generator = torch.Generator(part.device).manual_seed(zlib.crc32(f"{name} {expert}".encode()))
                _fill_one(name, part, generator)


def num_experts(config: Any) -> int:
    """The experts of a layer by a model's config, without copies; 0 if it does not say."""
    text = getattr(config, "text_config", None) or config
    names = ("num_experts", "n_routed_experts", "num_local_experts")  # of Qwen3, DeepSeek-V3 and gpt-oss
    return next((getattr(text, name) for name in names if getattr(text, name, None)), 0)


def _fill_one(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
    scale = "scale" in name.rpartition(".")[2]
    if not torch.is_floating_point(values):
        if scale:
            values.fill_(PACKED_SCALE)
        elif values.dtype is torch.uint8:
            values.random_(0, 256, generator=generator)
    elif torch.finfo(values.dtype).bits < 16:
        rows = max(1, DRAWN * values.shape[0] // values.numel())
        for part in values.split(rows):  # what is drawn takes four times the memory
            drawn = torch.randn(part.shape, generator=generator, device=part.device)
            part.copy_((drawn * FP8_STD).clamp_(-448, 448).to(part.dtype))
    elif scale:
        values.uniform_(*FP8_SCALES, generator=generator)
    elif "norm" in name and values.dim() == 1:
        values.fill_(1)
    else:
        values.normal_(0, EMBEDDING_STD if "embed" in name else WEIGHT_STD, generator=generator)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def stand_in_numba() -> None:
    """vLLM imports it for drafts of n-grams, which nothing here makes; it may refuse the machine's numpy."""
    try:
        importlib.import_module("numba")
    except ImportError:
        stand_in = types.ModuleType("numba")
        stand_in.njit = stand_in.jit = lambda *words, **_: words[0] if words and callable(words[0]) else lambda f: f  # type: ignore[attr-defined]
        stand_in.prange, stand_in.get_num_threads = range, lambda: 1  # type: ignore[attr-defined]
        stand_in.set_num_threads = lambda number: None  # type: ignore[attr-defined]
        sys.modules["numba"] = stand_in


def _print_stacks_at_the_end() -> None:
    """This process of an engine prints its stacks shortly before its turn is ended, at the time in STACKS_AT."""
    faulthandler.dump_traceback_later(max(float(os.environ[STACKS_AT]) - time.time(), 1.0))


def register_vllm() -> None:
    """A general plug-in of vLLM: its loader of dummy weights calls `fill`."""
    _print_stacks_at_the_end()
    stand_in_numba()
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, config: fill(model, _rank())


def register_sglang() -> None:
    """A plug-in of SGLang that does the same."""
    _print_stacks_at_the_end()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(target, lambda model, *_, **__: fill(model, _rank()), HookType.REPLACE)
