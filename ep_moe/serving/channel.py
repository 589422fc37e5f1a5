"""How plans go from rank 0 to the other ranks, and what they make back: over the store through which the ranks joined.

The store belongs to the launcher and uses no collective, so that ranks of an idle server wait for a plan without a
timeout, while heartbeats still tell which rank is lost.
"""

import collections
import datetime
import queue
import threading
import time
from typing import Any

from ep_moe.engines.transformers.decoding.passes import MESSAGES, RowsMade, RowsPlan
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.group.wire import decode, encode

_CLOSED = encode(None)
_LONG = datetime.timedelta(days=20)  # the longest wait that fits the store's milliseconds


class _Inbox:
    """Messages of a queue of the store; a thread waits for them, since the store's own wait cannot be interrupted.

    The thread ends when all senders have sent `_CLOSED`, which is None to `receive`.
    """

    def __init__(self, store: Any, key: str, num_senders: int) -> None:
        self._store, self._key, self._num_senders = store, key, num_senders
        self._found: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        store.set_timeout(_LONG)
        threading.Thread(target=self._run, name="ep_moe-inbox", daemon=True).start()

    def _run(self) -> None:
        try:
            while self._num_senders:
                message = self._store.queue_pop(self._key)
                self._num_senders -= message == _CLOSED
                self._found.put(message)
        except RuntimeError as error:  # the launcher has gone, and its store with it
            self._found.put(error)

    def receive(self, secs: float) -> bytes:
        """The next message; queue.Empty after so many seconds."""
        message = self._found.get(timeout=secs)
        if isinstance(message, Exception):
            raise message
        return message


class PlanChannel:
    """Rank 0's `send` and `collect`, each in a thread of its own if it likes, and the other ranks' `receive` and
    `answer`, in turns. Plans may be sent before the results of earlier ones are collected, which is in order.

    Errors of all: PeerLostError names a rank that is lost; ValueError for bytes that no rank has sent. Made on
    all ranks in the same order; the waits are local.
    """

    def __init__(self, group: EPGroup) -> None:
        self._group = group
        self._round = 0  # of plans received, on rank 0 of results collected
        self._results = [collections.deque[RowsMade]() for _ in range(group.num_ranks)]  # not yet collected
        plans, answers = group.connect_store(), group.connect_store()
        lead = group.rank == 0
        self._outbox = plans if lead else answers
        self._inbox = None
        if group.num_ranks > 1:
            self._inbox = (
                _Inbox(answers, "answers", group.num_ranks - 1) if lead else _Inbox(plans, f"plans/{group.rank}", 1)
            )

    def send(self, plan: RowsPlan | None) -> None:
        """Send a plan to all other ranks."""
        message = encode(plan)
        for rank in range(1, self._group.num_ranks):
            self._outbox.queue_push(f"plans/{rank}", message)

    def collect(self, result: RowsMade) -> list[RowsMade]:
        """Wait for the other ranks' results of the oldest plan that is not collected; returns all, in rank order, with
        rank 0's own."""
        group, results = self._group, self._results
        results[0].append(result)
        self._round += 1
        start, limit = time.monotonic(), group.config.timeout_secs
        while not all(results):
            message = self._poll()
            if message is not None:
                rank, answer = decode(message, *MESSAGES)
                results[rank].append(answer)
            elif time.monotonic() - start > limit:
                missing = tuple(rank for rank, found in enumerate(results) if not found)
                reason = f"did not arrive: no answer to a plan (timeout {limit:g} s)"
                raise group.blame(missing, "plan", self._round, reason)
        return [found.popleft() for found in results]

    def close(self) -> None:
        """Tell the other ranks that no plan follows; their `receive` returns None."""
        self.send(None)

    def receive(self) -> RowsPlan | None:
        """Wait for the next plan, without a timeout; None if none follows."""
        self._round += 1
        with self._group.waiting("plan", self._round):
            while True:
                message = self._poll()
                if message is not None:
                    break
        if message == _CLOSED:
            self._outbox.queue_push("answers", _CLOSED)
            return None
        plan: RowsPlan = decode(message, *MESSAGES)
        return plan

    def answer(self, result: RowsMade) -> None:
        """Send this rank's result of the plan to rank 0."""
        self._outbox.queue_push("answers", encode((self._group.rank, result)))

    def _poll(self) -> bytes | None:
        """The next message; None if there is none for a moment and no rank is lost."""
        assert self._inbox is not None
        self._group.check()
        try:
            return self._inbox.receive(SLICE_SECS)
        except queue.Empty:
            return None
        except RuntimeError as error:
            if isinstance(error, PeerLostError):
                raise
            raise self._group.explain(error) from error
