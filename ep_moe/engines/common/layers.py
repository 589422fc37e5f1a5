"""Layers of one model on one transport: their placement, their weights, and the warm-up of those that differ.

Letters: K top-k, E logical experts, R ranks, L local experts, H hidden, I intermediate.
"""

import dataclasses
from collections.abc import Iterable

import torch

from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import QuantScheme, quantize_weight
from ep_moe.weights import ExpertWeights


def placement_of(placement: str | Placement, num_experts: int, group: EPGroup) -> Placement:
    """A placement by name, or this one. Errors: ValueError if it is not of E experts and R ranks. Local."""
    if isinstance(placement, str):
        return create_placement(placement, num_experts, group.num_ranks)
    if placement.num_ranks != group.num_ranks or placement.num_experts != num_experts:
        raise ValueError(
            f"the placement is of {placement.num_experts} experts on {placement.num_ranks} ranks, "
            f"expected {num_experts} experts on {group.num_ranks} ranks"
        )
    return placement


def warm_up(layers: Iterable[ExpertParallelMoE], num_topk: int, *, padded: bool = False) -> None:
    """Compile the kernels of all layers, once for layers that use the same kernels. Collective.

    Args:
        num_topk: K. padded: compile for calls with `num_tokens` too.
    """
    alike = {(layer.config, *(tensor is None for tensor in layer.weights.optional)): layer for layer in layers}
    for layer in alike.values():
        layer.warmup(num_topk=num_topk, padded=padded)


def gate_above_up(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rows [gate 0, up 0, gate 1, up 1, ...] to [gate; up]: [L, 2I] or [L, 2I, H], a copy. Local."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def gate_beside_up(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `gate_above_up`. Local."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def quantize_experts(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Quantize unquantized weights; with scheme "none" they are returned unchanged. Local."""
    if not scheme.weight.quantized:
        return weights
    w13, w2 = (quantize_weight(matrix.values, scheme) for matrix in (weights.w13, weights.w2))
    return dataclasses.replace(weights, w13=w13, w2=w2, scheme=scheme)
