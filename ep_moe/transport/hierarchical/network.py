"""Messages between nodes: each rank exchanges rows with the ranks of its number on the other nodes, chunk by chunk.

Letters: N nodes, R ranks, H hidden.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin, begin_all_to_all
from ep_moe.transport.hierarchical.nodes import NodeGrid


@dataclasses.dataclass(kw_only=True, slots=True)
class NetworkTraffic:
    """What this rank has sent to other nodes since its transport was created, counted as it is sent.

    `dispatch_bytes` are values and scales of tokens; ids, weights, padding and headers are `metadata_bytes`.
    """

    dispatch_rows: int = 0
    dispatch_bytes: int = 0
    combine_rows: int = 0
    combine_bytes: int = 0
    metadata_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A chunk in flight, to and from all other nodes. It keeps the tensors alive that the backend reads and writes."""

    work: dist.Work
    incoming: tuple[torch.Tensor, ...]  # by source rank
    outgoing: tuple[torch.Tensor, ...]
    staged: torch.Tensor | None  # what arrives, if the backend cannot receive in place

    def land(self) -> None:
        """Copy staged rows to their places, once the work is complete. Local."""
        if self.staged is not None:
            for place, rows in zip(self.incoming, self.staged.split([len(t) for t in self.incoming]), strict=True):
                place.copy_(rows)


class Network:
    """Sends rows between nodes over the group's backend: NCCL in place, gloo by way of a copy.

    Every rank calls `exchange` equally often, also if it has nothing to send: it is a collective of the whole group in
    which ranks with other numbers on their nodes exchange nothing.
    """

    def __init__(self, group: EPGroup, grid: NodeGrid) -> None:
        self._group, self._grid = group, grid
        self.traffic = NetworkTraffic()

    def exchange(self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor]) -> Message:
        """Send outgoing[n] to node n and receive incoming[n] from it; those of this node are left out.

        Args:
            incoming, outgoing: by node, [rows, any], contiguous, of one dtype. At least 2 nodes.
        Errors: PeerLostError. Collective, no wait; on the current stream.
        """
        takes, sends = self._by_rank(incoming), self._by_rank(outgoing)
        if self._group.backend == "nccl":
            process_group = self._group.process_group
            work = begin(self._group, lambda: dist.all_to_all(takes, sends, group=process_group, async_op=True))
            return Message(work=work, incoming=tuple(takes), outgoing=tuple(sends), staged=None)
        packed, staged = torch.cat(sends), incoming[0].new_empty(sum(map(len, takes)), incoming[0].shape[1])
        started = begin_all_to_all(self._group, staged, packed, [len(t) for t in takes], [len(t) for t in sends])
        assert started is not None
        return Message(work=started, incoming=tuple(takes), outgoing=(packed,), staged=staged)

    def _by_rank(self, by_node: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[R] tensors: those of the relays on other nodes, and empty ones."""
        tensors = [by_node[0][:0]] * self._group.num_ranks
        for node, rank in enumerate(self._grid.relays):
            if node != self._grid.node:
                tensors[rank] = by_node[node]
        return tensors

    def wait(self, messages: Sequence[Message], phase: str, round_: int) -> None:
        """Wait for messages and land them. Errors: PeerLostError. Collective, host sync."""
        for message in messages:
            self._group.wait(message.work, phase=phase, round=round_)
            message.land()
