"""The exchange kernels and how they are launched. Runs on a CPU under TRITON_INTERPRET=1.

Nothing is read back, and what is launched does not depend on counts or ids: all of it may be captured in a CUDA graph.

Letters: T tokens on this rank, H hidden, V stored values of a row, G scale groups, K top-k, R ranks, M
max_tokens_per_rank, L local experts, P physical experts, B blocks of tokens.
"""

import dataclasses
import math
from typing import Any

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout, TransportConfig
from ep_moe.kernels.combine import _combine_kernel
from ep_moe.kernels.count_ids import _count_block_kernel, _sum_blocks_kernel
from ep_moe.kernels.dispatch import _dispatch_kernel
from ep_moe.kernels.dispatch_receive import Batch
from ep_moe.kernels.dispatch_send import Tokens
from ep_moe.kernels.exchange import Links, Own
from ep_moe.layout import TokenRows
from ep_moe.layout.base import ExpertBatch
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.layout.triton import as_words
from ep_moe.placement import Placement
from ep_moe.quant import Quantised, QuantScheme, as_bytes, quantise
from ep_moe.routing import Routing
from ep_moe.transport.nvlink.memory import ExchangeMemory, SlotMemory
from ep_moe.transport.nvlink.tuning import UNPLANNED_TOKENS, WORD_TOKENS, Tuning, awaited_words, block_words
from ep_moe.transport.wire import RowFormat

_BLOCK_TOKENS = 64  # whose ids are counted together, where there are many
_BLOCK_EXPERTS = 32
_SUMMED_BLOCKS = 64
_ANNOUNCED = 1024  # (token, expert) pairs that an announcer compares at a time
_REGISTERS = 128  # of a thread, so that four programs of 4 warps share a processor
_EARLY_CAPABILITY = (9, 0)  # programmatic dependent launch
_QUANTISED_ON_THE_WAY = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """What travels in a round: a scheme's rows of a model's dtype with K ids each."""

    scheme: QuantScheme
    dtype: torch.dtype
    hidden: int
    num_topk: int

    @property
    def fingerprint(self) -> int:
        """What ranks compare, as int32."""
        bits = RowFormat.of(self.scheme, self.dtype, self.hidden, self.num_topk).fingerprint
        return bits - 2**32 if bits >= 2**31 else bits

    @property
    def wordy(self) -> bool:
        """Whether few tokens travel as words: their scales, if any, are of 32 bits."""
        return self.scheme.scale_dtype.itemsize == 4

    @property
    def value_words(self) -> int:
        """32-bit words of a row's values."""
        return self.scheme.values_bytes(self.hidden, self.dtype) // 4

    @property
    def num_groups(self) -> int:
        """G."""
        return self.scheme.num_groups(self.hidden)

    @property
    def on_the_way(self) -> str:
        """How the send kernel quantises, "" where it cannot: then `quantise` does before it."""
        scheme = self.scheme
        how = _QUANTISED_ON_THE_WAY.get(scheme.dtype, "") if scheme.dtype is not None else ""
        if scheme.scale_dtype is not torch.float32 or scheme.activation not in ("token", "group"):
            return ""
        if scheme.activation == "group" and scheme.block[1] & (scheme.block[1] - 1):
            return ""
        return f"{how}_power_of_two" if how == "e4m3" and scheme.power_of_two else how

    @property
    def group(self) -> int:
        """Numbers that share a scale, a power of two: the last group of a row may be short."""
        return self.scheme.block[1] if self.scheme.activation == "group" else triton.next_power_of_2(self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A dispatch that is ready for its launch, or was launched."""

    payload: Payload
    layout: Layout
    num_tokens: int  # T, the rows that were brought
    tokens: Tokens
    numbers: dict[str, int]  # of the kernel
    constants: dict[str, Any]


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether rows can be moved in 16-byte pieces where they lie: contiguous, and ALIGNMENT numbers apart or more."""
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % ALIGNMENT == 0
    return aligned and (rows.stride(1) == 1 or rows.shape[1] == 1)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or a copy that `is_aligned`."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


class Exchange:
    """Launches the kernels of one transport on this rank."""

    def __init__(
        self,
        config: TransportConfig,
        placement: Placement,
        memory: ExchangeMemory,
        *,
        rank: int,
        device: torch.device,
        most_programs: int,
        report: torch.Tensor,
        patience: int,
    ) -> None:
        self._config, self._rank, self._device, self._memory = config, rank, device, memory
        self.num_ranks = placement.num_ranks
        self.num_local = placement.num_local_experts(rank)
        self._num_physical = placement.num_physical
        self._max_experts = memory.max_experts
        self.tuning = Tuning(most_programs=most_programs)
        self._nothing = torch.zeros(4, dtype=torch.int32, device=device)  # where a kernel reads nothing
        self._links = [
            Links(slot.peers, memory.offsets, placement.starts, memory.aborts, memory.abort) for slot in memory.slots
        ]
        self._own = [
            Own(
                slot.state,
                slot.homes,
                slot.rows,
                slot.row_weights,
                slot.num_rows,
                slot.row_start,
                slot.rows_seen,
                slot.waited_ns,
                report,
            )
            for slot in memory.slots
        ]
        self._patience = patience
        # on a GPU a kernel's programs may start before the one before it has ended, and wait for it themselves
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY_CAPABILITY
        self._launch_options = {"launch_pdl": True} if self._early else {}

    def prepare(
        self,
        x: torch.Tensor | Quantised,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        num_tokens: torch.Tensor | None = None,
        refusal: int = 0,
    ) -> Sent:
        """Ready a dispatch for its launch; `refusal` 1 says that the round is off. Local, no host sync.

        Quantises what the kernel cannot on the way, and counts the ids of many tokens block by block, in launches.
        """
        config, (rows, num_topk) = self._config, routing.topk_ids.shape
        payload = Payload(scheme=scheme, dtype=config.dtype, hidden=config.hidden, num_topk=num_topk)
        how = ""
        if scheme.quantised and not isinstance(x, Quantised):
            how = payload.on_the_way
            x = x if how else quantise(x, scheme)
        values, scale = (x.values, x.scale) if isinstance(x, Quantised) else (x, None)
        unit = math.gcd(payload.value_words, 4)
        if how:
            values, unit = aligned_rows(values), ALIGNMENT
        else:
            values = as_words(values)
        scale = as_bytes(scale) if scale is not None else None
        ids, weights = (t if t.stride(1) == 1 else t.contiguous() for t in (routing.topk_ids, routing.topk_weights))
        planned = rows > UNPLANNED_TOKENS
        block_counts, blocks = self._nothing, 0
        if planned:
            block_counts, blocks = self._count_blocks(ids, num_tokens, rows)
        programs = self.tuning.dispatch(rows, self.num_ranks)
        count = _BLOCK_TOKENS if planned else max(triton.next_power_of_2(rows), 1)
        share = max(min(triton.next_power_of_2(self._num_physical), _ANNOUNCED // count), 1)
        words, row_words = block_words(payload.value_words, programs.word_block), block_words(payload.value_words)
        if how:  # words are made of whole groups
            words, row_words = (max(size, payload.group // 4) for size in (words, row_words))
        groups = triton.next_power_of_2(max(payload.num_groups, 1))
        numbers = {
            "max_tokens": rows,
            "num_blocks": blocks,
            "x_stride": values.stride(0) // unit,
            "scale_token_stride": 0 if scale is None else scale.stride(0),
            "scale_group_stride": 0 if scale is None else scale.stride(1),
            "ids_stride": ids.stride(0),
            "weights_stride": weights.stride(0),
            "fingerprint": payload.fingerprint,
            "refusal": refusal,
            "announcers": 1 if planned else min(triton.cdiv(self._num_physical, share), programs.announcers),
        }
        constants = {
            "H": config.hidden if how else payload.value_words,
            "GROUP": payload.group if how else 1,
            "UNIT": unit,
            "SENT_WORDS": row_words,
            "WORD_BLOCK": words,
            "WORD_GROUPS": words * 4 // payload.group if how else groups,
            "FENCED": programs.fenced,
            "TOKENS": count,
            "COUNTED_EXPERTS": share,
            "QUANTISE": how,
            "COUNTED": num_tokens is not None,
            "PLANNED": planned,
        }
        return Sent(
            payload=payload,
            layout=layout,
            num_tokens=rows,
            tokens=Tokens(
                values,
                self._nothing if scale is None else scale,
                ids,
                weights,
                self._nothing if num_tokens is None else num_tokens,
                block_counts,
            ),
            numbers=numbers,
            constants=constants,
        )

    def send(self, slot: int, sent: Sent) -> None:
        """Launch the sending half of a dispatch. Local, no host sync."""
        nothing = self._nothing
        unused = Batch(nothing, nothing.view(torch.float32), nothing, nothing, nothing, nothing)
        self._launch_dispatch(slot, sent, unused, send=True, frame=None)

    def receive(self, slot: int, sent: Sent, *, send: bool) -> ExpertBatch:
        """Launch the receiving half, or with `send` both in one; returns the batch that it fills. Local, no host sync."""
        memory, (rows, frame) = self._memory.slots[slot], self._frame(self._memory.slots[slot], sent)
        scale = memory.pooled_weights if frame.scale is None else as_bytes(frame.scale)
        batch = Batch(
            frame.x.view(-1, frame.x.shape[-1]).view(torch.int32),
            scale,
            memory.token_to_row,
            memory.local_ids,
            memory.pooled_weights,
            memory.local_ids if frame.row_index is None else frame.row_index,
        )
        self._launch_dispatch(slot, sent, batch, send=send, frame=frame)
        packed = frame.finish(
            rows,
            scheme=sent.payload.scheme,
            dtype=self._config.dtype,
            expert_row_start=memory.row_start[: self.num_local],
            expert_num_tokens=memory.num_rows[: self.num_local],
            token_to_row=memory.token_to_row[: rows.local_topk_ids.numel()].view(rows.local_topk_ids.shape),
        )
        pairs = sent.num_tokens * self.num_ranks * sent.payload.num_topk  # if the others bring as many
        return dataclasses.replace(packed.batch, expected_rows=max(triton.cdiv(pairs, self._num_physical), 1))

    def _frame(self, slot: SlotMemory, sent: Sent) -> tuple[TokenRows, Frame]:
        """What the batch lies in, and the pool of received rows."""
        config, payload = self._config, sent.payload
        num_rows, k = self.num_ranks * config.max_tokens_per_rank, payload.num_topk
        size = num_rows * payload.value_words * 4
        dtype = payload.scheme.dtype or config.dtype
        groups, scale = payload.num_groups, None
        if groups:
            scale_dtype = payload.scheme.scale_dtype
            scale = slot.scales[: num_rows * groups * scale_dtype.itemsize].view(scale_dtype).view(num_rows, groups)
        rows = TokenRows(
            x=slot.values[:size].view(dtype).view(num_rows, -1),
            scale=scale,
            local_topk_ids=slot.local_ids[: num_rows * k].view(num_rows, k),
            topk_weights=slot.pooled_weights[: num_rows * k].view(num_rows, k),
        )
        frame = make_frame(
            rows,
            sent.layout,
            num_local_experts=self.num_local,
            capacity=num_rows,
            alignment=config.row_alignment,
            max_rows=None,
        )
        return rows, frame

    def _count_blocks(self, ids: torch.Tensor, num_tokens: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, int]:
        """Count the rows of every expert before each block of tokens, and in all. Two launches."""
        blocks, width = triton.cdiv(rows, _BLOCK_TOKENS), self._num_physical + 1
        counts = torch.empty(blocks + 1, width, dtype=torch.int32, device=ids.device)
        _count_block_kernel[(blocks, triton.cdiv(self._num_physical, _BLOCK_EXPERTS))](
            ids,
            self._nothing if num_tokens is None else num_tokens,
            counts,
            rows,
            self._num_physical,
            ids.stride(0),
            K=ids.shape[1],
            TOKENS=_BLOCK_TOKENS,
            EXPERTS=_BLOCK_EXPERTS,
            COUNTED=num_tokens is not None,
        )
        _sum_blocks_kernel[(triton.cdiv(width, _BLOCK_EXPERTS),)](
            counts, blocks, self._num_physical, BLOCKS=_SUMMED_BLOCKS, EXPERTS=_BLOCK_EXPERTS
        )
        return counts, blocks

    def _launch_dispatch(self, slot: int, sent: Sent, batch: Batch, *, send: bool, frame: Frame | None) -> None:
        payload, config = sent.payload, self._config
        programs, receive = self.tuning.dispatch(sent.num_tokens, self.num_ranks), frame is not None
        announcers, counted = sent.numbers["announcers"], sent.constants["COUNTED"]
        first_receiver = (announcers + programs.senders) * send
        _dispatch_kernel[(first_receiver + programs.receivers * receive,)](
            self._links[slot],
            self._own[slot],
            sent.tokens,
            batch,
            **sent.numbers,
            num_physical=self._num_physical,
            max_tokens_per_rank=config.max_tokens_per_rank,
            word_tokens=WORD_TOKENS,
            height=1 if frame is None else frame.height,
            alignment=1 if frame is None else frame.alignment,
            first_sender=announcers,
            senders=programs.senders,
            first_receiver=first_receiver,
            patience=self._patience,
            **sent.constants,
            G=payload.num_groups,
            GROUPS=triton.next_power_of_2(max(payload.num_groups, 1)),
            VALUE_WORDS=payload.value_words,
            TAKEN_WORDS=awaited_words(payload.value_words, programs.taken_block, programs.num_warps),
            ENTRY=2 * config.max_topk,
            R=self.num_ranks,
            RANK=self._rank,
            RANKS=triton.next_power_of_2(self.num_ranks),
            K=payload.num_topk,
            COLUMNS=triton.next_power_of_2(payload.num_topk),
            L=self._max_experts,
            EXPERTS=triton.next_power_of_2(self._max_experts),
            NEWS_WORDS=triton.next_power_of_2(self._max_experts + 2),
            BATCHED=sent.layout is Layout.BATCHED,
            POOLED=sent.layout is Layout.FLAT,
            WORDY=payload.wordy,
            TAKE_ROWS=not payload.wordy or config.max_tokens_per_rank > WORD_TOKENS,
            SEND_WORDS=payload.wordy and (counted or sent.num_tokens <= WORD_TOKENS),
            SEND_ROWS=not payload.wordy or sent.num_tokens > WORD_TOKENS,
            SEND=send,
            RECEIVE=receive,
            PDL=self._early,
            **self._launch_options,
            maxnreg=_REGISTERS,
            num_warps=programs.num_warps,
        )

    def combine(
        self,
        slot: int,
        sent: Sent,
        *,
        y: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        send: bool,
        receive: bool,
    ) -> None:
        """Launch a combine or one half of it; where it sends without `y`, NaN goes home. Local, no host sync."""
        config = self._config
        programs = self.tuning.combine(sent.num_tokens, self.num_ranks)
        like = self._memory.slots[slot].returned[:0].view(config.dtype)
        first_receiver = programs.senders * send
        _combine_kernel[(first_receiver + programs.receivers * receive,)](
            self._links[slot],
            self._own[slot],
            like if y is None else y,
            like if shared is None else shared,
            like if out is None else out,
            0 if shared is None else shared.stride(0) // ALIGNMENT,
            0 if out is None else out.stride(0) // ALIGNMENT,
            config.max_tokens_per_rank,
            programs.senders,
            first_receiver,
            self._patience,
            H=config.hidden,
            SENT_BLOCK=block_words(config.hidden, programs.sent_block),
            SUMMED_BLOCK=awaited_words(config.hidden, programs.summed_block, programs.num_warps),
            TOGETHER=programs.together,
            UNIT=ALIGNMENT,
            R=self.num_ranks,
            RANK=self._rank,
            RANKS=triton.next_power_of_2(self.num_ranks),
            K=sent.payload.num_topk,
            COLUMNS=triton.next_power_of_2(sent.payload.num_topk),
            SUMMED=sent.layout is Layout.FLAT,
            SPOILT=y is None,
            SHARED=shared is not None,
            SEND=send,
            RECEIVE=receive,
            PDL=self._early,
            **self._launch_options,
            maxnreg=_REGISTERS,
            num_warps=programs.num_warps,
            enable_fp_fusion=False,
        )
