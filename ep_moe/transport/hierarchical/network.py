"""The nodes of a group, each with as many ranks, numbered node by node, and messages between them.

Each rank exchanges rows with the ranks of its number on the other nodes, chunk by chunk.
Letters: N nodes, R ranks, G ranks of a node, H hidden.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin, begin_all_to_all
from ep_moe.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeGrid:
    """Rank r is number r % G of node r // G."""

    num_nodes: int  # N
    ranks_per_node: int  # G
    rank: int  # this one

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """This rank's number in its node."""
        return self.rank % self.ranks_per_node

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        size = self.ranks_per_node
        return tuple(tuple(range(node * size, (node + 1) * size)) for node in range(self.num_nodes))

    @property
    def relays(self) -> tuple[int, ...]:
        """By node, the rank that has this rank's number there, which forwards this rank's tokens."""
        return tuple(range(self.local_rank, self.num_nodes * self.ranks_per_node, self.ranks_per_node))

    def experts(self, placement: Placement) -> tuple[tuple[int, int], ...]:
        """By node, its physical experts [first, last)."""
        return tuple((placement.starts[ranks[0]], placement.starts[ranks[-1] + 1]) for ranks in self.nodes)


def find_nodes(group: EPGroup, ranks_per_node: int) -> NodeGrid:
    """The nodes as the launcher has made them, or, if `ranks_per_node` is not 0, of so many consecutive ranks.

    Errors: ValueError, on every rank alike, if nodes would have different numbers of ranks, or ranks are not numbered
    node by node. Collective.
    """
    num_ranks = group.num_ranks
    if ranks_per_node:
        if num_ranks % ranks_per_node:
            raise ValueError(f"ranks_per_node ({ranks_per_node}) does not divide num_ranks ({num_ranks})")
        return NodeGrid(num_nodes=num_ranks // ranks_per_node, ranks_per_node=ranks_per_node, rank=group.rank)
    node_of = group.all_gather_object(group.node)
    counts = {node: node_of.count(node) for node in dict.fromkeys(node_of)}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{count} on node {node}" for node, count in counts.items())
        raise ValueError(
            f"nodes have different numbers of ranks ({sizes}): transport 'hierarchical' needs as many on every node"
        )
    size = num_ranks // len(counts)
    if any(len(set(node_of[start : start + size])) > 1 for start in range(0, num_ranks, size)):
        raise ValueError(
            f"ranks 0 to {num_ranks - 1} are on nodes {node_of}: transport 'hierarchical' needs them node by node"
        )
    return NodeGrid(num_nodes=len(counts), ranks_per_node=size, rank=group.rank)


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
