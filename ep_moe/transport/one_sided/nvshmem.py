"""The one-sided transport over NVSHMEM's symmetric heap, on one node or several; in the interpreter, over files."""

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.nvshmem_heap import NvshmemBuffer, check_nvshmem
from ep_moe.group.symmetric import SymmetricBuffer, why_unreachable
from ep_moe.kernels.exchange.wire_layout import Ranks
from ep_moe.placement import Placement
from ep_moe.transport.one_sided.memory import PeerMemory
from ep_moe.transport.one_sided.round_plan import ranks_of, regions_of
from ep_moe.transport.one_sided.transport import NvlinkTransport


class NvshmemTransport(NvlinkTransport):
    """`NvlinkTransport`, in whose place NVSHMEM provides the memory; the kernels and the protocol are the same.

    `TransportConfig.nvshmem_stores` chooses how kernels reach each other rank: by the address at which its heap is
    mapped here, or by NVSHMEM's put-with-signal, from an outbox that takes as much memory again. Kernels with puts link
    NVSHMEM's device code, which takes seconds for each kernel.

    Errors, on all ranks and before anything is sent: RuntimeError if NVSHMEM is absent or of another version, if ranks
    that need it do not reach each other's memory, or if a heap is too small; ValueError for `on_peer_loss` "mask" on
    several nodes. Collective.
    """

    name = "nvshmem"

    def _connect(self, group: EPGroup, placement: Placement, config: TransportConfig) -> tuple[Ranks, PeerMemory]:
        on_gpus, stores = group.device.type == "cuda", config.nvshmem_stores
        if on_gpus:
            check_nvshmem(group)
        reason = why_unreachable(group, inside_nodes=stores != "addresses")
        if reason:
            needs = "that all ranks reach" if stores == "addresses" else "that all ranks of a node reach"
            raise RuntimeError(f"transport 'nvshmem' with nvshmem_stores {stores!r} needs memory {needs}, but {reason}")
        nodes = group.all_gather_object(group.node)
        if config.on_peer_loss == "mask" and len(set(nodes)) > 1:
            raise ValueError(
                f"on_peer_loss ('mask') needs ranks on one node, got {len(set(nodes))}: puts to another node may still "
                "be under way when their kernel has ended"
            )
        puts = 0
        for rank, node in enumerate(nodes):
            by_put = stores == "puts" or (stores == "auto" and node != group.node)
            puts |= (by_put and rank != group.rank) << rank
        ranks = ranks_of(placement, group.rank, puts)
        make = NvshmemBuffer if on_gpus else SymmetricBuffer
        memory = PeerMemory(group, regions_of(config, ranks), config.num_slots, puts=puts, make_buffer=make)
        return ranks, memory
