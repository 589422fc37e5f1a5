"""Hugging Face transformers with expert parallelism.

    group = EPGroup.from_env()
    model = from_pretrained(directory, group)
    generate(model, prompts, GenerationOptions(max_new_tokens=64))  # or model.generate(..., synced_gpus=True)

`register()` registers "ep_moe" with transformers, for models that transformers itself loads. Inference only.
Letters: T tokens on this rank, H hidden, K top-k, E logical experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ep_moe.config import Layout, TransportConfig
from ep_moe.engines.common.model import placements_of
from ep_moe.engines.transformers.decoding import GenerationOptions, generate
from ep_moe.engines.transformers.hooks import MAX_TOKENS_PER_RANK, Session
from ep_moe.engines.transformers.installing import Part, install
from ep_moe.engines.transformers.loading import build_skeleton, layers_of, load_dense
from ep_moe.engines.transformers.registering import distributed_config, register
from ep_moe.engines.transformers.regrouping import ExpertSource, Regrouped
from ep_moe.engines.transformers.sharding import shard_experts
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.weights import Checkpoint, ExpertWeights

__all__ = [
    "GenerationOptions",
    "Regrouped",
    "Session",
    "distributed_config",
    "from_pretrained",
    "generate",
    "register",
    "shard_experts",
]


def from_pretrained(
    directory: str | Path,
    group: EPGroup,
    *,
    dtype: torch.dtype | None = None,
    transport: str = "auto",
    experts: str = "auto",
    placement: str | Placement | Sequence[Placement] = "linear",
    scheme: str | None = None,
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model of which each rank holds its own experts and a copy of all other weights.

    Args:
        directory: a Hugging Face checkpoint of a family in `ep_moe.weights.FAMILIES`.
        group: the ranks; the model is on `group.device`. On a standby rank (`EPGroup.from_env`) the model has no
            experts until `model.ep_moe.regroup` gives it some, and `placement` has no effect.
        dtype: of weights and activations; by default that of config.json, else float32. Weights other than the
            experts are dequantized to it if they are quantized on disk.
        transport, experts: implementations by name. placement: by name, or a `Placement` over R ranks,
            or one for each MoE layer, with equal `starts`; experts may have copies.
        scheme: of experts and payload, a name that `ep_moe.quant.get_scheme` knows; by default the checkpoint's own;
            "none" dequantizes the experts.
        layout: of the expert batch.
        max_tokens_per_rank: M, the most tokens that one rank brings to a forward pass; a longer prompt is an error
            on every rank. Buffers grow with it.
        attn_implementation: passed to transformers.
    Returns: the model in evaluation mode, without gradients, with `model.ep_moe`, a `Session`. Every rank must call
        the model equally often, with its own tokens; in `model.generate`, `synced_gpus=True` ensures that. Every rank
        also calls `model.save_pretrained`: rank 0 gathers the experts, a layer at a time, and writes them; experts in
        a scheme other than "none" are refused (see `ep_moe.engines.transformers.saving`). `state_dict` does not contain
        the experts. Routers are replaced too if `ep_moe.engines.transformers.routers` knows them.
    Errors: ValueError for a checkpoint that cannot be read, as in `ExpertWeights.from_pretrained`, and for missing or
        unexpected tensors. Collective.
    """
    checkpoint = Checkpoint.open(directory)
    model = build_skeleton(checkpoint.directory, dtype, attn_implementation)
    layers = layers_of(model, checkpoint)
    load_dense(model, checkpoint, group.device)
    options: dict[str, Any] = {"dtype": model.dtype, "scheme": scheme, "device": group.device}
    source = ExpertSource(checkpoint, list(layers.values()), **options)
    found = placements_of("linear" if group.standby else placement, checkpoint.config.num_experts, len(layers), group)
    placements = dict(zip(layers.values(), found, strict=True))
    if group.standby:
        nothing = source.read(dict.fromkeys(range(len(layers)), ()))
        weights = dict(zip(layers.values(), nothing.values(), strict=True))
    else:
        weights = ExpertWeights.from_pretrained(
            checkpoint, placements, group.rank, layers=list(layers.values()), **options
        )
    parts = {}
    for name, layer in layers.items():
        own = weights[layer]
        config = dataclasses.replace(checkpoint.config, scheme=own.scheme.name, layout=Layout(layout))
        parts[name] = Part(
            module=model.get_submodule(name),
            config=config,
            placement=placements[layer],
            weights=functools.partial(weights.pop, layer),
        )
    sizes = TransportConfig(
        hidden=checkpoint.config.hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=model.dtype, num_slots=1
    )
    group.wait_for_all("load")  # no timeout: ranks read at different speeds, and the next collective has a timeout
    return install(model.eval(), group, parts, sizes, transport=transport, experts=experts, source=source)
