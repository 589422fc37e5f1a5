"""Plans of rounds: constants of the kernels, shapes of the batch and launches, made once for rounds of equal shapes.

Letters: T tokens on this rank, H hidden, K top-k, R ranks, M max_tokens_per_rank, L local experts, P physical experts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout, TransportConfig
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.repeated import Repeat, RepeatedLaunch
from ep_moe.kernels.exchange.dispatch_receive import Receiving
from ep_moe.kernels.exchange.dispatch_send import Sending
from ep_moe.kernels.exchange.wire_layout import Ranks, Regions, Row
from ep_moe.layout import TokenRows
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport.one_sided.payload import Payload
from ep_moe.transport.one_sided.tuning import (
    SELF_COUNTED_TOKENS,
    WORD_TOKENS,
    DispatchTuning,
    Tuning,
    awaited_words,
    block_words,
)

BLOCK_TOKENS = 64  # tokens per block, if ids are counted block by block
_COMPARED = 1024  # (token, expert) pairs that an announcer compares at a time
_FEWEST_TOKENS = 16  # smallest T that kernels are compiled for: with it, fewer tokens take no longer
_MOST_PLANS = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Constants, shapes and launches that rounds of equal shapes share."""

    scheme: QuantScheme
    fingerprint: int  # of the payload's format
    layout: Layout
    num_tokens: int  # T, the rows of x
    num_topk: int
    blocks: int  # of tokens whose ids are counted before the dispatch, 0 if each program counts all ids itself
    announcers: int
    programs: DispatchTuning
    frame: Frame  # meta tensors with the shapes of the batch
    x_shape: torch.Size  # of the batch's x
    x_strides: tuple[int, ...]
    x_dtype: torch.dtype
    scale_shape: torch.Size
    scale_strides: tuple[int, ...]
    scale_dtype: torch.dtype | None  # None if the payload has no scales
    output_shape: tuple[int, ...]  # of the experts' output
    new_result: Callable[[], torch.Tensor]  # allocates [T, H]
    in_place: bool  # contiguous inputs are sent as they are: nothing runs before the dispatch kernel
    strides: tuple[int, ...]  # of inputs sent in place, see `RoundInputs`
    expected_rows: int
    row: Row
    sending: Sending
    receiving: Receiving
    dispatches: dict[tuple[Any, ...], RepeatedLaunch] = dataclasses.field(default_factory=dict)
    combines: dict[tuple[Any, ...], RepeatedLaunch] = dataclasses.field(default_factory=dict)
    kept: dict[int, Any] = dataclasses.field(default_factory=dict)  # by slot, fields that batches share
    signature: object = dataclasses.field(default_factory=object)  # of its batches
    # loaded launches of both halves at once, whose tensors are sent and received in place
    repeated_dispatches: dict[int, Repeat] = dataclasses.field(default_factory=dict)  # by slot
    repeated_combines: dict[tuple[int, torch.dtype | None], Repeat] = dataclasses.field(default_factory=dict)


def plan_key(
    x: torch.Tensor | Quantized,
    routing: Routing,
    layout: Layout,
    scheme: QuantScheme,
    num_tokens: torch.Tensor | None,
) -> tuple[Any, ...]:
    """All that a plan and `check_dispatch` depend on; a `Quantized` x needs further checks.

    Layout and scheme are compared by identity: a cache must keep both alive with the key.
    Errors: AttributeError for an input that is no tensor, which `check_dispatch` refuses.
    """
    values, ids = (x.values if isinstance(x, Quantized) else x), routing.topk_ids
    count = None if num_tokens is None else (type(num_tokens), num_tokens.shape, num_tokens.dtype, num_tokens.device)
    sizes = type(values), values.layout, values.shape, values.dtype, values.device, ids.shape, ids.dtype, ids.device
    return (*sizes, type(routing), id(layout), id(scheme), isinstance(x, Quantized), count)


def ranks_of(placement: Placement, rank: int) -> Ranks:
    """The constants of kernels that depend on the ranks alone."""
    num_ranks = placement.num_ranks
    most = max(*map(placement.num_local_experts, range(num_ranks)), 1)
    return Ranks(
        R=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks),
        RANK=rank,
        STARTS=placement.starts,
        L=most,
        EXPERTS=triton.next_power_of_2(most),
    )


def regions_of(config: TransportConfig, ranks: Ranks) -> Regions:
    """The regions of a slot's memory."""
    return Regions(
        num_ranks=ranks.R,
        max_experts=ranks.L,
        max_tokens=config.max_tokens_per_rank,
        hidden=config.hidden,
        max_topk=config.max_topk,
        itemsize=config.dtype.itemsize,
        word_tokens=WORD_TOKENS,
    )


def distinct_sizes(max_tokens: int) -> Iterator[int]:
    """The T up to M that have kernels of their own; any other T uses those of the next larger one."""
    size = _FEWEST_TOKENS
    sizes = {SELF_COUNTED_TOKENS, 1024, max_tokens}
    while size < SELF_COUNTED_TOKENS:
        sizes.add(size)
        size *= 2
    yield from sorted(size for size in sizes if size <= max_tokens)


class RoundPlans:
    """The plans of a transport's rounds on this rank, by `plan_key`."""

    def __init__(
        self, config: TransportConfig, placement: Placement, ranks: Ranks, tuning: Tuning, device: torch.device
    ) -> None:
        self._config, self._placement, self._ranks, self._tuning = config, placement, ranks, tuning
        self._device = device
        self._plans: dict[tuple[Any, ...], RoundPlan] = {}
        self.find = self._plans.get

    def add(
        self,
        key: tuple[Any, ...],
        x: torch.Tensor | Quantized,
        routing: Routing,
        layout: Layout,
        scheme: QuantScheme,
        num_tokens: torch.Tensor | None,
    ) -> RoundPlan:
        """Make the plan of rounds with this key, and keep it. Local."""
        rows, num_topk = routing.topk_ids.shape
        quantized, has_num_tokens = isinstance(x, Quantized), num_tokens is not None
        plan = self.make(rows, num_topk, layout, scheme, quantized=quantized, has_num_tokens=has_num_tokens)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)  # the oldest: T varies freely in prefill
        self._plans[key] = plan
        return plan

    def make(
        self, rows: int, num_topk: int, layout: Layout, scheme: QuantScheme, *, quantized: bool, has_num_tokens: bool
    ) -> RoundPlan:
        """A plan for x with `rows` rows. quantized: x is `Quantized` already."""
        config, num_ranks, num_physical = self._config, self._placement.num_ranks, self._placement.num_physical
        payload = Payload(scheme=scheme, dtype=config.dtype, hidden=config.hidden, num_topk=num_topk)
        row = Row(
            K=num_topk,
            COLUMNS=triton.next_power_of_2(num_topk),
            VALUE_WORDS=payload.value_words,
            G=payload.num_groups,
            GROUPS=triton.next_power_of_2(max(payload.num_groups, 1)),
            ENTRY=2 * config.max_topk,
        )
        programs = self._tuning.dispatch(rows, num_ranks, packs=layout is not Layout.FLAT)
        fused_quant = "" if quantized or not scheme.payload.quantized else payload.fused_quant
        sending = self._sending(rows, payload, row, programs, fused_quant, has_num_tokens)
        frame = self._frame(payload, layout)
        lead = 0 if layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        scale = torch.empty(0, 0, 0, device="meta") if frame.scale is None else frame.scale
        row_units = (config.hidden if fused_quant else payload.value_words) // sending.UNIT
        announcers = min(triton.cdiv(num_physical, sending.EXPERT_BLOCK), programs.announcers)
        return RoundPlan(
            scheme=scheme,
            fingerprint=payload.fingerprint,
            layout=layout,
            num_tokens=rows,
            num_topk=num_topk,
            blocks=triton.cdiv(rows, BLOCK_TOKENS) if sending.IDS_COUNTED else 0,
            announcers=1 if sending.IDS_COUNTED else announcers,
            programs=programs,
            frame=frame,
            x_shape=frame.x.shape[lead:],
            x_strides=frame.x.stride()[lead:],
            x_dtype=frame.x.dtype,
            scale_shape=scale.shape[lead:],
            scale_strides=scale.stride()[lead:],
            scale_dtype=scheme.payload.scale_dtype if scheme.payload.quantized else None,
            new_result=allocator((rows, config.hidden), (config.hidden, 1), config.dtype, self._device),
            output_shape=(*frame.x.shape[lead:-1], config.hidden),
            in_place=not sending.IDS_COUNTED and not quantized and bool(fused_quant or not scheme.payload.quantized),
            strides=(row_units, 0, 0, num_topk, num_topk),
            expected_rows=max(triton.cdiv(rows * num_ranks * num_topk, num_physical), 1),
            row=row,
            sending=sending,
            receiving=Receiving(
                BLOCK_WORDS=awaited_words(payload.value_words, programs.taken_block, programs.num_warps),
                HEADER_SPAN=triton.next_power_of_2(self._ranks.header_stride),
                TOKENS=programs.taken_tokens,
                BATCHED=layout is Layout.BATCHED,
                POOLED=layout is Layout.FLAT,
                TAKE_LL=payload.may_be_ll,
                TAKE_ROWS=not payload.may_be_ll or config.max_tokens_per_rank > WORD_TOKENS,
            ),
        )

    def _sending(
        self,
        rows: int,
        payload: Payload,
        row: Row,
        programs: DispatchTuning,
        fused_quant: str,
        has_num_tokens: bool,
    ) -> Sending:
        """The constants of the sending half."""
        ids_counted = rows > SELF_COUNTED_TOKENS
        compared_tokens = BLOCK_TOKENS if ids_counted else max(triton.next_power_of_2(rows), _FEWEST_TOKENS)
        num_experts = triton.next_power_of_2(self._placement.num_physical)
        ll_block, row_words = block_words(row.VALUE_WORDS, programs.word_block), block_words(row.VALUE_WORDS)
        if fused_quant:  # a block of words holds whole groups
            ll_block, row_words = (max(size, payload.group // 4) for size in (ll_block, row_words))
        return Sending(
            H=self._config.hidden if fused_quant else row.VALUE_WORDS,
            GROUP=payload.group if fused_quant else 1,
            QUANTIZE=fused_quant,
            UNIT=ALIGNMENT if fused_quant else math.gcd(row.VALUE_WORDS, 4),
            ROW_WORDS=row_words,
            LL_BLOCK=ll_block,
            LL_GROUPS=ll_block * 4 // payload.group if fused_quant else row.GROUPS,
            TOKENS=compared_tokens,
            EXPERT_BLOCK=max(min(num_experts, _COMPARED // compared_tokens), 1),
            HAS_NUM_TOKENS=has_num_tokens,
            IDS_COUNTED=ids_counted,
            SEND_LL=payload.may_be_ll and (has_num_tokens or rows <= WORD_TOKENS),
            SEND_ROWS=not payload.may_be_ll or rows > WORD_TOKENS,
        )

    def destroy(self) -> None:
        """Drop all plans, and with them the references to the slots' memory. Local; calling it twice is fine."""
        self._plans.clear()

    def _frame(self, payload: Payload, layout: Layout) -> Frame:
        """The shapes of a batch, as meta tensors."""
        rows, scheme = self._placement.num_ranks * self._config.max_tokens_per_rank, payload.scheme
        k, groups = payload.num_topk, payload.num_groups
        shape = (rows, scheme.payload.row_values(self._config.hidden))
        pool = TokenRows(
            x=torch.empty(shape, dtype=scheme.payload.dtype or self._config.dtype, device="meta"),
            scale=torch.empty(rows, groups, dtype=scheme.payload.scale_dtype, device="meta") if groups else None,
            local_topk_ids=torch.empty(rows, k, dtype=torch.int32, device="meta"),
            topk_weights=torch.empty(rows, k, device="meta"),
        )
        return make_frame(
            pool,
            layout,
            num_local_experts=self._placement.num_local_experts(self._ranks.RANK),
            capacity=rows,
            alignment=self._config.row_alignment,
            max_rows=None,
        )
