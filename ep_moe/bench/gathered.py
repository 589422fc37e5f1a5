"""Baseline of expert-parallel exchanges: gather every token on every rank, compute, sum and scatter the outputs.

Letters: T tokens per rank, R ranks, N = R * T, H hidden, K top-k, G scale groups.
"""

import contextlib
from typing import cast

import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from ep_moe.config import Layout
from ep_moe.experts import Experts
from ep_moe.group import EPGroup
from ep_moe.group.collectives import all_gather_single, reduce_scatter_single
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layout import ExpertBatch
from ep_moe.local_moe import local_moe
from ep_moe.quant import Quantized, quantize
from ep_moe.routing import Routing, route
from ep_moe.weights import ExpertWeights


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
            routing = Routing(topk_ids=placement.to_physical(routing.topk_ids), topk_weights=routing.topk_weights)
        with contextlib.ExitStack() as dispatch:  # packing belongs to it too
            dispatch.enter_context(self.phases.phase("dispatch"))

            def experts(batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
                dispatch.close()
                with self.phases.phase("experts"):
                    return layer.experts(batch, weights, out=out)

            x, gathered = self._gather(hidden_states, routing)
            y = local_moe(
                x,
                gathered,
                layer.weights,
                cast(Experts, experts),
                layout=Layout.FLAT,
                local_expert_offset=placement.local_expert_offset(self._group.rank),
                num_experts=placement.num_physical,
                dtype=hidden_states.dtype,
            )
        with self.phases.phase("combine"):
            return self._scatter(y)

    def _gather(self, x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor | Quantized, Routing]:
        """The tokens of all ranks, in rank order, over NCCL in one launch; as bytes, as a launch takes one dtype."""
        layer, mine = self._layer, [routing.topk_ids.contiguous(), routing.topk_weights.contiguous()]
        if layer.scheme.payload.quantized:
            quantized = quantize(x, layer.scheme, static_scale=layer.weights.w13_input_scale)
            mine += [quantized.values, quantized.scale.contiguous()]
        else:
            mine.append(x.contiguous())
        everyones, group = mine, self._group.process_group
        if group is not None:
            everyones = [t.new_empty(self._group.num_ranks * t.shape[0], *t.shape[1:]) for t in mine]
            on_nccl = torch.distributed.get_backend(group) == "nccl"  # over gloo, coalesced calls crash now and then
            with _coalescing_manager(group=group) if on_nccl else contextlib.nullcontext():
                for whole, part in zip(everyones, mine, strict=True):
                    flat = [tensor.view(-1).view(torch.uint8) for tensor in (whole, part)]
                    all_gather_single(flat[0], flat[1], group=group)
        ids, weights, values, *scale = everyones
        tokens = Quantized(values=values, scale=scale[0], scheme=layer.scheme) if scale else values
        return tokens, Routing(topk_ids=ids, topk_weights=weights)

    def _scatter(self, y: torch.Tensor) -> torch.Tensor:
        """Sum [N, H] over the ranks; this rank's [T, H] of it."""
        if self._group.process_group is None:
            return y
        out = y.new_empty(y.shape[0] // self._group.num_ranks, y.shape[1])
        reduce_scatter_single(out, y, group=self._group.process_group)
        return out
