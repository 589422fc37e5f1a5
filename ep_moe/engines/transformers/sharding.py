"""Sharding a model's experts over ranks; everything is checked before any module is changed.

Letters: E logical experts, H hidden, I intermediate.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from ep_moe.config import Layout, MoEConfig, TransportConfig
from ep_moe.engines.common.model import Agreement, placements_of, quantize_experts
from ep_moe.engines.transformers.architectures import check_in_step
from ep_moe.engines.transformers.experts import ExpertsModule, activation_of, find_experts, weights_of
from ep_moe.engines.transformers.hooks import MAX_TOKENS_PER_RANK
from ep_moe.engines.transformers.installing import Part, install, is_sharded
from ep_moe.engines.transformers.registering import ensure_registered
from ep_moe.experts import create_experts
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, get_scheme
from ep_moe.weights import ExpertWeights


def shard_experts(
    model: PreTrainedModel,
    group: EPGroup,
    *,
    transport: str = "auto",
    experts: str = "auto",
    placement: str | Placement | Sequence[Placement] = "linear",
    scheme: str = "none",
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
) -> PreTrainedModel:
    """Shard the experts of a model that every rank has loaded whole: keep this rank's experts, free the others.

    It supports every architecture whose experts module takes an experts implementation of transformers, except those
    that `ep_moe.engines.transformers.architectures` refuses.

    Args:
        model: on `group.device`, changed in place.
        scheme: to which experts are quantized; those that transformers has loaded in fp8 stay as they are.
        others: as in `from_pretrained`.
    Returns: the model. Its `save_pretrained` works as after `from_pretrained`.
    Errors: ValueError, which names the cause, for unsupported experts, for a model on another device, and for one that
        is sharded already; an error on one rank is raised on all, and the model is left unchanged. Collective.
    """
    ensure_registered()
    with Agreement(group, "load"):
        if is_sharded(model):
            raise ValueError(f"the experts of {type(model).__name__} are spread over ranks already")
        modules = find_experts(model)
        if model.device != group.device:
            raise ValueError(f"the model is on {model.device}, the group's device is {group.device}")
        check_in_step(model, group.num_ranks)
        configs, dtypes = {}, {}
        for name, module in modules.items():
            shapes = weights_of(module, ())  # zero experts: only shapes and dtypes, nothing is copied
            chosen = _chosen_scheme(name, shapes.scheme, scheme)
            configs[name] = MoEConfig(
                hidden=shapes.w2.values.shape[1],
                intermediate=shapes.w2.values.shape[2],
                num_experts=module.down_proj.shape[0],
                activation=activation_of(module),
                scheme=chosen.name,
                layout=Layout(layout),
            )
            dtypes[name] = model.dtype if shapes.scheme.weight.quantized else shapes.w13.values.dtype
            create_experts(experts, configs[name].activation, group.device, scheme=chosen)
        _check_alike(configs, dtypes)
        first = next(iter(modules))
        sizes = TransportConfig(
            hidden=configs[first].hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=dtypes[first], num_slots=1
        )
        placements = placements_of(placement, configs[first].num_experts, len(modules), group)
        parts = {
            name: Part(
                module=module,
                config=configs[name],
                placement=place,
                weights=functools.partial(_own_weights, module, place.local_experts(group.rank), scheme),
            )
            for (name, module), place in zip(modules.items(), placements, strict=True)
        }
        weights = parts[first].weights()  # running out of memory here leaves the model unchanged
        parts[first] = dataclasses.replace(parts[first], weights=lambda: weights)
    return install(model, group, parts, sizes, transport=transport, experts=experts)


def _check_alike(configs: Mapping[str, MoEConfig], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise unless one transport and one placement fit all modules."""
    found = {
        name: f"{config.num_experts} experts, hidden {config.hidden}, {str(dtypes[name]).removeprefix('torch.')}"
        for name, config in configs.items()
    }
    first, expected = next(iter(found.items()))
    for name, sizes in found.items():
        if sizes != expected:
            raise ValueError(f"{first} has {expected}, but {name} has {sizes}: one transport cannot serve both")


def _chosen_scheme(name: str, loaded: QuantScheme, scheme: str) -> QuantScheme:
    """The scheme of a module's layer: that of its weights if they are quantized already."""
    if not loaded.weight.quantized:
        return get_scheme(scheme)
    if scheme not in ("none", loaded.name):
        raise ValueError(f"scheme is {scheme!r}, but {name} is loaded in {loaded.name!r}")
    return loaded


def _own_weights(module: ExpertsModule, experts: tuple[int, ...], scheme: str) -> ExpertWeights:
    everything = experts == tuple(range(module.down_proj.shape[0]))
    found = weights_of(module, None if everything else experts)
    return found if found.scheme.weight.quantized else quantize_experts(found, get_scheme(scheme))
