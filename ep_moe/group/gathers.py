"""All-gathers of bytes through the store that the ranks of a group share: no device and no process group takes part."""

from typing import Any

_MOST_BYTES = 1 << 20  # of a value: torch's store takes no more than 8 MiB


class StoreGathers:
    """Gathers of one group, numbered by their calls.

    Args:
        store: a connection of this rank, under keys that only these gathers use.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._number = store, 0
        self._written: list[str] = []  # keys of this rank of the gather before

    def gather(self, group: Any, data: bytes, phase: str, round: int) -> list[bytes]:  # noqa: A002
        """Every rank's bytes, in rank order.

        Args:
            group: the `EPGroup`, of which nothing is kept: it has this object. phase, round: as of `EPGroup.wait`.
        Errors: PeerLostError if a rank is lost, or does not come within the group's timeout. Collective, host wait.
        """
        number = self._number
        self._number += 1
        keys = [f"{number}/{rank}" for rank in range(group.num_ranks)]
        own = keys[group.rank]
        pieces = [data[first : first + _MOST_BYTES] for first in range(0, len(data), _MOST_BYTES)]
        written = [f"{own}/{place}" for place in range(len(pieces))]
        with group.explained():
            group.check()
            for key, piece in zip(written, pieces, strict=True):
                self._store.set(key, piece)
            self._store.set(own, str(len(pieces)))  # last: then they are all there
            group.wait_until(lambda: self._store.check(keys), phase, round)
            counts = [int(count) for count in self._store.multi_get(keys)]
            found = [
                b"".join(self._store.get(f"{key}/{place}") for place in range(count))
                for key, count in zip(keys, counts, strict=True)
            ]
            for key in self._written:  # which all ranks have read, since they have come to this gather
                self._store.delete_key(key)
            self._written = [*written, own]
        return found
