"""What launches of a transport's kernels share, and plans: what rounds of equal shapes share, made once.

Letters: T tokens on this rank, H hidden, K top-k, R ranks, M max_tokens_per_rank, L local experts, P physical experts.
"""

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout, TransportConfig
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.device import Device
from ep_moe.kernels.exchange.dispatch_receive import Receiving
from ep_moe.kernels.exchange.dispatch_send import Sending
from ep_moe.kernels.exchange.wire_layout import Ranks, Row, header_stride
from ep_moe.layout import TokenRows
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, TensorFormat
from ep_moe.transport.base import Handle
from ep_moe.transport.checks import DispatchArguments
from ep_moe.transport.layer_tag import signed_word
from ep_moe.transport.one_sided.memory import PeerMemory, regions_of
from ep_moe.transport.one_sided.occupancy import REGISTERS, WIDE_REGISTERS
from ep_moe.transport.one_sided.slot_state import SlotStates
from ep_moe.transport.one_sided.tuning import (
    SELF_COUNTED_TOKENS,
    WORD_TOKENS,
    DispatchTuning,
    Tuning,
    awaited_words,
    block_words,
)
from ep_moe.transport.payload import RowFormat

_FUSED_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
BLOCK_TOKENS = 64  # tokens per block, if ids are counted block by block
_COMPARED = 1024  # (token, expert) pairs that an announcer compares at a time, if it can have 4 experts then
_FEWEST_TOKENS = 16  # smallest T that kernels are compiled for: with it, fewer tokens take no longer
_MOST_PLANS = 512
_EXACT_TOKENS = 128  # T beyond which experts are told of `batch_sizes` alone: they prepare for each that they see
SIZE_STEP = 16  # between the smallest batches


@dataclasses.dataclass(kw_only=True, slots=True)
class KernelContext:
    """Sizes, memory and options of a transport's launches."""

    config: TransportConfig
    ranks: Ranks
    device: torch.device
    memory: PeerMemory
    states: SlotStates
    tuning: Tuning
    timeout_ns: int
    waiting: Callable[[str, int], contextlib.AbstractContextManager[None]]  # `Faults.waiting`

    def options(self, num_warps: int) -> dict[str, Any]:
        """Options of the compiler."""
        options: dict[str, Any] = {"num_warps": num_warps}
        if not Device.of(self.device).hip:
            options["maxnreg"] = WIDE_REGISTERS if num_warps > 4 else REGISTERS
        if self.memory.libraries:
            options["extern_libs"] = self.memory.libraries
        return options


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether rows can be moved in 16-byte pieces in place: each contiguous, ALIGNMENT elements or a multiple apart."""
    at_pieces = rows.data_ptr() % 16 == 0 and rows.stride(0) % ALIGNMENT == 0
    return at_pieces and (rows.stride(1) == 1 or rows.shape[1] == 1)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or a copy that `is_aligned`."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


class RoundSpec(NamedTuple):
    """What the plan of a round follows from."""

    num_tokens: int  # T, the rows of x
    num_topk: int
    layout: Layout
    scheme: QuantScheme
    quantized: bool  # x is `Quantized` already
    counted: bool  # the number of tokens among the rows is on the device
    max_num_tokens: int  # of any rank, M or less: rows of a source rank in the batch

    @classmethod
    def of(cls, arguments: DispatchArguments, max_num_tokens: int) -> "RoundSpec":
        """That of a dispatch."""
        x, routing, layout, scheme, num_tokens, *_ = arguments
        (rows, num_topk), counted = routing.topk_ids.shape, num_tokens is not None
        return cls(rows, num_topk, layout, scheme, isinstance(x, Quantized), counted, max_num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Constants, shapes and launches that rounds of equal shapes share."""

    spec: RoundSpec
    fingerprint: int  # of the payload's format
    blocks: int  # of tokens whose ids are counted before the dispatch, 0 if each program counts all ids itself
    announcers: int
    programs: DispatchTuning
    frame: Frame  # meta tensors with the shapes of the batch
    output: tuple[Any, ...]  # shape, dtype, device and layout of the experts' output
    new_result: Callable[[], torch.Tensor]  # allocates [T, H]
    in_place: bool  # contiguous inputs are sent as they are: nothing runs before the dispatch kernel
    strides: tuple[int, ...]  # of inputs sent in place: of x, of its scales, of ids and of weights
    expected_rows: int  # of a local expert, if the other ranks bring as many tokens
    row: Row
    sending: Sending
    receiving: Receiving
    dispatches: dict[tuple[Any, ...], Kernel] = dataclasses.field(default_factory=dict)
    combines: dict[tuple[Any, ...], Kernel] = dataclasses.field(default_factory=dict)
    received: dict[int, Any] = dataclasses.field(default_factory=dict)  # `Received` by slot
    signature: object  # of its batches, shared by plans whose batches are alike: T varies freely in prefill


@dataclasses.dataclass(slots=True, eq=False)
class ExchangeRound(Handle):
    """A round of the one-sided exchange, from its dispatch to its combine."""

    slot: int
    round: int
    plan: RoundPlan
    tokens: tuple[torch.Tensor, ...]  # `dispatch_send.Tokens`, whose x may be in the model's dtype; () once received
    addresses: tuple[int, ...]  # of `tokens`
    numbers: tuple[int, ...]  # strides of `tokens`, `LayerTag.words`, the round's number, timeout
    refusal: int  # 1 if the dispatch sends the error flag
    sent_y: torch.Tensor | None = None  # y of a combine that was sent, kept alive until its kernel has read it


def fused_quantization(payload: TensorFormat) -> str:
    """How the dispatch kernel quantizes tokens; "" if it cannot, or there is nothing to quantize."""
    how = _FUSED_DTYPES.get(payload.dtype, "") if payload.dtype is not None else ""
    if payload.family != "scaled" or payload.granularity not in ("token", "group"):
        return ""
    if payload.granularity == "group" and payload.block[1] & (payload.block[1] - 1):
        return ""
    return f"{how}_power_of_two" if how == "e4m3" and payload.power_of_two else how


def _shared_elements(payload: TensorFormat, hidden: int) -> int:
    """Elements that share a scale, a power of two: the last group of a row may be short."""
    return payload.block[1] if payload.granularity == "group" else triton.next_power_of_2(hidden)


def distinct_sizes(max_tokens: int) -> Iterator[int]:
    """The T up to M that have kernels of their own; any other T uses those of the next larger one."""
    size = _FEWEST_TOKENS
    sizes = {SELF_COUNTED_TOKENS, 1024, max_tokens}
    while size < SELF_COUNTED_TOKENS:
        sizes.add(size)
        size *= 2
    yield from sorted(size for size in sizes if size <= max_tokens)


def batch_sizes(max_tokens: int) -> list[int]:
    """The tokens of a rank, up to M, that batches are sized for: steps of 16 up to 128, then four for each doubling.

    Fewer sizes are fewer plans, of which a new one takes host time.
    """
    sizes = [SIZE_STEP]
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + max(SIZE_STEP, 1 << (sizes[-1].bit_length() - 3)))
    return [*sizes[:-1], max_tokens]


class RoundPlans:
    """The plans of a transport's rounds on this rank, by the keys of `DispatchLauncher.begin`.

    Attributes:
        last: the key and plan of the last round, since rounds of one kind follow each other.
        most: M, which batches of rounds without a bound are sized for.
    """

    def __init__(
        self, config: TransportConfig, placement: Placement, ranks: Ranks, tuning: Tuning, device: torch.device
    ) -> None:
        self._config, self._placement, self._ranks, self._tuning = config, placement, ranks, tuning
        self._device, self.most = device, config.max_tokens_per_rank
        self._sizes = batch_sizes(self.most)
        self._plans: dict[tuple[Any, ...], RoundPlan] = {}
        self._signatures: dict[RoundSpec, object] = {}
        self.last: tuple[Any, RoundPlan | None] = (None, None)

    def size_for(self, max_num_tokens: int) -> int:
        """The tokens of a rank that a batch is sized for: at least the bound, the same on all ranks, M at most. Local.

        Errors: TypeError for a bound that is no number.
        """
        return self._sizes[bisect.bisect_left(self._sizes, min(max_num_tokens, self.most))]

    def find(self, key: tuple[Any, ...]) -> RoundPlan | None:
        """The plan of this key, if there is one. Local."""
        plan = self._plans.get(key)
        self.last = key, plan
        return plan

    def add(self, key: tuple[Any, ...], spec: RoundSpec) -> RoundPlan:
        """Make and keep the plan of a key. Local."""
        plan = self.make(spec)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)  # the oldest: T varies freely in prefill
        self._plans[key], self.last = plan, (key, plan)
        return plan

    def make(self, spec: RoundSpec) -> RoundPlan:
        """The plan of a round, whose `max_num_tokens` is of `size_for`. Local."""
        rows, num_topk, layout, scheme, quantized, _, max_num_tokens = spec
        config, num_ranks, num_physical = self._config, self._placement.num_ranks, self._placement.num_physical
        row_format = RowFormat.of(scheme, config.dtype, config.hidden, num_topk)
        may_be_ll = row_format.scale_dtype.itemsize == 4  # few tokens may be sent as LL words
        regions = regions_of(config, self._ranks)
        row = Row(
            K=num_topk,
            COLUMNS=triton.next_power_of_2(num_topk),
            VALUE_WORDS=row_format.value_bytes // 4,
            G=row_format.num_groups,
            GROUPS=triton.next_power_of_2(max(row_format.num_groups, 1)),
            ENTRY=2 * config.max_topk,
            VALUE_STRIDE=regions.value_bytes // 4,
            SCALE_STRIDE=regions.scale_bytes // row_format.scale_dtype.itemsize,
            LL_STRIDE=regions.ll_words,
        )
        programs = self._tuning.dispatch(rows, num_ranks, packs=layout is not Layout.FLAT)
        fused_quant = "" if quantized else fused_quantization(scheme.payload)
        sending = self._sending(spec, row, programs, fused_quant)
        frame = self._frame(spec)
        lead = 0 if layout is Layout.BATCHED else 1  # leading dimensions of the frame that the batch lacks
        row_units = (config.hidden if fused_quant else row.VALUE_WORDS) // sending.UNIT
        num_threads = programs.num_warps * Device.of(self._device).warp_size
        announcers = min(triton.cdiv(num_physical, sending.EXPERT_BLOCK), programs.announcers)
        tokens = rows if rows <= _EXACT_TOKENS else self.size_for(rows)
        expected_rows = max(triton.cdiv(tokens * num_ranks * num_topk, num_physical), 1)
        alike = spec._replace(num_tokens=expected_rows, quantized=False, counted=False)
        return RoundPlan(
            spec=spec,
            fingerprint=signed_word(row_format.fingerprint(max_num_tokens)),
            blocks=triton.cdiv(rows, BLOCK_TOKENS) if sending.IDS_COUNTED else 0,
            announcers=1 if sending.IDS_COUNTED else announcers,
            programs=programs,
            frame=frame,
            new_result=allocator((rows, config.hidden), (config.hidden, 1), config.dtype, self._device),
            output=((*frame.x.shape[lead:-1], config.hidden), config.dtype, self._device, torch.strided),
            in_place=not sending.IDS_COUNTED and not quantized and bool(fused_quant or not scheme.payload.quantized),
            strides=(row_units, 0, 0, num_topk, num_topk),
            expected_rows=expected_rows,
            signature=self._signatures.setdefault(alike, object()),
            row=row,
            sending=sending,
            receiving=Receiving(
                BLOCK_WORDS=awaited_words(row.VALUE_WORDS, programs.taken_block, num_threads),
                HEADER_SPAN=triton.next_power_of_2(header_stride(self._ranks.L)),
                TOKENS=programs.taken_tokens,
                BATCHED=layout is Layout.BATCHED,
                POOLED=layout is Layout.FLAT,
                TAKE_LL=may_be_ll,
                TAKE_ROWS=not may_be_ll or config.max_tokens_per_rank > WORD_TOKENS,
            ),
        )

    def _sending(self, spec: RoundSpec, row: Row, programs: DispatchTuning, fused_quant: str) -> Sending:
        """The constants of the sending half."""
        rows, payload, counted = spec.num_tokens, spec.scheme.payload, spec.counted
        group, may_be_ll = _shared_elements(payload, self._config.hidden), payload.scale_dtype.itemsize == 4
        ids_counted = rows > SELF_COUNTED_TOKENS
        compared_tokens = BLOCK_TOKENS if ids_counted else max(triton.next_power_of_2(rows), _FEWEST_TOKENS)
        num_experts = triton.next_power_of_2(self._placement.num_physical)
        ll_block, row_words = block_words(row.VALUE_WORDS, programs.word_block), block_words(row.VALUE_WORDS)
        if fused_quant:  # a block of words holds whole groups
            ll_block, row_words = (max(size, group // 4) for size in (ll_block, row_words))
        return Sending(
            H=self._config.hidden if fused_quant else row.VALUE_WORDS,
            GROUP=group if fused_quant else 1,
            QUANTIZE=fused_quant,
            UNIT=ALIGNMENT if fused_quant else math.gcd(row.VALUE_WORDS, 4),
            ROW_WORDS=row_words,
            LL_BLOCK=ll_block,
            LL_GROUPS=ll_block * 4 // group if fused_quant else row.GROUPS,
            TOKENS=compared_tokens,
            EXPERT_BLOCK=max(min(num_experts, max(_COMPARED // compared_tokens, 4)), 1),
            HAS_NUM_TOKENS=counted,
            IDS_COUNTED=ids_counted,
            SEND_LL=may_be_ll and (counted or rows <= WORD_TOKENS),
            SEND_ROWS=not may_be_ll or rows > WORD_TOKENS,
        )

    def destroy(self) -> None:
        """Drop all plans, and with them the references to the slots' memory. Local; calling it twice is fine."""
        for plan in self._plans.values():  # which handles refer to
            for kept in (plan.dispatches, plan.combines, plan.received):
                kept.clear()
        self._plans.clear()
        self.last = None, None

    def _frame(self, spec: RoundSpec) -> Frame:
        """The shapes of a batch, as meta tensors."""
        payload, hidden, meta = spec.scheme.payload, self._config.hidden, torch.device("meta")
        rows, groups = self._placement.num_ranks * spec.max_num_tokens, payload.num_groups(hidden)
        shape, dtype = (rows, payload.row_values(hidden)), payload.dtype or self._config.dtype
        pool = TokenRows(
            x=torch.empty(shape, dtype=dtype, device=meta),
            scale=torch.empty(rows, groups, dtype=payload.scale_dtype, device=meta) if groups else None,
            local_topk_ids=torch.empty(rows, spec.num_topk, dtype=torch.int32, device=meta),
            topk_weights=torch.empty(rows, spec.num_topk, dtype=torch.float32, device=meta),
        )
        num_local = self._placement.num_local_experts(self._ranks.RANK)
        sizes = {"num_local_experts": num_local, "capacity": rows, "alignment": self._config.row_alignment}
        return make_frame(pool, spec.layout, **sizes)
