"""The sizes of well-known models and of their MoE layers, from the config.json of their checkpoints."""

import dataclasses
from typing import Any

from ep_moe.config import ActivationConfig, ActivationKind, EngineConfig, MoEConfig, RoutingConfig, RoutingMethod


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPreset:
    """One MoE layer's routed experts.

    Args:
        hidden: H. intermediate: I of one expert. num_experts: E. routing: with K, experts per token.
        activation: between the two GEMMs. bias: True if both GEMMs add one.
    """

    hidden: int
    intermediate: int
    num_experts: int
    routing: RoutingConfig
    activation: ActivationConfig = ActivationConfig()
    bias: bool = False

    def moe(self, engine: EngineConfig) -> MoEConfig:
        """The layer's config. Errors: ValueError for sizes that do not fit each other. Local."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            routing=self.routing,
            activation=self.activation,
            scheme=engine.scheme,
            layout=engine.layout,
        )


def _softmax(num_topk: int) -> RoutingConfig:
    return RoutingConfig(method=RoutingMethod.RENORMALIZE_NAIVE, num_topk=num_topk)


LAYER_PRESETS: dict[str, LayerPreset] = {
    "deepseek-v3": LayerPreset(
        hidden=7168,
        intermediate=2048,
        num_experts=256,
        routing=RoutingConfig(
            method=RoutingMethod.DEEPSEEK_V3, num_topk=8, num_group=8, topk_group=4, routed_scaling_factor=2.5
        ),
    ),
    "qwen3-235b": LayerPreset(hidden=4096, intermediate=1536, num_experts=128, routing=_softmax(8)),
    "qwen3-30b": LayerPreset(hidden=2048, intermediate=768, num_experts=128, routing=_softmax(8)),
    "mixtral": LayerPreset(
        hidden=4096,
        intermediate=14336,
        num_experts=8,
        routing=RoutingConfig(method=RoutingMethod.RENORMALIZE, num_topk=2),
    ),
    "gpt-oss-120b": LayerPreset(
        hidden=2880,
        intermediate=2880,
        num_experts=128,
        routing=RoutingConfig(method=RoutingMethod.RENORMALIZE, num_topk=4),
        activation=ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0),
        bias=True,
    ),
    "tiny": LayerPreset(hidden=256, intermediate=128, num_experts=16, routing=_softmax(4)),
}

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-235b": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
}  # arguments of transformers' Qwen3MoeConfig, except for the number of layers
