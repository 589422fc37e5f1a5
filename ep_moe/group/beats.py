"""The heartbeats of a group's ranks, and how long each rank has been silent."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The heartbeat of a rank."""

    count: int
    host: str
    local_rank: int
    left: bool
    progress: dict[str, int]  # phase -> last round that it waited in
    place: str  # phase and round in which it waits or last waited, for messages
    sequence: int  # collectives that it has enqueued on the process group

    def has_reached(self, phase: str, count: int) -> bool:
        """Whether the rank has waited in round `count` of `phase`, or in a later one."""
        return self.progress.get(phase, -1) >= count


class Peer:
    """The last heartbeat of one rank. Only time in which we polled counts as its silence, so that a stall of ours does
    not."""

    __slots__ = ("beat", "raw", "sequence_secs", "silent_secs")

    def __init__(self) -> None:
        self.raw = b""
        self.beat: Beat | None = None
        self.silent_secs = 0.0
        self.sequence_secs = 0.0

    def update(self, raw: bytes, elapsed_secs: float) -> None:
        """Take the heartbeat that the store holds now, `elapsed_secs` after the last poll; `{}` is none yet."""
        self.sequence_secs += elapsed_secs
        if raw == self.raw:
            self.silent_secs += elapsed_secs
            return
        beat = Beat(**json.loads(raw)) if raw != b"{}" else None
        if beat is not None and (self.beat is None or beat.sequence != self.beat.sequence):
            self.sequence_secs = 0.0
        self.raw, self.beat, self.silent_secs = raw, beat, 0.0
