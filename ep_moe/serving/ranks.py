"""The ranks as the front end sees them: what they have been asked, and what they have answered."""

import collections
import contextlib
import queue
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.group import StorePlace
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.serving.channel import Answer, FrontChannel, Ready
from ep_moe.serving.rank import Rows
from ep_moe.serving.scheduler import Limits


class ServerEndedError(RuntimeError):
    """The server has ended, by an error that the message names or because it was closed."""


class Ranks(Protocol):
    """Who carries out a leader's plans.

    Attributes:
        most_sent: plans that a leader sends before it receives the results of the first.
    """

    most_sent: int

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

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._sent: collections.deque[RowsPlan] = collections.deque()

    def send(self, plan: RowsPlan) -> None:
        """See `Ranks`."""
        self._sent.append(plan)

    def receive(self) -> list[RowsMade]:
        """See `Ranks`. Errors: those of the model."""
        return [self._rows.run(self._sent.popleft())]

    def check(self) -> None:
        """See `Ranks`."""

    def close(self) -> None:
        """See `Ranks`."""


class StoreRanks:
    """The ranks of a launch, over its store, each of which calls `follow`.

    Args:
        place: of the store. num_ranks: of the launch. starter: a connection to the process that has started this one,
            which sends the error that has ended the ranks. timeout_secs: the most between the answers of two ranks to a
            plan.
    Errors of all calls: ServerEndedError. Used by one thread.
    """

    most_sent = 2  # ranks begin the next one while clients get the tokens of the last

    def __init__(self, place: StorePlace, num_ranks: int, *, starter: Connection, timeout_secs: float) -> None:
        self._starter, self._timeout_secs = starter, timeout_secs
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = FrontChannel(place, self._found)
        self._seats = tuple(range(num_ranks))
        self._processes: dict[int, int] = {}  # of ranks that are ready
        self._results = {seat: collections.deque[RowsMade]() for seat in self._seats}  # not yet received
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
        limits = None
        while len(self._processes) < len(self._seats):
            found = self._next(None)
            if isinstance(found, Answer) and isinstance(found.content, Ready):
                self._processes[found.seat] = found.process
                limits = found.content.limits if found.seat == 0 or limits is None else limits
        assert limits is not None
        return limits

    def send(self, plan: RowsPlan) -> None:
        """See `Ranks`."""
        try:
            self._channel.send(self._processes.items(), 0, plan)
        except RuntimeError as error:
            raise ServerEndedError(f"the launcher's store is gone: {error}") from error

    def receive(self) -> list[RowsMade]:
        """See `Ranks`."""
        results, deadline = self._results, None
        while not all(results.values()):
            self._take(self._next(SLICE_SECS))
            if deadline is None and any(results.values()):
                deadline = time.monotonic() + self._timeout_secs
            missing = [seat for seat, found in results.items() if not found]
            if missing and deadline is not None and time.monotonic() > deadline:
                names = " and ".join(f"rank {seat}" for seat in missing)
                raise ServerEndedError(f"{names} did not answer to a plan (timeout {self._timeout_secs:g} s)")
        return [found.popleft() for found in results.values()]

    def check(self) -> None:
        """See `Ranks`."""
        while (found := self._next(0.0)) is not None:
            self._take(found)

    def close(self) -> None:
        """See `Ranks`."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the ranks end with it
            self._channel.close(self._processes.items())

    def _next(self, secs: float | None) -> Any:
        """The next message; None if there is none for so many seconds."""
        try:
            found = self._found.get(timeout=secs) if secs != 0 else self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, ServerEndedError):
            raise found
        if isinstance(found, Exception):
            raise ServerEndedError(f"the launcher's store: {found}")
        return found

    def _take(self, found: Any) -> None:
        if isinstance(found, Answer) and isinstance(found.content, RowsMade):
            self._results[found.seat].append(found.content)
