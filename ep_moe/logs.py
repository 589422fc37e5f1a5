"""Log lines of the package on standard error: time, process and level before each.

The package itself only has loggers below "ep_moe"; programs that use it as a library configure these as they do others.
"""

import logging
import sys
from collections.abc import Callable

STEPS = logging.getLogger("ep_moe.steps")  # of long work: `log_step`; commands make bars of them
LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s {process} %(levelname)s %(name)s: %(message)s"


class _Stderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the time: a rank's is replaced after the fork."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        """The stream."""
        return sys.stderr


def configure(level: str, process: str) -> None:
    """Write the package's log lines from this level on, in place of an earlier configuration. Local.

    Args:
        level: one of LEVELS. process: its name in each line, such as "rank 2".
    """
    handler = _Stderr()
    handler.setLevel(level.upper())
    handler.setFormatter(logging.Formatter(_FORMAT.format(process=process)))
    package = logging.getLogger("ep_moe")
    package.handlers = [handler]
    package.setLevel(level.upper())


def log_step(work: str, done: int, total: int, num_bytes: int = 0) -> None:
    """Log at level DEBUG that a step of long work has ended. Local.

    Args:
        work: its name, such as "read experts". done, total: steps. num_bytes: that this step has read.
    """
    STEPS.debug("%s: %d of %d", work, done, total, extra={"step": (work, done, total, num_bytes)})


class StepsHandler(logging.Handler):
    """Calls a function with the work, steps done, steps in all and bytes of each step that is logged."""

    def __init__(self, show: Callable[[str, int, int, int], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show a step."""
        self._show(*record.step)  # type: ignore[attr-defined]
