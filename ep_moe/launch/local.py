"""Starts ranks on this machine, reports the first failure and ends the other ranks.

The launcher serves the store through which the ranks join, so that the store outlives any rank, and writes deaths to it
for the surviving ranks. Ranks are forked by a server that has torch loaded, so that a second launch takes 0.1 s.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import secrets
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.environment import SECRET
from ep_moe.fields import require, shown
from ep_moe.group import DEATHS_KEY, DEFAULT_CONFIG, StorePlace, secret_key, serve_store
from ep_moe.launch.outcomes import DIED, Failure
from ep_moe.launch.rank import Target, call_payload, rank_environ, read_outcome, run_pickled
from ep_moe.launch.server import open_standard_descriptors, start_server
from ep_moe.launch.signals import end_with_parent, ending_of, held_back, terminable
from ep_moe.launch.supervised import Front, SupervisedRanks

HOST = "127.0.0.1"  # all ranks are on this machine
TERMINATE_SECS = 1.0  # between SIGTERM and SIGKILL
THREADS = "OMP_NUM_THREADS"
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
    front: Front | None = None,
) -> list[Any]:
    """Start ranks on this machine, call `target(group, *args)` in each and return their results.

    Ranks write to stderr only; they ignore SIGINT, and end when the launcher ends for any reason. Each gets its share
    of the cores as torch threads, unless OMP_NUM_THREADS says how many. A script whose own function is the target calls
    this below `if __name__ == "__main__"`, as with multiprocessing.

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
    be pickled, such as a lambda, and other bad arguments; KeyboardInterrupt and, for SIGTERM and SIGHUP, SystemExit in
    the main thread, after the ranks have been ended. Local.
    """
    require(type(num_ranks) is int and num_ranks >= 1, f"num_ranks ({shown(num_ranks)}) must be an int of at least 1")
    payload = call_payload(target, args, config, device)
    added = dict(env or {})
    for name, value in added.items():
        require(isinstance(name, str) and isinstance(value, str), f"env has {shown(name)}: {shown(value)}, no texts")
    environ = dict(os.environ) | added
    environ[THREADS] = str(num_threads(environ) or max(1, _num_cores() // num_ranks))
    open_standard_descriptors()
    store = serve_store(HOST, 0, config.timeout_secs)
    ranks = _Ranks(store, num_ranks, grace_secs, front)
    with terminable():
        try:
            ranks.start(payload, environ, preload)
            return ranks.collect()
        finally:
            # for about a second at most
            with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                ranks.end()


def num_threads(environ: Mapping[str, str]) -> int | None:
    """The threads of OMP_NUM_THREADS, the first number if it is a list; None if it is unset or empty. Local.

    Errors: ValueError names the variable if that is no number of at least 1.
    """
    text = environ.get(THREADS, "").strip()
    first = text.partition(",")[0].strip()
    require(not text or (first.isdecimal() and int(first) >= 1), f"{THREADS} ({text!r}) is not a number of at least 1")
    return int(first) if text else None


class _Ranks(SupervisedRanks):
    """The processes of one launch."""

    def __init__(self, store: dist.TCPStore, num_ranks: int, grace_secs: float, front: Front | None) -> None:
        super().__init__(num_ranks, grace_secs, front)
        self._store, self._secret = store, secrets.token_hex(16)
        self._processes: dict[int, BaseProcess] = {}

    def start(self, payload: bytes, environ: dict[str, str], preload: Sequence[str] = ()) -> None:
        start_server(preload)
        store = {"MASTER_ADDR": HOST, "MASTER_PORT": str(self._store.port), SECRET: self._secret}
        self._payload, self._environ, self._preload = payload, environ | store, ", ".join(preload) or "none"
        self._begin_all(StorePlace(host=HOST, port=self._store.port, secret=self._secret))

    def _begin(self, rank: int, *, standby: bool) -> Connection:
        context, num_ranks = multiprocessing.get_context("forkserver"), self._num_ranks
        place = self._environ | rank_environ(rank, num_ranks, rank, num_ranks, standby=standby)
        receiver, sender = context.Pipe(duplex=False)
        # the fork server has the stderr of its own start; ours reaches the child as the descriptor of a connection
        closed = sys.__stderr__ is None  # since this process began: another file may have its number
        stderr = Connection(os.open(os.devnull, os.O_WRONLY) if closed else os.dup(2), readable=False)
        args = (sender, stderr, place, self._payload)
        process = self._processes[rank] = context.Process(target=_child, args=args, name=f"ep_moe-rank{rank}")
        try:
            with _unseen_main(b"__main__" in self._payload):
                process.start()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"the server that forks ranks has ended, its error is on stderr (modules to preload: {self._preload})"
            ) from error
        sender.close()
        stderr.close()
        return receiver

    def _outcome(self, rank: int) -> Failure | tuple[Any]:
        try:
            return read_outcome(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return Failure(error_type=DIED, message=self._how_it_died(rank))

    def _process(self, rank: int) -> int:
        return self._processes[rank].pid or 0

    def _kill(self, rank: int) -> None:
        self._processes[rank].kill()

    def _join(self, rank: int) -> None:
        self._processes[rank].join(EXIT_CODE_SECS)

    def _tell_ranks(self, deaths: str) -> None:
        self._store.set(secret_key(self._secret, DEATHS_KEY), deaths)

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

    def _how_it_died(self, rank: int) -> str:
        self._join(rank)
        code = self._processes[rank].exitcode
        if code is None:
            return "closed its pipe without a result"
        return ending_of(code) + " without a result" * (code >= 0)


def _child(pipe: Connection, stderr: Connection, environ: dict[str, str], payload: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()  # the fork server, which ends with the launcher
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
    torch.set_num_threads(int(environ[THREADS]))
    data = run_pickled(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone
        pipe.send_bytes(data)
    # without it the end of the launcher warns of semaphores, such as those of transformers' progress bars
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
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
