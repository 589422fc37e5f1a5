"""Replacing a model's experts modules by expert-parallel layers that share one transport.

Letters: K top-k, E logical experts, R ranks.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.engines.common.model import Agreement, check_placements, counting_table, warm_up
from ep_moe.engines.common.transports import with_topk
from ep_moe.engines.transformers.architectures import keep_in_step, num_topk_of
from ep_moe.engines.transformers.experts import LOCAL, SHARDED, ExpertsModule, drop_parameters
from ep_moe.engines.transformers.hooks import NAME, Session, ShardedExperts
from ep_moe.engines.transformers.moving import HeldExperts
from ep_moe.engines.transformers.norms import replace_norms
from ep_moe.engines.transformers.regrouping import ExpertSource, Recipe
from ep_moe.engines.transformers.routers import replace_routers
from ep_moe.engines.transformers.saving import save_pretrained
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport
from ep_moe.weights import ExpertWeights

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One experts module of a model, and the config, placement and weights of its layer."""

    module: ExpertsModule  # its parameters are dropped once the layer is made
    config: MoEConfig
    placement: Placement
    weights: Callable[[], ExpertWeights]  # returns this rank's experts


def install(
    model: PreTrainedModel,
    group: EPGroup,
    parts: Mapping[str, Part],
    config: TransportConfig,
    *,
    transport: str,
    experts: str,
    source: ExpertSource | None = None,
) -> PreTrainedModel:
    """Replace each experts module by a layer, the routers if ours mean the same, and RMS norms by torch's. Until the
    first layer is made, an error leaves the model unchanged.

    Layers are made one by one: each frees its module's parameters before the next needs memory. On a standby rank,
    whose parts have no experts yet, `Session.regroup` makes them.

    Args: source: of experts, for `Session.regroup`.
    Collective, but for a standby.
    """
    num_topk, standby = num_topk_of(model.config), group.standby
    placement = next(iter(parts.values())).placement  # of a transport only `starts` matter, which are equal
    recipe = Recipe(
        transport=transport,
        experts=experts,
        sizes=with_topk(config, num_topk),
        num_topk=num_topk,
        configs=tuple(part.config for part in parts.values()),
        source=source,
        spread=None if standby else (placement.num_physical, placement.num_ranks),
    )
    if standby:
        model.set_experts_implementation(NAME)
        held = [HeldExperts(experts=(), weights=part.weights()) for part in parts.values()]
        return _dressed(model, Session(group, None, (), recipe, held), parts)
    check_placements([part.placement for part in parts.values()], group)
    before = model.get_experts_implementation()
    exchange = create_transport(transport, group, placement, recipe.sizes)
    try:
        with Agreement(group, "load"):
            model.set_experts_implementation(NAME)
            layers = _make_layers(parts, group, exchange, experts)
    except Exception:
        model.set_experts_implementation(before)
        exchange.destroy()
        raise
    _dressed(model, Session(group, exchange, layers, recipe), parts)
    if num_topk is not None:
        warm_up(layers, num_topk)
    return model


def _dressed(model: PreTrainedModel, session: Session, parts: Mapping[str, Part]) -> PreTrainedModel:
    """The model, whose modules call the session's layers from now on. Local."""
    for index, part in enumerate(parts.values()):
        setattr(part.module, SHARDED, ShardedExperts(session, index))
    keep_in_step(model, num_topk_of(model.config))
    session.why_own_routers = replace_routers(model, parts)
    if session.why_own_routers and session.group.rank == 0:
        _log.info("%s keeps its own routers: %s", type(model).__name__, session.why_own_routers)
    replace_norms(model)
    setattr(model, NAME, session)
    vars(model)["_has_unfinished_sequences"] = functools.partial(_any_rank_unfinished, session)
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            prefix = f"{name}." if name else ""
            inside = {key.removeprefix(prefix): parts[key].module for key in parts if key.startswith(prefix)}
            if inside:
                vars(module)["save_pretrained"] = functools.partial(save_pretrained, module, inside)
    return model


def _make_layers(
    parts: Mapping[str, Part], group: EPGroup, exchange: Transport, experts: str
) -> tuple[ExpertParallelMoE, ...]:
    layers = []
    for index, (name, part) in enumerate(parts.items()):
        used = getattr(part.module.config, "_experts_implementation", None)
        if used != NAME:
            raise ValueError(f"{name} ({type(part.module).__name__}) keeps experts_implementation {used!r}")
        table = counting_table(part.placement, group)
        layer = ExpertParallelMoE(
            part.config, part.weights(), exchange, placement=table, experts=experts, layer_index=index
        )
        layers.append(layer)
        drop_parameters(part.module)
        if hasattr(part.module, LOCAL):  # a `LocalExperts` keeps the parameters alive too
            delattr(part.module, LOCAL)
    return tuple(layers)


def _any_rank_unfinished(session: Session, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether `generate` goes on. transformers' own implementation needs, with `synced_gpus`, torch's default process
    group, which may be larger than ours or absent. Collective with `synced_gpus`, host sync."""
    session.end_pass()  # every rank asks this before each pass
    if not synced_gpus:
        return not this_peer_finished
    unfinished = torch.tensor([0 if this_peer_finished else 1], dtype=torch.int64, device=device)
    return bool(session.group.all_reduce_sum(unfinished).item())


def is_sharded(model: Any) -> bool:
    """True for a model of `from_pretrained` or `shard_experts`, and for parts of one. Local."""
    return any(hasattr(module, SHARDED) for module in model.modules())
