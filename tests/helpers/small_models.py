"""Models of transformers with random weights, small enough for tests, and inputs of them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,  # at the default of 0.02 the experts would hardly move a logit
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
LOGITS_LIMIT = 1e-5  # of the largest logit


def make_config(model_type: str, **sizes: Any) -> PreTrainedConfig:
    """A config with `SIZES` but for other sizes."""
    return type(AutoConfig.for_model(model_type))(**SIZES | sizes)


def make_model(model_type: str, *, seed: int = 11, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """A model of such a config with random weights and eager experts."""
    torch.manual_seed(seed)
    config = make_config(model_type, **sizes)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=dtype).eval()


def token_ids(seed: int = 0, rows: int = 2, length: int = 7) -> torch.Tensor:
    """Tokens [rows, length] of the models' vocabulary, none of them special."""
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens, whole if transformers has spread them over ranks."""
    with torch.no_grad():
        logits = model(ids).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits."""
    assert (found - expected).abs().max() < LOGITS_LIMIT * expected.abs().max()
