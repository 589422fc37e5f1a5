"""A group of ranks: who they are, on which device, and which of them is to blame when a wait does not end.

R ranks. A thread of each rank beats into a store and reads the beats of the others. A backend that loses a peer says at
best that a connection broke, and at worst nothing; the beats say who is gone, who stands still and who never arrived.
The first rank that knows writes it into the store and all others take it over: survivors never blame each other.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig, LaunchEnv

# JSON [[world rank, reason], ...] in order of death, written by whoever started the ranks and sees them die
DEATHS_KEY = "ep_moe/deaths"
DEFAULT_CONFIG = GroupConfig()
JOIN_SECS = 60.0  # ranks start at different speeds: joining gets at least this long, however short the timeout
STORE_SECS = 3.0  # how long the main thread waits for one turn of the watch thread
SLICE_SECS = 0.25  # longest blocking wait between two looks at the group's state
SPIN_COUNT = 50  # polls of the device before the first sleep: a round on one node ends within them
REASON_CHARS = 2000
POINT_TO_POINT = (12, 13, 14)  # c10d OpType SEND, RECV, RECVANYSOURCE
STILL_THERE = ("stopped answering", "did not arrive")  # reasons of ranks whose processes may not have ended
BROKEN_PEER = ("connection", "peer", "broken pipe", "socket", "nccl")

_log = logging.getLogger(__name__)


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


class EPGroup:
    """The ranks that hold the experts of one model together; a context manager.

    Made by `from_env`, `connect`, `single` or `from_process_group`. All calls that are collective are made by every
    rank in the same order, as SPMD programs do: who is behind is told by comparing rounds.

    Attributes:
        rank, num_ranks: within the group.
        local_rank, local_num_ranks, node: within this machine, and its index.
        device: where this rank's tensors live.
        backend: "nccl" or "gloo".
        process_group: for torch.distributed; None in a group made by `single`.
        config: the deadlines.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        local_rank: int,
        local_num_ranks: int,
        node: int,
        device: torch.device,
        config: GroupConfig,
        backend: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        watch: "_Watch | None" = None,
        owns_world: bool = False,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.local_rank = local_rank
        self.local_num_ranks = local_num_ranks
        self.node = node
        self.device = device
        self.backend = backend or _backend_of(device)
        self.config = config
        self.process_group = process_group
        self._watch = watch
        self._owns_world = owns_world
        self._destroyed = False
        self._rounds: dict[str, int] = {}
        self._timeout = datetime.timedelta(seconds=config.timeout_secs)
        self._slice = datetime.timedelta(seconds=min(SLICE_SECS, config.heartbeat_secs))
        if watch is not None and process_group is not None:
            watch.serve(process_group, abort_on_failure=self.backend == "nccl")

    @classmethod
    def from_env(
        cls, config: GroupConfig = DEFAULT_CONFIG, device: torch.device | str | None = None, *, attempt: int = 0
    ) -> "EPGroup":
        """The group that the environment describes (`LaunchEnv`); a single rank where RANK is not set.

        Args and errors: as `connect`. Collective.
        """
        env = LaunchEnv.from_environ()
        return cls.single(device, config) if env is None else cls.connect(env, config, device, attempt=attempt)

    @classmethod
    def single(cls, device: torch.device | str | None = None, config: GroupConfig = DEFAULT_CONFIG) -> "EPGroup":
        """A group of one rank: no process group, no store, no thread. Local."""
        return cls(
            rank=0,
            num_ranks=1,
            local_rank=0,
            local_num_ranks=1,
            node=0,
            device=_pick_device(device, 0, 1),
            config=config,
        )

    @classmethod
    def connect(
        cls,
        env: LaunchEnv,
        config: GroupConfig = DEFAULT_CONFIG,
        device: torch.device | str | None = None,
        *,
        attempt: int = 0,
    ) -> "EPGroup":
        """Meet the ranks of `env` at its store and make torch's default process group.

        Where `env.store_is_hosted` is False (a bare RANK environment, as srun and mpirun give it) rank 0 serves the
        store. That is the weaker case: if rank 0 dies its store dies too, so that the others know that rank 0 is lost,
        but no longer agree on anything else.

        On CUDA the environment should have TORCH_NCCL_ASYNC_ERROR_HANDLING=0, as `run_rank` sets it: torch's own
        watchdog may otherwise kill this process before it can name the lost rank.

        Args:
            device: cuda:local_rank where this machine has a GPU for each of its ranks, else the CPU; NCCL or gloo.
            attempt: counts restarts that share one store, so that an old failure is not read again.
        Errors: PeerLostError names the ranks that did not come within max(timeout_secs, 60 s); RuntimeError where the
        store cannot be reached or the machine lacks the device. Collective.
        """
        place = _pick_device(device, env.local_rank, env.local_world_size)
        patience = max(config.timeout_secs, JOIN_SECS)
        hosts_store = not env.store_is_hosted and env.rank == 0
        store = dist.TCPStore(
            env.master_addr,
            env.master_port,
            is_master=hosts_store,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=patience),
        )
        watch = _Watch(
            dist.PrefixStore(f"ep_moe/world/{attempt}/watch", store),
            rank=env.rank,
            world_ranks=tuple(range(env.world_size)),
            config=config,
            local_rank=env.local_rank,
            store_rank=None if env.store_is_hosted else 0,
        )
        try:
            watch.meet(patience)
            try:
                _init_world(dist.PrefixStore(f"ep_moe/world/{attempt}/group", store), env, config, place)
            except RuntimeError as error:
                raise watch.explain(error, "connect", None) or error from error
        except BaseException:
            watch.close()
            raise
        return cls(
            rank=env.rank,
            num_ranks=env.world_size,
            local_rank=env.local_rank,
            local_num_ranks=env.local_world_size,
            node=sum(beat.local_rank == 0 for beat in watch.beats()[: env.rank + 1]) - 1,
            device=place,
            config=config,
            process_group=dist.group.WORLD,
            watch=watch,
            owns_world=True,
        )

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup,
        store: dist.Store,
        config: GroupConfig = DEFAULT_CONFIG,
        device: torch.device | str | None = None,
    ) -> "EPGroup":
        """A group over any subset of an existing torch.distributed world, which stays the caller's to destroy.

        Args:
            process_group: with a gloo or NCCL backend; ranks count within it.
            store: a TCPStore, prefixed or not, that all its ranks share and that outlives them. Groups, also several
                over the same ranks, keep apart in it by themselves.
            device: the current CUDA device where the process group speaks NCCL, else the CPU.
        Errors: ValueError for a store or a device that does not serve; PeerLostError as `connect`. Collective among
        the ranks of `process_group`.
        """
        backends = dist.get_backend_config(process_group)
        if device is None:
            device = f"cuda:{torch.cuda.current_device()}" if "nccl" in backends else "cpu"
        place = torch.device(device)
        backend = dict(pair.split(":") for pair in backends.split(",")).get(place.type)
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"device ({place}) has no gloo or nccl among the process group's backends ({backends})")
        shared: Any = store  # torch's stubs lack the next call
        if not shared.has_extended_api():
            raise ValueError(f"store ({type(store).__name__}) cannot read many keys at once; use a TCPStore")
        rank, num_ranks = process_group.rank(), process_group.size()
        world_ranks = tuple(dist.get_process_group_ranks(process_group))
        key = f"ep_moe/{process_group.group_name}/{'-'.join(map(str, world_ranks))}"
        nth = store.add(f"{key}/made/{rank}", 1)
        watch = _Watch(
            dist.PrefixStore(f"{key}/{nth}", store), rank=rank, world_ranks=world_ranks, config=config, local_rank=rank
        )
        try:
            watch.meet(max(config.timeout_secs, JOIN_SECS))
        except BaseException:
            watch.close()
            raise
        hosts = [beat.host for beat in watch.beats()]
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_num_ranks=hosts.count(hosts[rank]),
            node=list(dict.fromkeys(hosts)).index(hosts[rank]),
            device=place,
            config=config,
            backend=backend,
            process_group=process_group,
            watch=watch,
        )

    def wait(self, work: "dist.Work | torch.cuda.Event", *, phase: str, round: int) -> None:  # noqa: A002
        """Wait on the host until an operation that needs the other ranks is complete.

        Args:
            work: of a gloo or NCCL operation on this group, or an event recorded behind one.
            phase, round: what is waited for; a rank whose own waits have not come that far is the one that is stuck.
        Errors: PeerLostError names the ranks to blame within timeout_secs (plus about a second), at once where the
        group has failed before. Collective, host sync.
        """
        watch = self._watch
        if watch is None:
            work.synchronize() if isinstance(work, torch.cuda.Event) else work.wait()
            return
        before = watch.enter(phase, round, round)
        try:
            self.check()
            if isinstance(work, torch.cuda.Event):
                self._poll_device(work.query, phase, round)
            elif self.backend == "gloo":
                self._wait_on_host(work, phase, round)
            else:
                self._poll_device(work.is_completed, phase, round)
                work.wait()  # orders the current stream behind the operation and raises what NCCL found
        except PeerLostError:
            raise
        except RuntimeError as error:
            lost = watch.explain(error, phase, round)
            if lost is None:
                raise
            raise lost from error
        finally:
            watch.resume(before)

    def _wait_on_host(self, work: Any, phase: str, round: int) -> None:  # noqa: A002
        deadline = time.monotonic() + self.config.timeout_secs
        # cutting a wait for a send or a receive into slices would break its connection at the first of them
        whole = work._get_op_type() in POINT_TO_POINT
        while True:
            try:
                work.wait(self._timeout if whole else self._slice)
                return
            except RuntimeError:
                if whole:
                    raise
                if work.is_completed():
                    work.wait()  # either it came in just after the slice, or this raises what went wrong
                    return
            self.check()
            if time.monotonic() > deadline:
                raise self._blame(phase, round)

    def _poll_device(self, done: Callable[[], bool], phase: str, round: int | None) -> None:  # noqa: A002
        deadline = time.monotonic() + self.config.timeout_secs
        polls, pause = 0, 20e-6
        while not done():
            polls += 1
            if polls < SPIN_COUNT:
                continue
            self.check()
            if round is not None and time.monotonic() > deadline:
                raise self._blame(phase, round)
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
        self.check()  # an aborted communicator completes its operations too, with garbage in the buffers

    def _blame(self, phase: str, round: int) -> PeerLostError:  # noqa: A002
        assert self._watch is not None
        return self._watch.blame(phase, round, round)

    @contextlib.contextmanager
    def guard(self, phase: str, round: int | None = None) -> Iterator[None]:  # noqa: A002
        """Name the lost rank when a collective inside breaks that is not ours, such as those of transformers' generate.

        On gloo such a collective ends by the process group's own timeout. On NCCL, where it would hang, the group is
        aborted in the background, and the end of the block waits for the stream. An error that no peer caused passes
        unchanged.

        Args:
            phase, round: as in `wait`; a round that is not given is counted.
        Errors: PeerLostError instead of the RuntimeError that a lost rank caused. Host sync on CUDA.
        """
        if self._watch is None:
            yield
            return
        before = self._watch.enter(phase, round, self._next_round(phase) if round is None else round)
        try:
            self.check()
            yield
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self.device))
                self._poll_device(event.query, phase, None)
        except PeerLostError:
            raise
        except Exception as error:
            lost = self.explain(error)
            if lost is error:
                raise
            raise lost from error
        finally:
            self._watch.resume(before)

    def explain(self, error: Exception) -> Exception:
        """The PeerLostError behind an error that a lost rank caused; the error itself where none did.

        Takes a few heartbeats for an error that speaks of a connection or a timeout, no time for others. Local.
        """
        if self._watch is None or isinstance(error, PeerLostError):
            return error
        # after an abort the buffers hold garbage, which any kind of error may come from
        if not isinstance(error, RuntimeError) and not (self.backend == "nccl" and self._watch.lost()):
            return error
        return self._watch.explain(error, *self._watch.where()) or error

    def check(self) -> None:
        """Raise the PeerLostError of a group that has failed. Local, no host sync."""
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure.copy()

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails by its own error, so that theirs name it. Local."""
        in_order = isinstance(error, SystemExit) and not error.code
        if self._watch is None or isinstance(error, PeerLostError) or in_order:
            return
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._watch.publish((self.rank,), *self._watch.where(), f"failed: {what}")

    def barrier(self) -> None:
        """Wait until every rank is here. Errors: PeerLostError. Collective, host sync."""
        self._all_reduce(torch.zeros(1, dtype=torch.int32, device=self.device), "barrier")

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of `device` over the ranks in place; return it. Errors: PeerLostError. Collective, host sync."""
        return self._all_reduce(tensor, "all_reduce_sum")

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order. Errors: PeerLostError. Collective, host sync."""
        if self.process_group is None:
            return [obj]
        data = bytearray(pickle.dumps(obj))
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        sizes = self._all_gather(size).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8).to(self.device)
        rows = self._all_gather(padded).cpu()
        return [pickle.loads(row[:num].numpy().tobytes()) for row, num in zip(rows, sizes, strict=True)]

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        phase = "all_gather_object"
        round_ = self._next_round(phase)
        with self.guard(phase, round_):  # a connection that is broken already fails the call, not the wait
            self.wait(dist.all_gather(rows, tensor, group=self.process_group, async_op=True), phase=phase, round=round_)
        return torch.stack(rows)

    def _all_reduce(self, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        if self.process_group is None:
            return tensor
        round_ = self._next_round(phase)
        with self.guard(phase, round_):
            self.wait(dist.all_reduce(tensor, group=self.process_group, async_op=True), phase=phase, round=round_)
        return tensor

    def _next_round(self, phase: str) -> int:
        self._rounds[phase] = self._rounds.get(phase, -1) + 1
        return self._rounds[phase]

    def destroy(self) -> None:
        """Leave the group, and end the world that `connect` made; calling it twice is fine.

        Local, but for rank 0 where it serves the store: it stays until the others have left, at most timeout_secs.
        """
        if self._destroyed:
            return
        self._destroyed = True
        if self._watch is None:
            return
        self._watch.leave()
        if self._owns_world and not self._watch.lost():
            dist.destroy_process_group()  # watched, for a rank may be lost in the shutdown too
        self._watch.close()
        if self._owns_world and dist.is_initialized():
            self._drop_world()
        self.process_group = None

    def _drop_world(self) -> None:
        """End a world that has lost a rank, without waiting for that rank."""
        if self.backend == "nccl":
            dist.distributed_c10d._abort_process_group()
            return
        # who lets go of the last reference waits for gloo's threads, and these for the lost rank until the timeout
        holder = [self.process_group]
        self.process_group = None
        dist.destroy_process_group()
        threading.Thread(target=holder.clear, name="ep_moe-release", daemon=True).start()

    def __enter__(self) -> "EPGroup":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.report_failure(error)
        self.destroy()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Beat:
    """What a rank says of itself."""

    count: int
    host: str
    local_rank: int
    left: bool
    progress: dict[str, int]  # phase -> last round that it waited in
    place: str  # where it waits or last waited, in words
    sequence: int  # collectives that it has enqueued on the process group

    def has_reached(self, phase: str, count: int) -> bool:
        return self.progress.get(phase, -1) >= count


class _Peer:
    """What is known of one rank. Only time in which we looked counts as silence, so that our own stop is not theirs."""

    __slots__ = ("beat", "raw", "sequence_secs", "silent_secs")

    def __init__(self) -> None:
        self.raw = b""
        self.beat: _Beat | None = None
        self.silent_secs = 0.0
        self.sequence_secs = 0.0

    def update(self, raw: bytes, elapsed_secs: float) -> None:
        self.sequence_secs += elapsed_secs
        if raw == self.raw:
            self.silent_secs += elapsed_secs
            return
        beat = _Beat(**json.loads(raw)) if raw != b"{}" else None
        if beat is not None and (self.beat is None or beat.sequence != self.beat.sequence):
            self.sequence_secs = 0.0
        self.raw, self.beat, self.silent_secs = raw, beat, 0.0


class _Watch:
    """The beats of a group. Its thread is the only user of its store connection, for a connection serves one at a time.

    Other threads read `failure` and leave proposals; they wait for the thread, never for the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_ranks: tuple[int, ...],
        config: GroupConfig,
        local_rank: int,
        store_rank: int | None = None,
    ) -> None:
        self.failure: PeerLostError | None = None
        self._place: tuple[str, int | None] = ("", None)
        self._rank = rank
        self._world_ranks = world_ranks
        self._config = config
        self._local_rank = local_rank
        self._store_rank = store_rank
        self._host = socket.gethostname()
        self._store = store.clone()
        self._base = getattr(self._store, "_underlying_non_prefix_store", self._store)
        self._keys = [f"beat/{peer}" for peer in range(len(world_ranks))] + ["failure"]
        self._peers = [_Peer() for _ in world_ranks]
        self._progress: dict[str, int] = {}
        self._waits: tuple[str, int | None, int] | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._abort_thread: threading.Thread | None = None
        self._aborts = False
        self._proposal: PeerLostError | None = None
        self._turns = 0
        self._looked_at = time.monotonic()
        self._left = False
        self._stop = False
        self._wake = threading.Event()
        self._turned = threading.Condition()
        # reading a key that does not exist would block, so each rank makes all of them before its first turn
        for key in self._keys:
            self._store.compare_set(key, "", "{}")
        self._base.compare_set(DEATHS_KEY, "", "[]")
        self._thread = threading.Thread(target=self._run, name="ep_moe-watch", daemon=True)
        self._thread.start()

    def serve(self, process_group: dist.ProcessGroup, *, abort_on_failure: bool) -> None:
        """Read the process group's count of collectives; abort it when the group fails."""
        self._aborts = abort_on_failure
        self._process_group = process_group

    def lost(self) -> bool:
        """Whether the group has failed."""
        return self.failure is not None

    def beats(self) -> list[_Beat]:
        """The last beat of every rank; after `meet`."""
        return [peer.beat for peer in self._peers if peer.beat is not None]

    def where(self) -> tuple[str, int | None]:
        """The phase and round that this rank waits in, or has last waited in."""
        waits = self._waits
        return self._place if waits is None else waits[:2]

    def enter(self, phase: str, round: int | None, count: int) -> tuple[str, int | None, int] | None:  # noqa: A002
        """Publish that this rank has come to `count` of `phase` and waits there; returns what `resume` takes."""
        before = self._waits
        self._progress[phase] = count
        self._place = (phase, round)
        self._waits = (phase, round, count)
        return before

    def resume(self, before: tuple[str, int | None, int] | None) -> None:
        """End a wait."""
        self._waits = before

    def meet(self, patience_secs: float) -> None:
        """Wait for the first beat of every rank."""
        deadline = time.monotonic() + patience_secs
        self._place = ("connect", None)
        while self.failure is None:
            missing = tuple(rank for rank, peer in enumerate(self._peers) if peer.beat is None)
            if not missing:
                return
            if time.monotonic() > deadline:
                self.publish(missing, "connect", None, f"did not arrive: not within {patience_secs:g} s")
            time.sleep(0.01)
            self._wake.set()
        raise self.failure.copy()

    def blame(self, phase: str, round: int | None, count: int) -> PeerLostError:  # noqa: A002
        """Find out who is missing in a wait that has lasted for the whole timeout, and publish it."""
        if not self._take_turn():
            return self._fail(self._unanswered(phase, round))
        limit = self._config.timeout_secs
        ranks, reason = self._evidence(phase, count)
        if not ranks:
            reason = f"the operation did not end within {limit:g} s, although every rank lives and has arrived"
        return self.publish(ranks, phase, round, reason)

    def _evidence(self, phase: str, count: int) -> tuple[tuple[int, ...], str]:
        """Who is missing after a whole timeout: first those that are silent, then those that are behind."""
        limit = self._config.timeout_secs
        silent = self._silent(limit / 2)
        if silent:
            age = max(self._peers[rank].silent_secs for rank in silent)
            return silent, f"stopped answering: no heartbeat for {age:.1f} s (timeout {limit:g} s)"
        behind = self._behind(phase, count)
        places = " and ".join(self.beats()[rank].place or "no wait" for rank in behind)
        return behind, f"did not arrive: alive, last seen in {places} (timeout {limit:g} s)"

    def explain(self, error: Exception, phase: str, round: int | None) -> PeerLostError | None:  # noqa: A002
        """Who broke the connection that `error` complains of; None where all ranks are well."""
        text = str(error).lower()
        from_backend = isinstance(error, dist.DistError) or "gloo" in text
        if self.failure is None and not from_backend and not any(word in text for word in BROKEN_PEER):
            return None
        # a launcher's notice or a failing rank's own word comes at once; without either it takes some missed beats
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
            if from_backend and "timed out" in text:
                *_, count = self._waits or (phase, round, -1)
                ranks, reason = self._evidence(phase, count)
                if ranks:
                    return self.publish(ranks, phase, round, reason)
            time.sleep(0.05)
        left = tuple(rank for rank, beat in enumerate(self.beats()) if beat.left)
        if self.failure is None and left:
            return self.publish(left, phase, round, "has left")
        return None if self.failure is None else self.failure.copy()

    def _unanswered(self, phase: str, round: int | None) -> PeerLostError:  # noqa: A002
        age = time.monotonic() - self._looked_at
        return PeerLostError((), phase, round, f"the launcher's store has not answered for {age:.1f} s")

    def publish(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> PeerLostError:  # noqa: A002
        """Propose a failure; return the one that the group has agreed on, which may be another rank's proposal."""
        proposal = PeerLostError(ranks, phase, round, reason[:REASON_CHARS])
        if self.failure is None:
            self._proposal = proposal
            self._take_turn()
        return self._fail(proposal)

    def leave(self) -> None:
        """Say that this rank goes; the rank that serves the store lets the others go first, or read why it does."""
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

    def _take_turn(self) -> bool:
        """Let the thread write and read once from now on; False where the store does not answer."""
        with self._turned:
            wanted = self._turns + 2  # the turn under way may have read already
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
        # on a machine that starves everyone the lost rank has still been silent for longest
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
            with self._turned:
                self._turns += 1
                self._turned.notify_all()
            self._wake.wait(self._config.heartbeat_secs)
            self._wake.clear()

    def _turn(self) -> None:
        phase, round_ = self._place
        beat = _Beat(
            count=self._turns,
            host=self._host,
            local_rank=self._local_rank,
            left=self._left,
            progress=dict(self._progress),
            place=phase if round_ is None else f"{phase} of round {round_}",
            sequence=self._sequence(),
        )
        self._store.set(self._keys[self._rank], json.dumps(dataclasses.asdict(beat)))
        deaths = json.loads(self._base.get(DEATHS_KEY))
        *beats, failure = self._store.multi_get(self._keys)
        now = time.monotonic()
        elapsed = min(now - self._looked_at, 2 * self._config.heartbeat_secs)
        self._looked_at = now
        for peer, raw in zip(self._peers, beats, strict=True):
            peer.update(raw, elapsed)
        proposal = self._proposal
        if proposal is None and self.failure is None:
            proposal = self._judge(deaths)
        if failure == b"{}" and proposal is not None:
            failure = self._store.compare_set("failure", "{}", json.dumps(proposal.__reduce__()[1]))
        if failure != b"{}":
            ranks, phase, round_, reason = json.loads(failure)
            self._fail(PeerLostError(tuple(ranks), phase, round_, reason))

    def _judge(self, deaths: list[list[Any]]) -> PeerLostError | None:
        """What this turn shows without anybody's asking."""
        left = {rank for rank, peer in enumerate(self._peers) if peer.beat is not None and peer.beat.left}
        for world_rank, reason in deaths:
            if world_rank in self._world_ranks and self._world_ranks.index(world_rank) not in left:
                return PeerLostError((self._world_ranks.index(world_rank),), *self.where(), reason)
        waits = self._waits
        if waits is None:
            return None
        phase, round_, count = waits
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
        """Who has not enqueued a collective that ours, enqueued a timeout ago, still needs; NCCL has no deadline."""
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
                self.failure = failure
                if self._aborts:
                    self._abort_thread = threading.Thread(target=self._abort, name="ep_moe-abort", daemon=True)
                    self._abort_thread.start()
            return self.failure.copy()

    def _abort(self) -> None:
        process_group = self._process_group
        try:
            if process_group is not None:
                process_group.abort()  # ends NCCL kernels that wait for the lost rank
        except RuntimeError as error:
            _log.warning("the process group could not be aborted after a failure: %s", error)


def _pick_device(device: torch.device | str | None, local_rank: int, local_num_ranks: int) -> torch.device:
    if device is not None:
        picked = torch.device(device)
        if picked.type != "cuda":
            return picked
        index = local_rank if picked.index is None else picked.index
        if index >= torch.cuda.device_count():
            raise RuntimeError(f"device cuda:{index} was asked for, this machine has {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", index)
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_num_ranks:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _init_world(store: dist.Store, env: LaunchEnv, config: GroupConfig, device: torch.device) -> None:
    timeout_secs = config.timeout_secs
    if device.type == "cuda":
        torch.cuda.set_device(device)
        timeout_secs = 2 * timeout_secs + 30  # NCCL's is the last resort, behind ours and the time of an abort
    dist.init_process_group(
        _backend_of(device),
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=datetime.timedelta(seconds=timeout_secs),
        device_id=device if device.type == "cuda" else None,
    )
