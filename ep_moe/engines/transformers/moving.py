"""Experts of a layer on their way to other ranks, as bytes, whatever their format.

Letters: E logical experts, L positions of this rank.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ep_moe.balance.carrier import Carrier, Parcel, aligned
from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin_all_to_all
from ep_moe.group.symmetric import why_unreachable
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix
from ep_moe.routing import PositionTable
from ep_moe.weights import ExpertWeights, PerExpert

_SHARED = "w13_input_scale"  # of all experts, the same on all ranks
_OUTPUT_SCALES = ("w13_output_scale", "w13_gate_output_scale", "w2_output_scale")  # 1 on a rank that has none

_OPTIONAL = ("w13_bias", "w2_bias", "w2_input_scale", "w13_order")


@dataclasses.dataclass(kw_only=True, slots=True)
class HeldExperts:
    """What this rank has of one layer, between two groups or before its first.

    Args: experts: logical, in the order of `weights`. counts: [E] int64, tokens of this rank by expert; None for none.
    """

    experts: tuple[int, ...]
    weights: ExpertWeights
    counts: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: ExpertParallelMoE) -> "HeldExperts":
        """Those of a layer. Local."""
        table = layer.positions
        counts = table.counts if isinstance(table, PositionTable) else None
        return cls(experts=layer.placement.local_experts(layer.transport.rank), weights=layer.weights, counts=counts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How an expert comes to position `index` of rank `target`: from a row of rank `source`, or, if that is None, of
    what the target reads."""

    expert: int
    target: int
    index: int
    source: int | None
    row: int

    @property
    def travels(self) -> bool:
        return self.source not in (None, self.target)


def maps_peers(group: EPGroup) -> bool:
    """Whether experts are stored into other ranks' memory: then NCCL, which takes long to begin, is not needed.
    Collective on GPUs."""
    return group.device.type == "cuda" and not why_unreachable(group)


def arriving_bytes(held: HeldExperts, ways: Sequence[Way], names: Sequence[str]) -> int:
    """The most bytes of a layer's experts that a rank gets from others.

    Args: ways: of the layer, on all ranks. names: of the tensors that any rank has, sorted.
    Local; equal on all ranks.
    """
    counts = collections.Counter(way.target for way in ways if way.travels)
    num_bytes = sum(map(row_bytes, _complete(held.weights, names).values()))
    return max(counts.values(), default=0) * aligned(num_bytes)


def rows_of(weights: ExpertWeights | None) -> dict[str, torch.Tensor]:
    """The tensors of which each expert has a row, by name. Local."""
    return {} if weights is None else {n: each for n, each in weights.named_tensors.items() if n != _SHARED}


def row_bytes(rows: torch.Tensor) -> int:
    """Of one expert. Local."""
    return rows.element_size() * torch.Size(rows.shape[1:]).numel()


def _complete(weights: ExpertWeights, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """`rows_of` with all that other ranks have: factors of outputs, which are 1 here."""
    rows = rows_of(weights)
    for name in names:
        if name not in rows:
            if name not in _OUTPUT_SCALES:
                raise RuntimeError(f"{name} of experts is on some ranks only: these have loaded other weights")
            rows[name] = torch.ones(weights.num_local_experts, dtype=torch.float32, device=weights.w2.values.device)
    return rows


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """[L, n] uint8, a view of contiguous rows."""
    return (rows[:, None] if rows.dim() == 1 else rows.flatten(1)).view(torch.uint8)


@torch.inference_mode()
def move_experts(
    held: HeldExperts,
    read: ExpertWeights | None,
    ways: Sequence[Way],
    placement: Placement,
    names: Sequence[str],
    group: EPGroup,
    layer: int,
    carrier: Carrier | None,
) -> None:
    """Exchange the experts of a layer that travel, and put together what this rank has from now on.

    Args:
        held: changed. read: what this rank has read of it. ways, names: as of `arriving_bytes`. layer: its number.
        carrier: for `arriving_bytes`, if ranks map its memory; None for an all-to-all.
    Errors: PeerLostError. Collective.
    """
    rank, rows = group.rank, _complete(held.weights, names)
    flat = {name: _bytes(each.contiguous()) for name, each in rows.items()}
    ends = list(itertools.accumulate(each.shape[1] for each in flat.values()))
    spans = {name: slice(end - each.shape[1], end) for (name, each), end in zip(flat.items(), ends, strict=True)}
    travelling = [way for way in ways if way.travels]
    arriving = sorted((way for way in travelling if way.target == rank), key=lambda way: way.source or 0)
    if not travelling:
        incoming = torch.empty(0, ends[-1], dtype=torch.uint8, device=group.device)
    elif carrier is not None:
        size = aligned(ends[-1])
        parcels = [Parcel(source=way.source or 0, target=way.target, num_bytes=size) for way in travelling]
        group.barrier()  # all have read what came of the layer before
        carrier.begin(
            parcels,
            lambda number, memory: [(memory[spans[name]], each[travelling[number].row]) for name, each in flat.items()],
        )
        carrier.wait()
        group.barrier()
        incoming = carrier.spare[: len(arriving) * size].view(len(arriving), size)  # in the order of `arriving`
    else:
        leaving = [way for way in travelling if way.source == rank]
        outgoing = torch.empty(len(leaving), ends[-1], dtype=torch.uint8, device=group.device)
        for name, each in flat.items():
            outgoing[:, spans[name]] = each[[way.row for way in leaving]]
        counts = (
            [sum(way.source == other for way in arriving) for other in range(group.num_ranks)],
            [sum(way.target == other for way in leaving) for other in range(group.num_ranks)],
        )
        incoming = outgoing.new_empty(len(arriving), ends[-1])
        work = begin_all_to_all(group, incoming, outgoing, *counts)
        if work is not None:
            group.wait(work, phase="regroup", round=layer)
    experts = placement.local_experts(rank)
    if experts == held.experts:
        return
    kept = [way for way in ways if way.target == way.source == rank]
    reads = [way for way in ways if way.target == rank and way.source is None]
    found = {} if read is None else {name: _bytes(each) for name, each in _complete(read, names).items()}
    new = {name: each.new_empty(len(experts), *each.shape[1:]) for name, each in rows.items()}
    for name, each in new.items():
        into, own = _bytes(each), flat[name]
        into[[way.index for way in kept]] = own[[way.row for way in kept]]
        into[[way.index for way in arriving]] = incoming[:, spans[name]]
        if reads:
            into[[way.index for way in reads]] = found[name]
    held.experts, held.weights = experts, with_rows(held.weights, new)


def with_rows(weights: ExpertWeights, rows: Mapping[str, torch.Tensor]) -> ExpertWeights:
    """The weights with other experts: `rows` by the names of `rows_of`. Local."""

    def matrix(name: str, parts: StoredMatrix) -> StoredMatrix:
        return StoredMatrix(**{part: rows[name if part == "values" else f"{name}_{part}"] for part in parts.tensors})

    of_experts = [field.name for field in dataclasses.fields(PerExpert)]
    more: dict[str, Any] = {name: each for name, each in rows.items() if name in _OPTIONAL}
    more["per_expert"] = PerExpert(**{name: rows[name] for name in of_experts if name in rows})
    return dataclasses.replace(weights, w13=matrix("w13", weights.w13), w2=matrix("w2", weights.w2), **more)
