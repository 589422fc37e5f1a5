"""The model families and their expert tensors in a Hugging Face checkpoint: one entry of `FAMILIES` each.

Letters: E logical experts, H hidden, I intermediate, K top-k.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind, MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.fields import shown, typed
from ep_moe.weights.json_files import build_config, read_key, read_object

ACTIVATIONS = {"silu": ActivationKind.SILU, "swish": ActivationKind.SILU, "gelu": ActivationKind.GELU}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensor:
    """A tensor name pattern of experts.

    Args:
        name: in the checkpoint, with `{layer}` and, if every expert has its own tensor, `{expert}`; without `{expert}`
            all E experts are stacked along the first dimension.
        field: of `ExpertWeights` that it fills.
        rows: the rows of that field that it fills, of each expert.
        transposed: the matrix of an expert is [columns, rows] in the checkpoint.
        interleaved: rows of the gate and of the linear half alternate in the checkpoint, the gate's first.
    """

    name: str
    field: Literal["w13", "w2", "w13_bias", "w2_bias"]
    rows: Literal["gate", "up", "all"] = "all"
    transposed: bool = False
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        """True if one tensor holds all experts."""
        return "{expert}" not in self.name

    def shape(self, config: MoEConfig) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        rows = config.hidden
        if self.field in ("w13", "w13_bias"):
            rows = config.w13_rows if self.rows == "all" else config.intermediate
        columns = {"w13": (config.hidden,), "w2": (config.intermediate,)}.get(self.field, ())
        shape = (*columns, rows) if self.transposed else (rows, *columns)
        return (config.num_experts, *shape) if self.stacked else shape

    def place(self, out: torch.Tensor) -> torch.Tensor:
        """The view of one expert's field, [rows, columns] or [rows], that this tensor fills, in the order on disk.

        Example: for gpt-oss' w13 [2I, H] it is [H, I, 2], the last dimension gate and linear half. Local.
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
    activation = read_key(config, name, str, "hidden_act")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: hidden_act ({activation!r}) is not one of {', '.join(ACTIVATIONS)}")
    return ActivationConfig(kind=ACTIVATIONS[activation])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models.

    Args:
        forms: the ways in which checkpoints store a layer's experts; each form covers all their fields.
        routing, activation: functions that build these configs from config.json and its name in errors.
        renames: (part of a checkpoint name, its replacement in the transformers model) of tensors that are not experts.
        experts_module: name of a layer's experts in the transformers model, with `{layer}`.
        router: name of the router weight [E, H] in the transformers model.
        router_bias: name of a bias [E] that is added to the logits; None if there is none.
        routing_bias: name of the bias [E] of `ep_moe.routing.route`, for the choice only; None if there is none.
        num_experts: keys of config.json that may hold E; the first that is present counts. transformers 5 writes
            another key than published checkpoints have.
        hidden, intermediate: the keys of config.json.
        first_layer: the key of the first layer with experts; None: layer 0.
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
    first_layer: str | None = None


def _forms(prefix: str, gate: str, up: str, down: str) -> tuple[Form, ...]:
    """One tensor per expert, as in published checkpoints, and stacked, as transformers 5 keeps them in memory."""
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


TOPK = {"num_topk": "num_experts_per_tok"}  # fields of RoutingConfig and their keys in config.json
GROUPS = {"num_group": "n_group", "topk_group": "topk_group", "routed_scaling_factor": "routed_scaling_factor"}

LLAMA_FORMS = _forms("model.layers.{layer}.mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_FORMS = _forms("model.layers.{layer}.block_sparse_moe.experts", "w1", "w3", "w2")


def _gpt_oss_form(weight: str, *, transposed: bool) -> Form:
    """`weight`: the end of the names of weights."""
    first, second = (f"model.layers.{{layer}}.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
    return (
        ExpertTensor(name=f"{first}{weight}", field="w13", transposed=transposed, interleaved=True),
        ExpertTensor(name=f"{first}_bias", field="w13_bias", interleaved=True),
        ExpertTensor(name=f"{second}{weight}", field="w2", transposed=transposed),
        ExpertTensor(name=f"{second}_bias", field="w2_bias"),
    )


def _softmax_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Softmax over all experts, top-k, and division by the sum only if `norm_topk_prob` is set."""
    renormalize = read_key(config, name, bool, "norm_topk_prob", default=False)
    method = RoutingMethod.RENORMALIZE_NAIVE if renormalize else RoutingMethod.DEFAULT
    return build_config(RoutingConfig, config, name, TOPK, method=method)


def _renormalized_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    return build_config(RoutingConfig, config, name, TOPK, method=RoutingMethod.RENORMALIZE)


def _grouped_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Sigmoid and bias within the best groups of experts; config.json has all its parameters."""
    renormalize = read_key(config, name, bool, "norm_topk_prob", default=True)
    return build_config(
        RoutingConfig, config, name, TOPK | GROUPS, method=RoutingMethod.DEEPSEEK_V3, norm_topk_prob=renormalize
    )


def _biased_routing(config: Mapping[str, Any], name: str) -> RoutingConfig:
    """Sigmoid and bias over all experts; MiniMax-M2 divides by the sum and does not scale."""
    return build_config(RoutingConfig, config, name, TOPK, method=RoutingMethod.MINIMAX2)


def _clamped_swiglu(config: Mapping[str, Any], name: str) -> ActivationConfig:
    """gpt-oss; its published config.json has no `swiglu_alpha`, and its `hidden_act` "silu" names another function."""
    return build_config(
        ActivationConfig,
        config,
        name,
        {},
        kind=ActivationKind.SWIGLU,
        alpha=read_key(config, name, float, "swiglu_alpha", default=1.702),
        beta=1.0,
        limit=read_key(config, name, float, "swiglu_limit", default=7.0),
    )


GROUPED_FAMILY = Family(
    forms=LLAMA_FORMS,
    routing=_grouped_routing,
    routing_bias="model.layers.{layer}.mlp.gate.e_score_correction_bias",
    num_experts=("n_routed_experts",),
    first_layer="first_k_dense_replace",
)
FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(forms=LLAMA_FORMS, routing=_softmax_routing),
    "olmoe": Family(forms=LLAMA_FORMS, routing=_softmax_routing, intermediate="intermediate_size"),
    "mixtral": Family(
        forms=MIXTRAL_FORMS,
        routing=_renormalized_routing,
        renames=((".block_sparse_moe.", ".mlp."),),
        intermediate="intermediate_size",
    ),
    "deepseek_v3": GROUPED_FAMILY,
    "glm4_moe": GROUPED_FAMILY,
    "minimax_m2": Family(
        forms=MIXTRAL_FORMS,
        routing=_biased_routing,
        renames=((".block_sparse_moe.", ".mlp."),),
        routing_bias="model.layers.{layer}.mlp.e_score_correction_bias",
        intermediate="intermediate_size",
    ),
    "gpt_oss": Family(
        forms=(_gpt_oss_form("_blocks", transposed=False), _gpt_oss_form("", transposed=True)),
        routing=_renormalized_routing,
        activation=_clamped_swiglu,
        router="model.layers.{layer}.mlp.router.weight",
        router_bias="model.layers.{layer}.mlp.router.bias",
        intermediate="intermediate_size",
    ),
}

NUM_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


class TransformersConfig(Protocol):
    """The part of `transformers.PreTrainedConfig` that is used here."""

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        ...


Source = str | Path | Mapping[str, Any] | TransformersConfig


def read_config(source: Source, name: str = "config") -> tuple[Mapping[str, Any], str]:
    """Return config.json as a mapping, with the quantization of hf_quant_config.json, and its name in errors.

    Args:
        source: a checkpoint directory, the content of its config.json, or a transformers config.
        name: of a mapping in errors.
    Errors: ValueError for a directory without config.json, and for one that is not a JSON object. Local.
    """
    if isinstance(source, Mapping):
        return source, name
    if not isinstance(source, str | Path):
        return source.to_dict(), type(source).__name__
    path = Path(source) / "config.json"
    if not path.is_file():
        raise ValueError(f"{source} has no config.json, so it is not a Hugging Face checkpoint directory")
    found = read_object(path)
    if found.get("quantization_config") is None:  # under other names of older releases
        modelopt = path.with_name("hf_quant_config.json")
        if found.get("compression_config") is not None:
            found["quantization_config"] = found["compression_config"]
        elif modelopt.is_file():
            settings = typed(read_object(modelopt).get("quantization"), dict, f"{modelopt}: quantization")
            if settings.get("quant_algo") is not None:
                found["quantization_config"] = {"quant_method": "modelopt", **settings}
    return found, str(path)


def find_family(source: Source, name: str = "config") -> Family:
    """Return the entry of `FAMILIES` for a config's `model_type`.

    Args: source, name: as of `read_config`. Errors: ValueError lists the known ones. Local.
    """
    config, name = read_config(source, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{name}: model_type ({shown(model_type)}) is not one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def moe_config(source: Source, name: str = "config") -> MoEConfig:
    """Read the config of a model's MoE layers.

    Args: source, name: as of `read_config`.
    Returns: sizes, routing and activation; the scheme and the layout are the defaults of `MoEConfig`.
    Errors: ValueError for an unknown model_type or activation, or for a key that is missing. Local.
    """
    config, name = read_config(source, name)
    family = find_family(config, name)
    present = (key for key in family.num_experts if config.get(key) is not None)
    num_experts = next(present, " or ".join(family.num_experts))  # errors name both
    keys = {"hidden": family.hidden, "intermediate": family.intermediate, "num_experts": num_experts}
    activation, routing = family.activation(config, name), family.routing(config, name)
    return build_config(MoEConfig, config, name, keys | TOPK | GROUPS, routing=routing, activation=activation)


def extra_layers(config: Mapping[str, Any], name: str) -> range:
    """The multi-token prediction layers after the last one of the model (DeepSeek-V3's layer 61, GLM-4.5's layer 92),
    which no transformers model has. Errors: ValueError for a count that is not an integer. Local."""
    first = read_key(config, name, int | None, "num_hidden_layers", default=None)
    counts = [read_key(config, name, int, key, default=0) for key in NUM_EXTRA_LAYERS]
    return range(0) if first is None else range(first, first + next(filter(None, counts), 0))


def moe_layers(config: Mapping[str, Any], name: str) -> Iterator[int]:
    """The layers with experts by config.json, ascending; none if it lacks their number or the first one. Errors:
    ValueError for a value of another type. Local."""
    count = read_key(config, name, int, "num_hidden_layers", default=0)
    key = find_family(config, name).first_layer
    first = 0 if key is None else read_key(config, name, int, key, default=count)
    step = max(read_key(config, name, int, "decoder_sparse_step", default=1), 1)  # Qwen3's, as the next
    dense = read_key(config, name, tuple[int, ...], "mlp_only_layers", default=())
    return (layer for layer in range(max(first, step - 1), count, step) if layer not in dense)


def dtype_of(config: Mapping[str, Any], name: str) -> torch.dtype:
    """The dtype that config.json names for the model, else float32. Errors: ValueError for a value that is not a
    string. Local."""
    named = read_key(config, name, str, "torch_dtype", default="")
    return DTYPES.get(read_key(config, name, str, "dtype", default="") or named, torch.float32)
