"""Placements for other ranks than before, in which experts stay where they are as far as possible.

Letters: A layers, E logical experts, P positions (physical experts), R ranks.
"""

import collections
import heapq
from collections.abc import Sequence

from ep_moe.balance.plan import plan_placement
from ep_moe.placement import Placement

_LEAST_GAIN = 0.02  # of an exchange of experts between ranks that need none, as a part of a rank's mean load

Held = Sequence[Sequence[int]]  # [A], of one rank: the experts that it has of each layer, in its positions' order


def plan_handover(held: Sequence[Held], load: Sequence[Sequence[float]], num_physical: int) -> tuple[Placement, ...]:
    """Plan which of R ranks has which expert, when ranks have gone or come.

    A rank keeps its experts, in their order, as far as it has positions for them. Experts that no rank has, or for
    which a rank has no position left, go where the load is least; what is free then holds copies of the experts of the
    most load. As many moves as positions were filled may follow, if they spread the load further.

    Args:
        held: [R][A], what the ranks have; () for a rank that is new.
        load: [A][E], tokens that each expert gets. num_physical: P, as of `plan_placement`; ranks have P / R positions.
    Errors: those of `plan_placement`. Local; equal arguments give equal placements.
    """
    num_ranks, starts = len(held), Placement.linear(num_physical, len(held)).starts
    sizes = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    placements, num_filled = list[Placement](), 0
    for layer, counts in enumerate(load):
        slots = _Slots([ranks[layer] for ranks in held], sizes, [float(count) or 1e-9 for count in counts])
        num_filled += slots.fill()
        placements.append(Placement(tuple(expert for rank in slots.experts for expert in rank), starts))
    return plan_placement(
        load, num_physical, num_ranks, previous=placements, max_moves=num_filled, min_gain=_LEAST_GAIN
    ).placements


class _Slots:
    """The positions of one layer, by rank; -1 is free."""

    def __init__(self, held: Sequence[Sequence[int]], sizes: Sequence[int], load: Sequence[float]) -> None:
        self._load, copies = load, collections.Counter(expert for rank in held for expert in set(rank))
        self.experts = list[list[int]]()
        for rank, size in zip(held, sizes, strict=True):
            kept = list(dict.fromkeys(rank))
            while len(kept) > size:  # the last one of those with most copies goes
                gone = max(reversed(kept), key=lambda expert: copies[expert])
                kept.remove(gone)
                copies[gone] -= 1
            row = [
                expert if expert in kept and rank.index(expert) == place else -1 for place, expert in enumerate(rank)
            ]
            row = (row + [-1] * size)[:size]
            for expert in kept:
                if expert not in row:
                    row[row.index(-1)] = expert
            self.experts.append(row)
        self._copies = collections.Counter(expert for row in self.experts for expert in row if expert >= 0)

    def fill(self) -> int:
        """Give every free position an expert; returns how many there were."""
        missing = [expert for expert in range(len(self._load)) if not self._copies[expert]]
        while sum(row.count(-1) for row in self.experts) < len(missing):
            self._free_a_copy()
        free = sum(row.count(-1) for row in self.experts)
        for expert in sorted(missing, key=lambda each: (-self._load[each], each)):
            self._put(expert)
        most = [(-self._load[expert] / self._copies[expert], expert) for expert in range(len(self._load))]
        heapq.heapify(most)
        while any(-1 in row for row in self.experts):
            _, expert = heapq.heappop(most)
            if any(-1 in row and expert not in row for row in self.experts):  # else there is no place for it any more
                self._put(expert)
                heapq.heappush(most, (-self._load[expert] / self._copies[expert], expert))
        return free

    def _free_a_copy(self) -> None:
        """The copy that is missed least, where most load is."""
        gone = min((each for each, count in self._copies.items() if count > 1), key=lambda e: (self._load[e], e))
        row = max((row for row in self.experts if gone in row), key=self._load_of)
        row[row.index(gone)] = -1
        self._copies[gone] -= 1

    def _put(self, expert: int) -> None:
        """On the rank of least load that has a free position and not this expert."""
        rows = [row for row in self.experts if -1 in row and expert not in row]
        row = min(rows, key=self._load_of)
        row[row.index(-1)] = expert
        self._copies[expert] += 1

    def _load_of(self, row: list[int]) -> float:
        return sum(self._load[expert] / self._copies[expert] for expert in row if expert >= 0)
