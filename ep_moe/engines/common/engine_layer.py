"""One layer of a serving engine that runs here: whether it can, its transport, weights, and our layer in each layout.

Letters: K top-k, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import ActivationConfig, Layout, MoEConfig, TransportConfig
from ep_moe.engines.common.formats import LoadedFormat, RowOrder, share_scale, weights_of
from ep_moe.engines.common.local import LocalExperts
from ep_moe.engines.common.model import warm_up
from ep_moe.engines.common.plugin import Plugin
from ep_moe.engines.common.rows import RowShare
from ep_moe.engines.common.transports import with_topk
from ep_moe.experts import create_experts, kernels_compute
from ep_moe.group import PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layer.warmup import round_kinds
from ep_moe.placement import Placement
from ep_moe.weights import ExpertWeights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a layer computes and sends.

    Args:
        loaded: how its weights are loaded. moe: the layer as ours, whose layout is not chosen yet.
        exchange: of its transport. num_topk: K.
    """

    loaded: LoadedFormat
    moe: MoEConfig
    exchange: TransportConfig
    num_topk: int


def eligible_kind(
    loaded: LoadedFormat,
    activation: ActivationConfig,
    *,
    hidden: int,
    intermediate: int,
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    max_num_tokens: int,
    num_slots: int,
) -> LayerKind:
    """The kind of a layer that we compute on the device that the model is made on.

    Args:
        num_experts: physical experts of all ranks. dtype: of the tokens.
        max_num_tokens: the most rows that this rank sends in a step. num_slots: rounds that may be open at once.
    Errors: ValueError says why the layer stays on its engine's path. Local.
    """
    scheme, device = loaded.scheme, torch.empty(0).device
    exchange = TransportConfig(
        hidden=hidden, max_tokens_per_rank=max(max_num_tokens, 1), dtype=dtype, num_slots=num_slots
    )
    moe = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        activation=activation,
        scheme=scheme.name,
    )
    rows_share = scheme.weight.granularity == "tensor" or scheme.weight.block[0] > 1
    if loaded.interleaved and rows_share:
        raise ValueError(f"its gate and up rows are interleaved and share scales in scheme '{scheme.name}'")
    if device.type == "cuda" and not kernels_compute(scheme):  # CPUs compute all
        raise ValueError(f"no kernels here compute scheme '{scheme.name}'")
    return LayerKind(loaded=loaded, moe=moe, exchange=with_topk(exchange, num_topk), num_topk=num_topk)


class EngineLayer:
    """The state of one layer, which its method of the engine keeps.

    Args:
        plugin: shared with the other layers. name: of the layer. kind: what it computes.
        share: which of the engine's rows this rank sends. process_group: the ranks, None for this rank alone.
        halves: the kinds of rounds whose kernels are compiled at load: whether send and receive of the dispatch are
            separate calls, and whether those of the combine are.
    Collective at the first layer: ranks join the group of the transports.
    """

    def __init__(
        self,
        plugin: Plugin,
        name: str,
        kind: LayerKind,
        *,
        share: RowShare,
        process_group: dist.ProcessGroup | None,
        halves: tuple[tuple[bool, bool], ...],
    ) -> None:
        self.plugin, self.name, self.kind, self.share = plugin, name, kind, share
        self.process_group = process_group
        self._halves = halves
        self._number = plugin.transports.number_module()
        self._order = RowOrder()
        self._device = torch.empty(0).device  # engines make their models under their device
        self.group = plugin.transports.join(process_group, self._device)
        self.weights: ExpertWeights | None = None  # once loaded

    def log_lost(self, error: PeerLostError) -> None:
        """Log that a rank is lost. Local."""
        self.plugin.log.error("ep_moe in %s: %s", self.name, error)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that the layer may use: small steps use the first, others the last."""
        chosen = self.plugin.config.layout
        return (Layout.COMPACT, Layout.FLAT) if chosen is None else (chosen,)

    def moe_layers(self, parameters: Any) -> dict[Layout, ExpertParallelMoE]:
        """Take the parameters of the engine's layer; called again after each reload of weights.

        Returns: a layer of ours for each layout, all on one transport and on the same weights.
        Errors: ValueError for parameters that are not as the engine's loader leaves them.
        Collective at the first call, without a deadline: ranks read checkpoints at different speeds.
        """
        weights, sizes = self._weights(parameters), self.kind.exchange
        transport = self.plugin.transports.get(self.process_group, self.kind.moe.num_experts, sizes, self._device)
        self._log(f"at most {sizes.max_tokens_per_rank} tokens per rank")
        made = {}
        for layout in self.layouts:
            made[layout] = ExpertParallelMoE(
                dataclasses.replace(self.kind.moe, layout=layout),
                weights,
                transport,
                experts=self.plugin.config.experts,
                layer_index=self._number,
            )
            self._warm_up(made[layout])
        return made

    def local_experts(self, parameters: Any) -> LocalExperts:
        """`moe_layers` for a layer whose rows are on all ranks, or on one rank alone: there is no exchange."""
        moe, exchange = self.kind.moe, self.kind.exchange
        weights = self._weights(parameters)
        made = LocalExperts(
            weights=weights,
            experts=create_experts(self.plugin.config.experts, moe.activation, self._device, scheme=weights.scheme),
            first=Placement.linear(moe.num_experts, self.group.num_ranks).starts[self.group.rank],
            num_experts=moe.num_experts,
        )
        self._log("without exchange")
        for layout in self.layouts:
            kind = (moe, layout, weights.num_local_experts, *(tensor is None for tensor in weights.optional))
            if kind not in self.plugin.warm:
                self.plugin.warm.add(kind)
                most = exchange.max_tokens_per_rank * self.share.sharers
                made.warm_up(layout, most, self.kind.num_topk, hidden=exchange.hidden, dtype=exchange.dtype)
        return made

    def _weights(self, parameters: Any) -> ExpertWeights:
        """The weights of the engine's parameters, where they were at the first call: CUDA graphs and launches read them
        there, and vLLM's `reload_weights` processes new tensors, which it copies to the first ones afterwards.

        Collective, without a deadline, at the first layer of its kind.
        """
        self._order.arrange(parameters, self.kind.loaded)
        if self.kind.loaded.scheme.weight.granularity == "tensor":
            share_scale(parameters)
        if self.kind.exchange not in self.plugin.loaded:  # waits until all ranks have read their files
            self.group.wait_for_all("load")
            self.plugin.loaded.add(self.kind.exchange)
        found = self._with_input_scales(parameters, weights_of(parameters, self.kind.loaded))
        if self.weights is None:
            self.weights = found
        self.weights.refit(found)
        return self.weights

    def _log(self, how: str) -> None:
        """Log once for each kind of layer that it runs here."""
        layouts, scheme = " or ".join(layout.value for layout in self.layouts), self.kind.moe.scheme
        self.plugin.log_once(
            f"{self.kind.exchange} {scheme}",
            logging.INFO,
            f"ep_moe runs {self.name} and layers like it: {self.group.num_ranks} ranks, scheme {scheme}, layout "
            f"{layouts} (by the step's tokens), {how}",
        )

    def _with_input_scales(self, parameters: Any, weights: ExpertWeights) -> ExpertWeights:
        """Add static scales of activations, if any: one for all experts of all ranks, the largest, since an
        engine's load balancer moves experts without them. Collective then."""
        if self.kind.loaded.method.input_scale is None:
            return weights
        own = [float(getattr(parameters, f"{name}_input_scale").max()) for name in ("w13", "w2")]
        first, second = (max(scales) for scales in zip(*self.group.all_gather_object(own), strict=True))
        like: dict[str, Any] = {"dtype": torch.float32, "device": weights.w13.values.device}
        return dataclasses.replace(
            weights,
            w13_input_scale=torch.full((1,), first, **like),
            w2_input_scale=torch.full((weights.num_local_experts,), second, **like),
        )

    def _warm_up(self, moe_layer: ExpertParallelMoE) -> None:
        """Compile the kernels of a kind of layer once. Collective on GPUs, does nothing on a CPU."""
        kind = (moe_layer.config, id(moe_layer.transport), *(tensor is None for tensor in moe_layer.weights.optional))
        if kind not in self.plugin.warm:
            self.plugin.warm.add(kind)
            warm_up([moe_layer], self.kind.num_topk)
            if self._device.type == "cuda":
                rounds = round_kinds(moe_layer, self.kind.num_topk, padded=False)
                moe_layer.transport.warmup(
                    [
                        dataclasses.replace(round_, split_dispatch=dispatch, split_combine=combine)
                        for round_ in rounds
                        for dispatch, combine in self._halves
                    ]
                )
