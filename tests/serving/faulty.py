"""`ep-moe` whose ranks have faults when a test asks for them: `python faulty.py serve ...`.

A file FOLDER/<process id> of the text "kind phase count" gives that rank a fault in the count-th step of a phase from
then on. The rank removes the file, and adds a line of that text, its process and the time to FOLDER/hits. FOLDER is in
EP_MOE_TEST_FAULTS.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("kill", "stop", "raise", "hang", "memory")  # hang: an error, behind which the rank does not end
PHASES = ("prefill", "decode", "moving", "joining", "healing")
FOLDER = "EP_MOE_TEST_FAULTS"


class Faults:
    """The faults of a rank. phase: of its passes.

    Attributes:
        awaited: whether others wait for it. A process that loads the model beside them is given up by none if it is
            stopped, and may join them later.
    """

    def __init__(self, folder: Path, awaited: bool) -> None:
        self.awaited = awaited
        self._order, self._hits, self._left = folder / str(os.getpid()), folder / "hits", 0
        self._phase = "decode"

    def step(self, phase: str = "") -> None:
        """A step of a phase, by default that of passes: the place of a fault."""
        phase = phase or self._phase
        self.awaited |= phase == "joining"
        if not self._order.exists():
            self._left = 0
            return
        text = self._order.read_text()
        kind, wanted, count = text.split()
        if wanted != phase or (kind == "stop" and not self.awaited):
            return
        self._left = (self._left or int(count)) - 1
        if self._left:
            return
        self._order.unlink()
        with self._hits.open("a") as file:
            file.write(f"{text} in {os.getpid()} at {time.strftime('%X')}\n")
        if kind == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))  # what it has stays
            bytearray(2**28)
        if kind == "hang":
            from ep_moe.group import EPGroup

            EPGroup.destroy = lambda group: time.sleep(1000)  # type: ignore[method-assign]
        if kind in ("raise", "hang"):
            raise KeyError(f"a fault of the test in process {os.getpid()}")  # not the same one twice
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def before(self, owner: Any, name: str, phase: str = "") -> None:
        """Make each call of a function a step."""
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.step(phase)
            return function(*args, **options)

        setattr(owner, name, call)

    @contextlib.contextmanager
    def prefilling(self) -> Any:
        """Steps of passes are of prefills in the block."""
        self._phase = "prefill"
        try:
            yield
        finally:
            self._phase = "decode"


def rank_main(group: Any, *args: Any) -> Any:
    """A rank of `ep-moe serve`, with faults. Collective."""
    from ep_moe.app.serve_rank import serve_rank_main
    from ep_moe.balance import Rebalancer
    from ep_moe.engines.transformers import regrouping
    from ep_moe.engines.transformers.decoding import RowDecoder
    from ep_moe.experts.reference import ReferenceExperts
    from ep_moe.group import joining

    faults, prefill = Faults(Path(os.environ[FOLDER]), awaited=not group.standby), RowDecoder._prefill

    def prefilling(self: Any, sizes: Any) -> Any:
        with faults.prefilling():
            return prefill(self, sizes)

    RowDecoder._prefill = prefilling  # type: ignore[method-assign]
    faults.before(ReferenceExperts, "__call__")
    faults.before(Rebalancer, "_change", "moving")
    faults.before(joining, "_init_world", "joining")
    faults.before(regrouping, "move_experts", "healing")
    return serve_rank_main(group, *args)


if __name__ == "__main__":
    import ep_moe.app.serve
    from ep_moe.app.start import on_ranks
    from ep_moe.cli import main
    from ep_moe.launch import supervised

    def on_faulty_ranks(target: Any, *args: Any, **options: Any) -> Any:
        return on_ranks("faulty:rank_main", *args, **options)

    ep_moe.app.serve.on_ranks = on_faulty_ranks
    supervised.LONGEST_PAUSE_SECS = 1.0  # a rank has many faults here
    sys.exit(main())
