"""Starts ranks as actors of a Ray cluster, and ends all after the first failure unless a `Front` keeps them going.

Every node of the job is one bundle of a STRICT_SPREAD placement group, with a GPU or a CPU for each of its ranks: Ray
reserves all bundles or none, and on different nodes. An actor in place of one that has ended goes into the same bundle.
The store is served by this process, so that it outlives any rank. Needs the extra `ray`.
"""

import contextlib
import dataclasses
import functools
import os
import pickle
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from ep_moe.config import GroupConfig
from ep_moe.environment import SECRET
from ep_moe.group import DEATHS_KEY, DEFAULT_CONFIG, StorePlace, secret_key, serve_store
from ep_moe.launch.local import num_threads
from ep_moe.launch.outcomes import DIED, Failure, describe
from ep_moe.launch.rank import Target, call_payload, rank_environ, read_outcome, run_pickled
from ep_moe.launch.ray_cluster import NodeRanks, check_nodes, connected, has_gpus
from ep_moe.launch.signals import held_back, terminable
from ep_moe.launch.supervised import Front, SupervisedRanks

RESERVE_SECS = 15.0  # for resources that another job is about to free
START_SECS = 120.0  # for actors to start: they import torch, perhaps from a slow disk, or need a node that is lost
END_SECS = 5.0
# the rest of this process's environment belongs to its machine
FORWARDED = ("EP_MOE_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "OMP_", "MKL_")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActorPlace:
    """Where Ray has started a rank."""

    node_id: str
    address: str
    pid: int
    gpus: tuple[str, ...]


class _Rank:
    """An actor that is one rank."""

    def place(self) -> ActorPlace:
        """Where this actor is."""
        import ray

        return ActorPlace(
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        )

    def run(self, environ: dict[str, str], payload: bytes, node_id: str) -> bytes:
        """Run the rank. Returns its result in a tuple, or its `Failure`, since Ray would wrap an error; pickled.

        node_id: of the node whose GPUs `environ` names, if it does.
        """
        moved = self.place().node_id != node_id
        if moved and "CUDA_VISIBLE_DEVICES" in environ:
            return pickle.dumps(describe(RuntimeError("Ray has moved it to a node whose GPUs the others do not know")))
        os.dup2(2, 1)  # stdout belongs to the launcher
        os.environ.update(environ)
        torch.set_num_threads(num_threads(os.environ) or 1)  # torch has read the one that Ray sets
        return run_pickled(payload)


def launch_on_ray(
    target: Target,
    *args: Any,
    nodes: NodeRanks,
    config: GroupConfig = DEFAULT_CONFIG,
    env: Mapping[str, str] | None = None,
    grace_secs: float = 5.0,
    front: Front | None = None,
) -> list[Any]:
    """Start ranks on the nodes of a Ray cluster, call `target(group, *args)` in each and return their results.

    The nodes need the same ep_moe, and the model's files under the same path. Ranks are numbered node by node. A rank
    with a GPU sees the GPUs of all ranks of its node and uses that of its local rank. Ray shows what ranks write.

    Args:
        target, args: as in `launch`. nodes: how many ranks, and where.
        config: as in `EPGroup.connect`.
        env: environment variables of the ranks, added to those of this process whose names begin as in `FORWARDED`.
        grace_secs: how long the other ranks may take to end after the first failure, before they are killed.
        front: as in `launch`.
    Returns: the results in rank order.
    Errors: RankFailedError; RuntimeError if ray is not installed, the cluster does not answer, lacks nodes, or does not
    start the actors; ValueError for OMP_NUM_THREADS; KeyboardInterrupt and SystemExit as in `launch`. Local.
    """
    num_threads({**os.environ, **(env or {})})  # its error comes before anything starts
    try:
        with (
            terminable(),
            connected(nodes),
            terminable(),  # again: connecting has given SIGTERM to a handler of Ray's
            contextlib.closing(RayRanks(nodes, config, grace_secs, front)) as ranks,
        ):
            ranks.start(target, *args, env=env)
            return ranks.collect()
    except SystemExit:  # that of SIGTERM or SIGHUP; Ray's calls replace its code
        raise SystemExit(128 + signal.SIGTERM) from None


class RayRanks(SupervisedRanks):
    """The actors of one launch. `close` ends them.

    Attributes:
        places: where the ranks have started first, in rank order; empty before `start`.
    Errors: RuntimeError if the cluster has too few nodes. Needs a connection to the cluster.
    """

    def __init__(
        self,
        nodes: NodeRanks,
        config: GroupConfig = DEFAULT_CONFIG,
        grace_secs: float = 5.0,
        front: Front | None = None,
    ) -> None:
        super().__init__(nodes.num_ranks, grace_secs, front)
        self.places: list[ActorPlace] = []
        self._nodes, self._config = nodes, config
        self._gpus = has_gpus(nodes)
        check_nodes(nodes, "GPU" if self._gpus else "CPU")
        self._group: Any = None
        self._secret = secrets.token_hex(16)  # it travels as Ray's arguments do, never through the store
        self._actors: list[Any] = []  # by rank, as all below
        self._bundles: list[int] = []
        self._placing: list[Any] = []  # what each actor's `place` will return
        self._runs: dict[int, Any] = {}  # what its `run` will return
        self._late: set[int] = set()  # those killed as they have not started

    def start(self, target: Target, *args: Any, env: Mapping[str, str] | None = None) -> None:
        """Reserve nodes and start the ranks; arguments as `launch_on_ray`."""
        import ray

        payload = call_payload(target, args, self._config, "cuda" if self._gpus else "cpu")
        self._reserve()
        bundles = [node for node in range(self._nodes.num_nodes) for _ in range(self._per_node)]
        self._actors = actors = [self._create(bundle) for bundle in bundles]
        placing = [actor.place.remote() for actor in actors]
        places = self._answers(placing)
        order = sorted(range(len(actors)), key=lambda index: _by_node(places[index]))
        self._actors, self.places = [actors[index] for index in order], [places[index] for index in order]
        self._bundles, self._placing = [bundles[index] for index in order], [placing[index] for index in order]
        address = ray.util.get_node_ip_address()
        self._store = serve_store(address, 0, self._config.timeout_secs)
        place = StorePlace(host=address, port=self._store.port, secret=self._secret)
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        store = {"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port), SECRET: place.secret}
        self._environ = forwarded | dict(env or {}) | store
        self._payload = ray.put(payload)
        self._begin_all(place)

    @property
    def _per_node(self) -> int:
        return self._nodes.ranks_per_node

    def _begin(self, rank: int, *, standby: bool) -> Connection:
        if standby:
            self._actors[rank] = self._create(self._bundles[rank])
            self._placing[rank] = self._actors[rank].place.remote()
        environ = self._environ | self._place_of(rank, standby)
        self._runs[rank] = self._actors[rank].run.remote(environ, self._payload, self.places[rank].node_id)
        receiver, sender = Pipe(duplex=False)
        self._runs[rank].future().add_done_callback(lambda _: sender.close())
        self._late.discard(rank)
        if standby:
            give_up = functools.partial(self._give_up, rank, self._runs[rank])
            self._due.append((time.monotonic() + START_SECS, give_up))
        return receiver

    def _give_up(self, rank: int, run: Any) -> None:
        """Kill an actor that has not started, for good."""
        if self._runs[rank] is run and not self._process(rank):
            self._late.add(rank)
            self._start_no_more(rank)
            self._kill(rank)

    def _outcome(self, rank: int) -> Failure | tuple[Any]:
        import ray

        try:
            outcome = read_outcome(ray.get(self._runs[rank]))
        except ray.exceptions.RayError as error:
            return Failure(error_type=DIED, message=self._how_it_died(rank, error))
        finally:
            self._kill(rank)  # whose resources the next one needs
        if isinstance(outcome, Failure):  # clocks of machines differ
            return dataclasses.replace(outcome, when=time.monotonic())
        return outcome

    def _place(self, rank: int) -> ActorPlace | None:
        """Where a rank's actor is; None if it has not started."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            found: ActorPlace = ray.get(self._placing[rank], timeout=0)
            return found
        return None

    def _process(self, rank: int) -> int:
        place = self._place(rank)
        return 0 if place is None else place.pid

    def _kill(self, rank: int) -> None:
        import ray

        ray.kill(self._actors[rank])

    def _join(self, rank: int) -> None:
        import ray

        self._kill(rank)
        with contextlib.suppress(ray.exceptions.RayError):  # which comes when the process has gone
            ray.get(self._actors[rank].place.remote(), timeout=END_SECS)

    def _tell_ranks(self, deaths: str) -> None:
        self._store.set(secret_key(self._secret, DEATHS_KEY), deaths)

    def _how_it_died(self, rank: int, error: Exception) -> str:
        if rank in self._late:
            return f"has not been started by Ray within {START_SECS:g} s: its node may be lost"
        place = self._place(rank)
        if place is None:
            return f"died before it had started: {_reason(error)}"
        return f"(process {place.pid} on {place.address}) died: {_reason(error)}"

    def close(self) -> None:
        """End the actors and give the nodes back; returns when Ray has seen them end. May be called again."""
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._close()

    def _close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._runs:
            ray.wait([*self._runs.values()], num_returns=len(self._runs), timeout=END_SECS)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        for pipe in self._pipes.values():
            pipe.close()
        self._actors, self._group, self._runs = [], None, {}

    def _reserve(self) -> None:
        import ray

        kind = "GPU" if self._gpus else "CPU"
        bundles = [{kind: float(self._per_node)}] * self._nodes.num_nodes
        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(RESERVE_SECS):
            raise RuntimeError(
                f"the Ray cluster has not freed {self._nodes.num_nodes} nodes with {self._per_node} {kind}s within "
                f"{RESERVE_SECS:g} s: other jobs use them"
            )

    def _create(self, bundle: int) -> Any:
        """A rank's actor in a bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": int(not self._gpus), "num_gpus": int(self._gpus)}
        return ray.remote(_Rank).options(**options, max_restarts=0, scheduling_strategy=where).remote()

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        """What the first calls of the actors return. Errors: RuntimeError if one does not start."""
        import ray

        try:
            return ray.get(list(calls), timeout=START_SECS)
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(f"the Ray cluster has not started ranks within {START_SECS:g} s") from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"the Ray cluster cannot start ranks: {_reason(error)}") from error

    def _place_of(self, rank: int, standby: bool) -> dict[str, str]:
        node, local_rank = divmod(rank, self._per_node)
        environ = rank_environ(rank, len(self.places), local_rank, self._per_node, standby=standby)
        if self._gpus:  # ranks map the memory of their node's GPUs, so that each has to see all of them
            mine = self.places[node * self._per_node : (node + 1) * self._per_node]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for place in mine for gpu in place.gpus)
        return environ


def _by_node(place: ActorPlace) -> tuple[Any, ...]:
    """Sorts ranks by node, and within a node by GPU."""
    return place.address, place.node_id, [gpu.zfill(3) for gpu in place.gpus]


def _reason(error: Exception) -> str:
    """Why an actor has died: the sentence of Ray's message that says so."""
    text = str(error)
    creation = "The actor died because of an error raised in its creation task, "
    for mark in ("Worker exit detail: ", creation, "The actor died because ", "The actor is dead because "):
        if mark in text:
            return text.partition(mark)[2].partition(". Some common causes")[0].strip().splitlines()[-1].strip()
    return " ".join(text.split())[:500]
