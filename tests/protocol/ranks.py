"""The states of the model `losses`: ranks, their slots, and the words that they write into each other's memory.

Letters: a is a rank, b another, e the epoch of a round, s a slot. Words that b writes for a: D and C, the headers of a
dispatch and of a combine, which carry an epoch, and Y, a result, EMPTY until it arrives. A is an abort word.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

EMPTY = 0
Call = tuple[Literal["look", "check", "send", "receive", "combine"], int]  # and the slot
Message = tuple[int, str, int, int, int]  # writer, word, owner, slot, value
LATE, HERE, OVER, TIMED_OUT = range(4)  # result of a warp's poll: missing, arrived, aborted, timed out


class Slot(NamedTuple):
    """A rank's own state of a slot."""

    sent: int = 0  # the last epoch of which the dispatch was sent; likewise begun (dispatch received) and done
    begun: int = 0
    done: int = 0
    resume: int = 0  # rounds before this epoch are not exchanged
    fine: bool = False  # the dispatch received all that it waited for
    dest_rank_mask: tuple[int, ...] = ()  # ranks that got tokens of this one and return results
    right: bool = True  # the last round gave a result
    told: bool = False  # its first dispatch headers are sent


class Rank(NamedTuple):
    """The state of a rank."""

    at: int = 0  # index of its next call
    part: str = "begin"  # stage of that call
    warps: tuple[tuple[str, int], ...] = ()  # of a wait: ("looks" | "meets" | "left", result of the poll)
    slots: tuple[Slot, ...] = ()
    active: tuple[int, ...] = ()
    agreed: int = 0  # number of agreements that it has adopted
    abort: bool = False

    def with_slot(self, s: int, **values: object) -> "Rank":
        """The same with other values of a slot."""
        return self._replace(slots=(*self.slots[:s], self.slots[s]._replace(**values), *self.slots[s + 1 :]))


class State(NamedTuple):
    """A point of a run; `votes` of (agreement, rank, sent epochs), `clean` of (agreement, rank)."""

    ranks: tuple[Rank, ...]
    words: frozenset[tuple[str, int, int, int, int]]  # name, owner, writer, slot, value; absent words are 0
    flight: frozenset[Message]
    votes: frozenset[tuple[int, int, tuple[int, ...]]]
    clean: frozenset[tuple[int, int]]
    lived: int  # number of stores of the last rank so far
    dead: bool
    woke: int = 0  # number of stores of the last rank after it was masked out


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model to explore, with at most one broken rule.

    Attributes:
        calls: of every rank but the last, which runs at most the first round of every slot.
        wakes: the last rank is not dead, and goes on once the others have agreed to go on without it.
        may_time_out: the ranks whose waits may time out. agrees: hosts vote to go on without a lost rank.
    """

    calls: tuple[Call, ...]
    num_ranks: int = 3
    num_slots: int = 1
    num_warps: int = 1
    may_time_out: tuple[int, ...] = (0, 1)
    agrees: bool = True
    wakes: bool = False
    broken: str = ""

    @property
    def victim(self) -> int:
        """The rank that may be lost."""
        return self.num_ranks - 1
