"""The memory of the one-sided exchange that peers write to: torch symmetric memory or NVSHMEM's symmetric heap.

In the interpreter it is files. Memory of a slot that no peer sees is in `slot_state`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.nvshmem_heap import NvshmemBuffer, check_nvshmem
from ep_moe.group.symmetric import SymmetricBuffer, why_unreachable
from ep_moe.kernels.exchange.peers import Links
from ep_moe.kernels.exchange.wire_layout import PLACE_BITS, RETURNED, VALUES, Ranks, Regions, host_abort
from ep_moe.placement import Placement
from ep_moe.transport.one_sided.tuning import WORD_TOKENS

MOST_RANKS = 32  # one bit each in int32 masks
MOST_TOKENS = 1 << PLACE_BITS.value  # of a rank: an entry's low bits hold a row's place, its high bits the expert
MOST_LOCAL_EXPERTS = 1 << 31 - PLACE_BITS.value
ABORT_BYTES = 256  # after the slots: abort words, in cache lines of their own


def check_limits(name: str, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
    """Raise ValueError if a size exceeds what the words of transport `name` hold. Local."""
    most_experts = max(map(placement.num_local_experts, range(group.num_ranks)))
    for size, value, limit in (
        ("num_ranks", group.num_ranks, MOST_RANKS),
        ("max_tokens_per_rank", config.max_tokens_per_rank, MOST_TOKENS),
        ("num_local_experts", most_experts, MOST_LOCAL_EXPERTS),
    ):
        if value > limit:
            raise ValueError(f"{size} ({value}) exceeds {limit}, the most that transport {name!r} carries")


def ranks_of(placement: Placement, rank: int, puts: int = 0) -> Ranks:
    """The constants of kernels that depend on the ranks alone. puts: a bit for each rank that puts reach."""
    num_ranks = placement.num_ranks
    most = max(*map(placement.num_local_experts, range(num_ranks)), 1)
    return Ranks(
        R=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        RANK=rank,
        STARTS=placement.starts,
        L=most,
        EXPERTS=triton.next_power_of_2(most),
        PUTS=puts,
    )


def regions_of(config: TransportConfig, ranks: Ranks) -> Regions:
    """The regions of a slot's memory."""
    return Regions(
        num_ranks=ranks.R,
        max_experts=ranks.L,
        max_tokens=config.max_tokens_per_rank,
        hidden=config.hidden,
        max_topk=config.max_topk,
        itemsize=config.dtype.itemsize,
        word_tokens=WORD_TOKENS,
    )


class PeerMemory:
    """The peer-visible memory of a transport: regions of each slot, and abort words.

    Args:
        regions: of a slot, the same on all ranks.
        puts: a bit for each rank that is reached by puts, from an outbox of this rank; 0 by addresses alone.
        make_buffer: makes the memory from the group and a number of bytes; by default a `SymmetricBuffer`.
    Attributes:
        links: by slot, how kernels reach the ranks' memory.
        num_bytes: of this rank's part.
        abort: [R] int64, this rank's abort words, by the rank that writes them.
        libraries: of device code that kernels link, name -> file.
        prepare: called with each kernel that has been loaded, if it needs that.
    Errors: RuntimeError if the machine lacks the memory. Collective.
    """

    def __init__(
        self,
        group: EPGroup,
        regions: Regions,
        num_slots: int,
        *,
        puts: int = 0,
        make_buffer: Callable[[EPGroup, int], Any] | None = None,
    ) -> None:
        *offsets, slot_bytes = regions.offsets
        self._regions, self._slot_bytes, self._offsets = regions, slot_bytes, tuple(offsets)
        inbox_bytes = num_slots * slot_bytes + ABORT_BYTES
        self.num_bytes = inbox_bytes + (num_slots * slot_bytes if puts else 0)
        self._buffer = (make_buffer or SymmetricBuffer)(group, self.num_bytes)
        self.libraries: dict[str, str] = getattr(self._buffer, "libraries", {}) if puts else {}
        self.prepare: Callable[[Any], None] | None = getattr(self._buffer, "prepare", None) if puts else None
        addresses, aborts_at = self._buffer.addresses, num_slots * slot_bytes
        self._check_reached(group, puts)
        bases = [addresses[group.rank if puts >> rank & 1 else rank] for rank in range(group.num_ranks)]
        self.abort = self._buffer.local[aborts_at:][: 8 * group.num_ranks].view(torch.int64)
        self._urgent = torch.zeros(1, dtype=torch.int64, pin_memory=group.device.type == "cuda", device="cpu")
        aborts = [start + aborts_at if start else 0 for start in addresses]
        aborts_ptr = torch.tensor(aborts, dtype=torch.int64, device=group.device)
        self.links = [
            Links(
                tuple(start + slot * slot_bytes for start in bases),
                self._offsets,
                aborts_ptr,
                self.abort,
                self._urgent,
                inbox_bytes if puts else None,
            )
            for slot in range(num_slots)
        ]
        self.reset()
        group.barrier()  # no rank sends results before all ranks have written the sentinel

    def _check_reached(self, group: EPGroup, puts: int) -> None:
        """Raise RuntimeError, on all ranks, if one has no address of a rank that it does not reach by puts. Collective.

        NVSHMEM can be configured not to map peers that CUDA could map.
        """
        missing = [rank for rank, address in enumerate(self._buffer.addresses) if not address and not puts >> rank & 1]
        for rank, unmapped in enumerate(group.all_gather_object(missing)):
            if unmapped:
                self._buffer.destroy()
                names = " and ".join(f"rank {peer}" for peer in unmapped)
                raise RuntimeError(f"rank {rank} has no address of the memory of {names}, and is to store there")

    def values(self, slot: int) -> torch.Tensor:
        """A slot's region of received rows, uint8."""
        return self._region(slot, VALUES.value)

    def _region(self, slot: int, name: int) -> torch.Tensor:
        start = slot * self._slot_bytes + self._offsets[name]
        return self._buffer.local[start : start + self._regions.sizes[name]]

    @torch.inference_mode()  # which alone may write tensors that were made in it
    def reset(self) -> None:
        """Fill the regions of results with the sentinel (all ones) and clear the abort words, while no rank sends.

        Local, on the current stream.
        """
        for slot in range(len(self.links)):
            self._region(slot, RETURNED.value).fill_(0xFF)
        self._urgent[0] = 0
        self.abort.zero_()

    @torch.inference_mode()
    def end_waits(self, suspects: Sequence[int]) -> None:
        """End all waits of this rank, for these suspects. Local; no CUDA call, which could block on them."""
        self._urgent[0] = host_abort(tuple(suspects))

    def destroy(self) -> None:
        """Free everything. Local; calling it twice is fine."""
        self.links = []
        self.abort = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._buffer.destroy()


def map_peers(group: EPGroup, placement: Placement, config: TransportConfig) -> tuple[Ranks, PeerMemory]:
    """The kernels' constants of the ranks, and symmetric memory that all of them reach by address.

    Errors: RuntimeError if they do not. Collective.
    """
    reason = why_unreachable(group)
    if reason:
        raise RuntimeError(f"transport 'peer' needs memory that all ranks reach, but {reason}")
    ranks = ranks_of(placement, group.rank)
    return ranks, PeerMemory(group, regions_of(config, ranks), config.num_slots)


def map_heap(group: EPGroup, placement: Placement, config: TransportConfig) -> tuple[Ranks, PeerMemory]:
    """`map_peers` with NVSHMEM's heap, which peers reach by address or by puts; in the interpreter, with files."""
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
    return ranks, PeerMemory(group, regions_of(config, ranks), config.num_slots, puts=puts, make_buffer=make)
