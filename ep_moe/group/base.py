"""`EPGroup`: the ranks of a group, their devices, its collectives and waits."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.environment import LaunchEnv
from ep_moe.group.errors import PeerLostError
from ep_moe.group.gathers import StoreGathers
from ep_moe.group.joining import (
    Epoch,
    RankPlace,
    backend_of,
    connect_nccl,
    drop_world,
    join_subset,
    join_world,
    pick_device,
)
from ep_moe.group.waiting import Waits
from ep_moe.group.watch import Watch
from ep_moe.group.wire import decode, encode

DEFAULT_CONFIG = GroupConfig()
FIRST_PAUSE_SECS, LAST_PAUSE_SECS = 50e-6, 5e-3  # between two looks at the store


class EPGroup:
    """The ranks that hold the experts of one model together; a context manager.

    Made by `from_env`, `connect`, `single` or `from_process_group`. Every rank makes the collective calls in the same
    order, as SPMD programs do: comparing round numbers then shows which rank is behind.

    Attributes:
        rank, num_ranks: within the group.
        local_rank, local_num_ranks: within this machine. node: index of this machine.
        seat, seats: this rank and all ranks as the launch numbered them; errors name ranks so. epoch: how the group
            follows from the launch's, whose epoch is 0 (`regroup`).
        standby: whether this rank is alone until it joins others by `regroup`.
        device: of this rank's tensors.
        backend: "nccl" or "gloo".
        process_group: for torch.distributed; None in a group made by `single`.
        alone: whether no other process has part in it: of `single`, `rehearsal`, and on standby.
        config: the deadlines.
        watch: the heartbeats of its ranks; None for a group made by `single`.
        parts: of it, by the ranks of all parts of a split (`ep_moe.group.parts`).
        destroyed: whether `destroy` was called: every call that needs the other ranks raises RuntimeError from then on.
    """

    def __init__(
        self,
        place: RankPlace,
        *,
        device: torch.device,
        config: GroupConfig,
        backend: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
        epoch: Epoch | None = None,
        standby: bool = False,
    ) -> None:
        self.rank = place.rank
        self.num_ranks = place.num_ranks
        self.seat = place.rank if epoch is None else epoch.env.rank
        self.seats = tuple(range(place.num_ranks)) if epoch is None else (self.seat,) if standby else epoch.seats
        self.epoch = 0 if epoch is None else epoch.number
        self.standby = standby
        self.local_rank = place.local_rank
        self.local_num_ranks = place.local_num_ranks
        self.node = place.node
        self.device = device
        self.backend = backend or backend_of(device)
        self.config = config
        self.process_group, self.alone = process_group, process_group is None
        self.watch = watch
        self.parts: dict[tuple[tuple[int, ...], ...], EPGroup] = {}
        self._gathers: StoreGathers | None = None
        self.destroyed = False
        self._stores = 0
        self._epoch = epoch  # of a group of a launch, which owns torch's default process group; the last one tried
        self._successor: EPGroup | None = None
        self._rounds: dict[str, int] = {}
        self._is_connected = self.alone or self.backend != "nccl"
        self._waits = None if watch is None else Waits(watch, backend=self.backend, device=device, config=config)

    @classmethod
    def from_env(cls, config: GroupConfig = DEFAULT_CONFIG, device: torch.device | str | None = None) -> "EPGroup":
        """The group that the environment describes (`LaunchEnv`); a single rank if RANK is not set.

        With EP_MOE_STANDBY=1 it is a group of this rank alone, which joins the ranks that are running already by
        `regroup`.

        Args and errors: as `connect`. Collective, but for a standby.
        """
        env = LaunchEnv.from_environ()
        if env is not None and env.standby:
            return cls.on_standby(env, config, device)
        return cls.single(device, config) if env is None else cls.connect(env, config, device)

    @classmethod
    def on_standby(
        cls, env: LaunchEnv, config: GroupConfig = DEFAULT_CONFIG, device: torch.device | str | None = None
    ) -> "EPGroup":
        """A group of this rank alone until `regroup`, for a process that takes a seat of a running launch. Local."""
        picked = pick_device(device, env.local_rank, env.local_world_size)
        if picked.type == "cuda":
            torch.cuda.set_device(picked)  # as of ranks that have joined others: its kernels are launched there
        return cls(RankPlace(), device=picked, config=config, epoch=Epoch.first(env), standby=True)

    @classmethod
    def single(cls, device: torch.device | str | None = None, config: GroupConfig = DEFAULT_CONFIG) -> "EPGroup":
        """A group of one rank: no process group, no store, no thread. Local."""
        return cls(RankPlace(), device=pick_device(device, 0, 1), config=config)

    def rehearsal(self, rank: int, num_ranks: int) -> "EPGroup":
        """A group without other processes, in which this one takes part as `rank` of `num_ranks`, on this one's device.

        For what is to be compiled, loaded and allocated before a rank joins such a group. Its collectives give for each
        other rank what this one has sent; transport "peer" sends them nothing and does not wait for them. Local.
        """
        place = RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, local_num_ranks=num_ranks)
        return EPGroup(place, device=self.device, config=self.config, backend=self.backend)

    @classmethod
    def connect(
        cls, env: LaunchEnv, config: GroupConfig = DEFAULT_CONFIG, device: torch.device | str | None = None
    ) -> "EPGroup":
        """Join the ranks of `env` through its store and make torch's default process group.

        If `env.store_is_hosted` is False (a bare RANK environment, as from srun or mpirun), rank 0 serves the store,
        only on MASTER_ADDR if that is an address of its machine. Failure reports are weaker then: the store dies with
        rank 0, so that the others know that rank 0 is lost, but can no longer agree on anything else.

        On CUDA the environment should have TORCH_NCCL_ASYNC_ERROR_HANDLING=0, as `run_rank` sets it: torch's own
        watchdog may otherwise kill this process before it can name the lost rank.

        Args:
            device: cuda:local_rank if this machine has a GPU for each of its ranks, else the CPU; NCCL or gloo.
        Errors: PeerLostError names the ranks that did not join within max(timeout_secs, 60 s); RuntimeError if the
        store cannot be reached or the machine lacks the device. Collective.
        """
        picked, epoch = pick_device(device, env.local_rank, env.local_world_size), Epoch.first(env)
        watch = join_world(epoch, config, picked)
        place = RankPlace(
            rank=env.rank,
            num_ranks=env.world_size,
            local_rank=env.local_rank,
            local_num_ranks=env.local_world_size,
            node=sum(beat.local_rank == 0 for beat in watch.beats()[: env.rank + 1]) - 1,
        )
        return cls._watched(place, watch, device=picked, config=config, process_group=dist.group.WORLD, epoch=epoch)

    @classmethod
    def _watched(cls, place: RankPlace, watch: Watch, *, process_group: Any, **options: Any) -> "EPGroup":
        """A group whose heartbeats tell of its process group, which is aborted on NCCL when the group fails."""
        group = cls(place, watch=watch, process_group=process_group, **options)
        watch.serve(process_group, abort_on_failure=group.backend == "nccl")
        return group

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup,
        store: dist.Store,
        config: GroupConfig = DEFAULT_CONFIG,
        device: torch.device | str | None = None,
    ) -> "EPGroup":
        """A group over any subset of an existing torch.distributed world, which the caller destroys afterwards.

        Args:
            process_group: with a gloo or NCCL backend; its ranks become the group's.
            store: a TCPStore, prefixed or not, that all its ranks share and that outlives them. Each group uses its own
                keys; several groups may have the same ranks.
            device: by default the current CUDA device if the process group has NCCL, else the CPU; "cuda" is the
                current one too.
        Errors: ValueError for an unsupported store or device; PeerLostError as `connect`. Collective among the ranks of
        `process_group`.
        """
        backends = dist.get_backend_config(process_group)
        if device is None:
            device = "cuda" if "nccl" in backends else "cpu"
        picked = torch.device(device)
        if picked.type == "cuda" and picked.index is None:  # a tensor's device always has an index
            picked = torch.device("cuda", torch.cuda.current_device())
        backend = dict(pair.split(":") for pair in backends.split(",")).get(picked.type)
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"device ({picked}) has no gloo or nccl among the process group's backends ({backends})")
        shared: Any = store  # torch's stubs lack the next call
        if not shared.has_extended_api():
            raise ValueError(f"store ({type(store).__name__}) cannot read many keys at once; use a TCPStore")
        watch = join_subset(process_group, store, config)
        place = RankPlace.by_hosts(process_group.rank(), [beat.host for beat in watch.beats()])
        options: dict[str, Any] = {"device": picked, "config": config, "backend": backend}
        return cls._watched(place, watch, process_group=process_group, **options)

    def wait(self, work: "dist.Work | torch.cuda.Event", *, phase: str, round: int) -> None:  # noqa: A002
        """Wait on the host until an operation that needs the other ranks is complete.

        Args:
            work: of a gloo or NCCL operation on this group, or an event recorded behind one.
            phase, round: name and number of the operation; after a timeout the ranks that have not reached it are lost.
        Errors: PeerLostError names the ranks to blame within timeout_secs (plus about a second), at once if the group
        has failed before. Collective, host sync.
        """
        self.check_open()
        if self._waits is None:
            work.synchronize() if isinstance(work, torch.cuda.Event) else work.wait()
        else:
            self._waits.wait(work, *self._place_of(phase, round))

    @contextlib.contextmanager
    def guard(self, phase: str, round: int | None = None) -> Iterator[None]:  # noqa: A002
        """Name the lost rank when a collective in the block fails that others issue, such as transformers' generate.

        On gloo such a collective ends by the process group's own timeout. On NCCL, where it would hang, the group is
        aborted in the background, and the end of the block waits for the stream. An error that no peer caused is
        re-raised unchanged.

        Args:
            phase, round: as in `wait`; without a round, the guards of this phase are counted.
        Errors: PeerLostError instead of the RuntimeError that a lost rank caused. Host sync on CUDA.
        """
        self.check_open()
        if self._waits is None:
            yield
            return
        with self._waits.guard(phase, round, self._next_round(phase) if round is None else round):
            yield

    def explain(self, error: Exception) -> Exception:
        """The PeerLostError behind an error that a lost rank caused; the error itself if none did.

        Takes a few heartbeats for an error about a connection or a timeout, no time for others. Local.
        """
        return error if self._waits is None else self._waits.explain(error)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """In the block, an error that a lost rank caused is raised as the PeerLostError of `explain`. Local."""
        return contextlib.nullcontext() if self._waits is None else self._waits.explained()

    def check(self) -> None:
        """Raise PeerLostError if the group has failed, RuntimeError if it is destroyed. Local, no sync."""
        self.check_open()
        if self._waits is not None:
            self._waits.check()

    @property
    def waited_secs(self) -> float:
        """Time that this rank has waited for operations of gloo so far, 0 on other backends. Local."""
        return 0.0 if self._waits is None else self._waits.waited_secs

    def check_open(self) -> None:
        """Raise RuntimeError once the group is destroyed. Local."""
        if self.destroyed:
            raise RuntimeError(f"rank {self.seat} has left this group: destroy() was called, or its `with` block ended")

    @contextlib.contextmanager
    def waiting(self, phase: str, round: int) -> Iterator[None]:  # noqa: A002
        """Tell the other ranks that this one waits in the block, where the caller has a timeout of its own. Local.

        Args:
            phase, round: as in `wait`.
        """
        if self._waits is None:
            yield
            return
        with self._waits.elsewhere(*self._place_of(phase, round)):
            yield

    def wait_until(self, done: Callable[[], bool], phase: str, round: int) -> None:  # noqa: A002
        """Call `done`, less and less often, until it is true.

        Args:
            done: asks the store. phase, round: as in `wait`.
        Errors: those of `done`; PeerLostError as `wait`. Collective, host wait.
        """
        start, pause = time.monotonic(), FIRST_PAUSE_SECS
        with self.explained(), self.waiting(phase, round):
            while not done():
                self.check()
                if time.monotonic() - start > self.config.timeout_secs:
                    ranks, reason = self.find_missing(phase, round)
                    raise self.blame(ranks, phase, round, reason)
                time.sleep(pause)
                pause = min(1.5 * pause, LAST_PAUSE_SECS)

    def _place_of(self, phase: str, round_: int) -> tuple[str, int]:
        """The phase and round under which a wait of this group is published."""
        return phase, round_

    def find_missing(self, phase: str, round: int) -> tuple[tuple[int, ...], str]:  # noqa: A002
        """The ranks without heartbeats, or else those that have not reached this wait, and the reason. Local."""
        return ((), "") if self.watch is None else self.watch.evidence(phase, round)

    def blame(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> PeerLostError:  # noqa: A002
        """Propose that ranks are lost; return the failure that the ranks agree on, which may be another's proposal.

        Args:
            ranks, phase, round, reason: as in `PeerLostError`.
        Local; waits for one exchange with the store, at most about 3 s.
        """
        if self.watch is None:
            return PeerLostError(ranks, phase, round, reason)
        return self.watch.publish(ranks, phase, round, reason)

    @property
    def failure(self) -> PeerLostError | None:
        """The PeerLostError that `check` would raise; None if the group has not failed."""
        return None if self.watch is None else self.watch.failure

    @property
    def gone_ranks(self) -> tuple[int, ...]:
        """Ranks that the launcher has seen die, and those of `failure`."""
        return () if self.watch is None else self.watch.gone_ranks()

    @property
    def left_ranks(self) -> tuple[int, ...]:
        """Ranks that have left with `destroy`: they join no further operation."""
        return () if self.watch is None else self.watch.left_ranks()

    def connect_store(self) -> Any:
        """A new connection to the store that the ranks share, a `dist.Store`, for one thread at a time.

        Every rank connects in the same order: the nth connections of all ranks see the same keys, and no others.
        Errors: RuntimeError if the store does not answer. Local.
        """
        self.check_open()
        self._stores += 1
        return dist.HashStore() if self.watch is None else self.watch.connect_store(f"store/{self._stores}")

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with an error of its own, so that their errors name it. Local."""
        in_order = isinstance(error, SystemExit) and not error.code
        if self.watch is None or isinstance(error, PeerLostError) or in_order:
            return
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        self.watch.publish((self.rank,), *self.watch.where(), f"failed: {what}")

    def barrier(self) -> None:
        """Wait until every rank has called it, and its current stream is done. Errors: PeerLostError. Collective, host
        sync; no operation of the process group."""
        self.check_open()
        self._gather(b"", "barrier")

    def wait_for_all(self, phase: str) -> None:
        """Wait until every rank has called it, without a timeout for ranks whose heartbeats continue.

        For local work that may take one rank longer than timeout_secs, such as loading weights: call it between that
        work and the next collective.

        Args:
            phase: name of that work, for the error's message.
        Errors: PeerLostError names the ranks that die, fail, leave, or send no heartbeat for timeout_secs. Collective;
        no device sync.
        """
        self.check_open()
        if self._waits is not None:
            self._waits.wait_for_all(phase, self._next_round(phase))

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of `device` over the ranks in place; return it. Errors: PeerLostError. Collective, host sync."""
        return self._all_reduce(tensor, "all_reduce_sum")

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order.

        Args:
            obj: None, a bool, number, str or bytes, or a list, tuple, set, frozenset or dict of these.
        Errors: ValueError names an object of another type; PeerLostError. Collective, host sync; no operation of the
        process group.
        """
        self.check_open()
        data = encode(obj)
        if self.watch is None:
            return [obj] * self.num_ranks
        return [*map(decode, self._gather(data, "all_gather_object"))]

    @property
    def next_gather(self) -> tuple[str, int]:
        """Phase and round of the next `all_gather_object`, to which waits of a part before it belong. Local."""
        return "all_gather_object", self._rounds.get("all_gather_object", -1) + 1

    def _gather(self, data: bytes, phase: str) -> list[bytes]:
        """Every rank's bytes, behind what is on its current stream. Collective, host sync."""
        if self.watch is None:
            return [data] * self.num_ranks
        round_ = self._next_round(phase)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.wait(event, phase=phase, round=round_)
        if self._gathers is None:
            self._gathers = StoreGathers(self._connect("gathers"))
        return self._gathers.gather(self, data, phase, round_)

    def _connect(self, name: str) -> Any:
        """A connection to the store under keys of this name."""
        return None if self.watch is None else self.watch.connect_store(name)

    def _all_reduce(self, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        self.check_open()
        if self.process_group is None:
            return tensor
        round_ = self._next_round(phase)
        with self.guard(phase, round_):
            self.connect_backend()
            self.wait(dist.all_reduce(tensor, group=self.process_group, async_op=True), phase=phase, round=round_)
        return tensor

    def connect_backend(self) -> None:
        """Make NCCL's communicator, unless that is done: the first operation would, and nothing ends that when a rank
        dies meanwhile. Errors: PeerLostError. Collective."""
        if not self._is_connected and self.watch is not None and self.process_group is not None:
            connect_nccl(self.process_group, self.device, self.watch)
        self._is_connected = True

    def _next_round(self, phase: str) -> int:
        self._rounds[phase] = self._rounds.get(phase, -1) + 1
        return self._rounds[phase]

    def regroup(self, epoch: int, seats: tuple[int, ...], deaths: tuple[int, ...] | None = None) -> "EPGroup":
        """The group of other ranks of this launch, in place of this one, which is destroyed.

        For a group that has failed, after its error: the survivors go on without the lost ranks. For a whole group,
        between two collectives: ranks come or leave; it is left once all of its ranks are connected, as by `destroy`.
        Every rank of the new group calls it with the same arguments, those that are new to it on their standby group
        (`from_env`); no other rank is waited for. A rank that joins no further group calls `destroy`. Everything made
        with the old group is to be made anew (`Session.regroup` does it for a model). If it fails, it may be called
        again with a later epoch.

        Args:
            epoch: a number above those of all groups of the launch before, and of all attempts.
            seats: the ranks at launch of the new group, ascending; the nth is its rank n.
            deaths: by rank, how many processes of the seat the caller knows to have died, before the one that is meant;
                if another one has died since, the error names it at once. By default as many as have died by now: if
                the one that is meant has just died, the others wait for it until the timeout.
        Returns: the group, with this one's config and device. A `with` block of this group ends it too.
        Errors: ValueError for other numbers, and for seats that differ between ranks; PeerLostError names the seats
        that did not come within timeout_secs, or died; RuntimeError if no launcher serves the store of the group.
        Collective among `seats`.
        """
        if self._epoch is None or not self._epoch.env.store_is_hosted:
            raise RuntimeError(
                f"a group of {self.num_ranks} rank{'s' * (self.num_ranks > 1)} whose store no launcher serves cannot "
                f"regroup: start ranks by ep_moe.launch or `ep-moe`"
            )
        if self._successor is not None:
            raise RuntimeError(f"seat {self.seat} has left this group for another: call regroup of that one")
        joined = self._epoch = self._epoch.next(epoch, seats, deaths)
        self._leave(at_once=True)
        watch = join_world(joined, self.config, self.device)
        place = RankPlace.by_hosts(joined.rank, [beat.host for beat in watch.beats()])
        options: dict[str, Any] = {"device": self.device, "config": self.config, "epoch": joined}
        self._successor = self._watched(place, watch, process_group=dist.group.WORLD, **options)
        return self._successor

    @property
    def latest(self) -> "EPGroup":
        """The last group that `regroup` calls have made of this one; itself before any. Local."""
        return self if self._successor is None else self._successor.latest

    def destroy(self) -> None:
        """Leave the group, and destroy the default process group if `connect` made it; calling it twice is fine.

        Objects made with the group raise RuntimeError from then on; they can still be destroyed.
        Local; but a rank 0 that serves the store waits until the others have left, at most timeout_secs.
        """
        self._leave(at_once=False)

    def _leave(self, *, at_once: bool) -> None:
        """`destroy`; with `at_once`, as after a loss, waits for connected ranks go on in the background."""
        if self.destroyed:
            return
        self.destroyed, self._gathers = True, None
        if self.watch is None:
            return
        owned = self._epoch is not None
        if owned:
            self.watch.let_connect()
        self.watch.leave()
        at_once = self.watch.lost() or (at_once and self.backend == "gloo")
        for part in self.parts.values():
            part._gathers = None
            if at_once:
                part.destroyed = True
            else:
                part.destroy()
        if owned and not at_once:
            dist.destroy_process_group()  # before the watch ends: a rank may be lost during shutdown too
        self.watch.close()
        if owned and dist.is_initialized():
            holder = [each.process_group for each in (self, *self.parts.values())]
            for each in (self, *self.parts.values()):
                each.process_group = None
            drop_world(holder, self.backend)
        self.process_group = None

    def __enter__(self) -> "EPGroup":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        last = self.latest
        if error is not None:
            last.report_failure(error)
        last.destroy()
