"""What ranks agree on between two forward passes, through the store of their group: no device and no collective waits.

Letters: R ranks.
"""

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
        side = self._number % 2

        def cast() -> int:
            return int(self._ask("add", f"votes/{side}", 0)) - self._counted[side]

        self._group.wait_until(
            lambda: cast() & (1 << _FIELD) - 1 == self._group.num_ranks, phase="rebalance", round=self._number
        )
        new = cast()
        self._counted[side] += new
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
