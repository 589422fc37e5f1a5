"""What the layers of one model share: placement, warm-up, counts of chosen experts, and errors that all ranks raise.

Letters: T tokens of this rank, K top-k, E logical experts, R ranks, L local experts, H hidden, I intermediate.
"""

import dataclasses
from collections.abc import Iterable

import torch

from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import QuantScheme, quantize_weight
from ep_moe.weights import ExpertWeights


class Agreement:
    """A context in which an error on one rank is an error on all: ranks without one raise that of the first that has.

    They raise ValueError for a ValueError, else RuntimeError. The wait at the end has no timeout; it fails only if a
    rank dies or leaves.

    Args: group: the ranks. phase: names the work of the context in the error if a rank is lost.
    Collective, at its end.
    """

    def __init__(self, group: EPGroup, phase: str) -> None:
        self._group, self._phase = group, phase

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLostError) or not isinstance(error, Exception | None):
            return
        self._group.wait_for_all(self._phase)
        mine = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        for rank, found in enumerate(self._group.all_gather_object(mine)):
            if error is None and found is not None:
                raise (ValueError if found[0] else RuntimeError)(f"rank {rank} raised {found[1]}")


class ExpertLoad:
    """Counts on the device of the ids that `num_layers` MoE layers route to, for balancing experts over ranks."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        # the extra column counts ids that are no experts, so that they need no filtering, which would be a host sync
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._rows, self._one = self._counts.unbind(), self._counts.new_ones(1)

    @property
    def counts(self) -> torch.Tensor:
        """[MoE layers, E] int64 on the device, since the last `reset`; a copy. Local."""
        return self._counts[:, :-1].clone()

    def add(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Count a layer's ids [T, K] int32 or int64; -1 and E are no experts, and other ids the layer refuses.

        Two launches. Local, no host sync.
        """
        ids = torch.remainder(topk_ids.reshape(-1), self._counts.shape[1])  # -1 becomes E
        self._rows[layer].index_add_(0, ids, self._one.expand(ids.shape))

    def add_times(self, layer: int, topk_ids: torch.Tensor, times: torch.Tensor) -> None:
        """`add` in one launch, for ids [T, K] that are all in [0, E]; id i counts `times[i]`, [T * K] int64. Local."""
        self._rows[layer].scatter_add_(0, topk_ids.reshape(-1).long(), times)

    def reset(self) -> None:
        """Set the counts to zero. Local, no host sync."""
        self._counts.zero_()


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
    """Compile the kernels of all layers, once for layers that use the same; with `padded` also for calls with
    `num_tokens`. Collective."""
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
