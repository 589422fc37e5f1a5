"""A quantization method of SGLang that computes here: SGLang's object loads the weights, we do the rest."""

import dataclasses
from typing import Any

import torch
from sglang.srt.batch_overlap.single_batch_overlap import SboFlags
from sglang.srt.distributed.parallel_state import get_moe_ep_group
from sglang.srt.layers.moe.utils import get_moe_a2a_backend

from ep_moe.config import Layout
from ep_moe.engines.common.engine_layer import EngineLayer, LayerKind
from ep_moe.engines.common.local import LocalExperts
from ep_moe.engines.common.plugin import Plugin, adopt
from ep_moe.engines.common.rows import RowShare
from ep_moe.engines.sglang.step import layout_of, standard, without_padding
from ep_moe.layer import ExpertParallelMoE
from ep_moe.transport import Dispatched

_HALVES_OF_HOOKS = ((True, False),)  # single-batch overlap runs a hook between the halves of a dispatch
_HALVES_OF_TWO = ((True, True),)  # two batches that alternate


class LayerMethod(EngineLayer):
    """The state and the work of one layer, which its method of SGLang calls.

    Args:
        plugin: shared with the other layers. layer: FusedMoE, as far as its constructor has come.
        kind: what it computes.
    Collective at the first layer: ranks join the group of the transports.
    """

    def __init__(self, plugin: Plugin, layer: Any, kind: LayerKind) -> None:
        runner, ranks = layer.moe_runner_config, layer.moe_ep_size
        self.equal_rows = get_moe_a2a_backend().is_none()  # on all ranks, and the model sums their outputs
        super().__init__(
            plugin,
            layer.layer_name,
            kind,
            share=RowShare(sharers=ranks if self.equal_rows else 1, rank=layer.moe_ep_rank),
            process_group=get_moe_ep_group().device_group if ranks > 1 else None,
            halves=(
                (False, False),
                *_HALVES_OF_HOOKS * SboFlags.enable_dispatch_shared_one_stream_overlap(),
                *_HALVES_OF_TWO * (kind.exchange.num_slots > 1),
            ),
        )
        self.weights_on_input = bool(runner.apply_router_weight_on_input)
        self._layer = layer
        self._made: dict[Layout, ExpertParallelMoE] = {}
        self._local: LocalExperts | None = None

    @property
    def factor(self) -> float | None:
        """What weights of equal rows are multiplied by because SGLang's own experts on a GPU would multiply their
        output by it. On CPUs, and where the router does it, the model or the router multiplies."""
        factor: float | None = self._layer.moe_runner_config.routed_scaling_factor
        theirs = self._device.type == "cuda" and not self._layer.should_fuse_routed_scaling_factor_in_topk
        return factor if theirs else None

    def load(self, layer: Any) -> None:
        """Take the layer's parameters; called again after each reload of weights. Collective at the first call.

        Some models set only after the layer's constructor that gate and up rows of modelopt's NVFP4 are interleaved.
        """
        loaded = self.kind.loaded
        interleaved = getattr(layer, "inference_moe_w13_interleaved", False)
        if interleaved and "global_scale" in loaded.method.parts and not loaded.interleaved:
            self.kind = dataclasses.replace(self.kind, loaded=dataclasses.replace(loaded, interleaved=True))
        if self.equal_rows:
            self._local = self.local_experts(layer)
        else:
            self._made = self.moe_layers(layer)

    def part(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        """This rank's part of the sums of equal rows [T, H]. Errors: RuntimeError before weights are loaded. Local."""
        if self._local is None:
            raise RuntimeError(f"{self.name} was called before its weights were loaded")
        ids, weights = standard(topk_output)
        if self.factor is not None:
            weights = weights * self.factor
        layout, on_input = layout_of(self.layouts), self.weights_on_input
        return self._local(hidden_states, without_padding(ids), weights, layout, weights_on_input=on_input)

    def of_step(self) -> ExpertParallelMoE:
        """Our layer, in the layout of this step. Errors: RuntimeError before weights are loaded. Local."""
        if not self._made:
            raise RuntimeError(f"{self.name} was called before its weights were loaded")
        return self._made[layout_of(self.layouts)]

    def experts(self, made: ExpertParallelMoE, dispatched: Dispatched) -> torch.Tensor:
        """Compute the experts of a round; if they fail, the round is ended and the other ranks get NaN. Collective."""
        try:
            return made.experts(dispatched.batch, made.weights)
        except Exception:
            made.transport.abandon(slot=dispatched.handle.slot)
            raise


def compute_here(method: Any, state: LayerMethod) -> None:
    """Let a method of SGLang compute here, with weights as they were loaded: SGLang would repack them. Local."""
    adopt(
        method,
        state,
        process_weights_after_loading=lambda self, layer: state.load(layer),
        restore_weights_before_loading=lambda self, layer: None,  # nothing was repacked
        apply=lambda self, layer, dispatch_output: dispatch_output.compute(),
    )
