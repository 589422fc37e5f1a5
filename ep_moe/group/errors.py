"""The error that names a lost rank."""

from typing import Any

STILL_THERE = ("stopped answering", "did not arrive")  # reasons of ranks whose processes may not have ended


class PeerLostError(RuntimeError):
    """One or more ranks of the group are gone, stopped or stuck; the group is of no more use.

    Args:
        ranks: group ranks to blame; empty where no rank is, but the store or the network.
        phase: what the rank that noticed was waiting in, or had last waited in; may be empty.
        round: of that phase, None where it is not counted.
        reason: the predicate of the message, "stopped answering: no heartbeat for 5.0 s (timeout 5 s)".
    """

    def __init__(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> None:  # noqa: A002
        self.ranks = tuple(ranks)
        self.phase = phase
        self.round = round
        self.reason = reason
        where = phase if round is None else f"{phase} of round {round}"
        verb, colon, detail = reason.partition(": ")
        if verb in STILL_THERE:
            text = f"{verb} in {where}{colon}{detail}"
        elif where:
            text = f"{reason} ({'after' if verb == 'failed' else 'noticed in'} {where})"
        else:
            text = reason
        names = " and ".join(f"rank {rank}" for rank in self.ranks)
        super().__init__(f"{names} {text}".strip())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.phase, self.round, self.reason)

    def copy(self) -> "PeerLostError":
        """The same error without traceback and context, to be raised once more. Local."""
        return PeerLostError(self.ranks, self.phase, self.round, self.reason)
