"""The thread that writes heartbeats, reads those of the other ranks, and agrees with them on which rank is lost."""

import collections
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.group.errors import PeerLostError
from ep_moe.group.store import secret_key

# JSON [[seat, reason], ...] in order of death, by its `secret_key` of the launcher, which sees its processes end; an
# entry stays when a process takes the seat again
DEATHS_KEY = "ep_moe/deaths"
STORE_SECS = 3.0  # how long the main thread waits for one turn (write and read) of the watch thread
REASON_CHARS = 2000
BROKEN_PEER = ("connection", "peer", "broken pipe", "socket", "nccl")

_log = logging.getLogger(__name__)


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
    deaths: int  # of its seat that the launcher has seen before it joined

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


class Watch:
    """The heartbeats of a group. Only its thread uses its store connection, which serves one thread at a time.

    Other threads read `failure` and set the proposal; they wait for this thread, never for the store.

    Args:
        seats: how messages name the ranks; by default by their rank here.
        deaths: by rank, how many processes had died in its place before that of this group, () for none anywhere; None
            for as many as the store tells of now.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_ranks: tuple[int, ...],
        config: GroupConfig,
        local_rank: int,
        secret: str,
        store_rank: int | None = None,
        seats: tuple[int, ...] | None = None,
        deaths: tuple[int, ...] | None = (),
    ) -> None:
        self.failure: PeerLostError | None = None
        self._seats = tuple(range(len(world_ranks))) if seats is None else seats
        self._place: tuple[str, int | None] = ("", None)
        self._rank = rank
        self._world_ranks = world_ranks
        self._config = config
        self._local_rank = local_rank
        self._store_rank = store_rank
        self._host = socket.gethostname()
        self._secret, self._deaths_key = secret, secret_key(secret, DEATHS_KEY)
        self._store = store.clone()
        self._base = getattr(self._store, "_underlying_non_prefix_store", self._store)
        self._keys = [f"beat/{peer}" for peer in range(len(world_ranks))] + ["failure"]
        self._peers = [Peer() for _ in world_ranks]
        self._progress: dict[str, int] = {}
        self._waits: tuple[str, int | None, int] | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._others: list[dist.ProcessGroup] = []
        self._abort_thread: threading.Thread | None = None
        self._aborts = False
        self._proposal: PeerLostError | None = None
        self._deaths: dict[int, str] = {}  # rank -> how it died, for ranks that the launcher saw die before they left
        self._turns = 0
        self._polled_at = time.monotonic()
        self._left = False
        self._stop = False
        self._wake = threading.Event()
        self._turned = threading.Condition()
        # reading a key that does not exist would block, so each rank makes all of them before its first turn
        for key in self._keys:
            self._store.compare_set(key, "", "{}")
        self._base.compare_set(self._deaths_key, "", "[]")
        if deaths is None:
            self._deaths_before = collections.Counter(seat for seat, _ in json.loads(self._base.get(self._deaths_key)))
        else:
            self._deaths_before = collections.Counter(dict(zip(world_ranks, deaths, strict=bool(deaths))))
        self._thread = threading.Thread(target=self._run, name="ep_moe-watch", daemon=True)
        self._thread.start()

    def serve(self, process_group: dist.ProcessGroup, *, abort_on_failure: bool) -> None:
        """Watch this process group: publish its count of collectives; on request abort it when the group fails."""
        self._aborts = abort_on_failure
        self._process_group = process_group

    def abort_too(self, process_group: dist.ProcessGroup) -> None:
        """Abort this process group as well whenever the one of `serve` is aborted."""
        self._others.append(process_group)

    def lost(self) -> bool:
        """Whether the group has failed."""
        return self.failure is not None

    def connect_store(self, name: str) -> Any:
        """A new connection to the group's store, under keys of that name."""
        return dist.PrefixStore(secret_key(self._secret, name), self._store.clone())

    def gone_ranks(self) -> tuple[int, ...]:
        """All ranks that the launcher has seen die, and those of `failure`."""
        failed = () if self.failure is None else self.failure.ranks
        return tuple(sorted({*self._deaths, *failed}))

    def left_ranks(self) -> tuple[int, ...]:
        """Ranks that have left the group."""
        return tuple(rank for rank, peer in enumerate(self._peers) if peer.beat is not None and peer.beat.left)

    def beats(self) -> list[Beat]:
        """The last heartbeat of every rank; complete only after `meet`."""
        return [peer.beat for peer in self._peers if peer.beat is not None]

    def where(self) -> tuple[str, int | None]:
        """The phase and round that this rank waits in, or has last waited in."""
        waits = self._waits
        return self._place if waits is None else waits[:2]

    @contextlib.contextmanager
    def waiting(self, phase: str, round: int | None, count: int) -> Iterator[None]:  # noqa: A002
        """Publish that this rank has reached `count` of `phase` and waits in the block; then that around it, if any."""
        before = self._waits
        self._progress[phase] = count
        self._place, self._waits = (phase, round), (phase, round, count)
        try:
            yield
        finally:
            self._waits = before

    def all_have_reached(self, phase: str, count: int) -> bool:
        """Whether every rank's last heartbeat has reached `count` of `phase`; wakes the thread for its next turn."""
        self._wake.set()
        return all(beat.has_reached(phase, count) for beat in self.beats())

    def meet(self, timeout_secs: float) -> None:
        """Wait for the first heartbeat of every rank."""
        deadline = time.monotonic() + timeout_secs
        self._place = ("connect", None)
        while self.failure is None:
            missing = tuple(rank for rank, peer in enumerate(self._peers) if peer.beat is None)
            if not missing:
                return
            if time.monotonic() > deadline:
                self.publish(missing, "connect", None, f"did not arrive: not within {timeout_secs:g} s")
            time.sleep(0.01)
            self._wake.set()
        raise self.failure.copy()

    def connected(self) -> None:
        """Publish that this rank is connected to all others."""
        with self.waiting("connect", None, 1):
            self._wake.set()

    def let_connect(self) -> None:
        """Wait until all ranks are connected, at most timeout_secs: none can connect to a rank that has left."""
        deadline = time.monotonic() + self._config.timeout_secs
        while not self.lost() and not self.all_have_reached("connect", 1) and time.monotonic() < deadline:
            time.sleep(0.01)

    def blame(self, phase: str, round: int | None, count: int) -> PeerLostError:  # noqa: A002
        """Find the ranks for which a wait has timed out, and publish them as lost."""
        if not self._take_turn():
            return self._fail(self._unanswered(phase, round))
        limit = self._config.timeout_secs
        ranks, reason = self.evidence(phase, count)
        if not ranks:
            reason = f"the operation did not end within {limit:g} s, although every rank lives and has arrived"
        return self.publish(ranks, phase, round, reason)

    def evidence(self, phase: str, count: int) -> tuple[tuple[int, ...], str]:
        """The ranks missing after a timeout, and the reason: those without heartbeats, else those that are behind."""
        limit = self._config.timeout_secs
        silent = self._silent(limit / 2)
        if silent:
            age = max(self._peers[rank].silent_secs for rank in silent)
            return silent, f"stopped answering: no heartbeat for {age:.1f} s (timeout {limit:g} s)"
        behind = self._behind(phase, count)
        places = " and ".join(self.beats()[rank].place or "no wait" for rank in behind)
        return behind, f"did not arrive: alive, last seen in {places} (timeout {limit:g} s)"

    def explain(self, error: Exception, phase: str, round: int | None) -> PeerLostError | None:  # noqa: A002
        """The lost rank that caused `error`, a connection error or timeout; None if no rank is lost."""
        text = str(error).lower()
        own_timeout = "timeout caused pair closure" in text  # how gloo ends an operation before our wait for it ends
        from_backend = isinstance(error, dist.DistError) or "gloo" in text or own_timeout
        if self.failure is None and not from_backend and not any(word in text for word in BROKEN_PEER):
            return None
        # reports of the launcher or of a failing rank arrive at once; without either, heartbeats have to be missed
        silence = min(self._config.timeout_secs, max(2.0, 6 * self._config.heartbeat_secs))
        deadline = time.monotonic() + silence + 4 * self._config.heartbeat_secs
        while self.failure is None and time.monotonic() < deadline:
            if not self._take_turn():
                if from_backend:
                    self._fail(self._unanswered(phase, round))
                break
            silent = self._silent(silence)
            if silent:
                age = max(self._peers[rank].silent_secs for rank in silent)
                return self.publish(silent, phase, round, f"stopped answering: no heartbeat for {age:.1f} s, {error}")
            if own_timeout or (from_backend and "timed out" in text):
                *_, count = self._waits or (phase, round, -1)
                ranks, reason = self.evidence(phase, count)
                if ranks:
                    return self.publish(ranks, phase, round, reason)
            time.sleep(0.05)
        left = tuple(rank for rank, beat in enumerate(self.beats()) if beat.left)
        if self.failure is None and left:
            return self.publish(left, phase, round, "has left")
        return None if self.failure is None else self.failure.copy()

    def _unanswered(self, phase: str, round: int | None) -> PeerLostError:  # noqa: A002
        age = time.monotonic() - self._polled_at
        return PeerLostError((), phase, round, f"the launcher's store has not answered for {age:.1f} s")

    def publish(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> PeerLostError:  # noqa: A002
        """Propose a failure; return the one that the group agrees on, which may be another rank's proposal."""
        proposal = PeerLostError(ranks, phase, round, reason[:REASON_CHARS])
        if self.failure is None:
            self._proposal = proposal
            self._take_turn()
        return self._fail(proposal)

    def leave(self) -> None:
        """Publish that this rank leaves; the rank that serves the store waits for the others, at most timeout_secs."""
        self._left = True
        deadline = time.monotonic() + self._config.timeout_secs
        while self._take_turn() and self._store_rank == self._rank and time.monotonic() < deadline:
            lost = () if self.failure is None else self.failure.ranks
            if all(beat.left or rank in lost for rank, beat in enumerate(self.beats())):
                return
            time.sleep(0.01)

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._wake.set()
        self._thread.join(STORE_SECS)
        if self._abort_thread is not None:
            self._abort_thread.join(STORE_SECS)
        self._process_group = None
        self._others.clear()
        if not self._thread.is_alive():
            self._store = self._base = None  # its connection: groups that have followed keep this object

    def _take_turn(self) -> bool:
        """Wait until the thread has written and read once more; False if the store does not answer."""
        with self._turned:
            wanted = self._turns + 2  # the current turn may have read already
            self._wake.set()
            deadline = time.monotonic() + STORE_SECS
            while self._turns < wanted and self._thread.is_alive() and time.monotonic() < deadline:
                self._turned.wait(0.05)
                self._wake.set()
            return self._turns >= wanted

    def _silent(self, secs: float) -> tuple[int, ...]:
        ages = {
            rank: peer.silent_secs
            for rank, peer in enumerate(self._peers)
            if rank != self._rank and peer.beat is not None and not peer.beat.left and peer.silent_secs > secs
        }
        # on an overloaded machine all ranks may be silent; the lost one has been silent for longest
        return tuple(rank for rank, age in ages.items() if age > 0.75 * max(ages.values()))

    def _behind(self, phase: str, count: int) -> tuple[int, ...]:
        beats = list(enumerate(self.beats()))
        behind = tuple(rank for rank, beat in beats if rank != self._rank and not beat.has_reached(phase, count))
        own = self._sequence()
        return behind or tuple(rank for rank, beat in beats if rank != self._rank and beat.sequence < own)

    def _sequence(self) -> int:
        process_group: Any = self._process_group
        return 0 if process_group is None else process_group._get_sequence_number_for_group()

    def _run(self) -> None:
        while not self._stop:
            try:
                self._turn()
            except RuntimeError as error:
                if self._store_rank is None:
                    lost = PeerLostError((), *self.where(), f"the launcher's store is gone: {error}")
                else:
                    lost = PeerLostError((self._store_rank,), *self.where(), f"is gone with its store: {error}")
                self._fail(self._proposal or lost)
                return
            except (ValueError, TypeError, LookupError) as error:
                self._fail(PeerLostError((), *self.where(), f"the launcher's store holds what no rank wrote: {error}"))
                return
            with self._turned:
                self._turns += 1
                self._turned.notify_all()
            self._wake.wait(self._config.heartbeat_secs)
            self._wake.clear()

    def _turn(self) -> None:
        phase, round_ = self._place
        beat = Beat(
            count=self._turns,
            host=self._host,
            local_rank=self._local_rank,
            left=self._left,
            progress=dict(self._progress),
            place=phase if round_ is None else f"{phase} of round {round_}",
            sequence=self._sequence(),
            deaths=self._deaths_before[self._world_ranks[self._rank]],
        )
        self._store.set(self._keys[self._rank], json.dumps(dataclasses.asdict(beat)))
        deaths = json.loads(self._base.get(self._deaths_key))
        *beats, failure = self._store.multi_get(self._keys)
        now = time.monotonic()
        elapsed = min(now - self._polled_at, 2 * self._config.heartbeat_secs)
        self._polled_at = now
        for peer, raw in zip(self._peers, beats, strict=True):
            peer.update(raw, elapsed)
        proposal = self._proposal
        if self.failure is None:  # a death that the launcher saw is certain, a rank's proposal is a guess
            proposal = self._judge_deaths(deaths) or proposal or self._judge()
        else:
            self._judge_deaths(deaths)
        if failure == b"{}" and proposal is not None:
            failure = self._store.compare_set("failure", "{}", json.dumps(proposal.__reduce__()[1][:4]))
        if failure != b"{}":
            ranks, phase, round_, reason = json.loads(failure)
            self._fail(PeerLostError(tuple(ranks), phase, round_, reason))

    def _judge_deaths(self, deaths: list[list[Any]]) -> PeerLostError | None:
        """Note the ranks that have died; return the failure that names the first."""
        ranks, seen, left = dict[int, str](), collections.Counter[int](), self.left_ranks()
        for world, how in deaths:
            seen[world] += 1
            if world in self._world_ranks:
                rank = self._world_ranks.index(world)
                beat = self._peers[rank].beat
                if seen[world] > (self._deaths_before[world] if beat is None else beat.deaths):
                    ranks.setdefault(rank, how)
        self._deaths = {rank: how for rank, how in ranks.items() if rank not in left}
        first = next(iter(self._deaths), None)
        return None if first is None else PeerLostError((first,), *self.where(), self._deaths[first])

    def _judge(self) -> PeerLostError | None:
        """The failure that this turn's heartbeats show of the current wait, before its timeout."""
        waits = self._waits
        if waits is None:
            return None
        phase, round_, count = waits
        left = self.left_ranks()
        gone = tuple(rank for rank in left if rank != self._rank and not self.beats()[rank].has_reached(phase, count))
        if gone:
            return PeerLostError(gone, phase, round_, "has left")
        limit = self._config.timeout_secs
        silent = self._silent(limit)
        if silent:
            reason = f"stopped answering: no heartbeat for {limit:.1f} s (timeout {limit:g} s)"
            return PeerLostError(silent, phase, round_, reason)
        return self._judge_sequence(phase, round_) if self._aborts else None

    def _judge_sequence(self, phase: str, round: int | None) -> PeerLostError | None:  # noqa: A002
        """Blame ranks that lack a collective which we enqueued more than timeout_secs ago; NCCL itself would hang."""
        limit = self._config.timeout_secs
        own = self._peers[self._rank]
        if own.beat is None or own.sequence_secs <= limit:
            return None
        behind = tuple(
            rank
            for rank, peer in enumerate(self._peers)
            if peer.beat is not None and peer.beat.sequence < own.beat.sequence and peer.sequence_secs > limit
        )
        text = f"did not arrive: it lives, but has not joined collective {own.beat.sequence} (timeout {limit:g} s)"
        return PeerLostError(behind, phase, round, text) if behind else None

    def _fail(self, failure: PeerLostError) -> PeerLostError:
        with self._turned:
            if self.failure is None:
                seats = tuple(self._seats[rank] for rank in failure.ranks)
                self.failure = PeerLostError(failure.ranks, failure.phase, failure.round, failure.reason, seats)
                if self._aborts:
                    self._abort_thread = threading.Thread(target=self._abort, name="ep_moe-abort", daemon=True)
                    self._abort_thread.start()
            return self.failure.copy()

    def _abort(self) -> None:
        for process_group in (self._process_group, *self._others):
            try:
                if process_group is not None:
                    process_group.abort()  # ends NCCL kernels that wait for the lost rank
            except RuntimeError as error:
                _log.warning("the process group could not be aborted after a failure: %s", error)
