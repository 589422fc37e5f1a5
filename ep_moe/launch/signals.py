"""Signals while ranks run."""

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h

_before_leaving: list[Callable[[], None]] = []  # calls in place of the next SIGTERM's end


def ending_of(code: int) -> str:
    """How a process ended, by multiprocessing's exit code. Local."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def end_with_parent() -> None:
    """Have the end of this process's parent kill it, on Linux. Local."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def first_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM while ranks run makes a call, in the main thread, and ends nothing; the second one does."""
    _before_leaving.append(call)
    try:
        yield
    finally:
        _before_leaving.clear()


@contextlib.contextmanager
def terminable(*, interrupts_once: bool = True) -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that ranks are ended first. No effect in threads but the main one.

    SIGINT raises KeyboardInterrupt. It and SIGHUP do so once: some programs send them twice at once, as `timeout` and
    shells do, and the second one would end this process before its ranks. An ignored SIGHUP stays ignored.

    Args:
        interrupts_once: False leaves SIGINT alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: Any) -> None:
        if _before_leaving:
            _before_leaving.pop()()
            return
        raise SystemExit(128 + signum)

    def leave_once(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_IGN)
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, leave)}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, leave_once)
    if interrupts_once and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, leave_once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread (the main one, which gets them) and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
