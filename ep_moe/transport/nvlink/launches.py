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
from ep_moe.layout import Batched, Compact, Flat, TokenRows
from ep_moe.layout.base import ExpertBatch
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.layout.triton import as_words
from ep_moe.placement import Placement
from ep_moe.quant import Quantised, QuantScheme, as_bytes, quantise
from ep_moe.routing import Routing
from ep_moe.transport.nvlink.launch import Launch
from ep_moe.transport.nvlink.memory import ExchangeMemory
from ep_moe.transport.nvlink.payload import Payload, aligned, aligned_rows
from ep_moe.transport.nvlink.tuning import (
    UNPLANNED_TOKENS,
    WORD_TOKENS,
    DispatchTuning,
    Tuning,
    awaited_words,
    block_words,
)

_BLOCK_TOKENS = 64  # whose ids are counted together, where there are many
_BLOCK_EXPERTS = 32
_SUMMED_BLOCKS = 64
_ANNOUNCED = 1024  # (token, expert) pairs that an announcer compares at a time
_REGISTERS = 168  # of a thread, so that three programs of 4 warps share a processor; fewer spill
_EARLY_CAPABILITY = (9, 0)  # programmatic dependent launch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that rounds of a kind have in common, found once."""

    payload: Payload
    fingerprint: int
    layout: Layout
    num_tokens: int  # T, the rows that are brought
    how: str  # they are quantised on the way
    unit: int  # numbers, or words, that strides of rows count
    blocks: int  # of tokens whose ids are counted beforehand, 0 where each program counts all itself
    announcers: int
    programs: DispatchTuning
    frame: Frame  # on no device: the shapes of the batch
    expected_rows: int
    constants: dict[str, Any]  # of the dispatch kernel, but for its halves
    launches: dict[tuple[bool, ...], Launch]  # by halves
    kept: dict[int, dict[str, Any]]  # what batches of a slot share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A dispatch that is ready for its launch, or was launched."""

    plan: Plan
    tokens: Tokens
    strides: tuple[int, ...]  # of x, of its scales by token and by group, of ids, of weights
    refusal: int

    @property
    def num_tokens(self) -> int:
        """T, the rows that were brought."""
        return self.plan.num_tokens


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
        most_receivers: int,
        report: torch.Tensor,
        patience: int,
    ) -> None:
        self._config, self._rank, self._device, self._memory = config, rank, device, memory
        self.num_ranks = placement.num_ranks
        self.num_local = placement.num_local_experts(rank)
        self._num_physical, self._starts = placement.num_physical, placement.starts
        self._max_experts = memory.max_experts
        self.tuning = Tuning(most_receivers=most_receivers)
        self._nothing = torch.zeros(4, dtype=torch.int32, device=device)  # where a kernel reads nothing
        self._links = [Links(slot.peers, memory.offsets, memory.aborts, memory.abort) for slot in memory.slots]
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
        self._empty = torch.empty(0, dtype=config.dtype, device=device)
        self._patience = patience
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._combines: dict[tuple[Any, ...], Launch] = {}
        # on a GPU a kernel's programs may start before the one before it has ended, and wait for it themselves
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY_CAPABILITY

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
        (rows, num_topk), given = routing.topk_ids.shape, isinstance(x, Quantised)
        key = (rows, num_topk, layout, scheme.name, given, routing.topk_ids.dtype, num_tokens is not None)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(rows, num_topk, layout, scheme, given, num_tokens is not None)
        if scheme.quantised and not isinstance(x, Quantised) and not plan.how:
            if num_tokens is not None:  # a scale that tokens share must not know the rows that are none
                x = x.masked_fill(torch.arange(rows, device=x.device).unsqueeze(1) >= num_tokens, 0)
            x = quantise(x, scheme)
        values, scale = (x.values, aligned(as_bytes(x.scale))) if isinstance(x, Quantised) else (x, self._nothing)
        values = aligned_rows(values) if plan.how else aligned(as_words(values))
        ids, weights = (
            aligned(t if t.stride(1) == 1 else t.contiguous()) for t in (routing.topk_ids, routing.topk_weights)
        )
        count = self._nothing if num_tokens is None else aligned(num_tokens)
        block_counts = self._count_blocks(ids, count, plan) if plan.blocks else self._nothing
        return Sent(
            plan=plan,
            tokens=Tokens(values, scale, ids, weights, count, block_counts),
            strides=(
                values.stride(0) // plan.unit,
                *(scale.stride() if isinstance(x, Quantised) else (0, 0)),
                ids.stride(0),
                weights.stride(0),
            ),
            refusal=refusal,
        )

    def _make_plan(
        self, rows: int, num_topk: int, layout: Layout, scheme: QuantScheme, given: bool, counted: bool
    ) -> Plan:
        config = self._config
        payload = Payload(scheme=scheme, dtype=config.dtype, hidden=config.hidden, num_topk=num_topk)
        how = "" if given or not scheme.quantised else payload.on_the_way
        planned = rows > UNPLANNED_TOKENS
        programs = self.tuning.dispatch(rows, self.num_ranks)
        count = _BLOCK_TOKENS if planned else max(triton.next_power_of_2(rows), 1)
        share = max(min(triton.next_power_of_2(self._num_physical), _ANNOUNCED // count), 1)
        words, row_words = block_words(payload.value_words, programs.word_block), block_words(payload.value_words)
        if how:  # words are made of whole groups
            words, row_words = (max(size, payload.group // 4) for size in (words, row_words))
        groups = triton.next_power_of_2(max(payload.num_groups, 1))
        unit = ALIGNMENT if how else math.gcd(payload.value_words, 4)
        constants = {
            "H": config.hidden if how else payload.value_words,
            "GROUP": payload.group if how else 1,
            "G": payload.num_groups,
            "GROUPS": groups,
            "SENT_WORDS": row_words,
            "WORD_BLOCK": words,
            "WORD_GROUPS": words * 4 // payload.group if how else groups,
            "TAKEN_WORDS": awaited_words(payload.value_words, programs.taken_block, programs.num_warps),
            "VALUE_WORDS": payload.value_words,
            "UNIT": unit,
            "ENTRY": 2 * config.max_topk,
            "FENCED": programs.fenced,
            "R": self.num_ranks,
            "RANK": self._rank,
            "STARTS": self._starts,
            "RANKS": triton.next_power_of_2(self.num_ranks),
            "K": num_topk,
            "COLUMNS": triton.next_power_of_2(num_topk),
            "L": self._max_experts,
            "EXPERTS": triton.next_power_of_2(self._max_experts),
            "NEWS_WORDS": triton.next_power_of_2(self._max_experts + 2),
            "TOKENS": count,
            "COUNTED_EXPERTS": share,
            "QUANTISE": how,
            "COUNTED": counted,
            "PLANNED": planned,
            "BATCHED": layout is Layout.BATCHED,
            "POOLED": layout is Layout.FLAT,
            "WORDY": payload.wordy,
            "TAKE_ROWS": not payload.wordy or config.max_tokens_per_rank > WORD_TOKENS,
            "SEND_WORDS": payload.wordy and (counted or rows <= WORD_TOKENS),
            "SEND_ROWS": not payload.wordy or rows > WORD_TOKENS,
            "PDL": self._early,
        }
        return Plan(
            payload=payload,
            fingerprint=payload.fingerprint,
            layout=layout,
            num_tokens=rows,
            how=how,
            unit=unit,
            blocks=triton.cdiv(rows, _BLOCK_TOKENS) if planned else 0,
            announcers=1 if planned else min(triton.cdiv(self._num_physical, share), programs.announcers),
            programs=programs,
            frame=self._frame(payload, layout),
            expected_rows=max(triton.cdiv(rows * self.num_ranks * num_topk, self._num_physical), 1),
            constants=constants,
            launches={},
            kept={},
        )

    def _frame(self, payload: Payload, layout: Layout) -> Frame:
        """The shapes of a batch, of tensors without memory."""
        rows, k, groups = self.num_ranks * self._config.max_tokens_per_rank, payload.num_topk, payload.num_groups
        scheme = payload.scheme
        shape = (rows, scheme.row_values(self._config.hidden))
        pool = TokenRows(
            x=torch.empty(shape, dtype=scheme.dtype or self._config.dtype, device="meta"),
            scale=torch.empty(rows, groups, dtype=scheme.scale_dtype, device="meta") if groups else None,
            local_topk_ids=torch.empty(rows, k, dtype=torch.int32, device="meta"),
            topk_weights=torch.empty(rows, k, device="meta"),
        )
        return make_frame(
            pool,
            layout,
            num_local_experts=self.num_local,
            capacity=rows,
            alignment=self._config.row_alignment,
            max_rows=None,
        )

    def _count_blocks(self, ids: torch.Tensor, count: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Count the rows of every expert before each block of tokens, and in all. Two launches."""
        width = self._num_physical + 1
        counts = torch.empty(plan.blocks + 1, width, dtype=torch.int32, device=ids.device)
        _count_block_kernel[(plan.blocks, triton.cdiv(self._num_physical, _BLOCK_EXPERTS))](
            ids,
            count,
            counts,
            plan.num_tokens,
            self._num_physical,
            ids.stride(0),
            K=ids.shape[1],
            TOKENS=_BLOCK_TOKENS,
            EXPERTS=_BLOCK_EXPERTS,
            COUNTED=plan.constants["COUNTED"],
        )
        _sum_blocks_kernel[(triton.cdiv(width, _BLOCK_EXPERTS),)](
            counts, plan.blocks, self._num_physical, BLOCKS=_SUMMED_BLOCKS, EXPERTS=_BLOCK_EXPERTS
        )
        return counts

    def send(self, slot: int, sent: Sent) -> None:
        """Launch the sending half of a dispatch. Local, no host sync."""
        nothing = self._nothing
        unused = Batch(nothing, nothing.view(torch.float32), nothing, nothing, nothing, nothing)
        self._launch_dispatch(slot, sent, unused, send=True, receive=False)

    def receive(self, slot: int, sent: Sent, *, send: bool) -> ExpertBatch:
        """Launch the receiving half, or with `send` both; returns the batch that it fills. Local, no host sync."""
        plan, memory = sent.plan, self._memory.slots[slot]
        frame, kept = plan.frame, plan.kept.get(slot)
        if kept is None:
            kept = plan.kept[slot] = self._make_kept(slot, plan)
        x = (
            kept["pool"]
            if plan.layout is Layout.FLAT
            else torch.empty(frame.x.shape, dtype=frame.x.dtype, device=self._device)
        )
        scale, row_index = None, None
        if frame.scale is not None:
            experts, height, groups = frame.scale.shape
            shape = (experts, groups, height)
            scale = torch.empty(shape, dtype=frame.scale.dtype, device=self._device).transpose(1, 2)
        if frame.row_index is not None:
            row_index = memory.row_index[: frame.row_index.shape[0]]
        batch = Batch(
            as_bytes(x).view(torch.int32),
            memory.pooled_weights if scale is None else as_bytes(scale),
            memory.token_to_row,
            memory.local_ids,
            memory.pooled_weights,
            memory.local_ids if row_index is None else row_index,
        )
        self._launch_dispatch(slot, sent, batch, send=send, receive=True)
        common = kept["common"]
        if plan.layout is Layout.BATCHED:
            return Batched(x=x, scale=scale, row_index=None, **common)
        flat_scale = None if scale is None else scale[0]
        if plan.layout is Layout.COMPACT:
            return Compact(x=x[0], scale=flat_scale, row_index=None, **common)
        return Flat(x=x, scale=flat_scale, row_index=row_index, **common, **kept["rows"])

    def _make_kept(self, slot: int, plan: Plan) -> dict[str, Any]:
        """What batches of a slot share: views of its memory, and what the plan says."""
        memory, num_rows = self._memory.slots[slot], self.num_ranks * self._config.max_tokens_per_rank
        k = plan.payload.num_topk
        size = num_rows * plan.payload.value_words * 4
        return {
            "pool": memory.values[:size].view(plan.frame.x.dtype).view(num_rows, -1),
            "common": {
                "scheme": plan.payload.scheme,
                "dtype": self._config.dtype,
                "expert_row_start": memory.row_start[: self.num_local],
                "expert_num_tokens": memory.num_rows[: self.num_local],
                "expected_rows": plan.expected_rows,  # if the others bring as many tokens
            },
            "rows": {
                "local_topk_ids": memory.local_ids[: num_rows * k].view(num_rows, k),
                "topk_weights": memory.pooled_weights[: num_rows * k].view(num_rows, k),
                "token_to_row": memory.token_to_row[: num_rows * k].view(num_rows, k),
            },
        }

    def _launch_dispatch(self, slot: int, sent: Sent, batch: Batch, *, send: bool, receive: bool) -> None:
        plan, config = sent.plan, self._config
        first_receiver = (plan.announcers + plan.programs.senders) * send
        launch = plan.launches.get((send, receive))
        if launch is None:
            launch = plan.launches[send, receive] = Launch(
                _dispatch_kernel,
                first_receiver + plan.programs.receivers * receive,
                constants={**plan.constants, "SEND": send, "RECEIVE": receive},
                options=self._options(plan.programs.num_warps),
                direct=self._device.type == "cuda",
            )
        launch(
            self._links[slot],
            self._own[slot],
            sent.tokens,
            batch,
            plan.num_tokens,
            plan.blocks,
            self._num_physical,
            *sent.strides,
            config.max_tokens_per_rank,
            WORD_TOKENS,
            plan.frame.height,
            plan.frame.alignment,
            plan.fingerprint,
            sent.refusal,
            plan.announcers,
            plan.announcers,
            plan.programs.senders,
            first_receiver,
            self._patience,
        )

    def _options(self, num_warps: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": num_warps, "maxnreg": _REGISTERS}
        return {**options, "launch_pdl": True} if self._early else options

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
        plan, config = sent.plan, self._config
        programs = self.tuning.combine(plan.num_tokens, self.num_ranks)
        k, flat = plan.payload.num_topk, plan.layout is Layout.FLAT
        shared_dtype = None if shared is None else shared.dtype
        key = (plan.num_tokens, k, flat, y is None, shared_dtype, send, receive)
        first_receiver = programs.senders * send
        launch = self._combines.get(key)
        if launch is None:
            constants = {
                "H": config.hidden,
                "SENT_BLOCK": block_words(config.hidden, programs.sent_block),
                "SUMMED_BLOCK": awaited_words(config.hidden, programs.summed_block, programs.num_warps),
                "TOGETHER": programs.together,
                "UNIT": ALIGNMENT,
                "R": self.num_ranks,
                "RANK": self._rank,
                "RANKS": triton.next_power_of_2(self.num_ranks),
                "K": k,
                "COLUMNS": triton.next_power_of_2(k),
                "SUMMED": flat,
                "SPOILT": y is None,
                "SHARED": shared is not None,
                "SEND": send,
                "RECEIVE": receive,
                "PDL": self._early,
            }
            launch = self._combines[key] = Launch(
                _combine_kernel,
                first_receiver + programs.receivers * receive,
                constants=constants,
                options={**self._options(programs.num_warps), "enable_fp_fusion": False},
                direct=self._device.type == "cuda",
            )
        like = self._empty
        launch(
            self._links[slot],
            self._own[slot],
            like if y is None else aligned(y),
            like if shared is None else shared,
            like if out is None else out,
            0 if shared is None else shared.stride(0) // ALIGNMENT,
            0 if out is None else out.stride(0) // ALIGNMENT,
            config.max_tokens_per_rank,
            programs.senders,
            first_receiver,
            self._patience,
        )

    def destroy(self) -> None:
        """Let go of the memory. Local; calling it twice is fine."""
        self._plans, self._combines, self._links, self._own = {}, {}, [], []
