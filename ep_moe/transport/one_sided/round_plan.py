"""Plans of rounds: the compile-time constants of the kernels and the batch's shapes, made once per kind of round.

Letters: T tokens on this rank, H hidden, K top-k, R ranks, M max_tokens_per_rank, L local experts, P physical experts.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout, TransportConfig
from ep_moe.kernel_launch.repeated import RepeatedLaunch
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
    UNPLANNED_TOKENS,
    WORD_TOKENS,
    DispatchTuning,
    Tuning,
    awaited_words,
    block_words,
)

BLOCK_TOKENS = 64  # tokens per block, if ids are counted block by block
_ANNOUNCED = 1024  # (token, expert) pairs that an announcer compares at a time
_FEWEST_TOKENS = 16  # smallest T that kernels are compiled for: with it, fewer tokens take no longer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Constants, shapes and launches shared by all rounds of a kind."""

    payload: Payload
    fingerprint: int
    layout: Layout
    num_tokens: int  # T, the rows of x
    fused_quant: str  # how the send kernel quantizes, "" if it does not
    unit: int  # elements, or words, per unit of a row stride
    blocks: int  # of tokens whose ids are counted before the dispatch, 0 if each program counts all ids itself
    announcers: int
    programs: DispatchTuning
    frame: Frame  # meta tensors with the shapes of the batch
    x_shape: torch.Size  # of the batch's x
    x_strides: tuple[int, ...]
    scale_shape: torch.Size
    scale_strides: tuple[int, ...]
    output_shape: tuple[int, ...]  # of the experts' output
    strides: tuple[int, ...]  # `Sent.strides` if inputs are contiguous, and quantized in the kernel or not at all
    expected_rows: int
    row: Row
    sending: Sending
    receiving: Receiving
    dispatches: dict[tuple[Any, ...], RepeatedLaunch] = dataclasses.field(default_factory=dict)
    combines: dict[tuple[Any, ...], RepeatedLaunch] = dataclasses.field(default_factory=dict)
    kept: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by slot, its batches' fields


def kind_of(
    x: torch.Tensor | Quantized,
    routing: Routing,
    layout: Layout,
    scheme: QuantScheme,
    num_tokens: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The cache key of a plan: all that the plan and `check_dispatch` depend on; a `Quantized` x needs further checks.

    Layout and scheme are compared by identity: a cache must keep both alive with the key.
    Errors: AttributeError for an input that is no tensor, which `check_dispatch` refuses.
    """
    values, ids = (x.values if isinstance(x, Quantized) else x), routing.topk_ids
    counted = None if num_tokens is None else (type(num_tokens), num_tokens.shape, num_tokens.dtype, num_tokens.device)
    sizes = type(values), values.layout, values.shape, values.dtype, values.device, ids.shape, ids.dtype, ids.device
    return (*sizes, type(routing), id(layout), id(scheme), isinstance(x, Quantized), counted)


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
    sizes = {UNPLANNED_TOKENS, 1024, max_tokens}
    while size < UNPLANNED_TOKENS:
        sizes.add(size)
        size *= 2
    yield from sorted(size for size in sizes if size <= max_tokens)


class Planner:
    """Makes the plans of a transport's rounds on this rank."""

    def __init__(self, config: TransportConfig, placement: Placement, ranks: Ranks, tuning: Tuning) -> None:
        self._config, self._placement, self._rank = config, placement, ranks.RANK
        self._tuning, self._ranks = tuning, ranks

    def plan(
        self, rows: int, num_topk: int, layout: Layout, scheme: QuantScheme, *, given: bool, counted: bool
    ) -> Plan:
        """The plan for x with `rows` rows. given: x is `Quantized` already. counted: `num_tokens` is passed."""
        config, num_ranks, num_physical = self._config, self._placement.num_ranks, self._placement.num_physical
        payload = Payload(scheme=scheme, dtype=config.dtype, hidden=config.hidden, num_topk=num_topk)
        fused_quant = "" if given or not scheme.payload.quantized else payload.fused_quant
        planned = rows > UNPLANNED_TOKENS
        programs = self._tuning.dispatch(rows, num_ranks)
        count = BLOCK_TOKENS if planned else max(triton.next_power_of_2(rows), _FEWEST_TOKENS)
        share = max(min(triton.next_power_of_2(num_physical), _ANNOUNCED // count), 1)
        words, row_words = block_words(payload.value_words, programs.word_block), block_words(payload.value_words)
        if fused_quant:  # a block of words holds whole groups
            words, row_words = (max(size, payload.group // 4) for size in (words, row_words))
        groups = triton.next_power_of_2(max(payload.num_groups, 1))
        unit = ALIGNMENT if fused_quant else math.gcd(payload.value_words, 4)
        columns = triton.next_power_of_2(num_topk)
        row = Row(num_topk, columns, payload.value_words, payload.num_groups, groups, 2 * config.max_topk)
        sending = Sending(
            H=config.hidden if fused_quant else payload.value_words,
            GROUP=payload.group if fused_quant else 1,
            QUANTIZE=fused_quant,
            UNIT=unit,
            ROW_WORDS=row_words,
            LL_BLOCK=words,
            LL_GROUPS=words * 4 // payload.group if fused_quant else groups,
            TOKENS_PER_FENCE=programs.tokens_per_fence,
            TOKENS=count,
            EXPERT_BLOCK=share,
            HAS_NUM_TOKENS=counted,
            IDS_COUNTED=planned,
            SEND_LL=payload.wordy and (counted or rows <= WORD_TOKENS),
            SEND_ROWS=not payload.wordy or rows > WORD_TOKENS,
        )
        receiving = Receiving(
            BLOCK_WORDS=awaited_words(payload.value_words, programs.taken_block, programs.num_warps),
            HEADER_SPAN=triton.next_power_of_2(self._ranks.header_stride),
            BATCHED=layout is Layout.BATCHED,
            POOLED=layout is Layout.FLAT,
            TAKE_LL=payload.wordy,
            TAKE_ROWS=not payload.wordy or config.max_tokens_per_rank > WORD_TOKENS,
        )
        frame = self._frame(payload, layout)
        lead = 0 if layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        scale = torch.empty(0, 0, 0, device="meta") if frame.scale is None else frame.scale
        return Plan(
            payload=payload,
            fingerprint=payload.fingerprint,
            layout=layout,
            num_tokens=rows,
            fused_quant=fused_quant,
            unit=unit,
            blocks=triton.cdiv(rows, BLOCK_TOKENS) if planned else 0,
            announcers=1 if planned else min(triton.cdiv(num_physical, share), programs.announcers),
            programs=programs,
            frame=frame,
            x_shape=frame.x.shape[lead:],
            x_strides=frame.x.stride()[lead:],
            scale_shape=scale.shape[lead:],
            scale_strides=scale.stride()[lead:],
            output_shape=(*frame.x.shape[lead:-1], config.hidden),
            strides=(
                config.hidden // ALIGNMENT if fused_quant else payload.value_words // unit,
                0,
                0,
                num_topk,
                num_topk,
            ),
            expected_rows=max(triton.cdiv(rows * num_ranks * num_topk, num_physical), 1),
            row=row,
            sending=sending,
            receiving=receiving,
        )

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
            num_local_experts=self._placement.num_local_experts(self._rank),
            capacity=rows,
            alignment=self._config.row_alignment,
            max_rows=None,
        )
