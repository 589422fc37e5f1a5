"""The nodes of a group, each with as many ranks, numbered node by node.

Letters: R ranks, N nodes, G ranks of a node.
"""

import dataclasses

from ep_moe.group import EPGroup
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
