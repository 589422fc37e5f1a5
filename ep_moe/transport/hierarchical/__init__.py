"""Exchange over several nodes: a token crosses the network once for each node, then spreads inside it."""

from ep_moe.transport.hierarchical.gathered import NodesGatheredTransport
from ep_moe.transport.hierarchical.transport import HierarchicalTransport

__all__ = ["HierarchicalTransport", "NodesGatheredTransport"]
