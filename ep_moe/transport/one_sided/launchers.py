"""Launchers of the exchange kernels. Run on a CPU under TRITON_INTERPRET=1.

There is no host sync, and launches do not depend on counts or ids: all of them may be captured in a CUDA graph.

Letters: T tokens on this rank, H hidden, V stored values of a row, G scale groups, K top-k, R ranks, M
max_tokens_per_rank, L local experts, P physical experts, B blocks of tokens.
"""

import concurrent.futures
import os
from typing import Any, NamedTuple

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout, TransportConfig
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.exchange.combine import Combining, Results, _combine_kernel
from ep_moe.kernels.exchange.count_ids import _count_block_kernel, _sum_blocks_kernel
from ep_moe.kernels.exchange.dispatch import _dispatch_kernel
from ep_moe.kernels.exchange.dispatch_receive import Batch
from ep_moe.kernels.exchange.dispatch_send import Tokens
from ep_moe.kernels.exchange.round_state import Halves
from ep_moe.kernels.exchange.wire_layout import Ranks
from ep_moe.layout import Batched, Compact, Flat
from ep_moe.layout.base import ExpertBatch
from ep_moe.layout.triton import as_words
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, as_bytes, get_scheme, quantize
from ep_moe.routing import Routing
from ep_moe.transport.layer_tag import NO_LAYER
from ep_moe.transport.one_sided.memory import PeerMemory
from ep_moe.transport.one_sided.occupancy import REGISTERS
from ep_moe.transport.one_sided.payload import aligned, aligned_rows
from ep_moe.transport.one_sided.round_plan import BLOCK_TOKENS, Plan, Planner, distinct_sizes
from ep_moe.transport.one_sided.slot_state import SlotStates
from ep_moe.transport.one_sided.tuning import WORD_TOKENS, Tuning, awaited_words, block_words, held_words
from ep_moe.transport.round_kind import RoundKind

_BLOCK_EXPERTS = 32
_SUMMED_BLOCKS = 64
_EARLY_CAPABILITY = (9, 0)  # programmatic dependent launch
_MOST_PLANS = 512
_MOST_COMPILERS = 8  # threads


class Sent(NamedTuple):
    """The plan and arguments of a dispatch that is about to be launched, or was launched."""

    plan: Plan
    tokens: Tokens
    strides: tuple[int, ...]  # of x, of its scales by token and by group, of ids, of weights
    refusal: int
    layer: tuple[int, int]  # `LayerTag.words`

    @property
    def num_tokens(self) -> int:
        """T, the rows of x."""
        return self.plan.num_tokens


class Exchange:
    """Launches the kernels of one transport on this rank."""

    def __init__(
        self,
        config: TransportConfig,
        placement: Placement,
        memory: PeerMemory,
        states: SlotStates,
        ranks: Ranks,
        *,
        device: torch.device,
        most_receivers: int,
        timeout_ns: int,
    ) -> None:
        rank = ranks.RANK
        self._config, self._ranks, self._device = config, ranks, device
        self._memory, self._states = memory, states
        self.num_ranks = placement.num_ranks
        self.num_local = placement.num_local_experts(rank)
        self._num_physical = placement.num_physical
        self.tuning = Tuning(most_receivers=most_receivers, num_sms=config.num_sms)
        self._nothing = torch.zeros(4, dtype=torch.int32, device=device)  # for unused arguments
        self._unscaled = torch.zeros(4, device=device)
        self._empty = torch.empty(0, dtype=config.dtype, device=device)
        self._timeout_ns = timeout_ns
        # programs may start before the previous kernel has ended, and wait for it themselves
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY_CAPABILITY
        self._planner = Planner(config, placement, ranks, self.tuning)
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(self, kind: tuple[Any, ...]) -> Plan | None:
        """The cached plan of a kind (`kind_of`), or None."""
        return self._plans.get(kind)

    def make_plan(
        self,
        kind: tuple[Any, ...],
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        num_tokens: torch.Tensor | None,
    ) -> Plan:
        """Make and cache the plan of a kind. Local."""
        rows, num_topk = routing.topk_ids.shape
        plan = self._planner.plan(
            rows, num_topk, layout, scheme, given=isinstance(x, Quantized), counted=num_tokens is not None
        )
        if len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)  # the oldest: T varies freely in prefill
        self._plans[kind] = plan
        return plan

    def compile(self, kinds: tuple[RoundKind, ...]) -> None:
        """Compile the kernels of these kinds of rounds, for every T, and load them onto the GPU. Local."""
        launches = []
        for kind in kinds:
            for rows in distinct_sizes(self._config.max_tokens_per_rank):
                launches += self._launches_of(kind, rows)
        workers = min(_MOST_COMPILERS, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool):
            for launch, tensors, numbers in launches:
                launch.compile(tensors, numbers)
        for launch, tensors, numbers in launches:
            launch.load(tensors, numbers)

    def _launches_of(self, kind: RoundKind, rows: int) -> list[tuple[RepeatedLaunch, Any, Any]]:
        """The launches of a round with T = `rows`, with arguments to compile for."""
        like: dict[str, Any] = {"device": self._device}
        config, scheme = self._config, get_scheme(kind.scheme)
        x = torch.zeros(rows, config.hidden, dtype=config.dtype, **like)
        ids = torch.full((rows, kind.num_topk), -1, dtype=kind.ids_dtype, **like)
        routing = Routing(topk_ids=ids, topk_weights=torch.zeros(rows, kind.num_topk, **like))
        count = torch.zeros(1, dtype=torch.int32, **like) if kind.counted else None
        plan = self._planner.plan(rows, kind.num_topk, kind.layout, scheme, given=False, counted=kind.counted)
        sent = self.prepare(plan, x, routing, num_tokens=count)
        # only the dtypes of these arguments matter
        batch, shared = Batch(self._nothing, self._unscaled), None
        if scheme.payload.quantized:
            batch = batch._replace(out_scale_ptr=as_bytes(torch.empty(16, dtype=scheme.payload.scale_dtype, **like)))
        if kind.shared_dtype is not None:
            shared = torch.empty(16, dtype=kind.shared_dtype, **like)
        found: list[tuple[RepeatedLaunch, Any, Any]] = []
        whole, halves = ((True, True),), ((True, False), (False, True))
        for send, receive in halves if kind.split_dispatch else whole:
            launch = self._dispatch_of(0, sent, send=send, receive=receive)
            filled = batch if receive else Batch(self._nothing, self._unscaled)
            found.append((launch, (sent.tokens, filled), (*sent.strides, *sent.layer, self._timeout_ns)))
        for send, receive in halves if kind.split_combine else whole:
            added = shared if receive else None
            launch = self._combine_of(0, sent, poisoned=not send, shared=added, send=send, receive=receive)
            results = Results(self._empty, self._empty if added is None else added, self._empty)
            found.append((launch, (results,), (0, 0, self._timeout_ns)))
        return found

    def prepare(
        self,
        plan: Plan,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        num_tokens: torch.Tensor | None = None,
        refusal: int = 0,
        layer: tuple[int, int] = NO_LAYER.words,
    ) -> Sent:
        """Prepare a dispatch for its launch; `refusal` 1 sends the error flag. Local, no host sync.

        Launches `quantize` if the dispatch kernel cannot quantize, and for large T the kernels that count ids by block.
        """
        scheme, nothing = plan.payload.scheme, self._nothing
        ids, weights = routing.topk_ids, routing.topk_weights
        if plan.fused_quant and not plan.blocks and _lie_side_by_side(x, ids, weights):  # type: ignore[arg-type]
            count = nothing if num_tokens is None else aligned(num_tokens)
            return Sent(plan, Tokens(x, nothing, ids, weights, count, nothing), plan.strides, refusal, layer)
        if scheme.payload.quantized and not isinstance(x, Quantized) and not plan.fused_quant:
            if num_tokens is not None:  # rows that are no tokens must not affect a scale that tokens share
                x = x.masked_fill(torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= num_tokens, 0)
            x = quantize(x, scheme)
        scale = nothing
        scale_strides: tuple[int, ...] = (0, 0)
        if isinstance(x, Quantized):
            values, scale = as_words(x.values), aligned(as_bytes(x.scale))
            scale_strides = scale.stride()
        else:
            values = aligned_rows(x) if plan.fused_quant else as_words(x)
        values = values if plan.fused_quant else aligned(values)
        ids, weights = _aligned_columns(ids), _aligned_columns(weights)
        count = nothing if num_tokens is None else aligned(num_tokens)
        block_counts = self._count_blocks(ids, count, plan) if plan.blocks else nothing
        strides = values.stride(0) // plan.unit, *scale_strides, ids.stride(0), weights.stride(0)
        return Sent(plan, Tokens(values, scale, ids, weights, count, block_counts), strides, refusal, layer)

    def _count_blocks(self, ids: torch.Tensor, count: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Count the rows of every expert before each block of tokens, and in total. Two launches."""
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
            TOKENS=BLOCK_TOKENS,
            EXPERTS=_BLOCK_EXPERTS,
            HAS_NUM_TOKENS=plan.sending.HAS_NUM_TOKENS,
        )
        _sum_blocks_kernel[(triton.cdiv(width, _BLOCK_EXPERTS),)](
            counts, plan.blocks, self._num_physical, BLOCKS=_SUMMED_BLOCKS, EXPERTS=_BLOCK_EXPERTS
        )
        return counts

    def send(self, slot: int, sent: Sent) -> None:
        """Launch the sending half of a dispatch. Local, no host sync."""
        launch = self._dispatch_of(slot, sent, send=True, receive=False)
        launch((sent.tokens, Batch(self._nothing, self._unscaled)), (*sent.strides, *sent.layer, self._timeout_ns))

    def receive(self, slot: int, sent: Sent, *, send: bool) -> ExpertBatch:
        """Launch the receiving half, or with `send` both halves; returns the batch it fills. Local, no host sync."""
        plan = sent.plan
        launch = self._dispatch_of(slot, sent, send=send, receive=True)
        x, scale = self._allocate(plan, slot)
        batch = Batch(x, self._unscaled if scale is None else scale) if launch.loaded else self._as_stored(x, scale)
        launch((sent.tokens, batch), (*sent.strides, *sent.layer, self._timeout_ns))
        kept = plan.kept[slot]
        if plan.layout is Layout.BATCHED:
            return Batched(x=x, scale=scale, row_index=None, **kept["common"])
        if plan.layout is Layout.COMPACT:
            return Compact(x=x, scale=scale, row_index=None, **kept["common"])
        return Flat(x=x, scale=scale, **kept["common"], **kept["rows"])

    def discard(self, slot: int, sent: Sent) -> Sent:
        """Launch the receiving half of a dispatch whose rows are not needed, without allocating memory for x.

        Returns the `Sent` with which the round continues. Local, no host sync.
        """
        plan = sent.plan
        if plan.layout is not Layout.FLAT:  # FLAT rows stay in the slot's memory
            given = plan.payload.scheme.payload.quantized and not plan.fused_quant
            sizes = plan.num_tokens, plan.payload.num_topk
            counted = plan.sending.HAS_NUM_TOKENS
            plan = self._planner.plan(*sizes, Layout.FLAT, plan.payload.scheme, given=given, counted=counted)
        sent = sent._replace(plan=plan)
        self.receive(slot, sent, send=False)
        return sent

    def _allocate(self, plan: Plan, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Allocate a batch's x and scale; in FLAT x is the slot's pool."""
        kept, scheme, device, scale = plan.kept.get(slot), plan.payload.scheme, self._device, None
        if kept is None:
            kept = plan.kept[slot] = self._make_kept(slot, plan)
        if scheme.payload.quantized:
            scale = torch.empty_strided(
                plan.scale_shape, plan.scale_strides, dtype=scheme.payload.scale_dtype, device=device
            )
        if plan.layout is Layout.FLAT:
            return kept["pool"], scale
        # takes half the time of torch.empty
        x = torch.empty_strided(
            plan.x_shape, plan.x_strides, dtype=scheme.payload.dtype or self._config.dtype, device=device
        )
        return x, scale

    def _as_stored(self, x: torch.Tensor, scale: torch.Tensor | None) -> Batch:
        """Views in the dtypes that the kernel stores."""
        return Batch(as_bytes(x).view(torch.int32), self._unscaled if scale is None else as_bytes(scale))

    def _make_kept(self, slot: int, plan: Plan) -> dict[str, Any]:
        """The fields that batches of a slot share: views of its memory, and values of the plan."""
        own, num_rows = self._states.slots[slot], self.num_ranks * self._config.max_tokens_per_rank
        k, index = plan.payload.num_topk, plan.frame.row_index
        size = num_rows * plan.payload.value_words * 4
        return {
            "pool": self._memory.values(slot)[:size].view(plan.frame.x.dtype).view(num_rows, -1),
            "common": {
                "scheme": plan.payload.scheme,
                "dtype": self._config.dtype,
                "expert_row_start": own.row_start_ptr[: self.num_local],
                "expert_num_tokens": own.num_rows_ptr[: self.num_local],
                "expected_rows": plan.expected_rows,  # if the others bring as many tokens
            },
            "rows": {
                "row_index": None if index is None else own.row_index_ptr[: index.shape[0]],
                "local_topk_ids": own.local_ids_ptr[: num_rows * k].view(num_rows, k),
                "topk_weights": own.pooled_weights_ptr[: num_rows * k].view(num_rows, k),
                "token_to_row": own.token_to_row_ptr[: num_rows * k].view(num_rows, k),
            },
        }

    def _dispatch_of(self, slot: int, sent: Sent, *, send: bool, receive: bool) -> RepeatedLaunch:
        """The launch of a dispatch or one half of it."""
        plan, key = sent.plan, (slot, sent.refusal, send, receive)
        launch = plan.dispatches.get(key)
        if launch is None:
            first_receiver = (plan.announcers + plan.programs.senders) * send
            launch = plan.dispatches[key] = RepeatedLaunch(
                _dispatch_kernel,
                first_receiver + plan.programs.receivers * receive,
                fixed=(
                    self._memory.links[slot],
                    self._states.slots[slot],
                    plan.num_tokens,
                    plan.blocks,
                    self._num_physical,
                    self._config.max_tokens_per_rank,
                    WORD_TOKENS,
                    plan.frame.height,
                    plan.frame.alignment,
                    plan.fingerprint,
                    sent.refusal,
                    plan.announcers,
                    plan.announcers,
                    plan.programs.senders,
                    first_receiver,
                ),
                constants={
                    "ranks": self._ranks,
                    "row": plan.row,
                    "sending": plan.sending,
                    "receiving": plan.receiving,
                    "halves": Halves(send, receive, self._early),
                },
                options=self._options(plan.programs.num_warps),
                device=self._device,
            )
        return launch

    def _options(self, num_warps: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": num_warps, "maxnreg": REGISTERS}
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
        """Launch a combine or one half of it; without `y` the sending half sends NaN. Local, no host sync."""
        like = self._empty
        y, poisoned = (like, True) if y is None else (aligned(y), False)
        results = Results(y, like if shared is None else shared, like if out is None else out)
        strides = (
            0 if shared is None else shared.stride(0) // ALIGNMENT,
            0 if out is None else out.stride(0) // ALIGNMENT,
        )
        launch = self._combine_of(slot, sent, poisoned=poisoned, shared=shared, send=send, receive=receive)
        launch((results,), (*strides, self._timeout_ns))

    def _combine_of(
        self, slot: int, sent: Sent, *, poisoned: bool, shared: torch.Tensor | None, send: bool, receive: bool
    ) -> RepeatedLaunch:
        """The launch of a combine or one half of it."""
        plan, config = sent.plan, self._config
        key = (slot, poisoned, None if shared is None else shared.dtype, send, receive)
        launch = plan.combines.get(key)
        if launch is None:
            programs, k = self.tuning.combine(plan.num_tokens, self.num_ranks), plan.payload.num_topk
            held = held_words(self.num_ranks, config.dtype.itemsize, programs.num_warps)
            first_receiver = programs.senders * send
            combining = Combining(
                H=config.hidden,
                K=k,
                COLUMNS=triton.next_power_of_2(k),
                SENT_BLOCK=block_words(config.hidden, programs.sent_block),
                SUMMED_BLOCK=awaited_words(config.hidden, min(programs.summed_block, held), programs.num_warps),
                ROWS_IN_FLIGHT=programs.rows_in_flight,
                UNIT=ALIGNMENT,
                SUMMED=plan.layout is Layout.FLAT,
                POISONED=poisoned,
                SHARED=shared is not None,
            )
            launch = plan.combines[key] = RepeatedLaunch(
                _combine_kernel,
                first_receiver + programs.receivers * receive,
                fixed=(
                    self._memory.links[slot],
                    self._states.slots[slot],
                    config.max_tokens_per_rank,
                    programs.senders,
                    first_receiver,
                ),
                constants={
                    "ranks": self._ranks,
                    "combining": combining,
                    "halves": Halves(send, receive, self._early),
                },
                options={**self._options(programs.num_warps), "enable_fp_fusion": False},
                device=self._device,
            )
        return launch

    def destroy(self) -> None:
        """Drop the slots' state. Local; calling it twice is fine."""
        self._plans, self._states.slots = {}, []


def _lie_side_by_side(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether all are contiguous and aligned."""
    contiguous = x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
    return contiguous and not (x.data_ptr() | ids.data_ptr() | weights.data_ptr()) % 16


def _aligned_columns(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or an aligned copy with a column stride of 1."""
    return aligned(rows if rows.stride(1) == 1 else rows.contiguous())
