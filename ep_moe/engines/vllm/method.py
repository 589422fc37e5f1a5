"""A quantization method of vLLM that computes here: vLLM's own object creates and loads the weights, we do the rest.

Letters: T rows on this rank, K top-k, E physical experts, R ranks, M max_tokens_per_rank.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

from ep_moe.config import Layout
from ep_moe.engines.common.engine_layer import EngineLayer, LayerKind
from ep_moe.engines.common.local import LocalExperts
from ep_moe.engines.common.plugin import Plugin, adopt
from ep_moe.engines.vllm.experts import EpMoeBatchedExperts, EpMoeStandardExperts
from ep_moe.engines.vllm.prepare_finalize import EpMoePrepareAndFinalize, RoundOptions
from ep_moe.engines.vllm.step import in_micro_batch, share_of, shared_experts_beside, tokens_of_ranks, without_padding
from ep_moe.group import PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layout.frame import compact_rows

# tokens of all ranks, if each had as many as any, up to which "auto" packs rows (COMPACT), else gathers them (FLAT)
SMALL_STEP = 1024
_HALVES = ((False, False), (False, True))  # shared experts of large steps run between the halves of a combine
_HALVES_OF_MICRO_BATCHES = ((True, True),)


class LayerMethod(EngineLayer):
    """The state and the work of one layer, which its method of vLLM calls.

    Args:
        plugin: shared with the other layers. layer: RoutedExperts, as far as its constructor has come.
        moe: its FusedMoEConfig. kind: what it computes.
    Collective at the first layer: ranks join the group of the transports.
    """

    def __init__(self, plugin: Plugin, layer: Any, moe: Any, kind: LayerKind) -> None:
        parallel = moe.moe_parallel_config
        super().__init__(
            plugin,
            layer.layer_name,
            kind,
            share=share_of(parallel),
            process_group=get_ep_group().device_group if parallel.ep_size > 1 else None,
            halves=_HALVES + _HALVES_OF_MICRO_BATCHES * (kind.exchange.num_slots > 1),
        )
        self._moe = moe
        self._values = kind.loaded.method.names["values"]
        self._kernels: dict[Layout, mk.FusedMoEKernel] = {}
        self._local: LocalExperts | None = None
        self.local = self.share.sharers == self.group.num_ranks  # rows do not move

    def load(self, layer: Any) -> mk.FusedMoEKernel | None:
        """Take the layer's parameters; called again after each reload of weights.

        Returns: the kernel of the first layout; vLLM asks it for properties that all layouts share. None if rows do not
            move: vLLM's all-reduce adds up what ranks return.
        Collective at the first call, without a deadline: ranks read checkpoints at different speeds.
        """
        if type(layer.quant_method).__name__ == "AutoGPTQMoEMethod":
            for name in ("w13_bias", "w2_bias"):  # which 0.33 makes whether or not the checkpoint has them
                if name not in getattr(layer, "_loaded_expert_biases", (name,)):
                    layer.register_parameter(name, None)
        if self.local:
            self._local = self.local_experts(layer)
            return None
        self._kernels = {layout: self._kernel(made) for layout, made in self.moe_layers(layer).items()}
        return self._kernels[self.layouts[0]]

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the layer, a RoutedExperts, for the rows of this rank.

        Errors: as of `Transport.dispatch_send`; any other failure of this rank is raised here after its round is ended.
        `PeerLostError` is logged. Collective, unless rows do not move.
        """
        if self._local is not None:
            ids, on_input = without_padding(topk_ids, self.share), layer.apply_router_weight_on_input
            return self._local(x, ids, topk_weights, self._layout(x.shape[0]), weights_on_input=on_input)
        kernel = self._kernels[self._layout(x.shape[0])]
        exchange: EpMoePrepareAndFinalize = kernel.prepare_finalize
        halves = in_micro_batch()
        between = shared_experts is not None and not shared_experts_beside()
        exchange.begin(dispatch=halves, combine=halves or between)
        try:
            return kernel.apply(
                hidden_states=x,
                w1=getattr(layer, f"w13_{self._values}"),
                w2=getattr(layer, f"w2_{self._values}"),
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
        except PeerLostError as error:
            self.log_lost(error)
            raise
        except Exception:
            exchange.fail(x.shape[0], topk_ids.shape[-1])
            raise

    def _layout(self, num_rows: int) -> Layout:
        """The layout of this step; ranks may differ."""
        if len(self.layouts) == 1:
            return self.layouts[0]
        return Layout.COMPACT if self._sent(tokens_of_ranks(num_rows)[0]) <= SMALL_STEP else Layout.FLAT

    def _sent(self, num_tokens: int) -> int:
        """The most rows of all ranks if a rank has this many tokens before they are shared."""
        return self.group.num_ranks * self.share.most(num_tokens)

    def _most_output_rows(self, moe_layer: ExpertParallelMoE) -> int:
        """The rows of the largest output of any step: vLLM allocates no more once it serves."""
        config, kind = moe_layer.transport.config, self.kind
        sent, num_local = self.group.num_ranks * config.max_tokens_per_rank, moe_layer.weights.num_local_experts
        rows = {Layout.FLAT: sent, Layout.BATCHED: sent * num_local}
        if Layout.COMPACT in self.layouts:
            tokens = min(sent, SMALL_STEP) if Layout.FLAT in self.layouts else sent
            most = tokens * min(kind.num_topk, num_local)
            rows[Layout.COMPACT] = compact_rows(most, num_local, config.row_alignment)
        return max(rows[layout] for layout in self.layouts)

    def _kernel(self, moe_layer: ExpertParallelMoE) -> mk.FusedMoEKernel:
        """vLLM's kernel of our prepare/finalize and experts."""
        layout, transport = moe_layer.config.layout, moe_layer.transport
        options = RoundOptions(
            layout=layout,
            scheme=moe_layer.scheme,
            layer=moe_layer.tag,
            share=self.share,
            input_scale=moe_layer.weights.w13_input_scale,
            sized=True,
        )
        experts: EpMoeBatchedExperts | EpMoeStandardExperts
        if layout is Layout.BATCHED:
            experts = EpMoeBatchedExperts(
                self._moe, FUSED_MOE_UNQUANTIZED_CONFIG, transport.config.max_tokens_per_rank, transport.num_ranks
            )
        else:
            experts = EpMoeStandardExperts(self._moe, FUSED_MOE_UNQUANTIZED_CONFIG)
        experts.bind(moe_layer.weights, moe_layer.experts, self._most_output_rows(moe_layer))
        return mk.FusedMoEKernel(EpMoePrepareAndFinalize(transport, options), experts)


def compute_here(method: Any, state: LayerMethod) -> None:
    """Let a method of vLLM compute here, with weights and sizes as they were loaded: vLLM would repack them and round
    them up for a kernel of its own. Local."""
    no = property(lambda self: False)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        self.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG  # ours know the format from their scheme
        self.moe_kernel = state.load(layer)

    def keep_sizes(self: Any, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any) -> Any:
        return hidden_size, intermediate_size_per_partition

    adopt(
        method,
        state,
        is_monolithic=no,
        skip_forward_padding=no,
        has_unpadded_output=no,
        supports_internal_mk=True,  # also without a kernel
        topk_indices_dtype=property(lambda self: torch.int32),  # needs no conversion
        # asked in each forward; if not, vLLM runs them before or beside ours
        mk_can_overlap_shared_experts=property(lambda self: not state.local and not shared_experts_beside()),
        supports_pre_processed_weights=False,
        maybe_roundup_sizes=keep_sizes,
        process_weights_after_loading=process_weights_after_loading,
        get_fused_moe_quant_config=lambda self, layer: FUSED_MOE_UNQUANTIZED_CONFIG,
        apply=lambda self, layer, *arguments, **named: state.apply(layer, *arguments, **named),
    )
