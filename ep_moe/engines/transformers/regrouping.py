"""The experts of a model on other ranks than before: which goes where, where it comes from, and layers made anew.

Letters: A MoE layers, E logical experts, L positions of this rank, P positions of all ranks, R ranks.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import operator
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ep_moe.balance.carrier import Carrier, Parcel, aligned
from ep_moe.balance.handover import plan_handover
from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.engines.common.model import Agreement, check_placements, counting_table, warm_up
from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin_all_to_all
from ep_moe.group.symmetric import why_unreachable
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix
from ep_moe.routing import PositionTable
from ep_moe.transport import Transport, create_transport
from ep_moe.weights import Checkpoint, ExpertWeights, PerExpert

_SHARED = "w13_input_scale"  # of all experts, the same on all ranks
_OUTPUT_SCALES = ("w13_output_scale", "w13_gate_output_scale", "w2_output_scale")  # 1 on a rank that has none

_OPTIONAL = ("w13_bias", "w2_bias", "w2_input_scale", "w13_order")

_REHEARSED = ("auto", "local", "collective", "gathered", "peer", "nvlink")  # without other processes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """What `Session.regroup` has done, the same on all ranks but for `secs`.

    Args:
        epoch, seats: of the group. placements: which rank has which expert now, by MoE layer.
        from_ranks, from_checkpoint: experts that ranks have got from others, and read. rank_bytes, checkpoint_bytes:
            of these.
        secs: on this rank, of "plan", "read", "move" and "layers", which are made last, with their transport.
    """

    epoch: int
    seats: tuple[int, ...]
    placements: tuple[Placement, ...]
    from_ranks: int
    from_checkpoint: int
    rank_bytes: int
    checkpoint_bytes: int
    secs: dict[str, float]


class ExpertSource:
    """The checkpoint that a model's experts were read from.

    Args:
        checkpoint: as it was opened. layers: its numbers of the model's MoE layers, in order.
        dtype, scheme, device: as of `ExpertWeights.from_pretrained`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Sequence[int],
        *,
        dtype: torch.dtype,
        scheme: str | None,
        device: torch.device,
    ) -> None:
        self.num_experts = checkpoint.config.num_experts
        self._checkpoint, self._layers = checkpoint, tuple(layers)
        self._options: dict[str, Any] = {"dtype": dtype, "scheme": scheme, "device": device}
        stored = [getattr(tensor, "parts", {"": tensor}).values() for tensor in checkpoint.tensors.values()]
        self._files = {path: _version(path) for path in {part.file for part in itertools.chain(*stored)}}

    def read(self, experts: Mapping[int, Sequence[int]]) -> dict[int, ExpertWeights]:
        """Read some experts of the model's nth MoE layers, by n, in this order.

        Errors: ValueError, OSError if the checkpoint has gone or changed. Local; synchronizes with the device.
        """
        for path, version in self._files.items():
            if _version(path) != version:
                raise ValueError(f"{path} is not the file that was loaded: it was written to since")
        numbers = {index: self._layers[index] for index in experts}
        placements = {numbers[index]: self._alone(each) for index, each in experts.items()}
        found = ExpertWeights.from_pretrained(self._checkpoint, placements, 0, layers=numbers.values(), **self._options)
        return {index: found[number] for index, number in numbers.items()}

    def _alone(self, experts: Sequence[int]) -> Placement:
        """A placement whose rank 0 has these experts."""
        others = [expert for expert in range(self.num_experts) if expert not in experts]
        return Placement((*experts, *others), (0, len(experts), self.num_experts))


def _version(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the layers of a model are made of besides weights and ranks.

    Args:
        transport, experts: names of implementations. sizes: of the transport. num_topk: K, None if it is not known.
        configs: of each layer. source: of experts that no rank has; None for a model that was sharded in memory.
        spread: P and R of the first placement; None for a rank that joins later.
    """

    transport: str
    experts: str
    sizes: TransportConfig
    num_topk: int | None
    configs: tuple[MoEConfig, ...]
    source: ExpertSource | None
    spread: tuple[int, int] | None


class Rehearsal(NamedTuple):
    """A group in which this rank may be next, for `Session.rehearsing`.

    Args: rank, num_ranks: there. num_physical: P there; None for as many as `regroup` makes.
    """

    rank: int
    num_ranks: int
    num_physical: int | None = None


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
class _Way:
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


def regroup_experts(
    recipe: Recipe, held: Sequence[HeldExperts], group: EPGroup, lost: str
) -> tuple[Transport, tuple[ExpertParallelMoE, ...], Regrouped]:
    """Bring the experts of all layers to the ranks of a group, and make transport and layers for them.

    Args:
        held: what this rank has, by layer; changed layer by layer, so that after an error the call may be repeated in
            another group.
        lost: why ranks are gone, for errors.
    Errors: RuntimeError, on all ranks, if an expert is on no rank and cannot be read; PeerLostError. Collective.
    """
    secs: dict[str, float] = {}
    placements, ways = _bring(recipe, held, group, lost, (), secs)
    with _timed(secs, "layers"):
        transport, layers = _make(recipe, held, placements, group)
    sizes = [sum(_row_bytes(rows) for rows in _rows_of(each.weights).values()) for each in held]
    travelling, reading = ([sum(chosen(way) for way in of_layer) for of_layer in ways] for chosen in _KINDS)
    done = Regrouped(
        epoch=group.epoch,
        seats=group.seats,
        placements=placements,
        from_ranks=sum(travelling),
        from_checkpoint=sum(reading),
        rank_bytes=sum(map(operator.mul, travelling, sizes)),
        checkpoint_bytes=sum(map(operator.mul, reading, sizes)),
        secs=secs,
    )
    if group.rank == 0:
        _log.info(
            "experts of epoch %d are on ranks %s: %d from other ranks (%.1f MB), %d from the checkpoint (%.1f MB); %s",
            done.epoch,
            ", ".join(map(str, done.seats)),
            done.from_ranks,
            done.rank_bytes / 1e6,
            done.from_checkpoint,
            done.checkpoint_bytes / 1e6,
            ", ".join(f"{name} {each:.3f} s" for name, each in secs.items()),
        )
    return transport, layers, done


def hand_over_experts(
    recipe: Recipe, held: Sequence[HeldExperts], group: EPGroup, leaving: Collection[int]
) -> tuple[Placement, ...]:
    """Bring the experts of ranks that are about to leave to the others of their group; these have all of them then.

    Args:
        held: as of `regroup_experts`, which the others call next. leaving: ranks of the group, not all of them.
    Returns: which rank has which expert now, by layer; those that leave have none.
    Errors: as of `regroup_experts`. Collective.
    """
    secs: dict[str, float] = {}
    placements, ways = _bring(recipe, held, group, "ranks leave", leaving, secs)
    if group.rank == 0:
        _log.info(
            "%d experts of ranks %s are on the others: %s",
            sum(way.travels for of_layer in ways for way in of_layer),
            ", ".join(str(group.seats[rank]) for rank in sorted(leaving)),
            ", ".join(f"{name} {each:.3f} s" for name, each in secs.items()),
        )
    return placements


def _bring(
    recipe: Recipe,
    held: Sequence[HeldExperts],
    group: EPGroup,
    lost: str,
    leaving: Collection[int],
    secs: dict[str, float],
) -> tuple[tuple[Placement, ...], list[list["_Way"]]]:
    """Bring experts to the ranks that do not leave; returns where they are and how they came. Collective."""
    with _timed(secs, "plan"):
        ranks = group.all_gather_object(
            (recipe.spread, [each.experts for each in held], [_counted(each) for each in held])
        )
        placements = _planned(recipe, ranks, leaving)
        check_placements(placements, group)
        ways = [
            _ways_to(placement, [experts[layer] for _, experts, _ in ranks])
            for layer, placement in enumerate(placements)
        ]
    with _timed(secs, "read"):
        read = _read(recipe, ways, group, lost)
        mine = [{*_rows_of(each.weights), *_rows_of(read.get(index))} for index, each in enumerate(held)]
        everywhere = group.all_gather_object(mine)
    with _timed(secs, "move"), contextlib.ExitStack() as ends:
        names = [sorted(set().union(*(of_rank[index] for of_rank in everywhere))) for index in range(len(held))]
        carrier, most = None, max(map(_arriving_bytes, held, ways, names))
        if most and _maps_peers(group):
            carrier = Carrier(group, most, mapped=True)
            ends.callback(carrier.destroy)
        for index, each in enumerate(held):
            _move(each, read.pop(index, None), ways[index], placements[index], names[index], group, index, carrier)
    return placements, ways


def _maps_peers(group: EPGroup) -> bool:
    """Whether experts are stored into other ranks' memory: then NCCL, which takes long to begin, is not needed."""
    return group.device.type == "cuda" and not why_unreachable(group)


def _arriving_bytes(held: HeldExperts, ways: Sequence[_Way], names: Sequence[str]) -> int:
    """The most bytes of a layer's experts that a rank gets from others."""
    counts = collections.Counter(way.target for way in ways if way.travels)
    row_bytes = sum(map(_row_bytes, _complete(held.weights, names).values()))
    return max(counts.values(), default=0) * aligned(row_bytes)


_KINDS = (lambda way: way.travels, lambda way: way.source is None)


@contextlib.contextmanager
def _timed(secs: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    secs[name] = time.perf_counter() - start


def _counted(held: HeldExperts) -> list[int]:
    return [] if held.counts is None else held.counts.tolist()


def _planned(recipe: Recipe, ranks: Sequence[Any], leaving: Collection[int] = ()) -> tuple[Placement, ...]:
    """The placements of all layers for what ranks have; those that leave get nothing.

    There are as many positions as at the start, but for a group of fewer ranks no more on each than then, unless the
    experts need them.
    """
    stay = [rank for rank in range(len(ranks)) if rank not in leaving]
    num_ranks, num_experts = len(stay), recipe.configs[0].num_experts
    first, first_ranks = next((spread for spread, _, _ in ranks if spread is not None), (num_experts, len(ranks)))
    num_physical = _positions_on(num_ranks, num_experts, first, first_ranks)
    load = [[0] * num_experts for _ in recipe.configs]
    for _, _, counts in ranks:
        for layer, found in enumerate(counts):
            load[layer] = list(map(operator.add, load[layer], found or [0] * num_experts))
    planned = plan_handover([ranks[rank][1] or [()] * len(load) for rank in stay], load, num_physical)
    if not leaving:
        return planned
    # a rank that leaves has no positions between those of the others
    firsts = [sum(other < rank for other in stay) for rank in range(len(ranks) + 1)]
    return tuple(
        Placement(each.physical_to_logical, tuple(each.starts[first] for first in firsts), each.idle)
        for each in planned
    )


def _positions_on(num_ranks: int, num_experts: int, first: int, first_ranks: int) -> int:
    """How many positions of E experts there are on R ranks, if there were `first` on `first_ranks` at the start."""
    return min(first, max(num_experts, first * num_ranks // first_ranks), num_experts * num_ranks)


def _ways_to(placement: Placement, held: Sequence[Sequence[int]]) -> list[_Way]:
    """The ways of one layer's experts from where they are, by rank, in the order of positions."""
    ways, sent, num_read = list[_Way](), [0] * len(held), [0] * len(held)
    for target in range(placement.num_ranks):
        for index, expert in enumerate(placement.local_experts(target)):
            holders = [rank for rank, experts in enumerate(held) if expert in experts]
            source = target if target in holders else min(holders, key=lambda rank: (sent[rank], rank), default=None)
            if source is None:
                row = num_read[target]
                num_read[target] += 1
            else:
                row = held[source].index(expert)
                sent[source] += source != target
            ways.append(_Way(expert=expert, target=target, index=index, source=source, row=row))
    return ways


def _read(recipe: Recipe, ways: Sequence[Sequence[_Way]], group: EPGroup, lost: str) -> dict[int, ExpertWeights]:
    """What this rank reads, by layer. Collective if a rank reads anything."""
    needed = [(layer, way) for layer, of_layer in enumerate(ways) for way in of_layer if way.source is None]
    if not needed:
        return {}
    mine: dict[int, list[int]] = {}
    for layer, way in needed:
        if way.target == group.rank:
            mine.setdefault(layer, []).append(way.expert)
    layer, way = needed[0]
    what = f"{len(needed)} experts, the first of them expert {way.expert} of MoE layer {layer}, are on no rank ({lost})"
    with Agreement(group, "regroup"):
        if recipe.source is None:
            raise RuntimeError(f"{what}, and the model was not read from a checkpoint but sharded in memory")
        try:
            return recipe.source.read(mine) if mine else {}
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{what}, and the checkpoint cannot be read again: {error}") from error


def _rows_of(weights: ExpertWeights | None) -> dict[str, torch.Tensor]:
    """The tensors of which each expert has a row, by name."""
    return {} if weights is None else {n: each for n, each in weights.named_tensors.items() if n != _SHARED}


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.element_size() * torch.Size(rows.shape[1:]).numel()


def _complete(weights: ExpertWeights, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """`_rows_of` with all that other ranks have: factors of outputs, which are 1 here."""
    rows = _rows_of(weights)
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
def _move(
    held: HeldExperts,
    read: ExpertWeights | None,
    ways: Sequence[_Way],
    placement: Placement,
    names: Sequence[str],
    group: EPGroup,
    layer: int,
    carrier: Carrier | None,
) -> None:
    """Exchange the experts of a layer that travel, and put together what this rank has from now on. Collective."""
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
    held.experts, held.weights = experts, _with_rows(held.weights, new)


def _with_rows(weights: ExpertWeights, rows: Mapping[str, torch.Tensor]) -> ExpertWeights:
    """The weights with other experts: `rows` by the names of `_rows_of`."""

    def matrix(name: str, parts: StoredMatrix) -> StoredMatrix:
        return StoredMatrix(**{part: rows[name if part == "values" else f"{name}_{part}"] for part in parts.tensors})

    of_experts = [field.name for field in dataclasses.fields(PerExpert)]
    more: dict[str, Any] = {name: each for name, each in rows.items() if name in _OPTIONAL}
    more["per_expert"] = PerExpert(**{name: rows[name] for name in of_experts if name in rows})
    return dataclasses.replace(weights, w13=matrix("w13", weights.w13), w2=matrix("w2", weights.w2), **more)


def rehearse_experts(
    recipe: Recipe, held: Sequence[HeldExperts], group: EPGroup, num_physical: int | None
) -> tuple[Transport, tuple[ExpertParallelMoE, ...]]:
    """Transport and layers as of `regroup_experts`, with experts whose weights are zero, shared by layers that are
    alike.

    Args:
        held: whose weights are alike but for the experts. group: of `EPGroup.rehearsal`. num_physical: of `Rehearsal`.
    Local.
    """
    if recipe.transport not in _REHEARSED:
        recipe = dataclasses.replace(recipe, transport="collective")
    num_experts = recipe.configs[0].num_experts
    if num_physical is None:
        num_physical = _positions_on(group.num_ranks, num_experts, *(recipe.spread or (num_experts, 1)))
    starts = Placement.linear(num_physical, group.num_ranks).starts
    placement = Placement(tuple(position % num_experts for position in range(num_physical)), starts)
    experts, made, zeros = placement.local_experts(group.rank), list[HeldExperts](), dict[Any, ExpertWeights]()
    for each, config in zip(held, recipe.configs, strict=True):
        rows = _rows_of(each.weights)
        key = config, *((name, row.shape[1:], row.dtype) for name, row in rows.items())
        if key not in zeros:
            new = {name: row.new_zeros(len(experts), *row.shape[1:]) for name, row in rows.items()}
            zeros[key] = _with_rows(each.weights, new)
        made.append(HeldExperts(experts=experts, weights=zeros[key]))
    return _make(recipe, made, [placement] * len(made), group)


def _make(
    recipe: Recipe, held: Sequence[HeldExperts], placements: Sequence[Placement], group: EPGroup
) -> tuple[Transport, tuple[ExpertParallelMoE, ...]]:
    """Transport and layers, with their kernels. Collective."""
    transport = create_transport(recipe.transport, group, placements[0], _sizes_for(recipe, group))
    layers = []
    for index, (each, config, placement) in enumerate(zip(held, recipe.configs, placements, strict=True)):
        table = counting_table(placement, group)
        if each.counts is not None:
            table.lanes[0] = each.counts
        layers.append(
            ExpertParallelMoE(
                config, each.weights, transport, placement=table, experts=recipe.experts, layer_index=index
            )
        )
    if recipe.num_topk is not None:
        warm_up(layers, recipe.num_topk)
    return transport, tuple(layers)


def _sizes_for(recipe: Recipe, group: EPGroup) -> TransportConfig:
    """The transport's sizes; if nodes have different numbers of ranks now, each rank is a node of its own."""
    if recipe.transport != "hierarchical":
        return recipe.sizes
    sizes, nodes = recipe.sizes, collections.Counter(group.all_gather_object(group.node)).values()
    if group.num_ranks % sizes.ranks_per_node == 0 if sizes.ranks_per_node else len(set(nodes)) == 1:
        return sizes
    _log.info("transport 'hierarchical' takes each rank for a node: nodes have different numbers of ranks now")
    return dataclasses.replace(sizes, ranks_per_node=1)
