"""How model families name their experts in a Hugging Face checkpoint: one entry of `FAMILIES` each.

Letters: E logical experts, H hidden, I intermediate, K top-k.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind, MoEConfig, RoutingConfig, RoutingMethod

ACTIVATIONS = {"silu": ActivationKind.SILU, "swish": ActivationKind.SILU, "gelu": ActivationKind.GELU}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensor:
    """One kind of tensor that holds experts.

    Args:
        name: in the checkpoint, with `{layer}` and, where every expert has a tensor of its own, `{expert}`; without
            `{expert}` all E experts are stacked along the first dimension.
        field: of `ExpertWeights` that it fills.
        rows: which rows of that field, of each expert.
        transposed: the matrix of an expert is [columns, rows] in the checkpoint.
        interleaved: rows of the gate and of the linear half take turns in the checkpoint, the gate's first.
    """

    name: str
    field: Literal["w13", "w2", "w13_bias", "w2_bias"]
    rows: Literal["gate", "up", "all"] = "all"
    transposed: bool = False
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        """True where one tensor holds all experts."""
        return "{expert}" not in self.name

    def shape(self, config: MoEConfig) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        halves = 2 if self.rows == "all" and config.activation.kind.gated else 1
        rows = halves * config.intermediate if self.field in ("w13", "w13_bias") else config.hidden
        columns = {"w13": (config.hidden,), "w2": (config.intermediate,)}.get(self.field, ())
        shape = (*columns, rows) if self.transposed else (rows, *columns)
        return (config.num_experts, *shape) if self.stacked else shape

    def place(self, out: torch.Tensor) -> torch.Tensor:
        """The view of one expert's field, [rows, columns] or [rows], that this tensor fills, ordered as on disk.

        Example: of gpt-oss' w13 [2I, H] it is [H, I, 2], the last dimension gate and linear half. Local.
        """
        if self.rows != "all":
            gate, up = out.chunk(2)
            out = gate if self.rows == "gate" else up
        if self.interleaved:
            out = out.unflatten(0, (2, -1)).transpose(0, 1)
        return out.movedim(-1, 0) if self.transposed else out


Form = tuple[ExpertTensor, ...]


def _hidden_act(config: Mapping[str, Any], name: str) -> ActivationConfig:
    """The gated form of `hidden_act`."""
    activation = _value(config, name, "hidden_act")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: hidden_act ({activation!r}) is not one of {', '.join(ACTIVATIONS)}")
    return ActivationConfig(kind=ACTIVATIONS[activation])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models.

    Args:
        forms: the ways in which checkpoints store a layer's experts; each form covers their fields whole.
        routing, activation: build these configs from config.json and what errors call it.
        renames: (part of a checkpoint name, what the transformers model calls it) of tensors that are not experts.
        experts_module: name of a layer's experts in the transformers model, with `{layer}`.
        router: name of the weight [E, H] in the transformers model whose product with a token is its logits.
        router_bias: the same of a bias [E] that is part of the logits; None where there is none.
        routing_bias: the same of the bias [E] that `ep_moe.routing.route` takes, for the choice alone.
        num_experts: the keys of config.json that may hold E, the first that is there counts; transformers 5 writes
            another than published checkpoints have.
        hidden, intermediate: the keys of config.json.
    """

    forms: tuple[Form, ...]
    routing: Callable[[Mapping[str, Any], str], RoutingConfig]
    activation: Callable[[Mapping[str, Any], str], ActivationConfig] = _hidden_act
    renames: tuple[tuple[str, str], ...] = ()
    experts_module: str = "model.layers.{layer}.mlp.experts"
    router: str = "model.layers.{layer}.mlp.gate.weight"
    router_bias: str | None = None
    routing_bias: str | None = None
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    hidden: str = "hidden_size"
    intermediate: str = "moe_intermediate_size"


def _forms(prefix: str, gate: str, up: str, down: str) -> tuple[Form, ...]:
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


LLAMA_FORMS = _forms("model.layers.{layer}.mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_FORMS = _forms("model.layers.{layer}.block_sparse_moe.experts", "w1", "w3", "w2")
GPT_OSS_FORM = (
    ExpertTensor(name="model.layers.{layer}.mlp.experts.gate_up_proj", field="w13", transposed=True, interleaved=True),
    ExpertTensor(name="model.layers.{layer}.mlp.experts.gate_up_proj_bias", field="w13_bias", interleaved=True),
    ExpertTensor(name="model.layers.{layer}.mlp.experts.down_proj", field="w2", transposed=True),
    ExpertTensor(name="model.layers.{layer}.mlp.experts.down_proj_bias", field="w2_bias"),
)


def _num_topk(config: Mapping[str, Any], name: str) -> int:
    return _value(config, name, "num_experts_per_tok")


def _softmax_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Softmax over all experts, top-k, and the division by the sum only where `norm_topk_prob` asks for it."""
    renormalise = config.get("norm_topk_prob", False)
    method = RoutingMethod.RENORMALIZE_NAIVE if renormalise else RoutingMethod.DEFAULT
    return RoutingConfig(method=method, num_topk=_num_topk(config, name))


def _renormalised_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    return RoutingConfig(method=RoutingMethod.RENORMALIZE, num_topk=_num_topk(config, name))


def _grouped_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Sigmoid and bias within the best groups of experts; config.json has all of its numbers."""
    return RoutingConfig(
        method=RoutingMethod.DEEPSEEK_V3,
        num_topk=_num_topk(config, name),
        num_group=_value(config, name, "n_group"),
        topk_group=_value(config, name, "topk_group"),
        routed_scaling_factor=_value(config, name, "routed_scaling_factor"),
        norm_topk_prob=config.get("norm_topk_prob", True),
    )


def _biased_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Sigmoid and bias over all experts; MiniMax-M2 divides by the sum and scales by nothing."""
    return RoutingConfig(method=RoutingMethod.MINIMAX2, num_topk=_num_topk(config, name))


def _clamped_swiglu(config: Mapping[str, Any], name: str) -> ActivationConfig:
    """gpt-oss; its published config.json has no `swiglu_alpha`, and `hidden_act` says "silu" for something else."""
    del name
    return ActivationConfig(
        kind=ActivationKind.SWIGLU,
        alpha=config.get("swiglu_alpha", 1.702),
        beta=1.0,
        limit=config.get("swiglu_limit", 7.0),
    )


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(forms=LLAMA_FORMS, routing=_softmax_routing),
    "olmoe": Family(forms=LLAMA_FORMS, routing=_softmax_routing, intermediate="intermediate_size"),
    "mixtral": Family(
        forms=MIXTRAL_FORMS,
        routing=_renormalised_routing,
        renames=((".block_sparse_moe.", ".mlp."),),
        intermediate="intermediate_size",
    ),
    "deepseek_v3": Family(
        forms=LLAMA_FORMS,
        routing=_grouped_routing,
        routing_bias="model.layers.{layer}.mlp.gate.e_score_correction_bias",
        num_experts=("n_routed_experts",),
    ),
    "glm4_moe": Family(
        forms=LLAMA_FORMS,
        routing=_grouped_routing,
        routing_bias="model.layers.{layer}.mlp.gate.e_score_correction_bias",
        num_experts=("n_routed_experts",),
    ),
    "minimax_m2": Family(
        forms=MIXTRAL_FORMS,
        routing=_biased_routing,
        renames=((".block_sparse_moe.", ".mlp."),),
        routing_bias="model.layers.{layer}.mlp.e_score_correction_bias",
        intermediate="intermediate_size",
    ),
    "gpt_oss": Family(
        forms=(GPT_OSS_FORM,),
        routing=_renormalised_routing,
        activation=_clamped_swiglu,
        router="model.layers.{layer}.mlp.router.weight",
        router_bias="model.layers.{layer}.mlp.router.bias",
        intermediate="intermediate_size",
    ),
}

NUM_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


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
    activation = family.activation(config, name)
    return MoEConfig(
        hidden=_value(config, name, family.hidden),
        intermediate=_value(config, name, family.intermediate),
        num_experts=_value(config, name, *family.num_experts),
        routing=family.routing(config, name),
        activation=activation,
    )


def extra_layers(config: Mapping[str, Any]) -> range:
    """The layers behind the last one that published checkpoints hold to predict further tokens (DeepSeek-V3's layer
    61, GLM-4.5's layer 92); no transformers model has them. Local."""
    first = config.get("num_hidden_layers")
    count = next((config[key] for key in NUM_EXTRA_LAYERS if config.get(key)), 0)
    return range(0) if first is None else range(first, first + count)


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json names for the model, float32 where it names none. Local."""
    return DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "float32", torch.float32)


def _value(config: Mapping[str, Any], name: str, *keys: str) -> Any:
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    if found is None:
        raise ValueError(f"{name}: no key {' or '.join(keys)}, which model_type {config['model_type']!r} needs")
    return found
