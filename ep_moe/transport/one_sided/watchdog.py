"""The thread that ends the waits of a rank's kernels as soon as a rank is known to be lost.

A wait in a kernel ends by itself after the whole timeout. The group often knows earlier that a rank is lost: then the
thread writes an abort word to host memory, which kernels poll, and all waits end. It makes no CUDA calls, which
could block on these very kernels. Under the interpreter, which has no timer, the thread enforces the timeout too.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator

from ep_moe.group import EPGroup
from ep_moe.group.membership import Members
from ep_moe.transport.one_sided.memory import PeerMemory

STOP_SECS = 3.0

_log = logging.getLogger(__name__)


class Watchdog:
    """Looks for lost ranks twice per heartbeat; its thread ends with this object, with or without `stop`.

    Args:
        members: the transport's, if rounds continue without lost ranks; else None.

    Attributes:
        lock: held while the abort word is written or cleared.
        ended: whether the waits of this rank were ended since the last `restart`.
        suspects: the lost ranks for which they were ended.
    """

    def __init__(self, group: EPGroup, memory: PeerMemory, members: Members | None) -> None:
        self.lock = threading.Lock()
        self.ended = False
        self.suspects: tuple[int, ...] = ()
        self._turn = 0  # counts restarts: a loss found before one is stale
        self._group, self._memory, self._members = group, memory, members
        self._wait: tuple[str, int, float] | None = None
        self._stop = threading.Event()
        period = group.config.heartbeat_secs / 2
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._stop, period), name="ep_moe-watchdog", daemon=True
        )
        if group.num_ranks > 1:
            self._thread.start()

    @contextlib.contextmanager
    def waiting(self, phase: str, round: int) -> Iterator[None]:  # noqa: A002
        """Enforce the timeout of a wait in this block; on a GPU kernels enforce it themselves. Local."""
        self._wait = (phase, round, time.monotonic())
        try:
            with self._group.waiting(phase, round):
                yield
        finally:
            self._wait = None

    def poll(self) -> None:
        """End this rank's waits if a rank is lost. Local, called by the thread."""
        if self.ended:
            return
        turn, members, failure = self._turn, self._members, self._group.failure
        if members is None:
            known, gone = failure is not None, () if failure is None else failure.ranks
        else:
            gone = tuple(rank for rank in self._group.gone_ranks if members.active[rank])
            known = bool(gone) or members.called()
        gone = gone if known else self._overdue()
        if known or gone:
            self.end(gone, turn)

    def _overdue(self) -> tuple[int, ...]:
        """The ranks that a measured wait has waited for beyond the timeout."""
        wait = self._wait
        if wait is None or time.monotonic() - wait[2] < self._group.config.timeout_secs:
            return ()
        phase, round_, _ = wait
        ranks, reason = self._group.find_missing(phase, round_)
        if self._members is None:
            return self._group.blame(ranks, phase, round_, reason).ranks if ranks else ()
        return tuple(rank for rank in ranks if self._members.active[rank])

    def end(self, suspects: tuple[int, ...], turn: int | None = None) -> None:
        """End this rank's waits, unless there was a restart since `turn`. Local."""
        with self.lock:
            if self.ended or turn not in (None, self._turn):
                return
            self.ended, self.suspects = True, suspects
            self._memory.end_waits(suspects)
        names = " and ".join(f"rank {rank}" for rank in suspects) or "a rank"
        _log.warning("rank %d ends its waits: %s is lost", self._group.rank, names)

    def restart(self) -> None:
        """Look for lost ranks again, after the abort word was cleared. The caller holds `lock`."""
        self.ended, self.suspects = False, ()
        self._turn += 1

    def stop(self) -> None:
        """End the thread. Local; calling it twice is fine."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECS)


def _run(owner: "weakref.ref[Watchdog]", stop: threading.Event, period_secs: float) -> None:
    while not stop.wait(period_secs):
        watchdog = owner()
        if watchdog is None:
            return
        try:
            watchdog.poll()
        except RuntimeError as error:  # of the store or the device: kernels still time out by themselves
            _log.warning("the watchdog of kernels has ended: %s", error)
            return
        del watchdog
