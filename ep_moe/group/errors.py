"""The error that names a lost rank."""

from typing import Any

STILL_THERE = ("stopped answering", "did not arrive")  # how a reason begins if the process may still run


class PeerLostError(RuntimeError):
    """One or more ranks of the group have died, stopped or hang; the group cannot be used any more.

    Args:
        ranks: group ranks to blame; empty if the store or the network is to blame.
        phase: operation that the reporting rank was waiting in, or had last waited in; may be empty.
        round: of that phase, None if it is not counted.
        reason: the message without its subject, such as "stopped answering: no heartbeat for 5.0 s (timeout 5 s)".
        seats: the same ranks as the launcher numbers them, which the message names; by default `ranks`.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        phase: str,
        round: int | None,  # noqa: A002
        reason: str,
        seats: tuple[int, ...] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.seats = self.ranks if seats is None else tuple(seats)
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
        names = " and ".join(f"rank {rank}" for rank in self.seats)
        super().__init__(f"{names} {text}".strip())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, self.phase, self.round, self.reason, self.seats)

    def copy(self) -> "PeerLostError":
        """The same error without traceback and context, to be raised again. Local."""
        return PeerLostError(self.ranks, self.phase, self.round, self.reason, self.seats)
