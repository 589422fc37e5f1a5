"""The sizes of well-known models and of their MoE layers: presets.json, from the config.json of their checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ep_moe.config import ActivationConfig, EngineConfig, MoEConfig, RoutingConfig, from_mapping


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPreset:
    """One MoE layer's routed experts; `bias`: True if both GEMMs add one."""

    sizes: MoEConfig
    bias: bool = False

    def moe(self, engine: EngineConfig, **changes: Any) -> MoEConfig:
        """The layer's config. Errors: ValueError for changed sizes that do not fit each other. Local."""
        return dataclasses.replace(self.sizes, scheme=engine.scheme, layout=engine.layout, **changes)


def _layer(name: str, *, routing: Any, activation: Any = None, bias: bool = False, **sizes: Any) -> LayerPreset:
    parts: dict[str, Any] = {"routing": from_mapping(RoutingConfig, routing, name)}
    parts["activation"] = from_mapping(ActivationConfig, activation or {}, name)
    return LayerPreset(sizes=MoEConfig(**sizes, **parts), bias=bias)


_PRESETS: dict[str, Any] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
LAYER_PRESETS = {name: _layer(name, **given) for name, given in _PRESETS["layers"].items()}
# arguments of transformers' AutoConfig.for_model, without the number of layers
MODEL_PRESETS: dict[str, dict[str, Any]] = _PRESETS["models"]
