"""Starts ranks on this machine, reports the first failure and ends the other ranks.

The launcher serves the store through which the ranks join, so that the store outlives any rank, and writes deaths to it
for the surviving ranks. Ranks are forked by a server that has torch loaded, so that a second launch takes 0.1 s.
"""

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import secrets
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.environment import SECRET
from ep_moe.fields import require, shown
from ep_moe.group import DEATHS_KEY, DEFAULT_CONFIG, StorePlace, secret_key, serve_store
from ep_moe.launch.outcomes import Failure, Outcomes
from ep_moe.launch.rank import Target, call_payload, rank_environ, read_outcome, run_pickled
from ep_moe.launch.server import open_standard_descriptors, start_server
from ep_moe.launch.signals import held_back, terminable

HOST = "127.0.0.1"  # all ranks are on this machine
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TERMINATE_SECS = 1.0  # between SIGTERM and SIGKILL
EXIT_CODE_SECS = 5.0  # the fork server reports an exit code a moment after the process has gone


def launch(
    target: Target,
    *args: Any,
    num_ranks: int,
    config: GroupConfig = DEFAULT_CONFIG,
    device: torch.device | str | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    grace_secs: float = 5.0,
    front: "Front | None" = None,
) -> list[Any]:
    """Start ranks on this machine, call `target(group, *args)` in each and return their results.

    Ranks write to stderr only; they ignore SIGINT, and end when the launcher ends for any reason. Each gets its share
    of the cores as torch threads, unless OMP_NUM_THREADS is set. A script whose own function is the target calls this
    below `if __name__ == "__main__"`, as with multiprocessing.

    Args:
        target: a function, or its dotted name "package.module:function", which only the ranks import.
        target, args: pickled; so are results: move CUDA tensors to the CPU before returning them.
        num_ranks: processes; a single rank also runs in a process of its own.
        config, device: as in `EPGroup.connect`.
        env: environment variables of the ranks, added to this process's own; set before `target`'s module is imported,
            unless that module is the script itself or preloaded.
        preload: names of modules that the fork server imports once, so that the ranks need not. They see this
            process's environment without `env`, and must not touch CUDA, which does not survive a fork. Only a
            process's first launch, which starts the server, uses it; a module that is not found is left to the ranks.
        grace_secs: how long the other ranks may take to end after the first failure, before SIGTERM and SIGKILL.
        front: a process that is no rank, and may keep the ranks going when some of them die.
    Returns: the results in rank order.
    Errors: RankFailedError; ValueError, before anything starts, for num_ranks below 1, a target or argument that cannot
    be pickled, such as a lambda, and other bad arguments; KeyboardInterrupt and, for SIGTERM, SystemExit(143) in the
    main thread, after the ranks have been ended. Local.
    """
    require(type(num_ranks) is int and num_ranks >= 1, f"num_ranks ({shown(num_ranks)}) must be an int of at least 1")
    payload = call_payload(target, args, config, device)
    added = dict(env or {})
    for name, value in added.items():
        require(isinstance(name, str) and isinstance(value, str), f"env has {shown(name)}: {shown(value)}, no texts")
    open_standard_descriptors()
    store = serve_store(HOST, 0, config.timeout_secs)
    ranks = _Ranks(store, num_ranks, grace_secs, front)
    with terminable():
        try:
            ranks.start(payload, dict(os.environ) | added, preload)
            return ranks.collect()
        finally:
            # for about a second at most
            with held_back(signal.SIGINT, signal.SIGTERM):
                ranks.end()


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


class _Ranks:
    """The processes of one launch."""

    def __init__(self, store: dist.TCPStore, num_ranks: int, grace_secs: float, front: Front | None) -> None:
        self._front = front
        self._connection = None if front is None else front.connection
        self._starts = [(0, 0.0)] * num_ranks  # how often each rank was started again, and when
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._waiting: set[int] = set()  # ranks that will be started again
        self._stopped: set[int] = set()  # ranks that are not to run
        self._store = store
        self._num_ranks = num_ranks
        self._secret = secrets.token_hex(16)
        self._outcomes = Outcomes(num_ranks, grace_secs)
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}

    def start(self, payload: bytes, environ: dict[str, str], preload: Sequence[str] = ()) -> None:
        start_server(preload)
        if "OMP_NUM_THREADS" not in environ:
            environ["OMP_NUM_THREADS"] = str(max(1, _num_cores() // self._num_ranks))
        store = {"MASTER_ADDR": HOST, "MASTER_PORT": str(self._store.port), SECRET: self._secret}
        self._payload, self._environ, self._preload = payload, environ | store, ", ".join(preload) or "none"
        if self._connection is not None:
            place = StorePlace(host=HOST, port=self._store.port, secret=self._secret)
            self._connection.send((place, self._num_ranks, True))
        for rank in range(self._num_ranks):
            self._begin(rank)

    def _begin(self, rank: int, *, standby: bool = False) -> None:
        """Start the process of a rank."""
        context, num_ranks = multiprocessing.get_context("forkserver"), self._num_ranks
        place = self._environ | rank_environ(rank, num_ranks, rank, num_ranks, standby=standby)
        receiver, sender = context.Pipe(duplex=False)
        # the fork server has the stderr of its own start; ours reaches the child as the descriptor of a connection
        closed = sys.__stderr__ is None  # since this process began: another file may have its number
        stderr = Connection(os.open(os.devnull, os.O_WRONLY) if closed else os.dup(2), readable=False)
        args = (sender, stderr, place, self._payload)
        process = context.Process(target=_child, args=args, name=f"ep_moe-rank{rank}")
        self._pipes[rank], self._processes[rank] = receiver, process
        try:
            with _unseen_main(b"__main__" in self._payload):
                process.start()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"the server that forks ranks has ended, its error is on stderr (modules to preload: {self._preload})"
            ) from error
        sender.close()
        stderr.close()

    def _start_again(self, rank: int) -> None:
        if rank not in self._waiting:  # it is running already, or has been stopped
            return
        self._waiting.discard(rank)
        self._pipes[rank].close()
        self._outcomes.forget(rank)
        self._begin(rank, standby=True)

    def collect(self) -> list[Any]:
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
            seat, pid, secs = message
            process = self._processes[seat]
            if process.pid == pid:
                self._due.append((time.monotonic() + secs, process.kill))

    def _stop(self, order: Stop) -> None:
        rank, process = order.seat, self._processes[order.seat]
        self._stopped.add(rank)
        self._waiting.discard(rank)
        if rank not in self._outcomes.pending:
            self._note_stopped(rank)
            return

        def kill() -> None:
            if self._processes[rank] is process and rank in self._outcomes.pending:
                process.kill()

        self._due.append((time.monotonic() + order.secs, kill))

    def _note_stopped(self, rank: int) -> None:
        """A rank that is not to run has ended, however: its memory is free then."""
        self._processes[rank].join(EXIT_CODE_SECS)
        self._outcomes.leave(rank)
        self._tell_left(rank)

    def _tell_left(self, rank: int) -> None:
        """Tell the front process that a rank has ended in order."""
        if self._outcomes.keeps and self._connection is not None:
            ended = Ended(seat=rank, process=self._processes[rank].pid or 0, how=LEFT, again=None)
            with contextlib.suppress(OSError):
                self._connection.send(ended)

    def _start(self, rank: int) -> None:
        if rank in self._outcomes.pending:
            return
        self._stopped.discard(rank)
        self._starts[rank] = 0, time.monotonic()
        self._waiting.add(rank)
        self._start_again(rank)

    def end(self) -> None:
        pending = self._outcomes.pending
        for rank, process in self._processes.items():
            if rank in pending and process.pid is not None:
                process.terminate()
        deadline = time.monotonic() + TERMINATE_SECS
        for process in self._processes.values():
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()

    def _receive(self, rank: int) -> None:
        try:
            outcome = read_outcome(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            outcome = None
        if rank in self._stopped:
            self._note_stopped(rank)
            return
        if outcome is None:
            how = self._how_it_died(rank)
            self._tell_ranks(self._outcomes.add_death(rank, how))
        else:
            self._outcomes.add(rank, outcome)
            if not isinstance(outcome, Failure):
                self._tell_left(rank)
                return
            how = f"failed: {outcome.what()}"
            if self._outcomes.keeps:  # the rank has told those of its group, if it had one
                self._tell_ranks(self._outcomes.note(rank, how))
        if self._outcomes.keeps and self._connection is not None:
            self._tell_front(rank, how)

    def _tell_ranks(self, deaths: str) -> None:
        self._store.set(secret_key(self._secret, DEATHS_KEY), deaths)

    def _tell_front(self, rank: int, how: str) -> None:
        """Tell the front process that a rank has ended; start it again after a while, if it may be."""
        assert self._front is not None
        assert self._connection is not None
        now, pid = time.monotonic(), self._processes[rank].pid
        count, since = self._starts[rank]
        count = 0 if now - since > CALM_SECS else count
        again = min(PAUSE_SECS * 2**count, LONGEST_PAUSE_SECS) if count < self._front.restarts else None
        if again is not None:
            self._starts[rank] = count + 1, now + again
            self._waiting.add(rank)
            self._due.append((now + again, functools.partial(self._start_again, rank)))
        with contextlib.suppress(OSError):  # it has ended, which is noticed next
            self._connection.send(Ended(seat=rank, process=pid or 0, how=how, again=again))

    def _how_it_died(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(EXIT_CODE_SECS)
        code = process.exitcode
        if code is None:
            return "closed its pipe without a result"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"was killed by {names.get(-code, f'signal {-code}')}"
        return f"exited with code {code} without a result"


def _child(pipe: Connection, stderr: Connection, environ: dict[str, str], payload: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        # the fork server is the parent; it ends with the launcher, and this rank with the fork server
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
    os.dup2(stderr.fileno(), 2)
    os.dup2(2, 1)  # stdout belongs to the launcher
    for stream in (sys.stdout, sys.stderr):
        # whole lines, so that those of several ranks do not mix
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    data = run_pickled(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone
        pipe.send_bytes(data)
    os._exit(0)  # an orderly exit would join backend threads that may still wait for a lost rank


@contextlib.contextmanager
def _unseen_main(needed: bool) -> Iterator[None]:
    """Keep multiprocessing from running this program's main module in every rank, unless the payload needs it."""
    main = sys.modules["__main__"]
    if not needed:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
