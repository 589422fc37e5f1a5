"""Plans: where experts and their copies go, so that the fullest rank has as little load as possible.

Letters: A layers, E logical experts, P positions (physical experts), R ranks, G groups of experts.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ep_moe.balance.idle import idle_copies
from ep_moe.balance.load import balancedness, rank_loads
from ep_moe.balance.packing import Floats, Ints, Ranks, Search, copy_counts, pack
from ep_moe.balance.packing import Step as Found
from ep_moe.fields import typed
from ep_moe.placement import Placement

_WORSE = 0.02  # steps from the previous placement end if a plan from nothing is better by this part of its own load
_STEPS_PER_RANK = 4  # the most steps of a layer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """An expert that comes to a position, in place of the one that is there.

    Args:
        position: physical id. expert, replaced: logical ids. source: the first rank that has the expert before.
    """

    position: int
    expert: int
    replaced: int
    source: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Moves of one layer that belong together, and what they gain.

    Args:
        gain: by how much the load of the layer's fullest rank falls, as a part of the mean rank's; no copies are idle.
    """

    layer: int
    moves: tuple[Move, ...]
    gain: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPlan:
    """Placements of all layers, and the way to them from the previous ones.

    Args:
        placements: one for each layer, with equal `starts`.
        steps: in the order of their gain for each move; the steps of one layer in the order in which they are made.
            Empty without previous placements.
        before, after: balancedness of each layer, the mean load of its ranks by that of its fullest one; `before` is
            empty without previous placements.
    """

    placements: tuple[Placement, ...]
    steps: tuple[Step, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def num_moves(self) -> int:
        """Moves of all steps; an expert that moves twice counts twice."""
        return sum(len(step.moves) for step in self.steps)


def plan_placement(
    load: Any,
    num_physical: int,
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    num_groups: int = 1,
    previous: Sequence[Placement] | None = None,
    max_moves: int | None = None,
    min_gain: float = 0.005,
    slack: float = 0.01,
) -> PlacementPlan:
    """Plan where the experts of all layers go, and which experts have copies.

    A copy of an expert takes an equal share of its load, and no rank gets two copies of one expert. Copies go, one by
    one, to the expert whose copies have the most load; copies are packed, the heaviest first, on the rank of least load
    (as DeepSeek's EPLB does); steps of two kinds then lower the fullest rank: two ranks exchange an expert each, or a
    copy gives way to another expert's. If `num_groups` and the nodes fit (several equal nodes, G a multiple of them,
    no rank with more positions than its node has experts), plans are hierarchical as in EPLB: groups of experts go to
    nodes, and experts stay on the node of their group, as routing that is limited to groups wants it.

    Copies that the balance can do without are idle, on one node: each that takes tokens costs a pass the reading of its
    weights. A later plan may use them without a move.

    With `previous`, the steps begin there, with none idle, and a layer is planned from nothing only if it is better by
    2 %, in the order of ranks and positions that moves fewest experts; that is one step.

    Args:
        load: [A, E] array or tensor, tokens that each layer's experts get, at least 0; a layer without load counts
            as evenly loaded.
        num_physical: P, from E to E * R. num_ranks: R; ranks have P / R positions, the first P % R one more.
        ranks_per_node: ranks of a node are neighbors; None is one node.
        num_groups: G; group g has the experts [g * E / G, (g + 1) * E / G).
        previous: the placements of the layers now; their `starts` stay.
        max_moves: the most moves of all layers, those that gain most first; needs `previous`, from which all steps
            then begin.
        min_gain: steps lower the fullest rank by at least this part of the layer's mean rank load.
        slack: by how much of the mean rank's load idle copies may raise the fullest one's.
    Errors: ValueError for a load that is no such array, for sizes or previous placements that do not fit each other.
    Local; without device or group. Equal arguments give equal plans.
    """
    loads = _checked_load(load)
    (num_layers, num_experts), node_size = loads.shape, num_ranks if ranks_per_node is None else ranks_per_node
    _check_sizes(num_experts, num_physical, num_ranks, node_size, num_groups)
    if max_moves is not None and (previous is None or typed(max_moves, int, "max_moves") < 0):
        raise ValueError(f"max_moves ({max_moves}) must be at least 0, and needs previous placements")
    for name, value in (("min_gain", min_gain), ("slack", slack)):
        if not 0 <= typed(value, float, name) < 1:
            raise ValueError(f"{name} ({value}) is not in [0, 1)")
    starts, now = Placement.linear(num_physical, num_ranks).starts, None
    if previous is not None:
        starts, now = _held(previous, num_layers, num_experts, num_physical, num_ranks)
    ranks = Ranks(np.array(starts))
    planner = _Planner(loads, ranks, node_size, num_groups, min_gain)
    if now is None:
        held, found = planner.fresh()
        if not found.all():  # ranks of equal sizes have room for all: this would be a mistake of ours
            raise RuntimeError(f"no placement found for layer {int(found.argmin())}")
        steps, most = list[Step](), planner.most(held)
    else:
        held, steps, most = planner.changed(now, max_moves)
    placements = tuple(Placement(tuple(row), starts) for row in held.tolist())
    if num_physical > num_experts and node_size >= num_ranks:
        allowed = slack * loads.sum(1) / num_ranks
        idle = idle_copies(loads, held, ranks, most + allowed)
        placements = tuple(
            Placement(each.physical_to_logical, starts, unused) for each, unused in zip(placements, idle, strict=True)
        )
        if previous is not None:
            kept = _layers_to_keep(loads, previous, placements, allowed)
            placements = tuple((previous if keep else placements)[layer] for layer, keep in enumerate(kept))
            steps = [step for step in steps if not kept[step.layer]]
    before = () if previous is None else _balanced(loads, previous)
    after = _balanced(loads, placements)
    return PlacementPlan(placements=placements, steps=tuple(steps), before=before, after=after)


def _layers_to_keep(
    loads: Floats, previous: Sequence[Placement], planned: Sequence[Placement], allowed: Floats
) -> list[bool]:
    """Whether a layer is better off as it is: its copies in use balance better, or as well without any move."""
    before, after = (
        np.array([max(ranks) for ranks in rank_loads(loads.tolist(), each)]) for each in (previous, planned)
    )
    kept = []
    for layer, (old, new) in enumerate(zip(previous, planned, strict=True)):
        stays = old.physical_to_logical == new.physical_to_logical
        as_good = stays and before[layer] <= after[layer] and len(old.idle) >= len(new.idle)
        kept.append(bool(as_good or before[layer] < after[layer] - allowed[layer]))
    return kept


def _balanced(loads: Floats, placements: Sequence[Placement]) -> tuple[float, ...]:
    """The balancedness of each layer."""
    return tuple(balancedness([ranks]) for ranks in rank_loads(loads.tolist(), placements))


class _Planner:
    """Plans of one load; see `plan_placement`."""

    def __init__(self, load: Floats, ranks: Ranks, node_size: int, num_groups: int, min_gain: float) -> None:
        self._load, self._ranks, self._num_groups = load, ranks, num_groups
        (_, num_experts), num_ranks = load.shape, len(ranks.sizes)
        self._mean = load.sum(1) / num_ranks
        self._min_gain, self._most_steps = min_gain * self._mean, _STEPS_PER_RANK * num_ranks
        num_nodes = max(1, num_ranks // node_size)
        each = num_experts // num_nodes
        fits = num_ranks % node_size == num_groups % num_nodes == 0 and each >= ranks.sizes.max()
        self._num_nodes = num_nodes if fits and each <= np.diff(ranks.starts[::node_size]).min() else 1
        self._node_of = np.arange(num_ranks) * self._num_nodes // num_ranks
        copies = min(num_ranks // self._num_nodes, int(ranks.starts[-1]) - num_experts + 1)
        self._floor = np.maximum(self._mean, load.max(1) / copies)

    def most(self, held: Ints) -> Floats:
        """[A] load of the fullest rank, also of packings that have two copies of an expert on one."""
        rows = np.arange(len(held))[:, None]
        counts = np.zeros(self._load.shape, np.int64)
        np.add.at(counts, (np.broadcast_to(rows, held.shape), held), 1)
        share = np.take_along_axis(self._load / counts, held, 1)
        ends = np.concatenate([np.zeros((len(held), 1)), share.cumsum(1)], 1)[:, self._ranks.starts]
        most: Floats = np.diff(ends, axis=1).max(1)
        return most

    def fresh(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Packings [A, P] from nothing, and in which layers [A] there is one."""
        if self._num_nodes == 1:
            held, found = self._packed(self._load, self._ranks)
        else:
            held, found = self._by_nodes()
        good = np.flatnonzero(found)
        self._improved(good, held)
        return held, found

    def _packed(self, load: Floats, ranks: Ranks) -> tuple[Ints, npt.NDArray[np.bool_]]:
        counts = copy_counts(load, int(ranks.starts[-1]), int((ranks.sizes > 0).sum()))
        return pack(load, counts, ranks)

    def _by_nodes(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Pack groups on nodes, then the experts of each node on its ranks."""
        load, nodes, rows = self._load, self._num_nodes, np.arange(len(self._load))[:, None]
        members = np.arange(load.shape[1]).reshape(self._num_groups, -1)
        each = self._num_groups // nodes
        group_load = load[:, members].sum(2)
        groups, found = pack(group_load, np.ones_like(group_load, np.int64), Ranks(np.arange(nodes + 1) * each))
        held, size = np.zeros((len(load), int(self._ranks.starts[-1])), np.int64), len(self._ranks.sizes) // nodes
        for node in range(nodes):
            experts = members[groups[:, node * each : (node + 1) * each]].reshape(len(load), -1)
            starts = self._ranks.starts[node * size : (node + 1) * size + 1]
            own, ok = self._packed(load[rows, experts], Ranks(starts - starts[0]))
            held[:, starts[0] : starts[-1]] = experts[rows, own]
            found = found & ok
        return held, found

    def _improved(self, layers: Ints, held: Ints) -> list[Found]:
        """Improve the packings of these layers in place; returns the steps."""
        search = Search(self._load[layers], held[layers], self._ranks, self._node_of)
        limits = {"floor": self._floor[layers], "min_gain": self._min_gain[layers]}
        steps = search.improve(**limits, most_steps=self._most_steps)
        held[layers] = search.held
        return [dataclasses.replace(step, layer=int(layers[step.layer])) for step in steps]

    def changed(self, now: Ints, max_moves: int | None) -> tuple[Ints, list[Step], Floats]:
        """Packings [A, P] near those now, the steps to them, and [A] the load of the fullest rank."""
        held = now.copy()
        single = self._is_single(now)
        found = _useful(self._improved(np.flatnonzero(single), held), self.most(now))
        steps = self._named(now, found)
        if max_moves is None:
            fresh, exists = self.fresh()
            fresh[~exists] = now[~exists]
            bound = self.most(fresh) * (1 + _WORSE) + self._min_gain
            anew = np.flatnonzero(exists & (~single | (self.most(self._carried_out(now, steps)) > bound)))
            steps = [step for step in steps if step.layer not in set(anew.tolist())]
            steps += self._anew(now, fresh, anew)
        steps = _best_first(steps, max_moves)
        held = self._carried_out(now, steps)
        return held, steps, self.most(held)

    def _is_single(self, held: Ints) -> npt.NDArray[np.bool_]:
        """[A] whether no rank has two copies of an expert, and experts are on the nodes of their groups."""
        rank, num_experts = self._ranks.of_position, self._load.shape[1]
        ordered = np.sort(held + rank * num_experts, axis=1)
        single = (np.diff(ordered, axis=1) != 0).all(1)
        if self._num_nodes > 1:
            group = held * self._num_groups // num_experts
            node = self._node_of[rank]
            for each in range(self._num_groups):
                low = np.where(group == each, node, self._num_nodes).min(1)
                single &= low == np.where(group == each, node, -1).max(1)
        return single

    def _named(self, now: Ints, found: list[Found]) -> list[Step]:
        """Steps with the names and gains of their moves."""
        held, most, steps = now.copy(), self.most(now), list[Step]()
        for step in found:
            steps.append(self._step(step, held[step.layer], float(most[step.layer])))
            held[step.layer, list(step.positions)] = step.experts
            most[step.layer] = step.most
        return steps

    def _step(self, found: Found, row: Ints, before: float) -> Step:
        rank = self._ranks.of_position
        moves = tuple(
            Move(
                position=position,
                expert=expert,
                replaced=int(row[position]),
                source=int(rank[int((row == expert).argmax())]),
            )
            for position, expert in zip(found.positions, found.experts, strict=True)
        )
        gain = (before - found.most) / float(self._mean[found.layer])
        return Step(layer=found.layer, moves=moves, gain=gain)

    def _anew(self, now: Ints, fresh: Ints, layers: Ints) -> list[Step]:
        """One step for each of these layers, from its placement now to the fresh one with as many experts in place as
        a greedy matching of ranks finds."""
        before, after, steps = self.most(now), self.most(fresh), list[Step]()
        if not len(layers):
            return steps
        target = self._matched(now[layers], fresh[layers])
        for layer, row in zip(layers.tolist(), target, strict=True):
            positions = np.flatnonzero(row != now[layer])
            found = Found(layer, tuple(positions.tolist()), tuple(row[positions].tolist()), float(after[layer]))
            steps.append(self._step(found, now[layer], float(before[layer])))
        return steps

    def _matched(self, now: Ints, fresh: Ints) -> Ints:
        """The fresh packings with ranks exchanged, and experts in their old positions where the rank keeps them."""
        starts, sizes, num_ranks = self._ranks.starts, self._ranks.sizes, len(self._ranks.sizes)
        rows, shape = np.arange(len(now))[:, None], (len(now), num_ranks, self._load.shape[1])
        has, will = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        has[rows, self._ranks.of_position, now] = 1
        will[rows, self._ranks.of_position, fresh] = 1
        common = will @ has.transpose(0, 2, 1)  # [A, R fresh, R now] experts that stay
        if self._num_nodes > 1:
            size = num_ranks // self._num_nodes
            by_node = common.reshape(-1, self._num_nodes, size, self._num_nodes, size).sum((2, 4))
            of_node = sizes.reshape(self._num_nodes, size)
            by_node = np.where((of_node[:, None] == of_node).all(2), by_node, -1.0)  # only alike nodes change places
            same = _matching(by_node)[:, self._node_of, None] == self._node_of
            common = np.where(same, common, -1.0)
        common = np.where(sizes[:, None] == sizes, common, -2.0)
        placed = np.empty_like(now)
        for layer, order in enumerate(_matching(common)):
            for source, rank in enumerate(order):
                old, new = (
                    now[layer, starts[rank] : starts[rank + 1]],
                    fresh[layer, starts[source] : starts[source + 1]],
                )
                kept = np.zeros(len(old), bool)
                kept[np.unique(old, return_index=True)[1]] = True  # of two copies on a rank, one goes
                kept &= np.isin(old, new)
                target = old.copy()
                target[~kept] = new[~np.isin(new, old)]
                placed[layer, starts[rank] : starts[rank + 1]] = target
        return placed

    @staticmethod
    def _carried_out(now: Ints, steps: Sequence[Step]) -> Ints:
        held = now.copy()
        for step in steps:
            for move in step.moves:
                held[step.layer, move.position] = move.expert
        return held


def _useful(found: list[Found], most: Floats) -> list[Found]:
    """The steps without those at the end of a layer's that no longer lower its fullest rank."""
    last, kept = most.copy(), [False] * len(found)
    pending: dict[int, list[int]] = {}
    for index, step in enumerate(found):
        pending.setdefault(step.layer, []).append(index)
        if step.most < last[step.layer] * (1 - 1e-12):
            last[step.layer] = step.most
            for each in pending.pop(step.layer):
                kept[each] = True
    return [step for step, useful in zip(found, kept, strict=True) if useful]


def _best_first(steps: list[Step], max_moves: int | None) -> list[Step]:
    """The steps by gain for each move, those of a layer in their order, and `max_moves` moves at most."""
    of_layer: dict[int, list[Step]] = {}
    for step in steps:
        of_layer.setdefault(step.layer, []).append(step)
    queue = [(-_worth(ahead[0]), layer, 0) for layer, ahead in of_layer.items()]
    heapq.heapify(queue)
    chosen, left = list[Step](), sum(len(step.moves) for step in steps) if max_moves is None else max_moves
    while queue:
        _, layer, index = heapq.heappop(queue)
        step = of_layer[layer][index]
        if len(step.moves) > left:
            continue
        chosen.append(step)
        left -= len(step.moves)
        if index + 1 < len(of_layer[layer]):
            heapq.heappush(queue, (-_worth(of_layer[layer][index + 1]), layer, index + 1))
    return chosen


def _worth(step: Step) -> float:
    return step.gain / max(1, len(step.moves))


def _matching(score: npt.NDArray[np.float32]) -> Ints:
    """For each row of [A, N, N] its column, chosen greedily by score."""
    score, (num_layers, size, _) = score.copy(), score.shape
    rows, order = np.arange(num_layers), np.zeros((num_layers, size), np.int64)
    for _ in range(size):
        best = score.reshape(num_layers, -1).argmax(1)
        first, second = best // size, best % size
        order[rows, first] = second
        score[rows, first, :] = -np.inf
        score[rows, :, second] = -np.inf
    return order


def _checked_load(load: Any) -> Floats:
    """The load in float64; a layer without any gets 1 everywhere."""
    try:
        loads = np.array(load.cpu().numpy() if hasattr(load, "cpu") else load, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"load is no array of numbers: {error}") from None
    if loads.ndim != 2 or 0 in loads.shape:
        raise ValueError(f"load is {loads.shape}; [layers, num_experts] needed")
    if not np.isfinite(loads).all() or (loads < 0).any():
        layer, expert = np.argwhere(~np.isfinite(loads) | (loads < 0))[0].tolist()
        raise ValueError(
            f"load of expert {expert} in layer {layer} ({loads[layer, expert]}) must be a number from 0 on"
        )
    with np.errstate(over="ignore"):
        totals = loads.sum(1)
    if not np.isfinite(totals).all():
        raise ValueError(f"load of layer {int(np.argmin(np.isfinite(totals)))} adds up to more than a float64 can be")
    loads[totals == 0] = 1.0
    return loads


def _check_sizes(num_experts: int, num_physical: int, num_ranks: int, node_size: int, num_groups: int) -> None:
    for name, value in (
        ("num_physical", num_physical),
        ("num_ranks", num_ranks),
        ("ranks_per_node", node_size),
        ("num_groups", num_groups),
    ):
        if typed(value, int, name) < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if num_physical < num_experts:
        raise ValueError(
            f"num_physical ({num_physical}) is below num_experts ({num_experts}): experts would be dropped"
        )
    if num_physical > num_experts * num_ranks:
        raise ValueError(
            f"num_physical ({num_physical}) exceeds num_experts * num_ranks ({num_experts * num_ranks}): a rank would "
            f"have two copies of an expert"
        )
    if num_experts % num_groups:
        raise ValueError(f"num_experts ({num_experts}) is not a multiple of num_groups ({num_groups})")


def _held(
    previous: Sequence[Placement], num_layers: int, num_experts: int, num_physical: int, num_ranks: int
) -> tuple[tuple[int, ...], Ints]:
    """The common starts of placements, and the experts [A, P] of their positions."""
    if len(previous) != num_layers:
        raise ValueError(f"previous has {len(previous)} placements, load has {num_layers} layers")
    sizes = (num_experts, num_physical, num_ranks)
    for layer, placement in enumerate(previous):
        if not isinstance(placement, Placement):
            raise ValueError(f"previous[{layer}] is no Placement")
        found = (placement.num_experts, placement.num_physical, placement.num_ranks)
        if found != sizes:
            raise ValueError(
                f"previous[{layer}] has num_experts, num_physical and num_ranks {found}; this plan has {sizes}"
            )
        if placement.starts != previous[0].starts:
            raise ValueError(f"previous[{layer}] has starts {placement.starts}, previous[0] {previous[0].starts}")
    return previous[0].starts, np.array([placement.physical_to_logical for placement in previous])
