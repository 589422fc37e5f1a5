"""Starts ranks on this machine, reports the first failure and ends the other ranks.

The launcher serves the store through which the ranks join, so that the store outlives any rank, and writes deaths to it
for the surviving ranks. Ranks are forked by a server that has torch loaded, so that a second launch takes 0.1 s.
"""

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.group import DEATHS_KEY, DEFAULT_CONFIG, STILL_THERE, EPGroup, PeerLostError, serve_store

# The group aborts a hung NCCL communicator itself and names the rank; torch's watchdog would kill the process without
# naming one. After an error the watchdog sleeps for four times the last setting, and the process cannot end meanwhile.
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}
HOST = "127.0.0.1"  # all ranks are on this machine
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TERMINATE_SECS = 1.0  # between SIGTERM and SIGKILL
EXIT_CODE_SECS = 5.0  # the fork server reports an exit code a moment after the process has gone

# a worker entry point: a function, or its dotted name "package.module:function", which only the ranks import
Target = Callable[..., Any] | str


class RankFailedError(RuntimeError):
    """A rank failed, died or was lost; the message begins with the rank and its own error.

    Args:
        rank: the first to fail by itself, not because another rank did.
        error_type: the name of its exception's class; "Died" for a process that ended without one.
        error_message: of the exception, or how the process ended.
        traceback_text: of the rank, empty if the process died. Also shown as the cause of this error.
        failures: rank -> one line, for every rank that did not return a result.
    """

    def __init__(
        self, rank: int, error_type: str, error_message: str, traceback_text: str, failures: dict[int, str]
    ) -> None:
        self.rank = rank
        self.error_type = error_type
        self.error_message = error_message
        self.traceback_text = traceback_text
        self.failures = failures
        super().__init__(failures[rank])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.error_type, self.error_message, self.traceback_text, self.failures)


class RankTraceback(Exception):  # noqa: N818
    """The traceback of a rank as text: the cause of a RankFailedError, so that the launcher's traceback shows it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """How a rank ended that returned no result."""

    error_type: str
    message: str
    traceback_text: str = ""
    lost: PeerLostError | None = None  # if the rank only reports that another is lost
    when: float = dataclasses.field(default_factory=time.monotonic)  # one clock for all processes of a machine

    def line(self, rank: int) -> str:
        return f"rank {rank} {self.message}" if self.error_type == "Died" else f"rank {rank}: {self.what()}"

    def what(self) -> str:
        return f"{self.error_type}: {self.message}" if self.message else self.error_type


def run_rank(
    target: Target,
    *args: Any,
    config: GroupConfig = DEFAULT_CONFIG,
    device: torch.device | str | None = None,
) -> Any:
    """Run one rank in this process: make the group that the environment describes and call `target(group, *args)`.

    For ranks that torchrun, srun, Ray or the like has started; `launch` uses it for its own.

    Args:
        target: a function, or its dotted name "package.module:function".
        config, device: as in `EPGroup.from_env`.
    Returns: the result of `target`.
    Errors: those of `target`, after reporting them to the other ranks and writing a line "rank 1: ValueError: ..." to
    stderr; PeerLostError if a lost rank caused it. Collective.
    """
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    group: EPGroup | None = None
    try:
        with EPGroup.from_env(config, device) as group:
            try:
                function = pkgutil.resolve_name(target) if isinstance(target, str) else target
                return function(group, *args)
            except Exception as error:
                cause = group.explain(error)
                if cause is error:
                    raise
                raise cause from error
    except BaseException as error:
        rank = os.environ.get("RANK", "0") if group is None else group.rank
        sys.stderr.write(f"rank {rank}: {_describe(error).what()}\n")  # one write, so that ranks' lines do not mix
        raise


def launch(
    target: Target,
    *args: Any,
    num_ranks: int,
    config: GroupConfig = DEFAULT_CONFIG,
    device: torch.device | str | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    grace_secs: float = 5.0,
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
    Returns: the results in rank order.
    Errors: RankFailedError; ValueError for num_ranks below 1; KeyboardInterrupt and, for SIGTERM, SystemExit(143) in
    the main thread, after the ranks have been ended. Local.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be at least 1")
    if grace_secs < 0:
        raise ValueError(f"grace_secs ({grace_secs}) must not be negative")
    store = serve_store(HOST, 0, config.timeout_secs)
    ranks = _Ranks(store, grace_secs)
    with _terminable():
        try:
            ranks.start((target, args, config, device), dict(os.environ) | dict(env or {}), num_ranks, preload)
            return ranks.collect()
        finally:
            # for about a second at most
            with _held_back(signal.SIGINT, signal.SIGTERM):
                ranks.end()


def start_server(preload: Sequence[str] = ()) -> None:
    """Start the server that forks ranks ahead of the first launch; it imports in the background.

    Args:
        preload: as in `launch`; without effect if the server is running already.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed", *preload])
    resource_tracker.ensure_running()  # first: the server's start would start it too, and that unblocks SIGINT
    with _held_back(signal.SIGINT):  # on Ctrl-C during its imports the server would print a traceback
        forkserver.ensure_running()


class _Ranks:
    """The processes of one launch."""

    def __init__(self, store: dist.TCPStore, grace_secs: float) -> None:
        self._store = store
        self._grace_secs = grace_secs
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._results: dict[int, Any] = {}
        self._failures: dict[int, _Failure] = {}
        self._deaths: list[tuple[int, str]] = []

    def start(
        self, call: tuple[Any, ...], environ: dict[str, str], num_ranks: int, preload: Sequence[str] = ()
    ) -> None:
        start_server(preload)
        context = multiprocessing.get_context("forkserver")
        payload = pickle.dumps(call)
        if "OMP_NUM_THREADS" not in environ:
            environ["OMP_NUM_THREADS"] = str(max(1, _num_cores() // num_ranks))
        for rank in range(num_ranks):
            place = {
                "RANK": rank,
                "WORLD_SIZE": num_ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": num_ranks,
                "MASTER_ADDR": HOST,
                "MASTER_PORT": self._store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            rank_environ = environ | {name: str(value) for name, value in place.items()}
            receiver, sender = context.Pipe(duplex=False)
            # the fork server has the stderr of its own start; ours reaches the child as the descriptor of a connection
            stderr = Connection(os.dup(2), readable=False)
            process = context.Process(
                target=_child, args=(sender, stderr, rank_environ, payload), name=f"ep_moe-rank{rank}"
            )
            self._pipes.append(receiver)
            self._processes.append(process)
            try:
                with _unseen_main(b"__main__" in payload):
                    process.start()
            except (EOFError, ConnectionError) as error:
                names = ", ".join(preload) or "none"
                raise RuntimeError(
                    f"the server that forks ranks has ended, its error is on stderr (modules to preload: {names})"
                ) from error
            sender.close()
            stderr.close()

    def collect(self) -> list[Any]:
        deadline: float | None = None
        while self._pending() and (deadline is None or time.monotonic() < deadline):
            if self._pending() <= self._still_there():
                break
            wait_secs = None if deadline is None else max(0.0, deadline - time.monotonic())
            for pipe in wait_any([self._pipes[rank] for rank in self._pending()], wait_secs):
                self._receive(self._pipes.index(pipe))  # type: ignore[arg-type]
            if self._failures and deadline is None:
                deadline = time.monotonic() + self._grace_secs
        if self._failures:
            raise self._error()
        return [self._results[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for rank in self._pending():
            if self._processes[rank].pid is not None:
                self._processes[rank].terminate()
        deadline = time.monotonic() + TERMINATE_SECS
        for process in self._processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def _pending(self) -> set[int]:
        return set(range(len(self._pipes))) - set(self._results) - set(self._failures)

    def _still_there(self) -> set[int]:
        """Ranks that the others reported as lost but whose processes may still run: they will not end by themselves."""
        reports = [failure.lost for failure in self._failures.values() if failure.lost is not None]
        return {rank for lost in reports if lost.reason.startswith(STILL_THERE) for rank in lost.ranks}

    def _receive(self, rank: int) -> None:
        try:
            outcome = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            outcome = self._died(rank)
        except Exception as error:  # noqa: BLE001 - whatever unpickling a foreign class may raise
            outcome = _Failure(error_type=type(error).__name__, message=f"its result cannot be unpickled: {error}")
        if isinstance(outcome, _Failure):
            self._failures[rank] = outcome
        else:
            self._results[rank] = outcome[0]

    def _died(self, rank: int) -> _Failure:
        process = self._processes[rank]
        process.join(EXIT_CODE_SECS)
        code = process.exitcode
        if code is None:
            message = "closed its pipe without a result"
        elif code < 0:
            names = {number.value: number.name for number in signal.Signals}
            message = f"was killed by {names.get(-code, f'signal {-code}')}"
        else:
            message = f"exited with code {code} without a result"
        self._deaths.append((rank, message))
        self._store.set(DEATHS_KEY, json.dumps(self._deaths))
        return _Failure(error_type="Died", message=message)

    def _error(self) -> RankFailedError:
        lines = {rank: failure.line(rank) for rank, failure in sorted(self._failures.items())}
        ended = f"did not end within {self._grace_secs:g} s of the first failure and was killed"
        lines |= {rank: f"rank {rank} {ended}" for rank in self._pending()}
        rank, first = min(self._failures.items(), key=lambda item: (item[1].lost is not None, item[1].when))
        if first.lost is not None and first.lost.ranks:
            rank = first.lost.ranks[0]
            lines[rank] = str(first.lost)
        error = RankFailedError(rank, first.error_type, first.message, first.traceback_text, lines)
        if first.traceback_text:
            error.__cause__ = RankTraceback(first.traceback_text)
        return error


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
    try:
        target, args, config, device = pickle.loads(payload)
        outcome: Any = (run_rank(target, *args, config=config, device=device),)
        data = pickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001 - SystemExit is an outcome of this rank too
        data = pickle.dumps(_describe(error))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone
        pipe.send_bytes(data)
    os._exit(0)  # an orderly exit would join backend threads that may still wait for a lost rank


def _describe(error: BaseException) -> _Failure:
    return _Failure(
        error_type=type(error).__name__,
        message=str(error),
        traceback_text="".join(traceback.format_exception(error)),
        lost=error.copy() if isinstance(error, PeerLostError) else None,
    )


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


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit in the main thread, so that ranks are ended first; no effect in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread (the main one, which gets them) and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
