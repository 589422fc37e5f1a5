"""How the ranks of a transport agree, through the group's store, on the ranks that stay active after one is lost.

Agreements are numbered, the same on every rank. A rank's vote holds the ranks that it suspects, and the last epoch that
each of its slots has begun to send. A rank that votes is alive, even if others suspect it. A rank that does not vote is
lost: a suspect after some heartbeats, another rank after the whole timeout. The first rank to see all the votes that it
waits for writes the decision to the store, and all ranks adopt it; inactive ranks alone decide nothing.

Letters: R ranks, S slots.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ep_moe.group import EPGroup, PeerLostError

GRACE_HEARTBEATS = 4  # in which a suspected rank must vote
PAUSE_SECS = 0.01  # between two polls of the store

Vote = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The outcome of an agreement, the same on all ranks."""

    active: tuple[bool, ...]  # [R]
    resume: tuple[int, ...]  # [S] int32: rounds of an earlier epoch count as failed on every rank
    as_wanted: bool  # whether `active` is `wanted` without lost ranks
    error: str  # set if ranks want different active ranks, else ""


def later_epoch(epochs: Iterable[int]) -> int:
    """The epoch after the latest of int32 epochs that are less than 2^31 apart; never 0. (-1, 5, 3) gives 6."""
    last, *others = epochs
    for epoch in others:
        last = epoch if 0 < (epoch - last) % 2**32 < 2**31 else last
    return 1 if last == -1 else (last + 1 + 2**31) % 2**32 - 2**31


def earlier_epoch(epoch: int) -> int:
    """The epoch before an int32 epoch; never 0."""
    return -1 if epoch == 1 else (epoch - 1 + 2**31) % 2**32 - 2**31


class Members:
    """The ranks that take part in a transport's rounds.

    Attributes:
        active: [R], by rank, whether it takes part.
    Collective: every rank creates one, in the same order. Used by one thread, except for `called`.
    """

    def __init__(self, group: EPGroup) -> None:
        self.active = (True,) * group.num_ranks
        self._group, self._rank, self._number = group, group.rank, 0
        self._store = group.connect_store()
        self._watching = self._store if group.num_ranks == 1 else self._store.clone()

    def called(self) -> bool:
        """Whether another rank waits for this one's vote because a rank is lost. Safe in one other thread."""
        return self._watching.check([f"called/{self._number}"])

    def decide(
        self, suspects: Sequence[int], epochs: Sequence[int], wanted: tuple[bool, ...] | None = None
    ) -> Decision:
        """Vote, wait for the decision and set `active` to it. The active ranks then call `meet`.

        Args:
            suspects: ranks that did not answer.
            epochs: [S], the last epoch that each slot of this rank has begun to send.
            wanted: [R], the ranks to be active from now on, the same on all ranks that are or become active. If another
                rank votes because a rank is lost, that is decided first.
        Errors: PeerLostError if the store is gone; on an inactive rank also if no active one votes within the timeout.
        Collective, host sync with the others.
        """
        vote = {"suspects": list(suspects), "epochs": list(epochs), "wanted": wanted}
        try:
            decision = self._decide(vote)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise self._store_is_gone(error) from error
        self._number += 1
        self.active = decision.active
        return decision

    def _store_is_gone(self, error: RuntimeError) -> PeerLostError:
        return PeerLostError((), "agreement", self._number, f"the launcher's store is gone: {error}")

    def _decide(self, vote: Vote) -> Decision:
        while not self.active[self._rank] and self._store.check([f"decision/{self._number}"]):
            self.active = self._read_decision().active  # decided while this rank was inactive
            self._number += 1
        number, start = self._number, time.monotonic()
        self._store.set(f"vote/{number}/{self._rank}", json.dumps(vote))
        if vote["wanted"] is None:
            self._store.set(f"called/{number}", "1")
        key = f"decision/{number}"
        while not self._store.check([key]):
            votes, waited_secs = self._read_votes(number), time.monotonic() - start
            silent = {rank for rank, active in enumerate(self.active) if active} - self._absent()
            silent = silent if silent.isdisjoint(votes) else set()
            if silent and waited_secs > self._group.config.timeout_secs:
                self._store.delete_key(f"vote/{number}/{self._rank}")
                reason = f"did not arrive: rank {self._rank} is inactive and decides nothing alone"
                raise PeerLostError(tuple(sorted(silent)), "agreement", None, reason)
            if not silent and self._is_complete(votes, waited_secs):
                self._store.compare_set(key, "", json.dumps(dataclasses.asdict(self._judge(votes))))
            else:
                time.sleep(PAUSE_SECS)
        return self._read_decision()

    def _read_decision(self) -> Decision:
        read = json.loads(self._store.get(f"decision/{self._number}"))
        return Decision(
            active=tuple(read["active"]),
            resume=tuple(read["resume"]),
            as_wanted=read["as_wanted"],
            error=read["error"],
        )

    def _read_votes(self, number: int) -> dict[int, Vote]:
        keys = {rank: f"vote/{number}/{rank}" for rank in range(len(self.active))}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _is_complete(self, votes: dict[int, Vote], waited_secs: float) -> bool:
        """Whether no other vote needs to be waited for."""
        config = self._group.config
        suspected = {rank for vote in votes.values() for rank in vote["suspects"]}
        for rank in self._expected(votes) - set(votes) - self._absent():
            limit = GRACE_HEARTBEATS * config.heartbeat_secs if rank in suspected else config.timeout_secs
            if waited_secs <= limit:
                return False
        return True

    def _expected(self, votes: dict[int, Vote]) -> set[int]:
        """The ranks that are active, and those that votes want to be."""
        masks = [self.active, *(vote["wanted"] for vote in votes.values() if vote["wanted"] is not None)]
        return {rank for mask in masks for rank, wanted in enumerate(mask) if wanted}

    def _absent(self) -> set[int]:
        """The ranks that cannot vote."""
        left = [rank for rank in range(len(self.active)) if self._store.check([f"left/{rank}"])]
        return {*self._group.gone_ranks, *self._group.left_ranks, *left}

    def _judge(self, votes: dict[int, Vote]) -> Decision:
        """Decide by the votes: active ranks that voted stay active; or the ranks that all votes want, if they voted."""
        wishes = {tuple(vote["wanted"]) for vote in votes.values() if vote["wanted"] is not None}
        wish_counts = all(vote["wanted"] is not None for vote in votes.values())
        active, error = self.active, ""
        if wish_counts and len(wishes) == 1:
            (active,) = wishes
        elif wish_counts:
            asked = {rank: vote["wanted"] for rank, vote in sorted(votes.items())}
            error = f"ranks ask for different active ranks: {asked}"
        absent = self._absent()
        going_on = tuple(wanted and rank in votes and rank not in absent for rank, wanted in enumerate(active))
        counted = [vote for rank, vote in votes.items() if self.active[rank]] or list(votes.values())
        return Decision(
            active=going_on,
            resume=tuple(later_epoch(slot) for slot in zip(*(vote["epochs"] for vote in counted), strict=True)),
            as_wanted=wish_counts and not error,
            error=error,
        )

    def meet(self) -> tuple[int, ...]:
        """Wait until all active ranks have arrived; return those that have not by the timeout. Collective."""
        number, start = self._number, time.monotonic()
        try:
            self._store.set(f"met/{number}/{self._rank}", "1")
            while True:
                active = [rank for rank, is_active in enumerate(self.active) if is_active]
                missing = [rank for rank in active if not self._store.check([f"met/{number}/{rank}"])]
                if not missing:
                    return ()
                absent = self._absent()
                if absent.issuperset(missing) or time.monotonic() - start > self._group.config.timeout_secs:
                    return tuple(missing)
                time.sleep(PAUSE_SECS)
        except RuntimeError as error:
            raise self._store_is_gone(error) from error

    def leave(self) -> None:
        """Tell the other ranks that this one will not vote again. Local."""
        self._store.set(f"left/{self._rank}", "1")
