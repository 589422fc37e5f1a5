"""Hugging Face transformers with experts spread over ranks.

    group = EPGroup.from_env()
    model = from_pretrained(directory, group)
    model.generate(..., synced_gpus=True)

Importing this module makes "ep_moe" known to transformers (`register`). Inference only.
Letters: T tokens on this rank, H hidden, K top-k, E logical experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ep_moe.config import Layout, TransportConfig
from ep_moe.engines.transformers.architectures import refuse_to_be_ignored
from ep_moe.engines.transformers.experts import LOCAL, SHARDED, ExpertsModule
from ep_moe.engines.transformers.hooks import (
    MAX_TOKENS_PER_RANK,
    NAME,
    HookConfig,
    LocalExperts,
    Session,
    without_backward,
)
from ep_moe.engines.transformers.installing import Options, Part, install, placement_of, transport_config
from ep_moe.engines.transformers.loading import build_skeleton, layers_of, load_dense
from ep_moe.engines.transformers.parallel import distributed_config, register_parallelism
from ep_moe.engines.transformers.ranks import Agreement
from ep_moe.engines.transformers.sharding import plan_shards
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.weights import Checkpoint, ExpertWeights

__all__ = ["Session", "distributed_config", "from_pretrained", "register", "shard_experts"]


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
            dequantized to it where it is fp8 on disk.
        transport, experts: implementations by name. placement: by name, or one of R ranks.
        scheme: of experts and of tokens on the way, a name of `ep_moe.quant.SCHEMES`; by default that in which the
            checkpoint is stored, and "none" dequantizes it.
        layout: what the experts compute on.
        max_tokens_per_rank: M, the most tokens that one rank brings to a forward pass; a longer prompt is an error
            on every rank. Buffers grow with it.
        attn_implementation: as transformers has it.
    Returns: the model in evaluation mode, without gradients, with `model.ep_moe`, a `Session`. Every rank must call
        it equally often, with tokens of its own; in `generate`, `synced_gpus=True` sees to that. Every rank calls its
        `save_pretrained` too: rank 0 gathers the experts, a layer at a time, and writes; experts in a scheme other
        than "none" are refused (see `ep_moe.engines.transformers.saving`). `state_dict` leaves the experts out.
    Errors: ValueError for what does not fit in the directory, as of `ExpertWeights.from_pretrained`, and for tensors
        that are missing or too many. Collective.
    """
    checkpoint = Checkpoint.open(directory)
    model = build_skeleton(checkpoint.directory, dtype, attn_implementation)
    layers = layers_of(model, checkpoint)
    load_dense(model, checkpoint, group.device)
    place = placement_of(placement, checkpoint.config.num_experts, group)
    weights = ExpertWeights.from_pretrained(
        checkpoint,
        place,
        group.rank,
        layers=list(layers.values()),
        dtype=model.dtype,
        scheme=scheme,
        device=group.device,
    )
    parts, quantized_there = {}, []
    for name, layer in layers.items():
        own = weights[layer]
        config = dataclasses.replace(checkpoint.config, scheme=own.scheme.name, layout=Layout(layout))
        parts[name] = Part(
            module=model.get_submodule(name), config=config, weights=functools.partial(weights.pop, layer)
        )
        if own.w13_input_scale is None:
            quantized_there.append(config)
    sizes = TransportConfig(
        hidden=checkpoint.config.hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=model.dtype, num_slots=1
    )
    options = Options(transport=transport, experts=experts, placement=place)
    group.wait_for_all("load")  # ranks read at their own pace, and the next collective has a deadline
    return install(model.eval(), group, parts, options, transport_config(model, sizes, quantized_there))


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

    It works for every architecture whose experts transformers lets another implementation compute, but for those of
    `ep_moe.engines.transformers.architectures` that cannot be kept in step.

    Args: as of `from_pretrained`; model: on `group.device`, changed in place.
    Returns: the model. Its `save_pretrained` is that of `from_pretrained`.
    Errors: ValueError for experts that cannot be computed here (it names what stands in the way), for a model on
        another device, and for one that is sharded already; what one rank raises, all raise, and the model then
        computes as before. Collective.
    """
    with Agreement(group, "load"):
        plan = plan_shards(
            model,
            group,
            transport=transport,
            experts=experts,
            placement=placement,
            scheme=scheme,
            layout=layout,
            max_tokens_per_rank=max_tokens_per_rank,
        )
    return install(model, group, plan.parts, plan.options, plan.sizes)


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
    its weights are copied into our order for each call. `from_pretrained` and `shard_experts` do it once. To set
    "ep_moe" on a model with experts that takes no implementation, as Llama 4, is a ValueError from then on, where
    transformers itself would ignore it.

    Args: as of `from_pretrained`, for models that transformers itself loads; `transport` and `max_tokens_per_rank`
        are those of its expert parallelism, see `distributed_config`. Local.
    """
    config = HookConfig(
        transport=transport, experts=experts, layout=Layout(layout), max_tokens_per_rank=max_tokens_per_rank
    )
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function(config))
    register_parallelism(config)
    refuse_to_be_ignored(NAME)


def _experts_function(config: HookConfig) -> Any:
    """The function that transformers calls in place of an experts module's own forward."""

    @torch.compiler.disable
    def ep_moe_experts_forward(
        self: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            sharded = getattr(self, SHARDED, None)
            if sharded is not None:
                return sharded(hidden_states, top_k_index, top_k_weights)
            local = getattr(self, LOCAL, None)
            if local is None or not local.serves(self, top_k_index):
                local = LocalExperts(self, config, top_k_index)
                setattr(self, LOCAL, local)
            return local(self, hidden_states, top_k_index, top_k_weights)

        return without_backward(self, run, hidden_states, top_k_weights)

    return ep_moe_experts_forward


register()
