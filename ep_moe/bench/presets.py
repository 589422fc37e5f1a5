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


def _qwen3(hidden: int, intermediate: int, experts: int, topk: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    """Arguments of transformers' Qwen3MoeConfig; `heads` are queries, keys and values, and the size of one."""
    return {
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
        "vocab_size": 151936,
    }


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b": _qwen3(2048, 768, 128, 8, (32, 4, 128)),
    "qwen3-235b": _qwen3(4096, 1536, 128, 8, (64, 4, 128)),
    "tiny": _qwen3(64, 32, 8, 2, (4, 2, 16)) | {"vocab_size": 256},
}  # without the number of layers
