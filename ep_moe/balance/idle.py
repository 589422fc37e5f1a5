"""Which copies of experts take no tokens, since ranks are about as evenly loaded without them.

A copy that takes tokens costs reading its weights once more in each pass: a pass with few tokens does little else.

Letters: A layers, E logical experts, P positions (physical experts), R ranks.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from ep_moe.balance.packing import Floats, Ints, Ranks


def idle_copies(load: Floats, held: Ints, ranks: Ranks, limits: Floats) -> list[tuple[int, ...]]:
    """The positions of each layer that are to take no tokens, as many as a search over shares finds.

    Args:
        load: [A, E]. held: [A, P], the experts of positions, on no rank twice. limits: [A], the most load of a rank.
    Local; equal arguments give equal results.
    """
    found = []
    for row, experts, limit in zip(load.tolist(), held.tolist(), limits.tolist(), strict=True):
        places = collections.defaultdict[int, list[int]](list)
        for position, expert in enumerate(experts):
            places[expert].append(position)
        found.append(_Layer.of(row, places, ranks.of_position.tolist(), len(ranks.sizes)).idle(limit))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer's experts that have copies, those of most load first, and the load of ranks from all others."""

    copies: tuple[tuple[float, list[int]], ...]  # load and positions
    rank_of: Sequence[int]
    fixed: list[float]

    @classmethod
    def of(cls, load: list[float], places: Mapping[int, list[int]], rank_of: Sequence[int], num_ranks: int) -> "_Layer":
        fixed = [0.0] * num_ranks
        for expert, positions in places.items():
            if len(positions) == 1:
                fixed[rank_of[positions[0]]] += load[expert]
        copies = sorted(((load[each], found) for each, found in places.items() if len(found) > 1), reverse=True)
        return cls(copies=tuple(copies), rank_of=rank_of, fixed=fixed)

    def idle(self, limit: float) -> tuple[int, ...]:
        """The copies to leave out: with the largest share of a copy for which no rank exceeds `limit`."""
        shares = sorted({load / count for load, found in self.copies for count in range(1, len(found) + 1)})
        # the first share, from the largest on, that fits; none fits only if not even all copies do
        index = bisect.bisect_left(shares, True, key=lambda share: self._used(share, limit) is None)
        used = self._used(shares[index - 1], limit) if index else None
        if used is None:
            return ()
        return tuple(sorted(position for _, found in self.copies for position in found if position not in used))

    def _used(self, share: float, limit: float) -> set[int] | None:
        """The positions in use if no copy gets more than `share`, where an expert has as many; None beyond `limit`."""
        ranks, used = self.fixed.copy(), set[int]()
        for load, positions in self.copies:
            count = math.ceil(load / share - 1e-9) if load else 1
            chosen = sorted(positions, key=lambda each: ranks[self.rank_of[each]])[:count]
            for position in chosen:
                ranks[self.rank_of[position]] += load / len(chosen)
            used.update(chosen)
        return used if max(ranks) <= limit else None
