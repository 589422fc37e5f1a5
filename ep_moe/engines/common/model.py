"""What the layers of one model share: placement, warm-up, and errors that all ranks raise.

Letters: T tokens of this rank, K top-k, E logical experts, R ranks, L local experts, H hidden, I intermediate.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Sequence

import torch

from ep_moe.fields import shown
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import QuantScheme, quantize_weight
from ep_moe.routing import PositionTable
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


def placements_of(
    placement: str | Placement | Sequence[Placement], num_experts: int, num_layers: int, group: EPGroup
) -> tuple[Placement, ...]:
    """The placement of each layer: one by name or one `Placement` for all, or one for each.

    Errors: ValueError if they are not of E experts and R ranks, as many as layers, and with equal `starts`. Local.
    """
    if isinstance(placement, str):
        return (create_placement(placement, num_experts, group.num_ranks),) * num_layers
    found = (placement,) * num_layers if isinstance(placement, Placement) else tuple(placement)
    if len(found) != num_layers:
        raise ValueError(f"there are {len(found)} placements for {num_layers} layers")
    for layer, each in enumerate(found):
        if not isinstance(each, Placement):
            raise ValueError(f"placement[{layer}] ({shown(each)}) is no Placement")
        if each.num_ranks != group.num_ranks or each.num_experts != num_experts:
            raise ValueError(
                f"the placement is of {each.num_experts} experts on {each.num_ranks} ranks, "
                f"expected {num_experts} experts on {group.num_ranks} ranks"
            )
        if each.starts != found[0].starts:
            raise ValueError(f"placement[{layer}] has starts {each.starts}, placement[0] {found[0].starts}")
    return found


def check_placements(placements: Sequence[Placement], group: EPGroup) -> None:
    """Raise ValueError on every rank if ranks have different placements: tables that may change are not compared in
    rounds. Collective, host sync."""
    checksum = zlib.crc32(repr([(each.physical_to_logical, each.idle) for each in placements]).encode())
    found = group.all_gather_object(checksum)
    odd = next((rank for rank, other in enumerate(found) if other != found[0]), None)
    if odd is not None:
        raise ValueError(f"rank 0 and rank {odd} place experts differently; every rank needs the same placements")


def counting_table(placement: Placement, group: EPGroup) -> PositionTable:
    """A layer's table of positions for the tokens of this rank, which counts their experts and can change. Local."""
    first = group.rank - group.local_rank
    node = first, first + group.local_num_ranks
    return PositionTable(placement, group.rank, node=node, device=group.device, counted=True, changing=True)


def warm_up(layers: Iterable[ExpertParallelMoE], num_topk: int, *, padded: bool = False) -> None:
    """Compile the kernels of all layers, once for layers that use the same; with `padded` also for calls with
    `num_tokens`. Collective."""
    alike = {
        (layer.config, getattr(layer.positions, "maps", None), *(t is None for t in layer.weights.optional)): layer
        for layer in layers
    }
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
