"""How the front end and the ranks talk: orders to each rank, and its answers, in queues of the launcher's store.

The store belongs to the launcher and uses no collective, so that ranks of an idle server wait for a plan without a
timeout, while heartbeats still tell which rank is lost. All ranks are alike; the front end outlives any of them.

A seat is a rank as the launch numbers it. Each process has a queue of its own: one that takes the seat of another reads
nothing that was meant for that one.
"""

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

from ep_moe.balance import ModelSizes
from ep_moe.engines.transformers.decoding.passes import MESSAGES
from ep_moe.group import StorePlace
from ep_moe.group.wire import decode, encode
from ep_moe.placement import Placement
from ep_moe.serving.scheduler import Limits

_NAME, _ANSWERS = "serving", "answers"
_CLOSED = encode(None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The first answer of a rank: it has loaded the model, and can do this much; None if it has yet to join others."""

    limits: Limits | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """An order: the ranks that go on together, as the launch numbers them, ascending. Its number is its epoch's.

    deaths: how many processes of each of them have died before. leaving: ranks of the last membership, all of which are
    there, that hand their experts to its others first, and end.
    """

    seats: tuple[int, ...]
    deaths: tuple[int, ...]
    leaving: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """An answer: the rank goes on with these. forgotten: its rows whose keys and values are lost. placements: which
    rank has which expert now, by layer."""

    forgotten: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """An answer: the rank waits for another membership, as `seats` of its own are lost. text: of its error.
    still_there: whether their processes may still run."""

    seats: tuple[int, ...]
    text: str
    still_there: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """An answer, now and then: the process has not been stopped, whatever it does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank tells the front end. process: its id. epoch: of the membership that it belongs to."""

    seat: int
    process: int
    epoch: int
    content: Any


_KNOWN = (*MESSAGES, Answer, Ready, Alive, Membership, Joined, Lost, Limits, Placement, ModelSizes)


def start_inbox(store: Any, key: str, found: "queue.SimpleQueue[Any]") -> None:
    """Have a thread put a queue's messages into `found`, since the store's own wait cannot be interrupted.

    The thread ends with the message `_CLOSED`, or with an error, which is put there too.
    """

    def run() -> None:
        try:
            message = b""
            while message != _CLOSED:
                message = store.queue_pop(key)
                found.put(decode(message, *_KNOWN))
        except (RuntimeError, ValueError) as error:  # the launcher has gone, and its store with it; a stranger's bytes
            found.put(error)

    threading.Thread(target=run, name="ep_moe-inbox", daemon=True).start()


class RankChannel:
    """A rank's end. Used by one thread.

    Args:
        alive_secs: how often another thread says that the process runs.
    Attributes:
        is_gone: whether `receive` has raised an error of the store or its bytes: no order follows.
        fails: set it once this process is to end by an error: it no longer says that it runs.
    """

    def __init__(self, place: StorePlace, seat: int, alive_secs: float) -> None:
        self.is_gone, self.fails = False, False
        self._seat, self._process = seat, os.getpid()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox = place.connect(_NAME)
        start_inbox(place.connect(_NAME), _orders(seat, self._process), self._found)
        alive = place.connect(_NAME), alive_secs
        threading.Thread(target=self._keep_saying, args=alive, name="ep_moe-alive", daemon=True).start()

    def _keep_saying(self, outbox: Any, secs: float) -> None:
        with contextlib.suppress(RuntimeError):  # the launcher has gone
            while not self.fails:
                time.sleep(secs)
                outbox.queue_push(_ANSWERS, self._message(0, Alive()))

    def receive(self, secs: float) -> tuple[int, Any] | None:
        """The next order and its epoch; None if the front end has closed; queue.Empty after so many seconds.

        Errors: RuntimeError if the store is gone; ValueError for bytes that no front end has sent.
        """
        found = self._found.get(timeout=secs)
        if isinstance(found, Exception):
            self.is_gone = True
            raise found
        order: tuple[int, Any] | None = found
        return order

    def answer(self, epoch: int, content: Any) -> None:
        """Tell the front end."""
        self._outbox.queue_push(_ANSWERS, self._message(epoch, content))

    def _message(self, epoch: int, content: Any) -> bytes:
        return encode(Answer(seat=self._seat, process=self._process, epoch=epoch, content=content))


class FrontChannel:
    """The front end's end.

    Args:
        found: where `Answer`s and errors are put, from another thread.
    """

    def __init__(self, place: StorePlace, found: "queue.SimpleQueue[Any]") -> None:
        self._outbox = place.connect(_NAME)
        start_inbox(place.connect(_NAME), _ANSWERS, found)

    def send(self, ranks: Iterable[tuple[int, int]], epoch: int, order: Any) -> None:
        """Send an order to ranks, (seat, process) each."""
        message = encode((epoch, order))
        for seat, process in ranks:
            self._outbox.queue_push(_orders(seat, process), message)

    def close(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Tell ranks that no order follows, and end this channel's thread."""
        for seat, process in ranks:
            self._outbox.queue_push(_orders(seat, process), _CLOSED)
        self._outbox.queue_push(_ANSWERS, _CLOSED)


def _orders(seat: int, process: int) -> str:
    return f"orders/{seat}/{process}"
