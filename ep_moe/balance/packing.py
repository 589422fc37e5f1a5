"""Experts on ranks, for many layers at once: a first packing, and the steps that lower the load of the fullest rank.

All of it is arithmetic of NumPy arrays with a row for each layer. A copy of an expert takes an equal share of its load.
Letters: A layers, E logical experts, P positions (physical experts), R ranks, C most positions of a rank.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOWHERE = -1
_LIGHT_RANKS = 8  # of least load, with which the fullest rank exchanges experts
_CANDIDATES, _REPLACED = 4, 24  # experts that may get a copy in a step, and copies that may give way to it
_SMALLEST = 1e-12  # gains below this part of a layer's load are rounding


class Ranks:
    """Which positions ranks have: rank r owns [starts[r], starts[r + 1]).

    Attributes:
        sizes: [R] positions of each rank. of_position: [P] the rank of each position.
        slots: [R, C] the positions of each rank, NOWHERE behind its last one.
    """

    def __init__(self, starts: Ints) -> None:
        self.starts, self.sizes = starts, np.diff(starts)
        self.of_position = np.repeat(np.arange(len(self.sizes)), self.sizes)
        column = np.arange(max(1, self.sizes.max(initial=0)))
        self.slots = np.where(column < self.sizes[:, None], starts[:-1, None] + column, NOWHERE)


def copy_counts(load: Floats, num_physical: int, most: int) -> Ints:
    """How many copies experts get: each further one goes to the expert whose copies have the most load, as in EPLB.

    Args: load: [A, E]. most: copies of an expert; E <= num_physical <= E * most. Returns: [A, E].
    """
    rows, counts = np.arange(len(load)), np.ones(load.shape, np.int64)
    share = load.copy() if most > 1 else np.full_like(load, -1.0)
    for _ in range(num_physical - load.shape[1]):
        expert = share.argmax(1)
        counts[rows, expert] += 1
        found = counts[rows, expert]
        share[rows, expert] = np.where(found < most, load[rows, expert] / found, -1.0)
    return counts


def pack(load: Floats, counts: Ints, ranks: Ranks) -> tuple[Ints, Bools]:
    """Put copies on ranks, the heaviest first, each on the rank of least load that has room and no copy of its expert.

    Args: load, counts: [A, E].
    Returns: held [A, P], the expert of each position, and [A], False for layers in which no rank had room.
    """
    (num_layers, num_experts), sizes = load.shape, ranks.sizes
    share = load / counts
    order = np.argsort(-share, axis=1, kind="stable")
    # [A, P]: experts by descending share, as often as each has copies
    sequence = np.repeat(order.ravel(), np.take_along_axis(counts, order, 1).ravel()).reshape(num_layers, -1)
    rows, filled = np.arange(num_layers), np.zeros((num_layers, len(sizes)), np.int64)
    present = np.zeros((num_layers, num_experts, len(sizes)), bool)
    rank_load, found = np.zeros((num_layers, len(sizes))), np.ones(num_layers, bool)
    held = np.full((num_layers, sequence.shape[1]), NOWHERE)
    weights = np.take_along_axis(share, sequence, 1)
    for step in range(sequence.shape[1]):
        expert = sequence[:, step]
        barred = (filled >= sizes) | present[rows, expert]
        rank = np.where(barred, np.inf, rank_load).argmin(1)
        for layer in np.flatnonzero(barred[rows, rank]):
            if found[layer]:
                rank[layer] = _make_room(held[layer], filled[layer], present[layer], int(expert[layer]), ranks)
                found[layer] = rank[layer] != NOWHERE  # else this layer's packing is not used
                rank_load[layer] = (present[layer].T * share[layer]).sum(1)
        ok = found & (filled[rows, rank] < sizes[rank])
        at = np.where(ok, ranks.starts[rank] + filled[rows, rank], 0)
        held[rows[ok], at[ok]] = expert[ok]
        filled[rows, rank] += 1
        present[rows, expert, rank] = True
        rank_load[rows, rank] += weights[:, step]
    return held, found


def _make_room(held: Ints, filled: Ints, present: Bools, expert: int, ranks: Ranks) -> int:
    """Move an expert of one layer to a rank that has room and this expert; returns the rank that has room then."""
    starts, sizes = ranks.starts, ranks.sizes
    for free in np.flatnonzero(filled < sizes):
        for full in np.flatnonzero(~present[expert]):
            positions = np.arange(starts[full], starts[full] + filled[full])
            movable = positions[~present[held[positions], free]]
            if len(movable):
                moved, last = held[movable[-1]], positions[-1]
                held[starts[free] + filled[free]] = moved
                held[movable[-1]], held[last] = held[last], NOWHERE
                present[moved, full], present[moved, free] = False, True
                filled[free] += 1
                filled[full] -= 1
                return int(full)
    return NOWHERE


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one step changes in one layer: the positions, and the experts that they hold from then on."""

    layer: int
    positions: tuple[int, ...]
    experts: tuple[int, ...]
    most: float  # load of the fullest rank after it


class Search:
    """Steps from one packing to a better one: two ranks exchange an expert each, or a copy of one expert gives way to
    one of an expert of the fullest rank.

    Args: load: [A, E]. held: [A, P], changed by `improve`. node_of: [R]; experts stay on their node.
    """

    def __init__(self, load: Floats, held: Ints, ranks: Ranks, node_of: Ints) -> None:
        self.load, self.held, self._ranks = load, held, ranks
        self._of_position, self._slots = ranks.of_position, ranks.slots
        self._of_node, self._same_node = node_of, node_of[:, None] == node_of
        (num_layers, num_experts), num_ranks = load.shape, len(ranks.sizes)
        rows = np.arange(num_layers)[:, None]
        self.counts = np.zeros((num_layers, num_experts), np.int64)
        self._present = np.zeros((num_layers, num_experts, num_ranks), bool)
        self._present[rows, held, self._of_position] = True
        np.add.at(self.counts, (np.broadcast_to(rows, held.shape), held), 1)
        self.rank_load = np.einsum("aer,ae->ar", self._present, load / self.counts)

    @property
    def most(self) -> Floats:
        """[A] load of each layer's fullest rank."""
        return self.rank_load.max(1, initial=0)

    def improve(self, *, floor: Floats, min_gain: Floats, most_steps: int) -> list[Step]:
        """Take steps in each layer until none gains `min_gain` [A] or the fullest rank has at most `floor` [A].

        Returns: all steps, in order; those of different layers are independent of each other.
        """
        least = np.maximum(min_gain, _SMALLEST * self.load.sum(1))
        nodes = np.unique(np.argmax(self._same_node, axis=1), return_counts=True)
        of_node = np.add.reduceat(self.rank_load, nodes[0], axis=1) / nodes[1]  # which no step changes
        floor = np.maximum(floor, of_node.max(1))
        active, steps = np.flatnonzero(self.most > floor + least), list[Step]()
        for _ in range(most_steps):
            if not len(active):
                break
            swaps, copies = self._best_swap(active), self._best_copy(active)
            before = self.most[active]
            swap_gain, copy_gain = before - swaps[0], before - copies[0]
            copying = copy_gain > np.maximum(swap_gain / 2, least[active])  # one move against two
            going = np.where(copying, copy_gain, swap_gain) > least[active]
            for index in np.flatnonzero(going):
                positions: tuple[int, ...]
                experts: tuple[int, ...]
                layer, first, second = active[index], *(int(each[index]) for each in swaps[1:])
                if copying[index]:
                    position, expert = (int(each[index]) for each in copies[1:])
                    positions, experts = (position,), (expert,)
                else:
                    positions, experts = (first, second), (int(self.held[layer, second]), int(self.held[layer, first]))
                self._change(layer, positions, experts)
                steps.append(Step(int(layer), positions, experts, float(self.rank_load[layer].max())))
            active = active[going]
            active = active[self.most[active] > floor[active] + least[active]]
        return steps

    def _change(self, layer: int, positions: tuple[int, ...], experts: tuple[int, ...]) -> None:
        present, counts, ranks = self._present[layer], self.counts[layer], self._of_position
        for position in positions:
            present[self.held[layer, position], ranks[position]] = False
            counts[self.held[layer, position]] -= 1
        for position, expert in zip(positions, experts, strict=True):
            self.held[layer, position] = expert
            present[expert, ranks[position]] = True
            counts[expert] += 1
        self.rank_load[layer] = (self.load[layer] / counts) @ present

    def _best_swap(self, active: Ints) -> tuple[Floats, Ints, Ints]:
        """For each layer the larger load of the two ranks after the best exchange, and its two positions."""
        rows, rank_load = np.arange(len(active))[:, None], self.rank_load[active]
        fullest = rank_load.argmax(1)
        number = min(_LIGHT_RANKS, rank_load.shape[1])
        allowed = np.where(self._same_node[fullest], rank_load, np.inf)
        light = np.argpartition(allowed, number - 1, axis=1)[:, :number]  # [A, light]
        mine, theirs = self._slots[fullest], self._slots[light].reshape(len(active), -1)  # [A, C], [A, light * C]
        share, held = self.load[active] / self.counts[active], self.held[active]
        ours, others = held[rows, mine], held[rows, theirs]
        rank = self._of_position[theirs]
        present = self._present[active]
        change = share[rows, others][:, None] - share[rows, ours][:, :, None]  # [A, C, light * C], of the fullest
        after = np.maximum(
            rank_load.max(1)[:, None, None] + change, np.take_along_axis(rank_load, rank, 1)[:, None] - change
        )
        barred = ((theirs == NOWHERE) | present[rows, others, fullest[:, None]])[:, None] | (mine == NOWHERE)[
            :, :, None
        ]
        barred = barred | present[rows[:, :, None], ours[:, :, None], rank[:, None]]
        barred |= ~self._same_node[fullest[:, None], rank][:, None]
        after[barred] = np.inf
        flat = after.reshape(len(active), -1)
        best = flat.argmin(1)
        which = np.arange(len(active))
        return flat[which, best], mine[which, best // after.shape[2]], theirs[which, best % after.shape[2]]

    def _best_copy(self, active: Ints) -> tuple[Floats, Ints, Ints]:
        """For each layer the largest load after the best replacement of a copy, its position and its new expert.

        Either a copy anywhere makes room for one of the fullest rank's experts, or one on it for a lighter expert.
        """
        counts, held, load = self.counts[active], self.held[active], self.load[active]
        rank_load, rows = self.rank_load[active], np.arange(len(active))[:, None]
        fullest, share = rank_load.argmax(1), load / counts
        spare = np.take_along_axis(counts, held, 1) > 1  # [A, P]
        here = self._present[active][rows, np.arange(load.shape[1]), fullest[:, None]]  # [A, E]
        height = np.where(spare, rank_load[:, self._of_position] - share[rows, held], np.inf)
        spots = np.argpartition(height, (number := min(_REPLACED, held.shape[1])) - 1, axis=1)[:, :number]
        lost = load / (counts + 1)  # [A, E] share after one more copy
        gain = np.where(here, share - lost, -1.0)
        new = np.argpartition(-gain, (number := min(_CANDIDATES, load.shape[1])) - 1, axis=1)[:, :number]
        lighter = np.argpartition(np.where(here, np.inf, lost), number - 1, axis=1)[:, :number]
        found = [self._after_copies(active, spots, new), self._after_copies(active, self._slots[fullest], lighter)]
        return tuple(np.where(found[0][0] <= found[1][0], *pair) for pair in zip(*found, strict=True))

    def _after_copies(self, active: Ints, spots: Ints, new: Ints) -> tuple[Floats, Ints, Ints]:
        """The best of the replacements of positions [A, Q] by experts [A, B], as `_best_copy`."""
        counts, load, rank_load = self.counts[active], self.load[active], self.rank_load[active]
        present, rows = self._present[active], np.arange(len(active))[:, None]
        share, fewer, more = load / counts, load / np.maximum(counts - 1, 1), load / (counts + 1)
        old, rank = self.held[active][rows, spots], self._of_position[spots]
        after = rank_load[:, None, None] - ((share - more)[rows, new][:, :, None] * present[rows, new])[:, None]
        after = after + ((fewer - share)[rows, old][:, :, None] * present[rows, old])[:, :, None]  # [A, Q, B, R]
        change = more[rows, new][:, None] - fewer[rows, old][:, :, None]  # [A, Q, B], of the position's rank
        at = np.broadcast_to(rank[:, :, None, None], (*change.shape, 1))
        np.put_along_axis(after, at, np.take_along_axis(after, at, 3) + change[..., None], 3)
        most = after.max(3)
        barred = present[rows[:, :, None], new[:, None], rank[:, :, None]]
        barred |= ((counts[rows, old] < 2) | (spots == NOWHERE))[:, :, None]
        homes = self._of_node[present[rows, new].argmax(2)]  # [A, B] nodes of the experts
        most[barred | (homes[:, None] != self._of_node[rank][:, :, None])] = np.inf
        flat, which = most.reshape(len(active), -1), np.arange(len(active))
        best = flat.argmin(1)
        return flat[which, best], spots[which, best // new.shape[1]], new[which, best % new.shape[1]]
