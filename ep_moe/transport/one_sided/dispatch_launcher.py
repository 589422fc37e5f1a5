"""Launches the dispatch kernel, and the kernels that must run before it. Runs on a CPU under TRITON_INTERPRET=1.

There is no host sync, and launches do not depend on counts or ids: all of them may be captured in a CUDA graph.

Letters: T tokens on this rank, K top-k, R ranks, M max_tokens_per_rank, L local experts, P physical experts.
"""

from typing import Any, NamedTuple

import torch
import triton

from ep_moe.config import Layout
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernel_launch.kernel import Kernel, Numbers
from ep_moe.kernels.device import Device
from ep_moe.kernels.exchange.batch_rows import Batch
from ep_moe.kernels.exchange.count_ids import _count_block_kernel, _sum_blocks_kernel
from ep_moe.kernels.exchange.dispatch import Header, Layer, Roles, Sizes, _dispatch_kernel
from ep_moe.kernels.exchange.dispatch_send import Strides, Tokens
from ep_moe.kernels.exchange.round_state import Halves
from ep_moe.layout import Batched, Compact, Flat
from ep_moe.layout.base import BatchTemplate, ExpertBatch
from ep_moe.layout.triton import as_words
from ep_moe.quant import Quantized, QuantScheme, as_bytes, quantize
from ep_moe.routing import Routing
from ep_moe.tensors import aligned
from ep_moe.transport.checks import DispatchArguments, bound_fits, check_dispatch
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag
from ep_moe.transport.one_sided.round_plan import (
    BLOCK_TOKENS,
    ExchangeRound,
    KernelContext,
    RoundPlan,
    RoundPlans,
    RoundSpec,
    aligned_rows,
)
from ep_moe.transport.one_sided.tuning import WORD_TOKENS

_BLOCK_EXPERTS = 32
_SUMMED_BLOCKS = 64
_NUMBER_MASK = 2**31 - 1


class Received(NamedTuple):
    """How batches of one plan and slot are made."""

    template: BatchTemplate
    pool: int  # FLAT: the address of the slot's received rows, else 0: a batch has memory of its own
    scale_offset: int | None  # in a batch's memory; None if the payload has no scales


class DispatchLauncher:
    """Launches the dispatches of one transport.

    Args:
        plans: of the transport's rounds; `discard` makes one that needs no memory for x.
    """

    def __init__(self, context: KernelContext, plans: RoundPlans) -> None:
        self.context, self.plans = context, plans
        # for arguments that a launch does not need
        self.unused = torch.zeros(4, dtype=torch.int32, device=context.device)
        self._unscaled = torch.zeros(4, dtype=torch.float32, device=context.device)
        self._unused_at, self._unscaled_at = self.unused.data_ptr(), self._unscaled.data_ptr()
        self._no_scales = self._unused_at, self._unused_at, self._unscaled_at  # of `Tokens` whose ids are not counted

    def send(self, round_: ExchangeRound) -> None:
        """Launch the sending half. Local, no host sync."""
        kernel = self.kernel_of(round_, send=True, receive=False)
        if kernel.run is None:
            kernel(*self.arguments_of(round_, self.batch_of(None)))
        else:
            kernel.run((*round_.addresses, self._unused_at, self._unscaled_at, *round_.numbers))

    def receive(self, round_: ExchangeRound, *, send: bool = False, memory: torch.Tensor | None = None) -> ExpertBatch:
        """Launch the receiving half, or with `send` both; returns the batch that it fills, in new memory by default.

        Local, no host sync.
        """
        plan = round_.plan
        received = plan.received.get(round_.slot) or self._make_received(round_.slot, plan)
        template, offset = received.template, received.scale_offset
        memory = template.allocate() if memory is None else memory
        batch = template.batch(memory)
        kernel = plan.dispatches.get((round_.slot, round_.refusal, send, True))
        if kernel is not None and kernel.run is not None:
            base = memory.data_ptr()
            filled = received.pool or base, self._unscaled_at if offset is None else base + offset
            kernel.run((*round_.addresses, *filled, *round_.numbers))
        else:
            kernel = self.kernel_of(round_, send=send, receive=True)
            arguments = self.arguments_of(round_, self.batch_of(batch))
            with self.context.waiting("dispatch", round_.round):
                kernel(*arguments)
        round_.tokens = ()
        return batch

    def discard(self, round_: ExchangeRound) -> None:
        """Launch the receiving half of a dispatch whose rows are not needed, without allocating memory.

        Rows of FLAT stay where they arrive, and their scales are laid out over them: no rank reads either, and sources
        store the next round's rows only after this rank's combine. The round continues with the plan for FLAT.
        Local, no host sync.
        """
        spec = round_.plan.spec
        if spec.layout is not Layout.FLAT:
            quantized = spec.scheme.payload.quantized and not round_.plan.sending.QUANTIZE
            round_.plan = self.plans.make(spec._replace(layout=Layout.FLAT, quantized=quantized))
        self.receive(round_, memory=self.context.memory.values(round_.slot))

    def begin(
        self,
        place: tuple[int, int, int],
        x: torch.Tensor | Quantized,
        routing: Routing,
        layout: Layout,
        scheme: QuantScheme,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> ExchangeRound:
        """The round of a dispatch, checked, with its plan and its input as the kernel takes it.

        Launches `quantize` if the dispatch kernel cannot quantize, and for large T the kernels that count ids by block.

        Args:
            place: slot, number, and 1 to send the error flag. The others are as of `Transport.dispatch_send`.
        Errors: those of `check_dispatch`. Local, no host sync.
        """
        plans, unused, plan, quantized = self.plans, self.unused, None, isinstance(x, Quantized)
        try:
            ids, weights = routing.topk_ids, routing.topk_weights
            values: torch.Tensor = x.values if quantized else x  # type: ignore[assignment]
            key = (
                type(values),
                values.layout,
                values.shape,
                values.dtype,
                values.device,
                routing.signature or (ids.shape, ids.dtype, ids.device),
                type(routing),
                type(layer),
                id(layout),  # plans keep both alive
                id(scheme),
                quantized,
                None
                if num_tokens is None
                else (type(num_tokens), num_tokens.shape, num_tokens.dtype, num_tokens.device),
                plans.most if max_num_tokens is None else plans.size_for(max_num_tokens),
            )
            last, plan = plans.last
            if key != last:  # takes a third of the time of a hash
                plan = plans.find(key)
        except (AttributeError, TypeError):  # not a tensor, or no number: `check_dispatch` refuses it
            plan = None
        bounded = max_num_tokens is not None  # of the bound, the key has the size of batches alone
        if (
            plan is None
            or quantized
            or (bounded and not bound_fits(max_num_tokens, plan.spec.num_tokens, self.context.config))
        ):
            arguments = DispatchArguments(x, routing, layout, scheme, num_tokens, max_num_tokens, layer)
            check_dispatch(arguments, self.context.config, self.context.ranks.RANK, self.context.device)
            plan = plan or plans.add(key, RoundSpec.of(arguments, key[-1]))
        count, strides = unused if num_tokens is None else aligned(num_tokens), plan.strides
        tokens: tuple[torch.Tensor, ...] = ()
        if plan.in_place and values.is_contiguous():
            x_at, ids_at, weights_at = values.data_ptr(), ids.data_ptr(), weights.data_ptr()
            dense = routing.signature is not None or (ids.is_contiguous() and weights.is_contiguous())
            if dense and not (x_at | ids_at | weights_at) & 15:
                tokens = values, unused, ids, weights, count, unused, unused, self._unscaled
                addresses = x_at, self._unused_at, ids_at, weights_at, count.data_ptr(), *self._no_scales
        if not tokens:
            tokens, strides = self._converted(plan, x, routing, None if num_tokens is None else count)
            addresses = tuple(map(torch.Tensor.data_ptr, tokens))  # type: ignore[assignment]
        slot, number, refusal = place
        numbers = *strides, *layer.words, number & _NUMBER_MASK, self.context.timeout_ns
        return ExchangeRound(slot, number, plan, tokens, addresses, numbers, refusal)

    def _converted(
        self, plan: RoundPlan, x: torch.Tensor | Quantized, routing: Routing, num_tokens: torch.Tensor | None
    ) -> tuple[Tokens, tuple[int, ...]]:
        """Tensors that the kernel can take, and the strides of x, of its scales, of ids and of weights."""
        unused, fused_quant = self.unused, plan.sending.QUANTIZE
        count = unused if num_tokens is None else num_tokens
        if plan.spec.scheme.payload.quantized and not isinstance(x, Quantized) and not fused_quant:
            if num_tokens is not None:  # rows that are no tokens must not affect a scale that tokens share
                x = x.masked_fill(torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= num_tokens, 0)
            x = quantize(x, plan.spec.scheme)
        scale = unused
        scale_strides: tuple[int, ...] = (0, 0)
        if isinstance(x, Quantized):
            values, scale = as_words(x.values), aligned(as_bytes(x.scale))
            scale_strides = scale.stride()
        else:
            values = aligned_rows(x) if fused_quant else as_words(x)
        values = values if fused_quant else aligned(values)
        ids, weights = map(_aligned_columns, (routing.topk_ids, routing.topk_weights))
        counted = self._count_blocks(ids, weights, count, plan) if plan.blocks else (unused, unused, self._unscaled)
        strides = values.stride(0) // plan.sending.UNIT, *scale_strides, ids.stride(0), weights.stride(0)
        return Tokens(values, scale, ids, weights, count, *counted), strides

    def batch_of(self, batch: ExpertBatch | None) -> Batch:
        """A batch in the dtypes that the kernel stores; None is that of a launch which only sends. Local."""
        if batch is None:
            return Batch(self.unused, self._unscaled)
        scale = self._unscaled if batch.scale is None else as_bytes(batch.scale)
        return Batch(as_bytes(batch.x).view(torch.int32), scale)

    def arguments_of(self, round_: ExchangeRound, filled: Batch) -> tuple[tuple[Tokens, Batch], Numbers]:
        """The tensors and numbers of a launch through Triton. Local."""
        x, *others = round_.tokens
        values = x
        if not round_.plan.sending.QUANTIZE:  # without tokens x may have any strides
            values = x.view(torch.int32) if x.numel() else self.unused
        *strides, layer, settings, number, timeout_ns = round_.numbers
        return (Tokens(values, *others), filled), (Strides(*strides), Layer(layer, settings), number, timeout_ns)

    def _count_blocks(
        self, ids: torch.Tensor, weights: torch.Tensor, count: torch.Tensor, plan: RoundPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count the rows of every expert before each block of tokens, and place them: the last tensors of `Tokens`.

        Two launches.
        """
        num_physical = self.context.ranks.STARTS[-1]
        like: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
        counts = torch.empty(plan.blocks + 1, num_physical + 1, **like)
        planned = torch.empty(ids.shape, **like)
        planned_weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        early = ids.is_cuda and Device.of(ids.device).early_launch
        options: dict[str, Any] = {"enable_fp_fusion": False, **({"launch_pdl": True} if early else {})}
        _count_block_kernel[(plan.blocks, triton.cdiv(num_physical, _BLOCK_EXPERTS))](
            ids,
            weights,
            count,
            counts,
            planned,
            planned_weights,
            plan.spec.num_tokens,
            num_physical,
            ids.stride(0),
            weights.stride(0),
            K=ids.shape[1],
            TOKENS=BLOCK_TOKENS,
            EXPERTS=_BLOCK_EXPERTS,
            HAS_NUM_TOKENS=plan.sending.HAS_NUM_TOKENS,
            **options,
        )
        _sum_blocks_kernel[(triton.cdiv(num_physical + 1, _BLOCK_EXPERTS),)](
            counts, plan.blocks, num_physical, BLOCKS=_SUMMED_BLOCKS, EXPERTS=_BLOCK_EXPERTS, **options
        )
        return counts, planned, planned_weights

    def kernel_of(self, round_: ExchangeRound, *, send: bool, receive: bool) -> Kernel:
        """The kernel of a dispatch or one half of it. Local."""
        plan, slot, key = round_.plan, round_.slot, (round_.slot, round_.refusal, send, receive)
        kernel = plan.dispatches.get(key)
        if kernel is None:
            context, programs = self.context, plan.programs
            senders, receivers = programs.of(send=send, receive=receive)
            first_receiver = (plan.announcers + senders) * send
            kernel = plan.dispatches[key] = Kernel(
                _dispatch_kernel,
                first_receiver + receivers,
                fixed=(
                    context.memory.links[slot],
                    context.states.slots[slot],
                    Sizes(
                        max_tokens=plan.spec.num_tokens,
                        num_blocks=plan.blocks,
                        num_physical=context.ranks.STARTS[-1],
                        max_tokens_per_rank=context.config.max_tokens_per_rank,
                        word_tokens=WORD_TOKENS,
                        height=plan.frame.height,
                        alignment=plan.frame.alignment,
                    ),
                    Header(fingerprint=plan.fingerprint, refusal=round_.refusal),
                    Roles(announcers=plan.announcers, senders=senders, first_receiver=first_receiver),
                ),
                constants={
                    "ranks": context.ranks,
                    "row": plan.row,
                    "sending": plan.sending,
                    "receiving": plan.receiving,
                    "halves": Halves(send, receive),
                },
                options=context.options(programs.num_warps),
                early=True,
                device=context.device,
                prepare=context.memory.prepare,
            )
        return kernel

    def _make_received(self, slot: int, plan: RoundPlan) -> Received:
        """How batches of a plan and slot are made, found once."""
        context, own, frame, k = self.context, self.context.states.slots[slot], plan.frame, plan.spec.num_topk
        num_local, index = frame.num_local_experts, frame.row_index
        num_rows = context.ranks.R * plan.spec.max_num_tokens
        fields: dict[str, Any] = {
            "scheme": plan.spec.scheme,
            "dtype": context.config.dtype,
            "expert_row_start": own.row_start_ptr[:num_local],
            "expert_num_tokens": own.num_rows_ptr[:num_local],
            "row_index": None if index is None else own.row_index_ptr[: index.shape[0]],
            "expected_rows": plan.expected_rows,  # if the others bring as many tokens
        }
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        lead = 0 if plan.spec.layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        pool = None
        if plan.spec.layout is Layout.FLAT:
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
        received = plan.received[slot] = Received(
            BatchTemplate(classes[plan.spec.layout], plan.signature, fields, workspace),
            pool=0 if pool is None else pool.data_ptr(),
            scale_offset=workspace.offset_of("scale") if "scale" in pieces else None,
        )
        return received


def _aligned_columns(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or an aligned copy with a column stride of 1."""
    return aligned(rows if rows.stride(1) == 1 else rows.contiguous())
