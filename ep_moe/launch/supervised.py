"""Waits for the ranks of a launch, reports how each has ended, and starts those again that a `Front` keeps going.

How ranks are started and killed is the launchers' own part: `local` and `on_ray`.
"""

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from typing import Any

from ep_moe.group import StorePlace
from ep_moe.launch.outcomes import DIED, Failure, Outcomes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A process beside the ranks of a launch, connected to the launcher, that uses their store.

    It is sent (`StorePlace`, num_ranks, True) at the start. It may send KEEP, after which a rank that ends does not end
    the others; (seat, process, secs), to kill that rank then; `Stop` and `Start`; or a text, the error that ends the
    launch. After KEEP it is sent an `Ended` for each rank that ends by an error, which is then started again on
    standby, as `EPGroup.on_standby` has it, and for each that ends in order or has ended behind a `Stop`. Once it has
    ended itself, so do the ranks, and there are no results.

    Args:
        restarts: how often each rank is started again, with pauses that double; a rank that has run for CALM_SECS
            counts from none again.
    """

    connection: Connection
    restarts: int = 0


KEEP = "keep"
CALM_SECS = 600.0
PAUSE_SECS, LONGEST_PAUSE_SECS = 0.5, 30.0  # before a rank is started again for the first time; at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Have a rank end for good: it is killed after so many seconds, and not started again until a `Start`."""

    seat: int
    secs: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start a rank on standby that has ended, at once; without effect on one that has not."""

    seat: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank has ended; `how` is LEFT if it has done so in order, or behind a `Stop`. again: seconds until it is
    started again, None if it is not."""

    seat: int
    process: int
    how: str
    again: float | None


LEFT = "has left"


class FrontFailedError(RuntimeError):
    """The error by which a `Front` has ended the launch."""


class SupervisedRanks(abc.ABC):
    """The ranks of one launch.

    Args:
        num_ranks: of the launch. grace_secs: as in `launch`. front: None if the first failure ends all.
    """

    def __init__(self, num_ranks: int, grace_secs: float, front: Front | None) -> None:
        self._num_ranks, self._front = num_ranks, front
        self._connection = None if front is None else front.connection
        self._outcomes = Outcomes(num_ranks, grace_secs)
        self._pipes: dict[int, Connection] = {}  # of each rank: readable once it has ended
        self._starts = [(0, 0.0)] * num_ranks  # how often each rank was started again, and when
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._waiting: set[int] = set()  # ranks that will be started again
        self._stopped: set[int] = set()  # ranks that are not to run

    @abc.abstractmethod
    def _begin(self, rank: int, *, standby: bool) -> Connection:
        """Start the process of a rank, without waiting for it; returns what can be read once it has ended."""

    @abc.abstractmethod
    def _outcome(self, rank: int) -> Failure | tuple[Any]:
        """How a rank has ended whose connection can be read; a `Failure` of the type DIED if it has said nothing."""

    @abc.abstractmethod
    def _process(self, rank: int) -> int:
        """The id of a rank's process on its machine; 0 if that is not known."""

    @abc.abstractmethod
    def _kill(self, rank: int) -> None:
        """Kill the process of a rank, also if it hangs or has ended."""

    @abc.abstractmethod
    def _join(self, rank: int) -> None:
        """Wait a moment for the process of a rank that has ended to free its memory."""

    @abc.abstractmethod
    def _tell_ranks(self, deaths: str) -> None:
        """Write all deaths to the store, as `Outcomes.note` has them."""

    def _begin_all(self, place: StorePlace) -> None:
        """Tell the front process where the store is, and start all ranks."""
        if self._connection is not None:
            self._connection.send((place, self._num_ranks, True))
        for rank in range(self._num_ranks):
            self._pipes[rank] = self._begin(rank, standby=False)

    def _start_again(self, rank: int) -> None:
        if rank not in self._waiting:  # it is running already, or has been stopped
            return
        self._waiting.discard(rank)
        self._pipes[rank].close()
        self._outcomes.forget(rank)
        self._pipes[rank] = self._begin(rank, standby=True)

    def collect(self) -> list[Any]:
        """Wait for the ranks; returns their results in rank order, None for each if the front process has ended.

        Errors: RankFailedError; FrontFailedError.
        """
        outcomes = self._outcomes
        while not outcomes.complete() or (self._waiting and outcomes.secs_left is None):
            ranks = {self._pipes[rank]: rank for rank in outcomes.pending}
            front = [] if self._connection is None else [self._connection]
            for found in wait_any([*ranks, *front], self._secs_left()):
                if found in ranks:
                    self._receive(ranks[found])
                else:
                    self._obey()
            self._do_what_is_due()
        if self._front is not None and self._connection is None:
            return [None] * self._num_ranks
        return outcomes.results()

    def _secs_left(self) -> float | None:
        now, secs_left = time.monotonic(), self._outcomes.secs_left
        limits = [max(when - now, 0.0) for when, _ in self._due] + ([] if secs_left is None else [secs_left])
        return min(limits, default=None)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        due, self._due = [each for each in self._due if each[0] <= now], [each for each in self._due if each[0] > now]
        for _, call in due:
            call()

    def _do_later(self, secs: float, call: Callable[[int], None], rank: int) -> None:
        """Make a call for a rank after so many seconds, unless another process has taken its place."""
        pipe = self._pipes[rank]

        def do() -> None:
            if self._pipes[rank] is pipe:
                call(rank)

        self._due.append((time.monotonic() + secs, do))

    def _obey(self) -> None:
        """Do what the front process says."""
        assert self._connection is not None
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._connection = None
            self._waiting.clear()
            self._due.clear()
            self._outcomes.end()
            return
        if message == KEEP:
            self._outcomes.keep()
        elif isinstance(message, str):
            raise FrontFailedError(message)
        elif isinstance(message, Stop):
            self._stop(message)
        elif isinstance(message, Start):
            self._start(message.seat)
        else:
            seat, process, secs = message
            if self._process(seat) == process:
                self._do_later(secs, self._kill, seat)

    def _stop(self, order: Stop) -> None:
        self._stopped.add(order.seat)
        self._waiting.discard(order.seat)
        if order.seat in self._outcomes.pending:
            self._do_later(order.secs, self._kill, order.seat)
        else:
            self._note_stopped(order.seat)

    def _note_stopped(self, rank: int) -> None:
        """A rank that is not to run has ended, however: its memory is free then."""
        self._join(rank)
        self._outcomes.leave(rank)
        self._tell_left(rank)

    def _tell_left(self, rank: int) -> None:
        """Tell the front process that a rank has ended in order."""
        if self._outcomes.keeps and self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(Ended(seat=rank, process=self._process(rank), how=LEFT, again=None))

    def _start(self, rank: int) -> None:
        if rank in self._outcomes.pending:
            return
        self._stopped.discard(rank)
        self._starts[rank] = 0, time.monotonic()
        self._waiting.add(rank)
        self._start_again(rank)

    def _receive(self, rank: int) -> None:
        outcome = self._outcome(rank)
        if rank in self._stopped:
            self._note_stopped(rank)
            return
        self._outcomes.add(rank, outcome)
        if not isinstance(outcome, Failure):
            self._tell_left(rank)
            return
        died = outcome.error_type == DIED
        how = outcome.message if died else f"failed: {outcome.what()}"
        if died or self._outcomes.keeps:  # a rank that fails has told those of its group, if it had one
            self._tell_ranks(self._outcomes.note(rank, how))
        if self._outcomes.keeps and self._connection is not None:
            self._tell_front(rank, how)

    def _tell_front(self, rank: int, how: str) -> None:
        """Tell the front process that a rank has ended; start it again after a while, if it may be."""
        assert self._front is not None
        assert self._connection is not None
        now, process = time.monotonic(), self._process(rank)
        count, since = self._starts[rank]
        count = 0 if now - since > CALM_SECS else count
        again = min(PAUSE_SECS * 2**count, LONGEST_PAUSE_SECS) if count < self._front.restarts else None
        if again is not None:
            self._starts[rank] = count + 1, now + again
            self._waiting.add(rank)
            self._due.append((now + again, functools.partial(self._start_again, rank)))
        with contextlib.suppress(OSError):  # it has ended, which is noticed next
            self._connection.send(Ended(seat=rank, process=process, how=how, again=again))

    def _start_no_more(self, rank: int) -> None:
        """Have a rank that ends next stay so, until a `Start`."""
        assert self._front is not None
        self._starts[rank] = self._front.restarts, time.monotonic()
