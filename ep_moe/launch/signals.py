"""Signals while ranks run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_before_leaving: list[Callable[[], None]] = []  # calls in place of the next SIGTERM's end


def ending_of(code: int) -> str:
    """How a process ended, by multiprocessing's exit code. Local."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


@contextlib.contextmanager
def first_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM while ranks run makes a call, in the main thread, and ends nothing; the second one does."""
    _before_leaving.append(call)
    try:
        yield
    finally:
        _before_leaving.clear()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit in the main thread, so that ranks are ended first; no effect in other threads.

    SIGINT raises KeyboardInterrupt once: some programs send it twice at once, as `timeout` does, and the second one
    would end this process before its ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: Any) -> None:
        if _before_leaving:
            _before_leaving.pop()()
            return
        raise SystemExit(128 + signum)

    def interrupt(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, leave)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
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
