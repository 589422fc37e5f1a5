"""The waits of a rank for the others: in slices or by polling, so that it also checks the group for a failure."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.group.errors import PeerLostError
from ep_moe.group.watch import Watch

SLICE_SECS = 0.25  # longest blocking wait between two checks of the group
SPIN_SECS = 2e-3  # time of polling the device without sleep: a sleep would overshoot the end of a round on one node
POINT_TO_POINT = (12, 13, 14)  # c10d OpType SEND, RECV, RECVANYSOURCE


class Waits:
    """The waits of a rank in a group with heartbeats: each completes, or raises an error that names the lost rank.

    Attributes:
        waited_secs: time of all waits for operations of gloo so far; on a GPU the host waits for its own device too.
    """

    def __init__(self, watch: Watch, *, backend: str, device: torch.device, config: GroupConfig) -> None:
        self.waited_secs = 0.0
        self._watch = watch
        self._backend = backend
        self._device = device
        self._timeout_secs = config.timeout_secs
        self._heartbeat_secs = config.heartbeat_secs
        self._timeout = datetime.timedelta(seconds=config.timeout_secs)
        self._slice = datetime.timedelta(seconds=min(SLICE_SECS, config.heartbeat_secs))

    def wait(self, work: "dist.Work | torch.cuda.Event", phase: str, round: int) -> None:  # noqa: A002
        """Wait on the host until an operation that needs the other ranks is complete, as `EPGroup.wait`."""
        with self._watch.waiting(phase, round, round), self.explained():
            self.check()
            if isinstance(work, torch.cuda.Event):
                self._poll_device(work.query, phase, round)
            elif self._backend == "gloo":
                start = time.perf_counter()
                self._wait_on_host(work, phase, round)
                self.waited_secs += time.perf_counter() - start
            else:
                self._poll_device(work.is_completed, phase, round)
                work.wait()  # orders the current stream behind the operation and raises what NCCL found

    @contextlib.contextmanager
    def guard(self, phase: str, round: int | None, count: int) -> Iterator[None]:  # noqa: A002
        """Name the lost rank when a collective in the block fails that others issue, as `EPGroup.guard`.

        Args:
            round: for the message, None if the caller does not count rounds.
            count: number of this guard in its phase, which ranks compare to find the one that is behind.
        """
        with self._watch.waiting(phase, round, count), self.explained():
            self.check()
            yield
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
                self._poll_device(event.query, phase, None)

    def wait_for_all(self, phase: str, count: int) -> None:
        """Wait until the heartbeats of all ranks have reached `count` of `phase`, as `EPGroup.wait_for_all`."""
        pause = 0.01
        with self._watch.waiting(phase, None, count):
            while not self._watch.all_have_reached(phase, count):
                self.check()
                time.sleep(pause)
                pause = min(1.5 * pause, self._heartbeat_secs)
            self.check()

    def elsewhere(self, phase: str, round: int) -> contextlib.AbstractContextManager[None]:  # noqa: A002
        """Publish a wait of other code in the block, which has its own timeout, as `EPGroup.waiting`."""
        return self._watch.waiting(phase, round, round)

    def explain(self, error: Exception) -> Exception:
        """The PeerLostError behind an error that a lost rank caused, as `EPGroup.explain`."""
        if isinstance(error, PeerLostError):
            return error
        # after an abort the buffers hold garbage, which may cause any kind of error
        if not isinstance(error, RuntimeError) and not (self._backend == "nccl" and self._watch.lost()):
            return error
        return self._watch.explain(error, *self._watch.where()) or error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the PeerLostError behind an error of the block, as `EPGroup.explained`."""
        try:
            yield
        except Exception as error:
            cause = self.explain(error)
            if cause is error:
                raise
            try:
                raise cause from error
            finally:
                del cause  # its traceback has this frame: all that the frames below use would stay until a collection

    def check(self) -> None:
        """Raise PeerLostError if the group has failed. Local, no host sync."""
        if self._watch.failure is not None:
            raise self._watch.failure.copy()

    def _wait_on_host(self, work: Any, phase: str, round: int) -> None:  # noqa: A002
        deadline = time.monotonic() + self._timeout_secs
        # gloo breaks the connection of a send or receive when a wait for it times out: no slices for these
        whole = work._get_op_type() in POINT_TO_POINT
        while True:
            try:
                work.wait(self._timeout if whole else self._slice)
                return
            except RuntimeError:
                if whole:
                    raise
                if work.is_completed():
                    work.wait()  # returns if it completed just after the slice, else raises its error
                    return
            self.check()
            if time.monotonic() > deadline:
                raise self._watch.blame(phase, round, round)

    def _poll_device(self, done: Callable[[], bool], phase: str, round: int | None) -> None:  # noqa: A002
        start, pause = time.monotonic(), 20e-6
        while not done():
            waited_secs = time.monotonic() - start
            if waited_secs < SPIN_SECS:
                time.sleep(0)  # yields the GIL to this rank's heartbeat thread
                continue
            self.check()
            if round is not None and waited_secs > self._timeout_secs:
                raise self._watch.blame(phase, round, round)
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
        self.check()  # operations of an aborted communicator complete too, with garbage in the buffers
