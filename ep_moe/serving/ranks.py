"""The ranks as the front end sees them: who takes part, what they have been asked, and what they have answered."""

import collections
import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.group import StorePlace
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.launch import KEEP, LEFT, Ended, Start, Stop
from ep_moe.placement import Placement
from ep_moe.serving.channel import Answer, FrontChannel, Joined, Lost, Membership, Ready
from ep_moe.serving.rank import Rows
from ep_moe.serving.scheduler import Limits

END_SECS = 5.0  # for the process of a lost rank to end by itself, with its error
SETTLE_SECS = 0.1  # after a loss: ranks of a node die together, and one that is dead already would be waited for
REGROUP_SECS = 600.0  # for the first rank to join others: it may have read all experts, and compiled

_SCALE = "scale"  # a message: `StoreRanks.wanted` has changed
_log = logging.getLogger(__name__)


class ServerEndedError(RuntimeError):
    """The server has ended, by an error that the message names or because it was closed."""


class CannotScaleError(RuntimeError):
    """Ranks cannot come or go as asked, now or at all; the message says why."""


class RanksChangedError(RuntimeError):
    """A rank is lost: call `Ranks.regroup`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """The ranks after a change.

    Args:
        seats: that take part from now on, ascending.
        answers: of the ranks that were there before: their results of the oldest plans that were sent and not received;
            the other plans have had no effect. forgotten: of the same ranks, rows whose keys and values are lost.
        placements: which of them has which expert, by MoE layer. left: those of before that have left on purpose.
        errors: of those of before that have failed by one of their own.
    """

    seats: tuple[int, ...]
    answers: Mapping[int, Sequence[RowsMade]]
    forgotten: Mapping[int, frozenset[int]]
    placements: tuple[Placement, ...]
    left: tuple[int, ...] = ()
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Ranks(Protocol):
    """Who carries out a leader's plans.

    Attributes:
        most_sent: plans that a leader sends before it receives the results of the first.
        seats: the ranks that take part, as the launch numbers them, ascending. wanted: those that are to.
        lost: why others of them do not, by seat.
    """

    most_sent: int
    seats: tuple[int, ...]
    wanted: frozenset[int]
    lost: dict[int, str]

    @property
    def ending(self) -> Collection[int]:
        """Ranks that have left, or are not wanted any more, and whose processes have not ended. Any thread."""
        ...

    @property
    def changes(self) -> bool:
        """Whether a rank is ready to take part, or one is to leave: call `regroup` once all results are received."""
        ...

    def scale(self, wanted: frozenset[int]) -> None:
        """Have these ranks of the launch take part, one at least, and no others. Any thread.

        Errors: CannotScaleError.
        """
        ...

    def regroup(self) -> Regrouped:
        """Go on without the ranks that are lost or to leave, and with those that have become ready."""
        ...

    def send(self, plan: RowsPlan) -> None:
        """Send a plan, which the ranks carry out at once, or after those before it."""
        ...

    def receive(self) -> list[RowsMade]:
        """Wait for the results of the oldest plan that was sent, in rank order."""
        ...

    def check(self) -> None:
        """Raise an error if a rank is lost while there is no plan."""
        ...

    def close(self) -> None:
        """Tell the ranks that no plan follows."""
        ...


class OneRank:
    """A rank in the leader's own thread."""

    most_sent = 1  # `receive` carries out the plan, and makes its tokens no sooner for another
    changes = False
    ending = ()

    def __init__(self, rows: Rows) -> None:
        self._rows, self.seats, self.wanted = rows, (0,), frozenset((0,))
        self.lost: dict[int, str] = {}
        self._sent: collections.deque[RowsPlan] = collections.deque()

    def send(self, plan: RowsPlan) -> None:
        """See `Ranks`."""
        self._sent.append(plan)

    def receive(self) -> list[RowsMade]:
        """See `Ranks`. Errors: those of the model."""
        return [self._rows.run(self._sent.popleft())]

    def regroup(self) -> Regrouped:
        """See `Ranks`. Errors: RuntimeError."""
        raise RuntimeError("there is one rank, which cannot go on with others")

    def scale(self, wanted: frozenset[int]) -> None:
        """See `Ranks`."""
        raise CannotScaleError("there is one rank, which cannot go on with others")

    def check(self) -> None:
        """See `Ranks`."""

    def close(self) -> None:
        """See `Ranks`."""


class StoreRanks:
    """The ranks of a launch, over its store, each of which calls `follow`.

    Ranks are told of deaths by the launcher, or by the reports of other ranks. If the launcher keeps ranks going, the
    others go on without them, and a rank that has been started again joins when it is ready.

    Args:
        place: of the store. num_ranks: of the launch. keeps: whether the launcher keeps ranks going (`launch.Front`).
        starter: a connection to the process that has started this one, the launcher or rank 0: it sends an `Ended` for
            each rank that has ended, or the text of the error that has ended all.
        timeout_secs: the most between the answers of two ranks to an order.
    Attributes:
        seats, wanted, lost: as of `Ranks`.
    Errors of all calls: ServerEndedError; RanksChangedError if a rank is lost. Used by one thread, but for `scale`.
    """

    most_sent = 2  # ranks begin the next one while clients get the tokens of the last

    def __init__(
        self, place: StorePlace, num_ranks: int, keeps: bool, *, starter: Connection, timeout_secs: float
    ) -> None:
        self._starter, self._timeout_secs, self._keeps = starter, timeout_secs, keeps
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = FrontChannel(place, self._found)
        self.seats, self._epoch, self._num_ranks = tuple(range(num_ranks)), 0, num_ranks
        self.wanted = frozenset(self.seats)
        self._off: dict[int, bool] = {}  # seats that are not to have a process, and whether it has ended
        self._going: dict[int, int] = {}  # members that leave by the regroup under way and have not ended yet
        self.lost: dict[int, str] = {}
        self._deaths = collections.Counter[int]()  # of processes by seat, as the launcher tells all ranks of them
        self._ready: dict[int, int] = {}  # process of each rank that could take part
        self._members: dict[int, int] = {}  # of each rank that does
        self._asked = self.seats  # those of the last order to regroup, and those that leave by it
        self._silent: dict[tuple[int, int], float] = {}  # seconds of waiting since the last answer, by seat and process
        self._joined: dict[int, Joined] = {}  # answers to the last membership
        self._forgotten: dict[int, set[int]] = collections.defaultdict(set)
        self._results: dict[int, collections.deque[RowsMade]] = {}  # not yet received
        threading.Thread(target=self._read, name="ep_moe-starter", daemon=True).start()

    def _read(self) -> None:
        message: Any = None
        while not isinstance(message, Exception):
            try:
                message = self._starter.recv()
            except (EOFError, OSError):
                message = ServerEndedError("the process that has started the server has ended")
            self._found.put(ServerEndedError(message) if isinstance(message, str) else message)

    def wait_until_ready(self) -> Limits:
        """Wait until all ranks have loaded the model; returns what they can do."""
        found: list[Limits] = []
        while len(self._ready) < len(self.seats):
            answer = self._next(None)
            assert isinstance(answer, Answer)
            self._take(answer)
            found += [answer.content.limits] if isinstance(answer.content, Ready) and answer.content.limits else []
        self._members = dict(self._ready)
        self._results = {seat: collections.deque() for seat in self.seats}
        if self._keeps:
            self._starter.send(KEEP)
        return found[0]

    @property
    def changes(self) -> bool:
        """See `Ranks`."""
        return not self._ready.keys() <= self._members.keys() or bool(self._leaving())

    @property
    def ending(self) -> Collection[int]:
        """See `Ranks`."""
        return [seat for seat, ended in dict(self._off).items() if not ended]

    def scale(self, wanted: frozenset[int]) -> None:
        """See `Ranks`."""
        if not self._keeps:
            raise CannotScaleError("ranks can come and go if `ep-moe serve` starts them, not under torchrun or Ray")
        self.wanted = wanted
        self._found.put(_SCALE)

    def _leaving(self) -> dict[int, int]:
        """Processes of the members that are to leave now: while one is lost, or if no other stays, none."""
        leaving = {seat: process for seat, process in self._members.items() if seat not in self.wanted}
        whole = self._members.items() <= self._ready.items()
        return leaving if whole and len(leaving) < len(self._members) else {}

    def _arrange(self, again: bool = False) -> None:
        """Have processes of seats started and stopped as is wanted; with `again` also those that had given up."""
        for seat in range(self._num_ranks):
            if seat not in self.wanted:
                if seat not in self._members and seat not in self._off:
                    self._stop(seat)
            elif self._off.get(seat, again and seat in self.lost):
                self._off.pop(seat, None)
                self._tell_launcher(Start(seat=seat))

    def _stop(self, seat: int) -> None:
        """Have the process of a seat end that is no member."""
        self._off[seat] = False
        self._ready.pop(seat, None)
        self.lost.pop(seat, None)
        self._tell_launcher(Stop(seat=seat, secs=END_SECS))

    def _tell_launcher(self, order: Start | Stop) -> None:
        with contextlib.suppress(OSError):  # it has ended all, and why is received next
            self._starter.send(order)

    def _note_left(self, ended: Ended) -> None:
        """A rank has ended in order, or behind a `Stop`."""
        if self._ready.get(ended.seat) == ended.process:
            del self._ready[ended.seat]
        self._going.pop(ended.seat, None)
        if ended.seat in self._off:
            self._off[ended.seat] = True
            _log.warning("rank %d has left", ended.seat)
            self._arrange()

    def send(self, plan: RowsPlan) -> None:
        """See `Ranks`."""
        self._order(self._members, plan)

    def _order(self, members: Mapping[int, int], order: Any) -> None:
        try:
            self._channel.send(members.items(), self._epoch, order)
        except RuntimeError as error:
            raise ServerEndedError(f"the launcher's store is gone: {error}") from error

    def receive(self) -> list[RowsMade]:
        """See `Ranks`."""
        results, deadline = self._results, math.inf
        while not all(results.values()):
            self._check_members(self._members)
            self._take(self._next(SLICE_SECS))
            deadline = self._lose_late(results, deadline, "no answer to a plan")
        return [results[seat].popleft() for seat in self.seats]

    def _lose_late(self, answers: Mapping[int, Any], deadline: float, what: str) -> float:
        """Lose the ranks without an answer at the deadline, some time after the first answer; returns that time."""
        missing = [seat for seat, answer in answers.items() if not answer]
        if not missing or len(missing) == len(answers):
            return math.inf
        if time.monotonic() > deadline:
            for seat in missing:
                self._lose(seat, f"rank {seat} did not arrive: {what} (timeout {self._timeout_secs:g} s)", True)
        return min(deadline, time.monotonic() + self._timeout_secs)

    def check(self) -> None:
        """See `Ranks`."""
        while (found := self._next(0.0)) is not None:
            self._take(found)
        self._check_members(self._members)

    def _lose_silent(self) -> None:
        """Lose the ranks whose processes have been stopped; of several ranks the others notice it too."""
        limit = self._timeout_secs
        for seat, process in [*self._ready.items()]:
            if (silent := self._silent.get((seat, process), 0.0)) > limit:
                why = f"stopped answering: no sign of life for {silent:.1f} s (timeout {limit:g} s)"
                self._lose(seat, f"rank {seat} {why}", True)

    def _check_members(self, members: Mapping[int, int]) -> None:
        self._lose_silent()
        if any(self._ready.get(seat) != process for seat, process in members.items()):
            raise RanksChangedError("a rank is lost")

    def regroup(self) -> Regrouped:
        """See `Ranks`."""
        before, self._going = self._members, self._leaving()
        leaving = tuple(self._going)
        if any(self._ready.get(seat) != process for seat, process in before.items()):
            self._settle()
        while True:
            while not self._ready:  # all are lost: one may be started again, or an error comes
                self._take(self._next(None))
            self._epoch += 1
            members = {seat: process for seat, process in sorted(self._ready.items()) if seat not in leaving}
            self._joined = {}
            self._asked, deaths = (*members, *leaving), tuple(self._deaths[seat] for seat in members)
            self._order(members | self._going, Membership(seats=tuple(members), deaths=deaths, leaving=leaving))
            try:
                deadline, latest = math.inf, time.monotonic() + REGROUP_SECS
                while len(self._joined) < len(members):
                    self._check_members(members | self._going)
                    self._take(self._next(SLICE_SECS))
                    joined = {seat: self._joined.get(seat) for seat in members}
                    deadline = self._lose_late(joined, deadline, "it has not joined the others")
                    if time.monotonic() > latest and not self._joined:
                        for seat in members:
                            self._lose(seat, f"rank {seat} has not gone on within {REGROUP_SECS:g} s", True)
                self._check_members(members)
                break
            except RanksChangedError:  # those that were to leave go on with the others first, as far as they are there
                self._going, leaving = {}, ()
                self._settle()
        stay = [seat for seat, process in members.items() if before.get(seat) == process]
        found = Regrouped(
            seats=tuple(members),
            answers={seat: list(self._results[seat]) for seat in stay},
            forgotten={seat: frozenset(self._forgotten[seat]) for seat in stay},
            placements=next(iter(self._joined.values())).placements,
            left=leaving,
            errors={seat: self.lost[seat].partition(" failed: ")[2] for seat in before if seat in self.lost},
        )
        self._members, self.seats = members, found.seats
        self._results = {seat: collections.deque() for seat in members}
        self._forgotten.clear()
        self.lost = {seat: why for seat, why in self.lost.items() if seat not in members}
        for seat in leaving:
            self._stop(seat)
        self._arrange()
        whole = len(members) == self._num_ranks
        _log.warning("ranks %s go on%s", ", ".join(map(str, members)), " as before" if whole else "")
        return found

    def _settle(self) -> None:
        """Take the messages of a moment."""
        deadline = time.monotonic() + SETTLE_SECS
        while (secs := deadline - time.monotonic()) > 0:
            self._take(self._next(secs))

    def close(self) -> None:
        """See `Ranks`."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the ranks end with it
            self._channel.close(self._ready.items())

    def _next(self, secs: float | None) -> Any:
        """The next message; None if there is none for so many seconds."""
        start, found = time.monotonic(), None
        with contextlib.suppress(queue.Empty):
            found = self._found.get(timeout=secs) if secs != 0 else self._found.get_nowait()
        waited = min(time.monotonic() - start, 2 * SLICE_SECS)  # no more if this process was stopped itself
        self._silent = {each: self._silent.get(each, 0.0) + waited for each in self._ready.items()}
        if isinstance(found, Answer):
            self._silent[found.seat, found.process] = 0.0
        if isinstance(found, ServerEndedError):
            raise found
        if isinstance(found, Exception):
            raise ServerEndedError(f"the launcher's store: {found}")
        return found

    def _take(self, found: Any) -> None:
        """Take a message."""
        if found == _SCALE:
            self._arrange(again=True)
            return
        if isinstance(found, Ended):
            if found.how == LEFT:
                self._note_left(found)
                return
            self._deaths[found.seat] += 1
            if found.seat in self._off:
                return
            if self._ready.get(found.seat) == found.process:
                self._lose(found.seat, f"rank {found.seat} {found.how}")
            then = "it is not started again" if found.again is None else f"it is started again in {found.again:g} s"
            _log.warning("rank %d %s: %s", found.seat, found.how, then)
            self.lost.setdefault(found.seat, f"rank {found.seat} {found.how}")
            return
        if not isinstance(found, Answer):
            return
        seat, content = found.seat, found.content
        if seat in self._off:
            return
        if isinstance(content, Ready):
            self._ready[seat] = found.process
        elif self._ready.get(seat) != found.process:
            return  # of a rank that is lost
        elif isinstance(content, RowsMade):
            self._results[seat].append(content)
        elif isinstance(content, Joined):
            self._forgotten[seat] |= {*content.forgotten}
            if found.epoch == self._epoch:
                self._joined[seat] = content
        elif isinstance(content, Lost) and found.epoch == self._epoch:
            if not content.seats:
                self._fail(content.text)
            # one that has lost none of those that it was to go on with cannot go on itself
            for each in {*content.seats} & {*self._asked} or {seat}:
                self._lose(each, content.text, content.still_there)

    def _lose(self, seat: int, why: str, still_there: bool = False) -> None:
        """Go on without a rank, and have its process killed: one that comes back would have old state."""
        if seat not in self._ready:
            return
        if not self._keeps:
            self._fail(why)
        self.lost[seat], process = why, self._ready.pop(seat)
        with contextlib.suppress(OSError):  # it has ended all, and why is received next
            self._starter.send((seat, process, 0.0 if still_there else END_SECS))

    def _fail(self, why: str) -> NoReturn:
        """End the server."""
        with contextlib.suppress(OSError):
            self._starter.send(why)
        raise ServerEndedError(why)
