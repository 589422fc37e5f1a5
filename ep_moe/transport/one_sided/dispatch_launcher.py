"""Launches the dispatch kernel, and the kernels that must run before it. Runs on a CPU under TRITON_INTERPRET=1.

There is no host sync, and launches do not depend on counts or ids: all of them may be captured in a CUDA graph.

Letters: T tokens on this rank, K top-k, R ranks, M max_tokens_per_rank, L local experts, P physical experts.
"""

from typing import Any, NamedTuple

import torch
import triton

from ep_moe.config import Layout
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.exchange.batch_rows import Batch
from ep_moe.kernels.exchange.count_ids import _count_block_kernel, _sum_blocks_kernel
from ep_moe.kernels.exchange.dispatch import _dispatch_kernel
from ep_moe.kernels.exchange.dispatch_send import Tokens
from ep_moe.layout import Batched, Compact, Flat
from ep_moe.layout.base import BatchTemplate, ExpertBatch
from ep_moe.layout.triton import as_words
from ep_moe.quant import Quantized, as_bytes, quantize
from ep_moe.routing import Routing
from ep_moe.tensors import aligned
from ep_moe.transport.layer_tag import NO_LAYER
from ep_moe.transport.one_sided.kernel_context import KernelContext, aligned_rows
from ep_moe.transport.one_sided.round_plan import BLOCK_TOKENS, RoundPlan, RoundPlans
from ep_moe.transport.one_sided.tuning import WORD_TOKENS

_BLOCK_EXPERTS = 32
_SUMMED_BLOCKS = 64


class RoundInputs(NamedTuple):
    """The input of a rank to a round, as the dispatch kernel takes it."""

    plan: RoundPlan
    tokens: Tokens
    strides: tuple[int, ...]  # of x, of its scales by token and by group, of ids and of weights
    tag: tuple[int, int, int]  # `LayerTag.words`, and the round's number (`Round.number`)
    refusal: int  # 1 sends the error flag


class Received(NamedTuple):
    """How batches of one plan and slot are made."""

    template: BatchTemplate
    pool: int  # FLAT: the address of the slot's received rows, else 0: a batch has memory of its own
    scale_offset: int | None  # in a batch's memory; None if the payload has no scales
    unscaled: int  # an address for the scales of such batches

    def addresses(self, memory: torch.Tensor) -> tuple[int, int]:
        """Where the kernel stores values and scales of a batch in this memory."""
        base, offset = memory.data_ptr(), self.scale_offset
        return self.pool or base, self.unscaled if offset is None else base + offset


class DispatchLauncher:
    """Launches the dispatches of one transport.

    Args:
        plans: of the transport's rounds; `discard` makes one that needs no memory for x.
    """

    def __init__(self, context: KernelContext, plans: RoundPlans) -> None:
        self._context, self._plans = context, plans
        device = context.device
        self.unused = torch.zeros(4, dtype=torch.int32, device=device)  # for arguments that a launch does not need
        self._unscaled = torch.zeros(4, dtype=torch.float32, device=device)
        self.no_batch = Batch(self.unused, self._unscaled)
        self._unused_address, self._unscaled_address = self.unused.data_ptr(), self._unscaled.data_ptr()

    def send(
        self,
        slot: int,
        plan: RoundPlan,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        num_tokens: torch.Tensor | None,
        tag: tuple[int, int, int],
    ) -> RoundInputs:
        """Launch the sending half; returns the inputs for `receive`. Local, no host sync."""
        inputs = self.inputs_of(plan, x, routing, num_tokens=num_tokens, tag=tag)
        self._launch(slot, inputs, None, send=True, receive=False)
        return inputs

    def receive(
        self, slot: int, inputs: RoundInputs, *, send: bool = False, memory: torch.Tensor | None = None
    ) -> ExpertBatch:
        """Launch the receiving half, or with `send` both; returns the batch that it fills, in new memory by default.

        Local, no host sync.
        """
        template = self._received_of(inputs.plan, slot).template
        batch = template.batch(template.allocate() if memory is None else memory)
        self._launch(slot, inputs, batch, send=send, receive=True)
        return batch

    def _launch(self, slot: int, inputs: RoundInputs, batch: ExpertBatch | None, *, send: bool, receive: bool) -> None:
        """Launch a dispatch or one half of it, which fills the batch if it receives."""
        kernel = self.kernel_of(slot, inputs, send=send, receive=receive)
        numbers = *inputs.strides, *inputs.tag, self._context.timeout_ns
        if kernel.run is None:
            filled = self.no_batch
            if batch is not None:  # in the dtypes that the kernel stores
                scale = self._unscaled if batch.scale is None else as_bytes(batch.scale)
                filled = Batch(as_bytes(batch.x).view(torch.int32), scale)
            kernel((inputs.tokens, filled), numbers)
            return
        filled_at = self._unused_address, self._unscaled_address
        if batch is not None:
            assert batch.memory is not None
            filled_at = self._received_of(inputs.plan, slot).addresses(batch.memory)
        kernel.run((*map(torch.Tensor.data_ptr, inputs.tokens), *filled_at, *numbers))

    def repeat(
        self,
        slot: int,
        plan: RoundPlan,
        x: torch.Tensor,
        routing: Routing,
        *,
        num_tokens: torch.Tensor | None,
        tag: tuple[int, int, int],
    ) -> ExpertBatch | None:
        """`inputs_of` and `receive` with `send`, if their kernel is loaded and reads these inputs in place; else None.

        Local, no host sync.
        """
        kernel = plan.dispatches.get((slot, 0, True, True))
        if kernel is None or kernel.run is None:
            return None
        received: Received = plan.received.get(slot) or self._received_of(plan, slot)
        ids, weights, unused = routing.topk_ids, routing.topk_weights, self._unused_address
        dense = routing.signature is not None or (ids.is_contiguous() and weights.is_contiguous())
        x_address, ids_address, weights_address = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        count = unused if num_tokens is None else num_tokens.data_ptr()
        if not dense or (x_address | ids_address | weights_address | count) & 15 or not x.is_contiguous():
            return None
        template = received.template
        memory = template.allocate()
        tokens = x_address, unused, ids_address, weights_address, count, unused, unused, self._unscaled_address
        kernel.run((*tokens, *received.addresses(memory), *plan.strides, *tag, self._context.timeout_ns))
        return template.batch(memory)

    def discard(self, slot: int, inputs: RoundInputs) -> RoundPlan:
        """Launch the receiving half of a dispatch whose rows are not needed, without allocating memory.

        Rows of FLAT stay where they arrive, and their scales are laid out over them: no rank reads either, and sources
        store the next round's rows only after this rank's combine. Returns the plan with which the round continues.
        Local, no host sync.
        """
        plan = inputs.plan
        if plan.layout is not Layout.FLAT:
            plan = self._plans.make(
                plan.num_tokens,
                plan.num_topk,
                Layout.FLAT,
                plan.scheme,
                quantized=plan.scheme.payload.quantized and not plan.sending.QUANTIZE,
                has_num_tokens=plan.sending.HAS_NUM_TOKENS,
                max_num_tokens=plan.max_num_tokens,
            )
        self.receive(slot, inputs._replace(plan=plan), memory=self._context.memory.values(slot))
        return plan

    def inputs_of(
        self,
        plan: RoundPlan,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        num_tokens: torch.Tensor | None = None,
        tag: tuple[int, int, int] = (*NO_LAYER.words, 0),
        refusal: int = 0,
    ) -> RoundInputs:
        """The inputs of a round as the kernel takes them. Local, no host sync.

        Launches `quantize` if the dispatch kernel cannot quantize, and for large T the kernels that count ids by block.
        """
        unused, fused_quant = self.unused, plan.sending.QUANTIZE
        ids, weights = routing.topk_ids, routing.topk_weights
        count = unused if num_tokens is None else aligned(num_tokens)
        if plan.in_place and _are_dense(x, ids, weights):  # type: ignore[arg-type]
            values = x if fused_quant else x.view(torch.int32)  # type: ignore[union-attr]
            tokens = Tokens(values, unused, ids, weights, count, unused, unused, self._unscaled)
            return RoundInputs(plan, tokens, plan.strides, tag, refusal)
        if plan.scheme.payload.quantized and not isinstance(x, Quantized) and not fused_quant:
            if num_tokens is not None:  # rows that are no tokens must not affect a scale that tokens share
                x = x.masked_fill(torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= num_tokens, 0)
            x = quantize(x, plan.scheme)
        scale = unused
        scale_strides: tuple[int, ...] = (0, 0)
        if isinstance(x, Quantized):
            values, scale = as_words(x.values), aligned(as_bytes(x.scale))
            scale_strides = scale.stride()
        else:
            values = aligned_rows(x) if fused_quant else as_words(x)
        values = values if fused_quant else aligned(values)
        ids, weights = _aligned_columns(ids), _aligned_columns(weights)
        counted = unused, unused, self._unscaled
        if plan.blocks:
            counted = self._count_blocks(ids, weights, count, plan)
        strides = values.stride(0) // plan.sending.UNIT, *scale_strides, ids.stride(0), weights.stride(0)
        return RoundInputs(plan, Tokens(values, scale, ids, weights, count, *counted), strides, tag, refusal)

    def _count_blocks(
        self, ids: torch.Tensor, weights: torch.Tensor, count: torch.Tensor, plan: RoundPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count the rows of every expert before each block of tokens, and place them: the last tensors of `Tokens`.

        Two launches.
        """
        num_physical, early = self._context.ranks.STARTS[-1], self._context.early
        like: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
        counts = torch.empty(plan.blocks + 1, num_physical + 1, **like)
        planned = torch.empty(ids.shape, **like)
        planned_weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        options: dict[str, Any] = {"launch_pdl": True} if early else {}
        _count_block_kernel[(plan.blocks, triton.cdiv(num_physical, _BLOCK_EXPERTS))](
            ids,
            weights,
            count,
            counts,
            planned,
            planned_weights,
            plan.num_tokens,
            num_physical,
            ids.stride(0),
            weights.stride(0),
            K=ids.shape[1],
            TOKENS=BLOCK_TOKENS,
            EXPERTS=_BLOCK_EXPERTS,
            HAS_NUM_TOKENS=plan.sending.HAS_NUM_TOKENS,
            PDL=early,
            **options,
        )
        _sum_blocks_kernel[(triton.cdiv(num_physical + 1, _BLOCK_EXPERTS),)](
            counts, plan.blocks, num_physical, BLOCKS=_SUMMED_BLOCKS, EXPERTS=_BLOCK_EXPERTS, PDL=early, **options
        )
        return counts, planned, planned_weights

    def kernel_of(self, slot: int, inputs: RoundInputs, *, send: bool, receive: bool) -> Kernel:
        """The kernel of a dispatch or one half of it, for repeated launches."""
        plan, key = inputs.plan, (slot, inputs.refusal, send, receive)
        kernel = plan.dispatches.get(key)
        if kernel is None:
            context, programs = self._context, plan.programs
            senders, receivers = programs.of(send=send, receive=receive)
            first_receiver = (plan.announcers + senders) * send
            kernel = plan.dispatches[key] = Kernel(
                _dispatch_kernel,
                first_receiver + receivers,
                fixed=(
                    context.memory.links[slot],
                    context.states.slots[slot],
                    plan.num_tokens,
                    plan.blocks,
                    context.ranks.STARTS[-1],
                    context.config.max_tokens_per_rank,
                    WORD_TOKENS,
                    plan.frame.height,
                    plan.frame.alignment,
                    plan.fingerprint,
                    inputs.refusal,
                    plan.announcers,
                    senders,
                    first_receiver,
                ),
                constants={
                    "ranks": context.ranks,
                    "row": plan.row,
                    "sending": plan.sending,
                    "receiving": plan.receiving,
                    "halves": context.halves(send=send, receive=receive),
                },
                options=context.options(programs.num_warps),
                device=context.device,
                prepare=context.memory.prepare,
            )
        return kernel

    def _received_of(self, plan: RoundPlan, slot: int) -> Received:
        """How batches are made, found once."""
        received = plan.received.get(slot)
        if received is None:
            received = plan.received[slot] = self._make_received(slot, plan)
        return received

    def _make_received(self, slot: int, plan: RoundPlan) -> Received:
        context, own, frame, k = self._context, self._context.states.slots[slot], plan.frame, plan.num_topk
        num_local, index = frame.num_local_experts, frame.row_index
        num_rows = context.ranks.R * plan.max_num_tokens
        fields: dict[str, Any] = {
            "scheme": plan.scheme,
            "dtype": context.config.dtype,
            "expert_row_start": own.row_start_ptr[:num_local],
            "expert_num_tokens": own.num_rows_ptr[:num_local],
            "row_index": None if index is None else own.row_index_ptr[: index.shape[0]],
            "expected_rows": plan.expected_rows,  # if the others bring as many tokens
        }
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        lead = 0 if plan.layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        pool = None
        if plan.layout is Layout.FLAT:
            rows = context.memory.values(slot).view(-1, plan.row.VALUE_STRIDE * 4)[:num_rows]
            pool = rows[:, : plan.row.VALUE_WORDS * 4].view(frame.x.dtype)
            fields |= {
                "x": pool,
                "local_topk_ids": own.local_ids_ptr[: num_rows * k].view(num_rows, k),
                "topk_weights": own.pooled_weights_ptr[: num_rows * k].view(num_rows, k),
                "token_to_row": own.token_to_row_ptr[: num_rows * k].view(num_rows, k),
            }
        else:
            pieces["x"] = frame.x.shape[lead:], frame.x.dtype
        if frame.scale is None:
            fields["scale"] = None
        else:
            pieces["scale"] = frame.scale.mT.shape[lead:], frame.scale.dtype
        classes: dict[Layout, type[ExpertBatch]] = {
            Layout.BATCHED: Batched,
            Layout.COMPACT: Compact,
            Layout.FLAT: Flat,
        }
        workspace = Workspace(pieces, context.device)
        return Received(
            BatchTemplate(classes[plan.layout], plan.signature, fields, workspace),
            pool=0 if pool is None else pool.data_ptr(),
            scale_offset=workspace.offset_of("scale") if "scale" in pieces else None,
            unscaled=self._unscaled_address,
        )


def _are_dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether all are contiguous and aligned."""
    contiguous = x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
    return contiguous and not (x.data_ptr() | ids.data_ptr() | weights.data_ptr()) % 16


def _aligned_columns(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or an aligned copy with a column stride of 1."""
    return aligned(rows if rows.stride(1) == 1 else rows.contiguous())
