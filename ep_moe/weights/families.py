"""How model families name their experts in a Hugging Face checkpoint: one entry of `FAMILIES` each.

Letters: E logical experts, H hidden, I intermediate, K top-k.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from ep_moe.config import ActivationConfig, ActivationKind, MoEConfig, RoutingConfig, RoutingMethod

ACTIVATIONS = {"silu": ActivationKind.SILU, "swish": ActivationKind.SILU, "gelu": ActivationKind.GELU}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensor:
    """One kind of tensor that holds experts.

    Args:
        name: in the checkpoint, with `{layer}` and, where every expert has a tensor of its own, `{expert}`; without
            `{expert}` all E experts are stacked along the first dimension.
        field: of `ExpertWeights` that it fills, "w13" or "w2".
        rows: which rows of that field, of each expert.
    """

    name: str
    field: Literal["w13", "w2"]
    rows: Literal["gate", "up", "all"] = "all"

    @property
    def stacked(self) -> bool:
        """True where one tensor holds all experts."""
        return "{expert}" not in self.name

    def shape(self, config: MoEConfig) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        if self.field == "w2":
            matrix = (config.hidden, config.intermediate)
        else:
            halves = 2 if self.rows == "all" and config.activation.kind.gated else 1
            matrix = (halves * config.intermediate, config.hidden)
        return (config.num_experts, *matrix) if self.stacked else matrix


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models.

    Args:
        forms: the ways in which checkpoints store a layer's experts; each form covers w13 and w2 whole.
        experts_module: name of a layer's experts in the transformers model, with `{layer}`.
        routing: builds the routing config from config.json and K.
        renames: (part of a checkpoint name, what the transformers model calls it) of tensors that are not experts.
        num_experts: the keys of config.json that may hold E, the first that is there counts; transformers 5 writes
            another than published checkpoints have.
        hidden, intermediate, num_topk, activation: the keys of config.json.
    """

    forms: tuple[tuple[ExpertTensor, ...], ...]
    experts_module: str
    routing: Callable[[Mapping[str, Any], int], RoutingConfig]
    renames: tuple[tuple[str, str], ...] = ()
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    hidden: str = "hidden_size"
    intermediate: str = "moe_intermediate_size"
    num_topk: str = "num_experts_per_tok"
    activation: str = "hidden_act"


def _forms(prefix: str, gate: str, up: str, down: str) -> tuple[tuple[ExpertTensor, ...], ...]:
    """Each expert by itself, as published checkpoints have it, and stacked, as transformers 5 keeps it in memory."""
    each = f"{prefix}.{{expert}}"
    return (
        (
            ExpertTensor(name=f"{each}.{gate}.weight", field="w13", rows="gate"),
            ExpertTensor(name=f"{each}.{up}.weight", field="w13", rows="up"),
            ExpertTensor(name=f"{each}.{down}.weight", field="w2"),
        ),
        (
            ExpertTensor(name="model.layers.{layer}.mlp.experts.gate_up_proj", field="w13"),
            ExpertTensor(name="model.layers.{layer}.mlp.experts.down_proj", field="w2"),
        ),
    )


def _softmax_routing(config: Mapping[str, Any], num_topk: int) -> RoutingConfig:
    """Softmax over all experts, top-k, and the division by the sum only where `norm_topk_prob` asks for it."""
    renormalise = config.get("norm_topk_prob", False)
    method = RoutingMethod.RENORMALIZE_NAIVE if renormalise else RoutingMethod.DEFAULT
    return RoutingConfig(method=method, num_topk=num_topk)


def _renormalised_routing(config: Mapping[str, Any], num_topk: int) -> RoutingConfig:
    del config
    return RoutingConfig(method=RoutingMethod.RENORMALIZE, num_topk=num_topk)


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        forms=_forms("model.layers.{layer}.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        experts_module="model.layers.{layer}.mlp.experts",
        routing=_softmax_routing,
    ),
    "mixtral": Family(
        forms=_forms("model.layers.{layer}.block_sparse_moe.experts", "w1", "w3", "w2"),
        experts_module="model.layers.{layer}.mlp.experts",
        routing=_renormalised_routing,
        renames=((".block_sparse_moe.", ".mlp."),),
        intermediate="intermediate_size",
    ),
}


class TransformersConfig(Protocol):
    """What `transformers.PreTrainedConfig` offers here."""

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        ...


Source = str | Path | Mapping[str, Any] | TransformersConfig


def read_config(source: Source) -> tuple[Mapping[str, Any], str]:
    """Return config.json as a mapping, and how errors call it.

    Args:
        source: a checkpoint directory, the content of its config.json, or a transformers config.
    Errors: ValueError for a directory without config.json and for a config.json that is not JSON. Local.
    """
    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, str | Path):
        return source.to_dict(), type(source).__name__
    path = Path(source) / "config.json"
    if not path.is_file():
        raise ValueError(f"{source} has no config.json, so it is not a Hugging Face checkpoint directory")
    try:
        return json.loads(path.read_text(encoding="utf-8")), str(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def find_family(source: Source) -> Family:
    """Return the entry of `FAMILIES` for a config's `model_type`. Errors: ValueError lists the known ones. Local."""
    return family_of(*read_config(source))


def moe_config(source: Source) -> MoEConfig:
    """Read what a model's MoE layers are.

    Args:
        source: a checkpoint directory, the content of its config.json, or a transformers config.
    Returns: sizes, routing and activation; the scheme and the layout are the defaults of `MoEConfig`.
    Errors: ValueError for an unknown model_type or activation, or for a key that is missing. Local.
    """
    return moe_config_of(*read_config(source))


def family_of(config: Mapping[str, Any], name: str) -> Family:
    """`find_family` of a config that is read already; errors call it `name`. Local."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{name}: model_type ({model_type!r}) is not one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def moe_config_of(config: Mapping[str, Any], name: str) -> MoEConfig:
    """`moe_config` of a config that is read already; errors call it `name`. Local."""
    family = family_of(config, name)

    def value(*keys: str) -> Any:
        found = next((config[key] for key in keys if config.get(key) is not None), None)
        if found is None:
            raise ValueError(f"{name}: no key {' or '.join(keys)}, which model_type {config['model_type']!r} needs")
        return found

    activation = value(family.activation)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: {family.activation} ({activation!r}) is not one of {', '.join(ACTIVATIONS)}")
    return MoEConfig(
        hidden=value(family.hidden),
        intermediate=value(family.intermediate),
        num_experts=value(*family.num_experts),
        routing=family.routing(config, value(family.num_topk)),
        activation=ActivationConfig(kind=ACTIVATIONS[activation]),
    )
