"""Hugging Face transformers with experts spread over ranks.

    group = EPGroup.from_env()
    model = from_pretrained(directory, group)
    model.generate(..., synced_gpus=True)

Importing this module makes "ep_moe" known to transformers (`register`). Inference only.
Letters: T tokens on this rank, H hidden, K top-k, E logical experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ep_moe.config import Layout, MoEConfig, RoundKind, TransportConfig
from ep_moe.engines.transformers.experts import (
    ExpertsModule,
    activation_of,
    drop_parameters,
    find_experts,
    quantise_experts,
    weights_of,
)
from ep_moe.engines.transformers.hooks import (
    MAX_TOKENS_PER_RANK,
    NAME,
    HookConfig,
    LocalExperts,
    Session,
    ShardedExperts,
    without_backward,
)
from ep_moe.engines.transformers.loading import build_skeleton, layers_of, load_dense
from ep_moe.engines.transformers.parallel import distributed_config, register_parallelism
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import get_scheme
from ep_moe.transport import create_transport
from ep_moe.weights import Checkpoint, ExpertWeights

__all__ = ["Session", "distributed_config", "from_pretrained", "register", "shard_experts"]

_SHARDED = "_ep_moe_sharded"  # attributes of an experts module: a ShardedExperts, or a LocalExperts
_LOCAL = "_ep_moe_local"


def from_pretrained(
    directory: str | Path,
    group: EPGroup,
    *,
    dtype: torch.dtype | None = None,
    transport: str = "auto",
    experts: str = "auto",
    placement: str | Placement = "linear",
    scheme: str | None = None,
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model of which each rank holds all but the experts, and its own experts alone.

    Args:
        directory: a Hugging Face checkpoint of a family in `ep_moe.weights.FAMILIES`.
        group: the ranks; the model is on `group.device`.
        dtype: of weights and activations; by default what config.json says, else float32. All but the experts is
            dequantised to it where it is fp8 on disk.
        transport, experts: implementations by name. placement: by name, or one of R ranks.
        scheme: of experts and of tokens on the way, a name of `ep_moe.quant.SCHEMES`; by default that in which the
            checkpoint is stored, and "none" dequantises it.
        layout: what the experts compute on.
        max_tokens_per_rank: M, the most tokens that one rank brings to a forward pass; a longer prompt is an error
            on every rank. Buffers grow with it.
        attn_implementation: as transformers has it.
    Returns: the model in evaluation mode, without gradients, with `model.ep_moe`, a `Session`. Every rank must call
        it equally often, with tokens of its own; in `generate`, `synced_gpus=True` sees to that. `save_pretrained`
        would leave the experts out.
    Errors: ValueError for what does not fit in the directory, as of `ExpertWeights.from_pretrained`, and for tensors
        that are missing or too many. Collective.
    """
    checkpoint = Checkpoint.open(directory)
    model = build_skeleton(checkpoint.directory, dtype, attn_implementation)
    layers = layers_of(model, checkpoint)
    load_dense(model, checkpoint, group.device)
    place = _placement(placement, checkpoint.config.num_experts, group)
    weights = ExpertWeights.from_pretrained(
        checkpoint,
        place,
        group.rank,
        layers=list(layers.values()),
        dtype=model.dtype,
        scheme=scheme,
        device=group.device,
    )
    parts = {}
    for name, layer in layers.items():
        own = weights[layer]
        config = dataclasses.replace(checkpoint.config, scheme=own.scheme.name, layout=Layout(layout))
        parts[name] = model.get_submodule(name), config, own
    return _install(
        model.eval(),
        group,
        parts,
        transport=transport,
        experts=experts,
        placement=place,
        max_tokens_per_rank=max_tokens_per_rank,
    )


def shard_experts(
    model: PreTrainedModel,
    group: EPGroup,
    *,
    transport: str = "auto",
    experts: str = "auto",
    placement: str | Placement = "linear",
    scheme: str = "none",
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
) -> PreTrainedModel:
    """Turn a model that is loaded whole into one of which this rank keeps its own experts, and free the others.

    It works for every architecture whose experts transformers lets another implementation compute.

    Args: as of `from_pretrained`; model: on `group.device`, changed in place.
    Returns: the model. Errors: ValueError for experts that cannot be computed here (it names what stands in the way),
        and for a model on another device. Collective.
    """
    modules, chosen, kept = find_experts(model), get_scheme(scheme), {}
    if model.device != group.device:
        raise ValueError(f"the model is on {model.device}, the group's device is {group.device}")
    activations = {name: activation_of(module) for name, module in modules.items()}  # all, before any is taken apart
    place: Placement | None = None
    for name, module in modules.items():
        num_experts = module.down_proj.shape[0]
        place = _placement(placement, num_experts, group) if place is None else place
        weights = quantise_experts(weights_of(module, place.local_experts(group.rank)), chosen)
        config = MoEConfig(
            hidden=weights.w2.shape[1],
            intermediate=weights.w2.shape[2],
            num_experts=num_experts,
            activation=activations[name],
            scheme=scheme,
            layout=Layout(layout),
        )
        drop_parameters(module)
        kept[name] = (module, config, weights)
    assert place is not None
    model.set_experts_implementation(NAME)
    return _install(
        model,
        group,
        kept,
        transport=transport,
        experts=experts,
        placement=place,
        max_tokens_per_rank=max_tokens_per_rank,
    )


def _placement(placement: str | Placement, num_experts: int, group: EPGroup) -> Placement:
    if isinstance(placement, str):
        return create_placement(placement, num_experts, group.num_ranks)
    if placement.num_ranks != group.num_ranks or placement.num_experts != num_experts:
        raise ValueError(
            f"the placement is of {placement.num_experts} experts on {placement.num_ranks} ranks, "
            f"needed are {num_experts} on {group.num_ranks}"
        )
    return placement


def _install(
    model: PreTrainedModel,
    group: EPGroup,
    parts: Mapping[str, tuple[ExpertsModule, MoEConfig, ExpertWeights]],
    *,
    transport: str,
    experts: str,
    placement: Placement,
    max_tokens_per_rank: int,
) -> PreTrainedModel:
    """Put a layer into each experts module, one transport behind all of them. Collective."""
    hidden = next(iter(parts.values()))[1].hidden
    sizes = TransportConfig(
        hidden=hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=model.dtype, kinds=_kinds(model, parts)
    )
    group.wait_for_all("load")  # ranks read at their own pace, and the next collective has a deadline
    exchange = create_transport(transport, group, placement, sizes)
    layers = tuple(
        ExpertParallelMoE(config, weights, exchange, experts=experts) for _, config, weights in parts.values()
    )
    session = Session(group, exchange, layers)
    for index, (module, _, _) in enumerate(parts.values()):
        setattr(module, _SHARDED, ShardedExperts(session, index))
    setattr(model, NAME, session)
    vars(model)["_has_unfinished_sequences"] = functools.partial(_any_rank_unfinished, group)
    return model


def _kinds(
    model: PreTrainedModel, parts: Mapping[str, tuple[ExpertsModule, MoEConfig, ExpertWeights]]
) -> tuple[RoundKind, ...]:
    """The rounds that the layers will make, as far as the model's config tells: no prompt shall wait for a compiler."""
    num_topk = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not isinstance(num_topk, int):
        return ()
    quantised_here = [config for _, config, weights in parts.values() if weights.w13_input_scale is None]
    kinds = (RoundKind(num_topk=num_topk, scheme=config.scheme, layout=config.layout) for config in quantised_here)
    return tuple(dict.fromkeys(kinds))


def _any_rank_unfinished(group: EPGroup, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """What `generate` asks before each step: its own answer with `synced_gpus` needs torch's default process group,
    which may be wider than ours or not there. Collective with `synced_gpus`, host sync."""
    if not synced_gpus:
        return not this_peer_finished
    unfinished = torch.tensor([0 if this_peer_finished else 1], dtype=torch.int64, device=device)
    return bool(group.all_reduce_sum(unfinished).item())


def register(
    *,
    transport: str = "auto",
    experts: str = "auto",
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
) -> None:
    """Make "ep_moe" known to transformers, as an `experts_implementation` and to its expert parallelism.

    Importing this module has done it once; call it again, before a model is made, for other options. Calling it twice
    is fine. A model whose experts are transposed or interleaved, as those of gpt-oss, is computed right but slowly:
    its weights are copied into our order for each call. `from_pretrained` and `shard_experts` do it once.

    Args: as of `from_pretrained`, for models that transformers itself loads; `transport` and `max_tokens_per_rank`
        are those of its expert parallelism, see `distributed_config`. Local.
    """
    config = HookConfig(
        transport=transport, experts=experts, layout=Layout(layout), max_tokens_per_rank=max_tokens_per_rank
    )
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function(config))
    register_parallelism(config)


def _experts_function(config: HookConfig) -> Any:
    """The function that transformers calls in place of an experts module's own forward."""

    @torch.compiler.disable
    def ep_moe_experts_forward(
        self: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            sharded = getattr(self, _SHARDED, None)
            if sharded is not None:
                return sharded(hidden_states, top_k_index, top_k_weights)
            local = getattr(self, _LOCAL, None)
            if local is None or not local.serves(self, hidden_states.shape[0]):
                local = LocalExperts(self, config, hidden_states.shape[0])
                setattr(self, _LOCAL, local)
            return local(self, hidden_states, top_k_index, top_k_weights)

        return without_backward(self, run, hidden_states, top_k_weights)

    return ep_moe_experts_forward


register()
