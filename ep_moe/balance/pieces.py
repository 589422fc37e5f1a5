"""The way from one placement of a layer to another in pieces, after each of which the placement is valid.

Letters: P positions (physical experts), R ranks.
"""

import collections
import dataclasses

from ep_moe.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Positions of a layer that change at once.

    Args:
        layer: its index. positions: that get other experts. sources: for each, a position that has its expert before.
        idle: the positions that take no tokens afterwards.
    """

    layer: int
    positions: tuple[int, ...]
    sources: tuple[int, ...]
    idle: tuple[int, ...] = ()

    def after(self, placement: Placement) -> Placement:
        """The placement that follows."""
        experts = list(placement.physical_to_logical)
        for position, source in zip(self.positions, self.sources, strict=True):
            experts[position] = placement.physical_to_logical[source]
        return Placement(tuple(experts), placement.starts, self.idle)


def pieces_of(layer: int, now: Placement, target: Placement, most: int, *, sends_too: bool) -> list[Piece]:
    """Split the changes of a layer into pieces in which no rank gets more than `most` experts.

    An expert whose only copy would be overwritten changes places with another, so that any target can be reached.

    Args: now, target: with the same experts and starts. sends_too: no rank sends more than `most` either.
    Errors: ValueError if `most` is too small for a change. Local; equal arguments give equal pieces.
    """
    rank_of = [rank for rank in range(now.num_ranks) for _ in now.local_experts(rank)]
    found, current = list[Piece](), now
    while current.physical_to_logical != target.physical_to_logical:
        piece = _Builder(current, target, rank_of, most, sends_too=sends_too).build(layer)
        if not piece.positions:
            raise ValueError(
                f"layer {layer} has to change two positions of a rank at once, the spare memory (max_bytes) is for "
                f"{most} expert{'s' * (most != 1)} and must be for 2"
            )
        found.append(piece)
        current = piece.after(current)
    if current.idle != target.idle:
        last = found.pop() if found else Piece(layer=layer, positions=(), sources=())
        found.append(dataclasses.replace(last, idle=target.idle))
    return found


class _Builder:
    """One piece, which grows by changes of one or two positions."""

    def __init__(self, now: Placement, target: Placement, rank_of: list[int], most: int, *, sends_too: bool) -> None:
        self._now, self._wanted, self._rank_of = now.physical_to_logical, target.physical_to_logical, rank_of
        self._most, self._sends_too = most, sends_too
        self._new, self._copies = list(self._now), collections.Counter(self._now)
        self._holders, self._places = collections.defaultdict[int, list[int]](list), collections.defaultdict(list)
        for position, (has, wants) in enumerate(zip(self._now, self._wanted, strict=True)):
            self._holders[has].append(position)
            self._places[wants].append(position)
        self._sources: dict[int, int] = {}  # position -> where its expert comes from
        self._received, self._sent = [0] * now.num_ranks, [0] * now.num_ranks

    def build(self, layer: int) -> Piece:
        """The largest piece that is found, without positions if there is none."""
        for position, wanted in enumerate(self._wanted):
            while self._new[position] != wanted and self._take(self._change(position)):
                pass
        positions = tuple(sorted(self._sources))
        return Piece(layer=layer, positions=positions, sources=tuple(self._sources[each] for each in positions))

    def _change(self, position: int) -> dict[int, int]:
        """A change that gives one position its expert: this one, or that to which its only copy goes."""
        expert = self._new[position]
        if self._copies[expert] > 1:
            return {position: self._wanted[position]}
        other = next(each for each in self._places[expert] if self._new[each] != expert)
        return {position: self._new[other], other: expert}

    def _take(self, change: dict[int, int]) -> bool:
        """Make a change if no rank gets, or sends, too much by it."""
        before = self._new[:], self._copies.copy(), self._sources.copy(), self._received[:], self._sent[:]
        for position, expert in change.items():
            self._set(position, expert)
        fits = max(self._received) <= self._most and (not self._sends_too or max(self._sent) <= self._most)
        if not fits:  # sources depend on the order of changes: what was there comes back as it was
            self._new, self._copies, self._sources, self._received, self._sent = before
        return fits

    def _set(self, position: int, expert: int) -> None:
        rank = self._rank_of[position]
        source = self._sources.pop(position, None)
        if source is not None:
            self._received[rank] -= 1
            self._sent[self._rank_of[source]] -= 1
        self._copies[self._new[position]] -= 1
        self._copies[expert] += 1
        self._new[position] = expert
        if expert == self._now[position]:
            return
        holders = self._holders[expert]
        source = min(holders, key=lambda each: (self._rank_of[each] != rank, self._sent[self._rank_of[each]], each))
        self._sources[position] = source
        self._received[rank] += 1
        self._sent[self._rank_of[source]] += 1
