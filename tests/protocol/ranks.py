"""What a state of `losses` holds: ranks, their slots, the words that they write into each other's memory.

Letters: a is a rank, b another, e the epoch of a round, s a slot. Words that b writes for a: D and C, the cells of a
dispatch and of a combine, which carry an epoch, and Y, a result, which is EMPTY until it comes. A is an abort word.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

EMPTY = 0
Call = tuple[Literal["look", "check", "send", "receive", "combine"], int]  # and the slot
Message = tuple[int, str, int, int, int]  # writer, word, owner, slot, value
LATE, HERE, OVER, TIMED_OUT = range(4)  # what a warp finds when it looks


class Slot(NamedTuple):
    """A rank's own state of a slot."""

    sent: int = 0  # the last epoch whose dispatch was launched, and so on
    begun: int = 0
    done: int = 0
    resume: int = 0  # rounds before this epoch are not exchanged
    fine: bool = False  # the dispatch has all that it waited for
    dest_rank_mask: tuple[int, ...] = ()  # ranks that hold tokens of this one
    right: bool = True  # the last result was one
    told: bool = False  # its first cells are out


class Rank(NamedTuple):
    """Where a rank stands."""

    at: int = 0  # its next call
    part: str = "begin"  # of that call
    warps: tuple[tuple[str, int], ...] = ()  # of a wait: ("looks" | "meets" | "left", what it found)
    slots: tuple[Slot, ...] = ()
    active: tuple[int, ...] = ()
    agreed: int = 0  # agreements that it has taken up
    abort: bool = False

    def with_slot(self, s: int, **values: object) -> "Rank":
        """The same with other values of a slot."""
        return self._replace(slots=(*self.slots[:s], self.slots[s]._replace(**values), *self.slots[s + 1 :]))


class State(NamedTuple):
    """A point of a run; `votes` of (agreement, rank, sent epochs), `clean` of (agreement, rank)."""

    ranks: tuple[Rank, ...]
    words: frozenset[tuple[str, int, int, int, int]]  # name, owner, writer, slot, value; what is not there is 0
    flight: frozenset[Message]
    votes: frozenset[tuple[int, int, tuple[int, ...]]]
    clean: frozenset[tuple[int, int]]
    lived: int  # stores of the last rank
    dead: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is explored, and at most one broken rule.

    Attributes:
        calls: of every rank but the last, which runs the first round of every slot at most.
        may_time_out: the ranks whose timeout_ns may end. agrees: hosts go on without a lost rank, and call the others.
    """

    calls: tuple[Call, ...]
    num_ranks: int = 3
    num_slots: int = 1
    num_warps: int = 1
    may_time_out: tuple[int, ...] = (0, 1)
    agrees: bool = True
    broken: str = ""

    @property
    def victim(self) -> int:
        """The rank that may be lost."""
        return self.num_ranks - 1
