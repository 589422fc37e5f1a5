"""What ranks agree on between two forward passes, through the store of their group: no device and no collective waits.

Letters: R ranks.
"""

import time
from typing import Any

from ep_moe.group import EPGroup

_FIELD = 20  # bits of a number of ranks


class Votes:
    """Votes of all ranks, numbered by their calls: each rank calls `cast` and `read` in turns.

    A rank casts vote n + 2 only after all have read vote n, so two counters serve all votes.
    Errors: PeerLostError if a rank is lost, or does not cast its vote within the group's timeout. Made on all ranks in
    the same order.
    """

    def __init__(self, group: EPGroup) -> None:
        self._group, self._store = group, group.connect_store()
        self._number, self._counted = 0, [0, 0]

    def cast(self, ready: bool) -> None:
        """Say whether this rank is ready. Local, one exchange with the store."""
        self._ask("add", f"votes/{self._number % 2}", 1 | int(ready) << _FIELD)

    def read(self) -> bool:
        """Whether all ranks were ready when they cast their votes; waits for those that have not. Host wait."""
        side, phase = self._number % 2, "rebalance"
        start, pause, limit = time.monotonic(), 50e-6, self._group.config.timeout_secs
        with self._group.waiting(phase, self._number):
            while True:
                total = self._ask("add", f"votes/{side}", 0)
                new = total - self._counted[side]
                if new & (1 << _FIELD) - 1 == self._group.num_ranks:
                    break
                self._group.check()
                if time.monotonic() - start > limit:
                    missing, reason = self._group.find_missing(phase, self._number)
                    raise self._group.blame(missing, phase, self._number, reason)
                time.sleep(pause)
                pause = min(1.5 * pause, 5e-3)
        self._counted[side] = total
        self._number += 1
        return bool(new >> _FIELD == self._group.num_ranks)

    def publish(self, text: bytes) -> None:
        """Leave a text for all ranks before a vote. Local, one exchange with the store."""
        self._ask("set", "text", text)

    def text(self) -> bytes:
        """The text that a rank has left before the last vote. Local, one exchange with the store."""
        return bytes(self._ask("get", "text"))

    def _ask(self, verb: str, *arguments: Any) -> Any:
        self._group.check()
        with self._group.explained():
            return getattr(self._store, verb)(*arguments)
