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

from ep_moe.balance.carrier import Carrier
from ep_moe.balance.handover import plan_handover
from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.engines.common.model import Agreement, check_placements, counting_table, warm_up
from ep_moe.engines.transformers.moving import (
    HeldExperts,
    Way,
    arriving_bytes,
    maps_peers,
    move_experts,
    row_bytes,
    rows_of,
    with_rows,
)
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport
from ep_moe.weights import Checkpoint, ExpertWeights

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
    sizes = [sum(row_bytes(rows) for rows in rows_of(each.weights).values()) for each in held]
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
) -> tuple[tuple[Placement, ...], list[list["Way"]]]:
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
        mine = [{*rows_of(each.weights), *rows_of(read.get(index))} for index, each in enumerate(held)]
        everywhere = group.all_gather_object(mine)
    with _timed(secs, "move"), contextlib.ExitStack() as ends:
        names = [sorted(set().union(*(of_rank[index] for of_rank in everywhere))) for index in range(len(held))]
        carrier, most = None, max(map(arriving_bytes, held, ways, names))
        if most and maps_peers(group):
            carrier = Carrier(group, most, mapped=True)
            ends.callback(carrier.destroy)
        for index, each in enumerate(held):
            place = ways[index], placements[index], names[index]
            move_experts(each, read.pop(index, None), *place, group, index, carrier)
    return placements, ways


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


def _ways_to(placement: Placement, held: Sequence[Sequence[int]]) -> list[Way]:
    """The ways of one layer's experts from where they are, by rank, in the order of positions."""
    ways, sent, num_read = list[Way](), [0] * len(held), [0] * len(held)
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
            ways.append(Way(expert=expert, target=target, index=index, source=source, row=row))
    return ways


def _read(recipe: Recipe, ways: Sequence[Sequence[Way]], group: EPGroup, lost: str) -> dict[int, ExpertWeights]:
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
        rows = rows_of(each.weights)
        key = config, *((name, row.shape[1:], row.dtype) for name, row in rows.items())
        if key not in zeros:
            new = {name: row.new_zeros(len(experts), *row.shape[1:]) for name, row in rows.items()}
            zeros[key] = with_rows(each.weights, new)
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
