"""Ctrl-C: until there is something to clean up it ends the process, since imports of libraries swallow exceptions."""

import os
import signal


def leave_at_once(signum: int, frame: object) -> None:
    """A handler of SIGINT: end the process with exit code 130."""
    del signum, frame
    os.write(2, b"interrupted\n")
    os._exit(130)


def end_on_interrupt() -> None:
    """Ctrl-C ends the process, unless it is ignored. Local, in the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def raise_on_interrupt() -> None:
    """Ctrl-C raises KeyboardInterrupt again, so that what runs from here on is ended in order. Local."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
