"""Layers of one model on one transport: their placement, and the warm-up of those that differ.

Letters: K top-k, E logical experts, R ranks.
"""

from collections.abc import Iterable

from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement


def placement_of(placement: str | Placement, num_experts: int, group: EPGroup) -> Placement:
    """A placement by name, or the given one. Errors: ValueError if it is not of E experts and R ranks. Local."""
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
