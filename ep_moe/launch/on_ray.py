"""Starts ranks as actors of a Ray cluster, watches each of them, and ends all after the first failure.

Every node of the job is one bundle of a STRICT_SPREAD placement group, with a GPU or a CPU for each of its ranks: Ray
reserves all bundles or none, and on different nodes. One more actor on rank 0's node chooses the rendezvous and serves
the store, so that the store outlives any rank. Needs the extra `ray`.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ep_moe.config import GroupConfig
from ep_moe.environment import SECRET
from ep_moe.group import DEATHS_KEY, DEFAULT_CONFIG, secret_key, serve_store
from ep_moe.launch.outcomes import Failure, Outcomes
from ep_moe.launch.rank import Target, call_payload, rank_environ, read_outcome, run_pickled
from ep_moe.launch.ray_cluster import NodeRanks, check_nodes, connected, has_gpus
from ep_moe.launch.signals import held_back, terminable

RESERVE_SECS = 15.0  # for resources that another job is about to free
START_SECS = 120.0  # for actors to start: they import torch, perhaps from a slow disk
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


class _Store:
    """An actor that serves the store, on rank 0's node."""

    def __init__(self, timeout_secs: float, secret: str) -> None:
        import ray

        self._address = ray.util.get_node_ip_address()
        self._store = serve_store(self._address, 0, timeout_secs)
        self._deaths_key = secret_key(secret, DEATHS_KEY)

    def rendezvous(self) -> tuple[str, int]:
        """Address and port of the store."""
        return self._address, self._store.port

    def set_deaths(self, deaths: str) -> None:
        """Tell the surviving ranks."""
        self._store.set(self._deaths_key, deaths)


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

    def run(self, environ: dict[str, str], payload: bytes) -> bytes:
        """Run the rank. Returns its result in a tuple, or its `Failure`, since Ray would wrap an error; pickled."""
        os.dup2(2, 1)  # stdout belongs to the launcher
        os.environ.update(environ)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # torch has read the one that Ray sets
        return run_pickled(payload)


def launch_on_ray(
    target: Target,
    *args: Any,
    nodes: NodeRanks,
    config: GroupConfig = DEFAULT_CONFIG,
    env: Mapping[str, str] | None = None,
    grace_secs: float = 5.0,
) -> list[Any]:
    """Start ranks on the nodes of a Ray cluster, call `target(group, *args)` in each and return their results.

    The nodes need the same ep_moe, and the model's files under the same path. Ranks are numbered node by node. A rank
    with a GPU sees the GPUs of all ranks of its node and uses that of its local rank. Ray shows what ranks write.

    Args:
        target, args: as in `launch`. nodes: how many ranks, and where.
        config: as in `EPGroup.connect`.
        env: environment variables of the ranks, added to those of this process whose names begin as in `FORWARDED`.
        grace_secs: how long the other ranks may take to end after the first failure, before they are killed.
    Returns: the results in rank order.
    Errors: RankFailedError; RuntimeError if ray is not installed, the cluster does not answer, lacks nodes, or does not
    start the actors; KeyboardInterrupt and SystemExit as in `launch`. Local.
    """
    try:
        with (
            terminable(),
            connected(nodes),
            terminable(),  # again: connecting has given SIGTERM to a handler of Ray's
            contextlib.closing(RayRanks(nodes, config, grace_secs)) as ranks,
        ):
            ranks.start(target, *args, env=env)
            return ranks.collect()
    except SystemExit:  # that of SIGTERM; Ray's calls replace its code
        raise SystemExit(128 + signal.SIGTERM) from None


class RayRanks:
    """The actors of one launch. `close` ends them.

    Attributes:
        places: of the ranks, in rank order; empty before `start`.
    Errors: RuntimeError if the cluster has too few nodes. Needs a connection to the cluster.
    """

    def __init__(self, nodes: NodeRanks, config: GroupConfig = DEFAULT_CONFIG, grace_secs: float = 5.0) -> None:
        self.places: list[ActorPlace] = []
        self._nodes, self._config = nodes, config
        self._gpus = has_gpus(nodes)
        check_nodes(nodes, "GPU" if self._gpus else "CPU")
        self._outcomes = Outcomes(nodes.num_ranks, grace_secs)
        self._group: Any = None
        self._store: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # what each rank's `run` will return

    def start(self, target: Target, *args: Any, env: Mapping[str, str] | None = None) -> None:
        """Reserve nodes and start the ranks; arguments as `launch_on_ray`."""
        import ray

        secret = secrets.token_hex(16)  # it travels as Ray's arguments do, never through the store
        payload = call_payload(target, args, self._config, "cuda" if self._gpus else "cpu")
        self._reserve()
        actors = [self._create(_Rank, node) for node in range(self._nodes.num_nodes) for _ in range(self._per_node)]
        self._actors = actors
        places = self._answers([actor.place.remote() for actor in actors], "ranks")
        order = sorted(range(len(actors)), key=lambda index: _by_node(places[index]))
        self._actors, self.places = [actors[index] for index in order], [places[index] for index in order]
        self._store = self._create(_Store, order[0] // self._per_node, self._config.timeout_secs, secret)
        [(address, port)] = self._answers([self._store.rendezvous.remote()], "the rendezvous")
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        shared = forwarded | dict(env or {}) | {"MASTER_ADDR": address, "MASTER_PORT": str(port), SECRET: secret}
        environs = [shared | self._place_of(rank) for rank in range(len(actors))]
        self._runs = [
            actor.run.remote(environ, ray.put(payload)) for actor, environ in zip(self._actors, environs, strict=True)
        ]

    @property
    def _per_node(self) -> int:
        return self._nodes.ranks_per_node

    def collect(self) -> list[Any]:
        """Wait for the ranks and return their results in rank order. Errors: RankFailedError."""
        import ray

        outcomes = self._outcomes
        while not outcomes.complete():
            waiting = [self._runs[rank] for rank in sorted(outcomes.pending)]
            ended, _ = ray.wait(waiting, num_returns=1, timeout=outcomes.secs_left)
            for run in ended:
                self._receive(self._runs.index(run))
        return outcomes.results()

    def close(self) -> None:
        """End the actors and give the nodes back; returns when Ray has seen them end. May be called again."""
        with held_back(signal.SIGINT, signal.SIGTERM):
            self._close()

    def _close(self) -> None:
        import ray

        for actor in [*self._actors, *([] if self._store is None else [self._store])]:
            ray.kill(actor)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=END_SECS)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._actors, self._store, self._group, self._runs = [], None, None, []

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

    def _create(self, kind: type[Any], node: int, *args: Any) -> Any:
        """An actor in the bundle of a node; the store's takes no resources."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        number = int(kind is _Rank)
        options = {"num_cpus": 0 if self._gpus else number, "num_gpus": number if self._gpus else 0}
        return ray.remote(kind).options(**options, max_restarts=0, scheduling_strategy=where).remote(*args)

    def _answers(self, calls: Sequence[Any], what: str) -> list[Any]:
        import ray

        try:
            return ray.get(list(calls), timeout=START_SECS)
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(f"the Ray cluster has not started {what} within {START_SECS:g} s") from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"the Ray cluster cannot start {what}: {_reason(error)}") from error

    def _place_of(self, rank: int) -> dict[str, str]:
        node, local_rank = divmod(rank, self._per_node)
        environ = rank_environ(rank, len(self.places), local_rank, self._per_node)
        if self._gpus:  # ranks map the memory of their node's GPUs, so that each has to see all of them
            mine = self.places[node * self._per_node : (node + 1) * self._per_node]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for place in mine for gpu in place.gpus)
        return environ

    def _receive(self, rank: int) -> None:
        import ray

        try:
            outcome = read_outcome(ray.get(self._runs[rank]))
        except ray.exceptions.RayError as error:
            place = self.places[rank]
            message = f"(process {place.pid} on {place.address}) died: {_reason(error)}"
            self._store.set_deaths.remote(self._outcomes.add_death(rank, message))
            return
        if isinstance(outcome, Failure):  # clocks of machines differ
            outcome = dataclasses.replace(outcome, when=time.monotonic())
        self._outcomes.add(rank, outcome)


def _by_node(place: ActorPlace) -> tuple[Any, ...]:
    """Sorts ranks by node, and within a node by GPU."""
    return place.address, place.node_id, [gpu.zfill(3) for gpu in place.gpus]


def _reason(error: Exception) -> str:
    """Why an actor has died: the sentence of Ray's message that says so."""
    text = str(error)
    for mark in ("Worker exit detail: ", "The actor died because of an error raised in its creation task, "):
        if mark in text:
            return text.partition(mark)[2].partition(". Some common causes")[0].strip().splitlines()[-1]
    return " ".join(text.split())[:500]
