"""Our transports as a prepare/finalize of vLLM's modular kernels.

Letters: T rows on this rank, H hidden, K top-k, L local experts, R ranks, M the transport's max_tokens_per_rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk

from ep_moe.config import Layout
from ep_moe.engines.common.rows import RowShare, end_round, rows_to_send, send_rows, whole_output
from ep_moe.engines.vllm.step import current_slot, tokens_of_ranks, without_padding
from ep_moe.layout import ExpertBatch, Flat
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport import Dispatched, Transport
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag

FORMATS = {
    Layout.BATCHED: mk.FusedMoEActivationFormat.BatchedExperts,
    Layout.COMPACT: mk.FusedMoEActivationFormat.Standard,
    Layout.FLAT: mk.FusedMoEActivationFormat.Standard,
}


@dataclasses.dataclass
class BatchMetadata(mk.ExpertTokensMetadata):
    """vLLM's metadata, and our batch, which also has the rows' starts and indices."""

    batch: ExpertBatch | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """How a layer uses its transport.

    Args:
        layout: of the batch. scheme: of the payload. layer: compared between ranks.
        share: which of the engine's rows this rank sends. input_scale: [1] float32, static, of the tokens.
        sized: the batch is allocated for the tokens of the step, and not for the most of any step, which vLLM's own
            batched experts need; equal on all ranks.
    """

    layout: Layout
    scheme: QuantScheme
    layer: LayerTag = NO_LAYER
    share: RowShare = RowShare()
    input_scale: torch.Tensor | None = None
    sized: bool = False


class EpMoePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch and combine of one of our transports.

    BATCHED is vLLM's BatchedExperts format and serves its experts and ours. FLAT and COMPACT are its Standard format
    for our experts alone: local ids, and rows that only the batch in `BatchMetadata` describes. The combine applies the
    router weights that were dispatched, or in FLAT our experts do.

    Args:
        transport: moves the tokens. options: of the layer's rounds.
    """

    def __init__(self, transport: Transport, options: RoundOptions) -> None:
        super().__init__()
        self.transport = transport
        self.options = options
        self._open: dict[int, Dispatched] = {}
        self._sent: set[int] = set()
        self._halves: dict[int, tuple[bool, bool]] = {}  # by slot: whether dispatch and combine are two calls each

    @property
    def activation_format(self) -> Any:
        """vLLM's name of the layout's format."""
        return FORMATS[self.options.layout]

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that needs no conversion."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """M."""
        return self.transport.config.max_tokens_per_rank

    def num_dispatchers(self) -> int:
        """R."""
        return self.transport.num_ranks

    def output_is_reduced(self) -> bool:
        """Whether each rank has its rows whole. Ranks that share rows have a slice each, which vLLM's sum joins."""
        return self.options.share.sharers == 1

    def supports_async(self) -> bool:
        """True: vLLM runs shared experts, unless `shared_experts_beside`, between `combine_send` and `combine_recv`."""
        return True

    def begin(self, *, dispatch: bool = True, combine: bool = True) -> None:
        """Forget the slot's previous round. Local.

        Args: dispatch, combine: whether anything runs between send and receive; if not, both are one launch.
        """
        slot = current_slot()
        self._sent.discard(slot)
        self._open.pop(slot, None)
        self._halves[slot] = dispatch, combine

    def fail(self, num_rows: int, num_topk: int) -> None:
        """End the slot's round, and one that was left open, after a failure here: other ranks get NaN for its part.

        Args: num_rows, num_topk: T and K, if the round has not begun. Collective.
        """
        slot, options = current_slot(), self.options
        self._open.pop(slot, None)
        end_round(self.transport, slot)
        if slot not in self._sent:
            self.transport.sit_out(
                num_topk=num_topk,
                scheme=options.scheme,
                slot=slot,
                max_num_tokens=self._bound(num_rows),
                layer=options.layer,
            )

    def prepare(self, *arguments: Any, **named: Any) -> mk.PrepareResultType:
        """Send this rank's rows and lay out what arrives: `prepare_async` and its receiver. Collective."""
        return self.prepare_async(*arguments, **named)[1]()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], mk.PrepareResultType]]:
        """Send this rank's rows; what arrives is received later, or now if `begin` was called without `dispatch`.

        Args:
            a1: [T, H] in the transport's dtype. topk_ids: [T, K] physical, -1 none. topk_weights: [T, K].
            apply_router_weight_on_input: multiply rows by their weight before they are sent; K must be 1.
            num_experts, expert_map: not read; the transport has its placement.
            quant_config, defer_input_quant: a `quant_dtype` needs a scheme that quantizes, which excludes the latter.
        Returns: a hook that does nothing, and the receiver of the batch.
        Errors: those of `Transport.dispatch_send`, on all ranks. Collective.
        """
        del num_experts, expert_map
        options, slot = self.options, current_slot()

        def rows() -> tuple[torch.Tensor | Quantized, Routing]:
            wanted, quantized = getattr(quant_config, "quant_dtype", None), options.scheme.payload.quantized
            if defer_input_quant and quantized:
                raise ValueError(f"defer_input_quant is True, rows travel quantized in scheme '{options.scheme.name}'")
            if wanted is not None and not quantized and not defer_input_quant:
                raise ValueError(
                    f"quant_config.quant_dtype is {wanted}, scheme '{options.scheme.name}' sends rows as they are"
                )
            return self._rows(a1, topk_weights, topk_ids, apply_router_weight_on_input)

        begun, (halves, _) = self.transport.num_rounds, self._halves.get(slot, (True, True))
        self._sent.discard(slot)
        try:
            dispatched = send_rows(
                self.transport,
                rows,
                num_topk=topk_ids.shape[-1],
                layout=options.layout,
                slot=slot,
                halves=halves,
                scheme=options.scheme,
                max_num_tokens=self._bound(a1.shape[0]),
                layer=options.layer,
            )
        finally:
            if self.transport.num_rounds != begun:
                self._sent.add(slot)
        return _nothing, lambda: self._receive(slot, dispatched)

    def finalize(self, *arguments: Any, **named: Any) -> None:
        """Return the experts' output to the source ranks: `finalize_async` and its receiver. Collective."""
        self.finalize_async(*arguments, **named)[1]()

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, *_others: Any, **_named: Any
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Weight, sum and send the experts' output; the receiver does so if `begin` was called without `combine`.

        Args:
            output: [T, H], written by the receiver; rows that another rank sends become zero.
            fused_expert_output: of the layout's shape; not written to until the receiver has returned.
        Returns: a hook that does nothing, and the receiver. Collective.
        """
        slot = current_slot()
        dispatched, (_, halves) = self._open[slot], self._halves.get(slot, (True, True))
        if halves:
            self.transport.combine_send(fused_expert_output, dispatched)
        aliased = fused_expert_output.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()

        def receive() -> None:
            own = None if aliased else output[self.options.share.own(output.shape[0])]
            if halves:
                found = self.transport.combine_recv(dispatched, out=own)
            else:
                found = self.transport.combine(fused_expert_output, dispatched, out=own)
            whole_output(self.options.share, found if aliased else None, output)
            self._open.pop(slot, None)

        return _nothing, receive

    def _bound(self, num_rows: int) -> int | None:
        """The most rows that any rank sends in this step, equal on all ranks; None is M."""
        if not self.options.sized:
            return None
        return self.options.share.most(num_rows if self.transport.num_ranks == 1 else tokens_of_ranks(num_rows)[0])

    def _rows(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weights_on_input: bool
    ) -> tuple[torch.Tensor | Quantized, Routing]:
        """This rank's rows and their routing; rows of padding have no expert."""
        share = self.options.share
        return rows_to_send(
            a1,
            without_padding(topk_ids, share),
            topk_weights,
            share=share,
            scheme=self.options.scheme,
            weights_on_input=weights_on_input,
            input_scale=self.options.input_scale,
        )

    def _receive(self, slot: int, dispatched: Dispatched | None) -> mk.PrepareResultType:
        """The batch of a round, received now unless it has been."""
        dispatched = dispatched or self.transport.dispatch_recv(slot=slot)
        self._open[slot] = dispatched
        batch = dispatched.batch
        metadata = BatchMetadata(expert_num_tokens=batch.expert_num_tokens, expert_num_tokens_cpu=None, batch=batch)
        if isinstance(batch, Flat):
            return batch.x, batch.scale, metadata, batch.local_topk_ids, batch.topk_weights
        return batch.x, batch.scale, metadata, None, None


def _nothing() -> None:
    """The hook of vLLM's asynchronous halves: our receivers wait by themselves."""
