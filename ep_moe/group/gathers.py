"""All-gathers of bytes through the store that the ranks of a group share: no device and no process group takes part."""

import time
from typing import Any

_FIRST_PAUSE_SECS, _LAST_PAUSE_SECS = 50e-6, 10e-3  # between two looks at the store


class StoreGathers:
    """Gathers of one group, numbered by their calls.

    Args:
        store: a connection of this rank, under keys that only these gathers use.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._number = store, 0

    def gather(self, group: Any, data: bytes, phase: str, round: int) -> list[bytes]:  # noqa: A002
        """Every rank's bytes, in rank order.

        Args:
            group: the `EPGroup`, of which nothing is kept: it has this object. phase, round: as of `EPGroup.wait`.
        Errors: PeerLostError if a rank is lost, or does not come within the group's timeout. Collective, host wait.
        """
        number = self._number
        self._number += 1
        keys = [f"{number}/{rank}" for rank in range(group.num_ranks)]
        start, pause = time.monotonic(), _FIRST_PAUSE_SECS
        with group.explained(), group.waiting(phase, round):
            group.check()
            self._store.set(keys[group.rank], data)
            while not self._store.check(keys):
                group.check()
                if time.monotonic() - start > group.config.timeout_secs:
                    ranks, reason = group.find_missing(phase, round)
                    raise group.blame(ranks, phase, round, reason)
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE_SECS)
            found = self._store.multi_get(keys)
            if number:  # all ranks have read those of the gather before, since they have come to this one
                self._store.delete_key(f"{number - 1}/{group.rank}")
        return found
