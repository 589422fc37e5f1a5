"""Communication of a model's ranks outside of its layers: an error on one is an error on all."""

from ep_moe.group import EPGroup, PeerLostError


class Agreement:
    """A context in which an error on one rank is an error on all: ranks without one raise that of the first that has.

    Ranks leave the context together. The wait at its end has no timeout; it fails only if a rank dies or leaves.
    Ranks without an error raise ValueError for a ValueError, else RuntimeError.

    Args:
        group: the ranks. phase: names the work of the context in the error if a rank is lost.
    Collective, at its end.
    """

    def __init__(self, group: EPGroup, phase: str) -> None:
        self._group, self._phase = group, phase

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLostError) or not isinstance(error, Exception | None):
            return
        self._group.wait_for_all(self._phase)
        mine = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        for rank, found in enumerate(self._group.all_gather_object(mine)):
            if error is None and found is not None:
                raise (ValueError if found[0] else RuntimeError)(f"rank {rank} raised {found[1]}")
