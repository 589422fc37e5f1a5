"""The work between a front end and the ranks: generations in, tokens of each out, all ranks in step.

    leader = Leader(group, rows, limits)          # on rank 0; `follow(group, rows)` on the others
    ticket = leader.submit(generation, on_progress)  # from any thread
    leader.run()                                  # in the thread that owns the model, until `close` or an error

It knows nothing of HTTP or text: `ep_moe.serving.http` is one front end, and any other may take its place.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ep_moe.engines.transformers.decoding.rows import RowsPlan
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.serving.channel import PlanChannel
from ep_moe.serving.scheduler import Generation, Limits, Progress, Scheduler

OnProgress = Callable[[Progress], None]
PREFILL, DECODE = "prefill", "decode"


class Rows(Protocol):
    """What a rank does with plans; `RowDecoder` is one."""

    def run(self, plan: RowsPlan) -> list[list[int]]:
        """Carry out this rank's part. Collective."""
        ...


class ServerEndedError(RuntimeError):
    """The server has ended, by an error that the message names or because it was closed."""


def follow(group: EPGroup, rows: Rows) -> None:
    """Carry out rank 0's plans until it closes. Errors: those of the model; PeerLostError. Collective."""
    channel = PlanChannel(group)
    while (plan := channel.receive()) is not None:
        channel.answer(rows.run(plan))


class Leader:
    """Rank 0's part: the queue, the plans, and who gets which tokens. Made when `follow` is called on the others.

    Attributes:
        limits: of the queue and of all ranks' rows.
        on_plan: called after each plan with PREFILL or DECODE and its seconds, in the thread of `run`.
    """

    def __init__(self, group: EPGroup, rows: Rows, limits: Limits) -> None:
        self.limits = limits
        self._group, self._own = group, rows
        self._channel = PlanChannel(group)
        self.on_plan: Callable[[str, float], None] = lambda kind, secs: None
        self._scheduler = Scheduler(limits)
        self._watchers: dict[int, OnProgress] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closing = False

    @property
    def failure(self) -> Exception | None:
        """The error that has ended the server; None while it runs."""
        return self._failure

    @property
    def num_running(self) -> int:
        """Sequences that have a row now."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Generations that wait for a row."""
        return self._scheduler.num_waiting

    def room(self, prompt: tuple[int, ...]) -> int:
        """The most new tokens after a prompt. Errors: BadRequestError for one that is not served. Any thread."""
        return self._scheduler.room(prompt)

    def submit(self, generation: Generation, on_progress: OnProgress) -> int:
        """Queue a generation; returns the ticket that `cancel` takes.

        Args:
            on_progress: called in the thread of `run`, and must not block; the last call has `finish` or `error`.
        Errors: BadRequestError, QueueFullError, ServerEndedError. Any thread.
        """
        with self._changed:
            if self._failure is not None or self._closing:
                raise ServerEndedError(str(self._failure or "the server is closed"))
            ticket = self._scheduler.submit(generation)
            self._watchers[ticket] = on_progress
            self._changed.notify()
        return ticket

    def cancel(self, ticket: int) -> bool:
        """End a generation and free its row; False if it has ended already. Any thread."""
        with self._changed:
            self._watchers.pop(ticket, None)
            return self._scheduler.cancel(ticket)

    def close(self) -> None:
        """End `run` on this rank and `follow` on the others; sequences that run are cut off. Any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def run(self) -> None:
        """Carry out plans until `close`. Errors: those of the model; PeerLostError names a lost rank. Collective.

        However it ends, every generation gets its last progress, and `submit` raises ServerEndedError from then on.
        """
        error: Exception = ServerEndedError("the server is closed")
        try:
            while (plan := self._next()) is not None:
                self._step(plan)
            self._channel.close()
        except Exception as failure:
            cause = self._group.explain(failure)
            error = cause
            if not isinstance(cause, PeerLostError):
                error = ServerEndedError(f"rank {self._group.rank}: {type(failure).__name__}: {failure}")
            if cause is failure:
                raise
            raise cause from failure
        finally:
            self._end(error)

    def _next(self) -> RowsPlan | None:
        """Wait for something to do; None once the server is closed."""
        while True:
            with self._changed:
                if self._closing:
                    return None
                plan = self._scheduler.next_plan()
                if plan is not None:
                    return plan
                self._changed.wait(SLICE_SECS)
            self._group.check()  # a rank may be lost while nobody asks for anything

    def _step(self, plan: RowsPlan) -> None:
        start = time.perf_counter()
        self._channel.send(plan)
        tokens = self._channel.collect(self._own.run(plan))
        with self._changed:
            found = self._scheduler.take(tokens)
            watchers = [self._watchers.get(ticket) for ticket, _ in found]
            for ticket, progress in found:
                if progress.finish:
                    self._watchers.pop(ticket, None)
        for watcher, (_, progress) in zip(watchers, found, strict=True):
            if watcher is not None:
                watcher(progress)
        self.on_plan(PREFILL if any(plan.starts) else DECODE, time.perf_counter() - start)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            with contextlib.suppress(RuntimeError):  # a front end that has ended already
                watcher(Progress(error=error))
