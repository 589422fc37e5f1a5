"""How a rank picks its device, joins the other ranks through a store, and leaves them after a loss."""

import concurrent.futures
import dataclasses
import datetime
import json
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig
from ep_moe.environment import LaunchEnv, launch_secret, shares_gpus
from ep_moe.fields import typed
from ep_moe.group.store import secret_key, serve_store
from ep_moe.group.watch import Watch

MAX_SHARED_RANKS = 8  # of ranks that share GPUs: each has its own CUDA context and its turns on the GPU
JOIN_SECS = 60.0  # ranks start at different speeds: joining gets at least this long, however short the timeout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """The index of a rank in its group and on its machine."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_num_ranks: int = 1
    node: int = 0  # index of this machine

    @classmethod
    def by_hosts(cls, rank: int, hosts: Sequence[str]) -> "RankPlace":
        """The place of a rank among others on these hosts, by rank."""
        return cls(
            rank=rank,
            num_ranks=len(hosts),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_num_ranks=hosts.count(hosts[rank]),
            node=list(dict.fromkeys(hosts)).index(hosts[rank]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Which processes of a launch form its group for a time.

    Args:
        env: of this process. number: 0 for the group of the launch, larger ones follow.
        seats: the ranks at launch of the processes, ascending; a process's rank is its index there.
        deaths: by rank, how many processes of the seat had died before this one; None if that is not known.
    """

    env: LaunchEnv
    number: int
    seats: tuple[int, ...]
    deaths: tuple[int, ...] | None = ()

    @classmethod
    def first(cls, env: LaunchEnv) -> "Epoch":
        """That of the launch itself."""
        return cls(env=env, number=0, seats=tuple(range(env.world_size)))

    def next(self, number: int, seats: Sequence[int], deaths: Sequence[int] | None = None) -> "Epoch":
        """A later one. Errors: ValueError for one that cannot follow, or without this process's seat, or for other
        than as many deaths as seats."""
        own = self.env.rank
        found = typed(tuple(seats), tuple[int, ...], "seats")
        if typed(number, int, "epoch") <= self.number:
            raise ValueError(f"epoch ({number}) must be above {self.number}, the last one of seat {own}")
        if list(found) != sorted(set(found)) or own not in found or found[0] < 0:
            raise ValueError(f"seats {found} must be ascending, from 0 on, and include {own}, this process's own")
        counts = None if deaths is None else typed(tuple(deaths), tuple[int, ...], "deaths")
        if counts is not None and len(counts) != len(found):
            raise ValueError(f"deaths {counts} are not those of {len(found)} seats")
        return Epoch(env=self.env, number=number, seats=found, deaths=counts)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.seats.index(self.env.rank)


_ABORT_SECS = 10.0
POLL_SECS = 0.1
LAST_SECS = 0.5  # for a process group to be made although a rank has just died


def pick_device(device: torch.device | str | None, local_rank: int, local_num_ranks: int) -> torch.device:
    """The device of a rank: as requested, else a GPU if this machine has one for each of its ranks, else the CPU.

    Errors: RuntimeError if this machine lacks the requested device. Local.
    """
    if device is not None:
        picked = torch.device(device)
        if picked.type != "cuda":
            return picked
        index = _gpu_of(local_rank) if picked.index is None else picked.index
        if index >= torch.cuda.device_count():
            raise RuntimeError(f"device cuda:{index} was requested, this machine has {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", index)
    if torch.cuda.is_available() and num_gpu_ranks() >= local_num_ranks:
        return torch.device("cuda", _gpu_of(local_rank))
    return torch.device("cpu")


def num_gpu_ranks() -> int:
    """How many ranks of this machine can have a GPU: one for each, or MAX_SHARED_RANKS if they may share one."""
    found = torch.cuda.device_count()
    return max(found, MAX_SHARED_RANKS) if shares_gpus() and found else found


def _gpu_of(local_rank: int) -> int:
    return local_rank % max(torch.cuda.device_count(), 1) if shares_gpus() else local_rank


def backend_of(device: torch.device) -> str:
    """The backend for a device: "nccl", or "gloo" for CPUs and for GPUs that ranks share, which NCCL refuses."""
    return "nccl" if device.type == "cuda" and not shares_gpus() else "gloo"


def join_world(epoch: Epoch, config: GroupConfig, device: torch.device) -> Watch:
    """Join the ranks of an epoch through its store and make torch's default process group; errors as `EPGroup.connect`
    and `EPGroup.regroup`.

    The store's keys contain the restart count and the epoch, so that an earlier failure is not read again. Collective.
    """
    env, later = epoch.env, epoch.number > 0
    join_secs = config.timeout_secs if later else max(config.timeout_secs, JOIN_SECS)
    if env.rank == 0 and not env.store_is_hosted:
        store = serve_store(env.master_addr, env.master_port, join_secs)
    else:
        timeout = datetime.timedelta(seconds=join_secs)
        store = dist.TCPStore(env.master_addr, env.master_port, wait_for_workers=False, timeout=timeout)
    key, secret = f"ep_moe/world/{env.restart_count}", launch_secret()
    if later:
        key = f"{key}/{epoch.number}"
        _agree_on_seats(dist.PrefixStore(secret_key(secret, f"{key}/seats"), store), epoch)
    watch = Watch(
        dist.PrefixStore(secret_key(secret, f"{key}/watch"), store),
        rank=epoch.rank,
        world_ranks=epoch.seats,
        config=config,
        local_rank=env.local_rank,
        secret=secret,
        store_rank=None if env.store_is_hosted else 0,
        seats=epoch.seats,
        deaths=epoch.deaths,
    )
    try:
        watch.meet(join_secs)
        if not later:
            check_nodes([(beat.host, beat.local_rank) for beat in watch.beats()], env)
        try:
            _init_world(dist.PrefixStore(secret_key(secret, f"{key}/group"), store), epoch, config, device, watch)
        except RuntimeError as error:
            raise watch.explain(error, "connect", None) or error from error
        watch.connected()
    except BaseException:
        watch.close()
        raise
    return watch


def _agree_on_seats(store: dist.Store, epoch: Epoch) -> None:
    """Raise ValueError if another rank joins this epoch with other seats, or this seat has joined it before."""
    mine = json.dumps(epoch.seats)
    found = store.compare_set("all", "", mine).decode()
    if found != mine:
        raise ValueError(f"epoch {epoch.number} has seats {found} on another rank, {mine} on seat {epoch.env.rank}")
    if store.add(f"joined/{epoch.env.rank}", 1) > 1:
        raise ValueError(f"seat {epoch.env.rank} has joined epoch {epoch.number} before; only a later one can follow")


def check_nodes(places: Sequence[tuple[str, int]], env: LaunchEnv) -> None:
    """Raise ValueError, on all ranks alike, if nodes have different numbers of ranks or ranks are not sorted by node.

    Args:
        places: host and local rank of every rank. env: of this rank; its local_world_size has to be the node's.
    Local.
    """
    nodes: list[list[int]] = []
    for rank, (_, local_rank) in enumerate(places):
        if local_rank == 0 or not nodes:
            nodes.append([])
        if local_rank != len(nodes[-1]):
            raise ValueError(
                f"rank {rank} has LOCAL_RANK {local_rank}, {len(nodes[-1])} was expected: "
                f"ranks have to be numbered node by node"
            )
        nodes[-1].append(rank)
    if len({len(node) for node in nodes}) > 1:
        counts = ", ".join(f"{len(node)} from rank {node[0]} on {places[node[0]][0]}" for node in nodes)
        raise ValueError(f"nodes have different numbers of ranks ({counts}); start as many on every node")
    if len(nodes[0]) != env.local_world_size:
        raise ValueError(
            f"LOCAL_WORLD_SIZE ({env.local_world_size}) is not the number of ranks of every node ({len(nodes[0])})"
        )


def join_subset(process_group: dist.ProcessGroup, store: dist.Store, config: GroupConfig) -> Watch:
    """Join the ranks of an existing process group through a store that they share; errors as `EPGroup.connect`.

    Every call uses new keys, so that several groups over the same ranks do not interfere. Collective.
    """
    rank = process_group.rank()
    world_ranks = tuple(dist.get_process_group_ranks(process_group))
    secret = launch_secret()
    key = secret_key(secret, f"ep_moe/{process_group.group_name}/{'-'.join(map(str, world_ranks))}")
    nth = store.add(f"{key}/made/{rank}", 1)
    watch = Watch(
        dist.PrefixStore(f"{key}/{nth}", store),
        rank=rank,
        world_ranks=world_ranks,
        config=config,
        local_rank=rank,
        secret=secret,
    )
    try:
        watch.meet(max(config.timeout_secs, JOIN_SECS))
    except BaseException:
        watch.close()
        raise
    return watch


def drop_world(holder: list[dist.ProcessGroup | None], backend: str) -> None:
    """Destroy a default process group that has lost a rank, and its parts, without waiting for that rank.

    Args:
        holder: the process groups, to which the caller holds no other reference; emptied, for gloo in a thread, since
            dropping the last reference joins gloo's threads, which wait for the lost rank until the timeout.
    Errors: RuntimeError if NCCL does not end. Local.
    """
    if backend == "nccl":  # waits for CUDA graphs that hold its operations, which their owner may still have
        abort = threading.Thread(target=dist.distributed_c10d._abort_process_group, name="ep_moe-abort", daemon=True)
        abort.start()
        abort.join(_ABORT_SECS)
        if abort.is_alive():
            raise RuntimeError(
                f"NCCL has not ended within {_ABORT_SECS:g} s: CUDA graphs may hold operations of its group"
            )
        return
    dist.destroy_process_group()
    threading.Thread(target=holder.clear, name="ep_moe-release", daemon=True).start()


def _init_world(store: dist.Store, epoch: Epoch, config: GroupConfig, device: torch.device, watch: Watch) -> None:
    timeout_secs, backend = config.timeout_secs, backend_of(device)
    # part of torch's keys: it counts groups that could not be made, of which ranks may have seen different numbers
    dist.distributed_c10d._world.group_count = 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        timeout_secs = 2 * timeout_secs + 30  # NCCL's timeout is the last resort: longer than ours plus an abort

    def init() -> None:
        dist.init_process_group(
            backend,
            store=store,
            rank=epoch.rank,
            world_size=len(epoch.seats),
            timeout=datetime.timedelta(seconds=timeout_secs),
        )

    if backend == "nccl":
        init()
    else:  # gloo waits for the address of a rank that has died meanwhile
        run_beside(watch, init, "ep_moe-join")


def connect_nccl(process_group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
    """Make NCCL's communicator by a first operation. Errors: PeerLostError, RuntimeError. Collective."""

    def first() -> None:
        torch.cuda.set_device(device)
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=process_group)

    run_beside(watch, first, "ep_moe-connect")


def run_beside(watch: Watch, call: Callable[[], None], name: str) -> None:
    """Run a call that waits for the other ranks and that nothing ends, in a thread: it is left alone if the group
    fails. Errors: PeerLostError, those of the call. Collective."""
    begun = concurrent.futures.Future[None]()
    threading.Thread(target=_run_into, args=(begun, call), name=name, daemon=True).start()
    while not begun.done() and not watch.lost():
        concurrent.futures.wait([begun], POLL_SECS)
    concurrent.futures.wait([begun], LAST_SECS)  # it may be about to end
    if not begun.done() and watch.failure is not None:
        raise watch.failure.copy()
    begun.result()


def _run_into(future: "concurrent.futures.Future[None]", call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised where the result is read
        future.set_exception(error)
    else:
        future.set_result(None)
