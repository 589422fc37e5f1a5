"""Rounds of a fixed size over several nodes: those of `gathered`, whose results are summed node by node.

Letters: T tokens on this rank, H hidden, R ranks, N nodes, G ranks of a node, B bound of a round.
"""

from typing import Any

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import weighted_sum
from ep_moe.placement import Placement
from ep_moe.transport.base import Dispatched
from ep_moe.transport.collective.gathered import GatheredRound, GatheredTransport
from ep_moe.transport.collective.transport import CollectiveRound
from ep_moe.transport.headers import HEADER_WORDS
from ep_moe.transport.hierarchical.network import NetworkTraffic, NodeGrid, find_nodes
from ep_moe.transport.host_sync import Tokens


class NodesGatheredTransport(GatheredTransport):
    """Exchange by an all-gather and an all-to-all, whose bits are those of `HierarchicalTransport`.

    Args: as of `GatheredTransport`; `config.ranks_per_node` may declare nodes.

    Attributes:
        nodes: of the group.
        traffic: what this rank has sent to other nodes. An all-gather takes a message to each of them once; every rank
            there sends as many results back. Of a captured round it is counted at capture. Local.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        super().__init__(group, placement, config)
        self.nodes: NodeGrid = find_nodes(group, config.ranks_per_node)
        self.traffic = NetworkTraffic()

    @property
    def ranks_per_sum(self) -> int:
        """See `Transport.ranks_per_sum`: the ranks of a node. Local."""
        return self.nodes.ranks_per_node

    @property
    def _elsewhere(self) -> int:
        """Ranks of other nodes."""
        return self.num_ranks - self.nodes.ranks_per_node

    def _count_headers(self) -> None:
        self.traffic.metadata_bytes += self._elsewhere * HEADER_WORDS * torch.int64.itemsize

    def _send(self, tokens: Tokens, slot: int) -> CollectiveRound:
        state = super()._send(tokens, slot)
        assert isinstance(state, GatheredRound)
        rows, payload_bytes = state.sizes.most * (self.nodes.num_nodes - 1), state.row_format.payload_bytes
        height = state.send_counts[0] * (self.nodes.num_nodes - 1)
        self.traffic.dispatch_rows += rows
        self.traffic.dispatch_bytes += rows * payload_bytes
        self.traffic.metadata_bytes += height * state.row_format.row_bytes - rows * payload_bytes
        if not state.captured:
            self._count_headers()
        return state

    def _send_results(self, state: CollectiveRound, y: torch.Tensor, dispatched: Dispatched) -> None:
        super()._send_results(state, y, dispatched)
        rows = self._elsewhere * state.send_counts[0]
        self.traffic.combine_rows += rows
        self.traffic.combine_bytes += rows * self.config.hidden * self.config.dtype.itemsize

    def _receive_results(self, state: CollectiveRound) -> tuple[torch.Tensor, torch.Tensor]:
        results, columns = super()._receive_results(state)
        num_tokens, per_node = len(columns), self.nodes.ranks_per_node
        if per_node == 1:
            return results, columns
        # a row for each node and token, and that of NaN, in the place of one for each rank and token
        by_node = columns[:, :-1].split(per_node, dim=1)
        shape = len(by_node), num_tokens, self.config.hidden
        sums = results.new_empty(len(by_node) * num_tokens + 1, results.shape[1])
        for rows, of_node in zip(sums[:-1].view(*shape), by_node, strict=True):
            weighted_sum(results, of_node.contiguous(), None, out=rows)
        sums[-1] = results[-1]
        there = torch.stack([*((of_node >= 0).any(1) for of_node in by_node), columns[:, -1] >= 0], 1)
        like: dict[str, Any] = {"dtype": torch.int32, "device": columns.device}
        places = num_tokens * torch.arange(len(by_node) + 1, **like) + torch.arange(num_tokens, **like)[:, None]
        places[:, -1] = len(sums) - 1
        return sums, torch.where(there, places, -1)

    def _send_refusal(self, num_tokens: int, round_: int) -> None:
        super()._send_refusal(num_tokens, round_)
        self._count_headers()
