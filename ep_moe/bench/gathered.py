"""Baseline of expert-parallel exchanges: gather every token on every rank, compute, sum and scatter the outputs.

Letters: T tokens per rank, R ranks, N = R * T, H hidden, K top-k, G scale groups.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layout import pack_routed
from ep_moe.quant import Quantized, quantize
from ep_moe.routing import Routing, route

# torch 2.13 renamed both collectives and warns about the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GatheredMoE:
    """A MoE layer by all-gather and reduce-scatter, on NCCL one launch each.

    The payload is a transport's: values in the scheme's format, their scales, ids and weights. Every rank computes its
    own experts for all N tokens in the FLAT layout, and the sums are scattered in the model's dtype.

    Args:
        layer: with a routing; gives config, placement, weights and experts, and is what this is compared with.
        group: its ranks, all with the same number of tokens.
    """

    def __init__(self, layer: ExpertParallelMoE, group: EPGroup) -> None:
        if layer.config.routing is None:
            raise ValueError("the layer has no routing config, which the gathered layer needs")
        self.phases = layer.phases  # gets route, dispatch, experts and combine; may be replaced between calls
        self._layer, self._routing, self._group = layer, layer.config.routing, group

    def __call__(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Compute this rank's tokens [T, H] from logits [T, E]; returns [T, H]. Collective."""
        layer, placement = self._layer, self._layer.placement
        with self.phases.phase("route"):
            routing = route(router_logits, self._routing, routing_bias=layer.routing_bias)
            ids = placement.to_physical(routing.topk_ids)
        with self.phases.phase("dispatch"):
            x, gathered = self._gather(hidden_states, ids, routing.topk_weights)
            packed = pack_routed(
                x,
                gathered.topk_ids,
                gathered.topk_weights,
                Layout.FLAT,
                scheme=layer.scheme,
                dtype=hidden_states.dtype,
                first=placement.local_expert_offset(self._group.rank),
                num_local_experts=layer.weights.num_local_experts,
                capacity=gathered.topk_ids.shape[0],
            )
            # pack assumes the worst case, far above the rows that experts get here, which could select wrong tiles
            expected_rows = math.ceil(ids.numel() * self._group.num_ranks / placement.num_physical)
            batch = dataclasses.replace(packed.batch, expected_rows=expected_rows)
        with self.phases.phase("experts"):
            y = layer.experts(batch, layer.weights)
        with self.phases.phase("combine"):
            return self._scatter(y)

    def _gather(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor | Quantized, Routing]:
        """The tokens of all ranks, with their ids and weights."""
        layer, mine = self._layer, [ids.contiguous(), weights.contiguous()]
        if layer.scheme.payload.quantized:
            quantized = quantize(x, layer.scheme, static_scale=layer.weights.w13_input_scale)
            mine += [quantized.values, quantized.scale.contiguous()]
        else:
            mine.append(x.contiguous())
        all_ids, all_weights, values, *scale = self._all_gather(mine)
        tokens = Quantized(values=values, scale=scale[0], scheme=layer.scheme) if scale else values
        return tokens, Routing(topk_ids=all_ids, topk_weights=all_weights)

    def _all_gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each [T, .] as [N, .], in rank order, all in one launch; as bytes, as a launch takes one dtype."""
        if self._group.process_group is None:
            return list(tensors)
        gathered = [t.new_empty(self._group.num_ranks * t.shape[0], *t.shape[1:]) for t in tensors]
        with _coalescing_manager(group=self._group.process_group):
            for whole, part in zip(gathered, tensors, strict=True):
                all_gather(_flat_bytes(whole), _flat_bytes(part), group=self._group.process_group)
        return gathered

    def _scatter(self, y: torch.Tensor) -> torch.Tensor:
        """Sum [N, H] over the ranks; this rank's [T, H] of it."""
        if self._group.process_group is None:
            return y
        out = y.new_empty(y.shape[0] // self._group.num_ranks, y.shape[1])
        reduce_scatter(out, y, group=self._group.process_group)
        return out


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
