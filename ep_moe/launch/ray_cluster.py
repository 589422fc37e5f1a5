"""Connects to a Ray cluster, or starts one on this machine, and tells whether a job fits it. Needs the extra `ray`."""

import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Annotated

from ep_moe.fields import Field, check_fields
from ep_moe.launch.signals import held_back

CONNECT_SECS = 5.0
OBJECT_STORE_BYTES = 100 * 2**20  # of a cluster of our own: results are small


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeRanks:
    """The nodes of a job on a Ray cluster.

    Args:
        address: of the cluster: "auto", "HOST:PORT", or "local" for a new one on this machine that ends with the job;
            ignored in a process that is connected to a cluster.
        num_nodes: nodes to use. ranks_per_node: ranks on each of them.
        gpus: whether every rank gets a GPU, else a CPU; None: GPUs if there are enough.
    """

    address: str
    num_nodes: Annotated[int, Field(at_least=1)]
    ranks_per_node: Annotated[int, Field(at_least=1)]
    gpus: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node


def has_gpus(nodes: NodeRanks) -> bool:
    """Whether ranks get GPUs: as requested, or because enough nodes have one for each. Needs a connection. Local."""
    return nodes_with("GPU", nodes.ranks_per_node) >= nodes.num_nodes if nodes.gpus is None else nodes.gpus


@contextlib.contextmanager
def connected(nodes: NodeRanks) -> Iterator[None]:
    """Connect to the cluster; an existing connection of this process is used and stays.

    Errors: RuntimeError if ray is not installed, or the cluster does not answer within `CONNECT_SECS`. Local.
    """
    try:
        import ray
    except ImportError:
        raise RuntimeError("ray is not installed; install: pip install 'ep-moe[ray]'") from None
    if ray.is_initialized():
        yield
        return
    with _new_cluster(nodes) if nodes.address == "local" else _existing_cluster(nodes.address):
        try:
            yield
        finally:
            with held_back(signal.SIGINT, signal.SIGTERM):
                ray.shutdown()


@contextlib.contextmanager
def _existing_cluster(address: str) -> Iterator[None]:
    import ray

    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except Exception as error:  # noqa: BLE001 - Ray raises ConnectionError, RuntimeError and its own
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"ray ({address!r}) is not a cluster that can be used: {reason}") from error
    yield


def _check_answers(address: str) -> None:
    """Raise if nothing listens at the address: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"ray ({address!r}) is not auto, local or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECS).close()
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"ray ({address!r}) does not answer: {error}") from None


@contextlib.contextmanager
def _new_cluster(nodes: NodeRanks) -> Iterator[None]:
    """A cluster on this machine with a Ray node for each node of the job."""
    import ray

    if nodes.num_nodes == 1:
        ray.init(
            address="local",
            num_cpus=nodes.ranks_per_node,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
        yield
        return
    if nodes.gpus:
        raise RuntimeError(
            f"ray 'local' with nodes {nodes.num_nodes} needs device cpu: the GPUs of this machine are one node"
        )
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": nodes.ranks_per_node, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    try:
        for _ in range(nodes.num_nodes - 1):
            cluster.add_node(wait=False, **sizes)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level=logging.WARNING)
        yield
    finally:
        with held_back(signal.SIGINT, signal.SIGTERM):
            ray.shutdown()
            cluster.shutdown()


def nodes_with(kind: str, count: int) -> int:
    """The number of nodes that have `count` of a resource, in use or not. Needs a connection. Local."""
    return sum(amounts.get(kind, 0) >= count for amounts in _resources())


def check_nodes(nodes: NodeRanks, kind: str) -> None:
    """Raise RuntimeError if the cluster has too few nodes for the job, even when idle. Needs a connection. Local."""
    found = nodes_with(kind, nodes.ranks_per_node)
    if found < nodes.num_nodes:
        listed = ", ".join(f"{amounts.get(kind, 0):g}" for amounts in _resources()) or "none"
        raise RuntimeError(
            f"the Ray cluster has {found} nodes with {nodes.ranks_per_node} {kind}s, {nodes.num_nodes} are needed "
            f"(nodes {nodes.num_nodes}, nproc {nodes.ranks_per_node}); its nodes have {listed}"
        )


def _resources() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
