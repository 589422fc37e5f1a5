"""The one-sided transport for ranks with peer memory access: stores into peers, no collective, no host sync.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank, L local experts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NoReturn

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernels.device import Device
from ep_moe.kernels.exchange.wire_layout import Ranks
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport.agreement import compare_ranks
from ep_moe.transport.base import Dispatched, Handle, Transport, no_tokens
from ep_moe.transport.checks import (
    DispatchArguments,
    bound_fits,
    check_dispatch,
    check_expert_output,
    check_results,
    count_rows,
)
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag
from ep_moe.transport.one_sided.combine_launcher import CombineLauncher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher, RoundInputs
from ep_moe.transport.one_sided.faults import Faults
from ep_moe.transport.one_sided.kernel_context import KernelContext
from ep_moe.transport.one_sided.memory import PeerMemory, check_limits, map_peers
from ep_moe.transport.one_sided.occupancy import OpenRounds, most_receivers
from ep_moe.transport.one_sided.round_plan import RoundPlan, RoundPlans, plan_key
from ep_moe.transport.one_sided.slot_state import ExchangeStatistics, SlotStates
from ep_moe.transport.one_sided.tuning import Tuning
from ep_moe.transport.one_sided.warmup import warm_up
from ep_moe.transport.round_kind import RoundKind
from ep_moe.transport.slots import Slots

_NUMBER_MASK = 2**31 - 1
_STILL_IN_USE: list[object] = []  # memory of kernels that did not end: freeing it would break the device for all


@dataclasses.dataclass(slots=True)
class _Round:
    round: int
    plan: RoundPlan
    inputs: RoundInputs | None  # of a dispatch whose rows are to be received
    sent_y: torch.Tensor | None = None  # y of a combine that was sent, kept alive until its kernel has read it


class NvlinkTransport(Transport):
    """Dispatch and combine by stores over NVLink, from Triton kernels; on a CPU under TRITON_INTERPRET=1.

    Args:
        group: ranks of one machine, each with its own GPU and peer access to the others'; or all on the CPU.
        placement: which physical experts each rank owns.
        config: sizes and dtype, the same on all ranks.

    The constructor is collective: it compares the configs of all ranks, and maps O(R * M * H) bytes of each rank
    (`peer_bytes`). Kernels compile on first use; `ExpertParallelMoE.warmup` compiles them beforehand. CUDA may wait for
    the whole GPU to load a kernel: run a round of each kind once before ranks use two slots in different orders.

    A round has no host sync and may be captured in a CUDA graph. Replays may have other counts, ids and, by
    `num_tokens`, other T, and may alternate with other graphs and eager rounds.

    A batch's tensors other than x and scale are the slot's memory, valid until its next dispatch. In FLAT x is too, and
    is valid until `combine_send`: the other ranks may send the next round once they have this round's results.
    """

    name = "nvlink"

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        compare_ranks(group, placement, config)
        check_limits(self.name, group, placement, config)
        ranks, memory = self._connect(group, placement, config)
        self.config, self.placement = config, placement
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_rounds = 0
        self._group = group
        self._memory = memory
        self._states = SlotStates(config, group.device, ranks)
        self._faults = Faults(group, placement, config, self._memory, self._states)
        tuning = Tuning(most_receivers=most_receivers(group.device, config.num_slots), num_sms=config.num_sms)
        self._context = KernelContext(
            config=config,
            ranks=ranks,
            device=group.device,
            memory=self._memory,
            states=self._states,
            tuning=tuning,
            timeout_ns=self._faults.timeout_ns,
            early=group.device.type == "cuda" and Device.of(group.device).early_launch,
        )
        self._plans = RoundPlans(config, placement, ranks, tuning, group.device)
        self._dispatches = DispatchLauncher(self._context, self._plans)
        self._combines = CombineLauncher(self._context)
        self._slots: Slots[_Round] = Slots(config.num_slots)
        self._compiled: set[RoundKind] = set()
        self._open: OpenRounds | None = None
        if self.device.type == "cuda":
            receivers_of = functools.partial(tuning.receivers, num_ranks=group.num_ranks)
            self._open = OpenRounds.on(self.device, receivers_of)

    def _connect(self, group: EPGroup, placement: Placement, config: TransportConfig) -> tuple[Ranks, PeerMemory]:
        """The kernels' constants of the ranks, and memory that these reach. Errors: RuntimeError. Collective."""
        return map_peers(group, placement, config)

    @property
    def peer_bytes(self) -> int:
        """Bytes of this rank's memory that its peers map."""
        return self._memory.num_bytes

    @property
    def open_slots(self) -> tuple[int, ...]:
        """See `Transport.open_slots`. Local."""
        return self._slots.open

    def statistics(self) -> ExchangeStatistics:
        """Rows received and time waited for each rank, since the transport was created. Local, no host sync."""
        self._slots.check_open()
        return self._states.statistics(self.placement.num_local_experts(self.rank))

    @property
    def active_ranks(self) -> tuple[bool, ...]:
        """By rank, whether it takes part in rounds: inactive ranks are sent no tokens and are not waited for."""
        return self._faults.active

    def set_active_ranks(self, mask: Sequence[bool]) -> None:
        """Choose the ranks that take part, between two rounds; brings a rank that comes back up to date.

        Args:
            mask: [R], the same on every rank.
        Errors: ValueError if ranks ask for different masks, or `on_peer_loss` is not "mask"; RuntimeError if a round is
        open; PeerLostError. A rank that is lost meanwhile is left out. Collective among the ranks that are active and
        those that become active, host sync.
        """
        self._slots.check_open()
        wanted = tuple(bool(there) for there in mask)
        if len(wanted) != self.num_ranks or not any(wanted):
            raise ValueError(f"active ranks {wanted} are not a mask of {self.num_ranks} ranks with at least one True")
        for slot in range(self.config.num_slots):
            self._slots.expect(slot, "dispatch_send")
        self._faults.set_active(wanted)

    def dispatch_send(
        self,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        slot: int = 0,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """See `Transport.dispatch_send`. Local, on the current stream, no host sync."""
        arguments = DispatchArguments(x, routing, layout, scheme, num_tokens, max_num_tokens, layer)
        plan = self._plan_round(arguments, slot)
        inputs = self._dispatches.send(slot, plan, x, routing, num_tokens=num_tokens, tag=self._tag(layer))
        self._begin(slot, "dispatch_send", plan, inputs)

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`. Local, on the current stream, no host sync."""
        self._faults.poll()
        state = self._slots.expect(slot, "dispatch_recv")
        assert state is not None
        assert state.inputs is not None
        with self._faults.waiting("dispatch", state.round):
            batch = self._dispatches.receive(slot, state.inputs)
        self._slots.advance(slot, "dispatch_recv", state)
        return Dispatched(batch=batch, handle=Handle(slot=slot, round=state.round))

    def dispatch(
        self,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        slot: int = 0,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> Dispatched:
        """`dispatch_send` and `dispatch_recv` in one launch. Local, on the current stream, no host sync.

        If there is no memory for the batch, nothing has been sent and the call may be repeated.
        """
        arguments = DispatchArguments(x, routing, layout, scheme, num_tokens, max_num_tokens, layer)
        plan = self._plan_round(arguments, slot)
        batch = inputs = None
        if plan.in_place:  # x is no `Quantized`
            batch = self._dispatches.repeat(slot, plan, x, routing, num_tokens=num_tokens, tag=self._tag(layer))  # type: ignore[arg-type]
        if batch is None:
            inputs = self._dispatches.inputs_of(plan, x, routing, num_tokens=num_tokens, tag=self._tag(layer))
            with self._faults.waiting("dispatch", self.num_rounds):
                batch = self._dispatches.receive(slot, inputs, send=True)
        state = self._begin(slot, "dispatch_recv", plan, inputs)
        return Dispatched(batch=batch, handle=Handle(slot=slot, round=state.round))

    def _plan_round(self, arguments: DispatchArguments, slot: int) -> RoundPlan:
        """Check a dispatch, and find the plan of its round or make it."""
        self._faults.poll(settle=True)
        self._slots.expect(slot, "dispatch_send")
        key: tuple[object, ...] = ()
        size, bound = self.config.max_tokens_per_rank, arguments.max_num_tokens
        try:
            size = self._plans.size_for(bound)
            key = plan_key(arguments, size)
            plan = self._plans.find(key) if isinstance(arguments.layer, LayerTag) else None
        except (AttributeError, TypeError):  # not a tensor: `check_dispatch` refuses it
            plan = None
        if plan is None or plan.quantized or not (bound is None or bound_fits(bound, plan.num_tokens, self.config)):
            try:
                check_dispatch(arguments, self.config, self.rank, self.device)
            except ValueError as error:
                self.refuse(error, slot=slot, num_tokens=count_rows(arguments.x))
        return self._plans.add(key, arguments, size) if plan is None else plan

    def _tag(self, layer: LayerTag = NO_LAYER) -> tuple[int, int, int]:
        """`RoundInputs.tag` of the next round."""
        return *layer.words, self.num_rounds & _NUMBER_MASK

    def _begin(self, slot: int, call: str, plan: RoundPlan, inputs: RoundInputs | None) -> _Round:
        """Record a round whose dispatch has been launched, or its sending half."""
        state = _Round(self.num_rounds, plan, inputs)
        self.num_rounds += 1
        self._slots.advance(slot, call, state)
        if self._open is not None:
            self._open.begin(slot, plan.num_tokens)
        return state

    def combine(
        self,
        y: torch.Tensor,
        dispatched: Dispatched,
        *,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`combine_send` and `combine_recv` in one launch. Local, on the current stream, no host sync."""
        self._faults.poll()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_send", handle.round)
        assert state is not None
        self._check_output(y, state, dispatched)
        if out is None:
            if shared is not None:
                check_results(
                    (state.plan.num_tokens, self.config.hidden), self.config, self.device, shared=shared, out=out
                )
            result = self._combines.repeat(handle.slot, state.plan, y, shared)
            if result is not None:
                self._close(handle.slot)
                return result
        return self._receive_results(handle.slot, state, y.contiguous(), shared=shared, out=out, send=True)

    def _check_output(self, y: torch.Tensor, state: _Round, dispatched: Dispatched) -> None:
        """`check_expert_output`, with a fast path for a y that fits."""
        fits = type(y) is torch.Tensor and y.shape == state.plan.output_shape and y.dtype == self.config.dtype
        if not fits or y.device != self.device or y.layout is not torch.strided:
            check_expert_output(y, dispatched.batch)

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`. Local, on the current stream, no host sync."""
        self._faults.poll()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_send", handle.round)
        assert state is not None
        self._check_output(y, state, dispatched)
        state.sent_y = y.contiguous()
        self._combines.send(handle.slot, state.plan, state.sent_y)
        self._slots.advance(handle.slot, "combine_send", state)

    def send_nan(self, *, slot: int) -> int:
        """`combine_send` of NaN, also before `dispatch_recv`: experts have failed. It needs no memory.

        Returns the round. Local, on the current stream, no host sync.
        """
        call, state = self._slots.stage(slot)
        if state is not None and call == "dispatch_recv":
            assert state.inputs is not None
            with self._faults.waiting("dispatch", state.round):
                state.plan = self._dispatches.discard(slot, state.inputs)
            self._slots.advance(slot, call, state)
        state = self._slots.expect(slot, "combine_send")
        assert state is not None
        self._combines.send(slot, state.plan, None)
        self._slots.advance(slot, "combine_send", state)
        return state.round

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`. Local, on the current stream, no host sync."""
        self._faults.poll()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_recv", handle.round)
        assert state is not None
        return self._receive_results(handle.slot, state, None, shared=shared, out=out, send=False)

    def _receive_results(
        self,
        slot: int,
        state: _Round,
        y: torch.Tensor | None,
        *,
        shared: torch.Tensor | None,
        out: torch.Tensor | None,
        send: bool,
    ) -> torch.Tensor:
        """Launch the receiving half of a combine, or with `send` both halves."""
        plan = state.plan
        check_results((plan.num_tokens, self.config.hidden), self.config, self.device, shared=shared, out=out)
        with self._faults.waiting("combine", state.round):
            result = self._combines.receive(slot, plan, y, send=send, shared=shared, out=out)
        self._close(slot)
        return result

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. On the other ranks the round gives NaN, and `check` raises.

        `num_tokens`: this rank's token count in the header.
        """
        self._faults.poll(settle=True)
        self._slots.expect(slot, "dispatch_send")
        x, no_routing = no_tokens(self.config, 1, self.device)
        count, too_many = None, num_tokens > self.config.max_tokens_per_rank
        if too_many:
            self._faults.note_too_many(num_tokens)
            count = torch.full((1,), num_tokens, dtype=torch.int32, device=self.device)
        plan = self._plans.plan_of_refusal(x, no_routing, count)
        tag, refusal = self._tag(), int(not too_many)
        inputs = self._dispatches.inputs_of(plan, x, no_routing, num_tokens=count, tag=tag, refusal=refusal)
        state = _Round(self.num_rounds, plan, inputs)
        self.num_rounds += 1
        with self._faults.waiting("dispatch", state.round):
            self._dispatches.receive(slot, inputs, send=True)
        self._slots.advance(slot, "dispatch_recv", state)  # if the next launch fails, `abandon` continues here
        with self._faults.waiting("combine", state.round):
            self._combines.receive(slot, plan, send=True)
        self._close(slot)
        raise error

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`. Local, on the current stream, no host sync.

        If a launch fails, it may be called again and continues after the last launch.
        """
        self._faults.poll()
        call, state = self._slots.stage(slot)
        if state is None:
            return
        if call != "combine_recv":
            self.send_nan(slot=slot)
        nowhere = self._combines.unused.expand(state.plan.num_tokens, -1)
        with self._faults.waiting("combine", state.round):
            self._combines.receive(slot, state.plan, out=nowhere)
        self._close(slot)

    def warmup(self, kinds: Sequence[RoundKind]) -> None:
        """See `Transport.warmup`. Waits for the other ranks without a timeout, since compile times differ."""
        self._slots.check_open()
        if self.device.type == "cuda":
            new = tuple(kind for kind in kinds if kind not in self._compiled)
            warm_up(new, self._context, self._plans, self._dispatches, self._combines)
            self._compiled.update(kinds)
        self._group.wait_for_all("compile")

    def check(self) -> None:
        """See `Transport.check`. Host sync, of this rank's whole device; not while a stream is captured.

        If a rank is lost and the others continue, a rank that only replays graphs votes here: a replay cannot. Until
        then its kernels give NaN without waiting, and the others wait for its vote, for `timeout_secs` at most.
        """
        self._slots.check_open()
        self._faults.check()

    def destroy(self) -> None:
        """See `Transport.destroy`. Waits for this rank's launches, with a timeout; open rounds are dropped.

        Memory that kernels still use after the timeout is never freed.
        """
        self._slots.destroy()
        if self._open is not None:
            self._open.destroy()
        if self._faults.destroy():
            self._plans.destroy()
            self._states.destroy()
            self._memory.destroy()
        else:
            _STILL_IN_USE.append((self._context, self._plans, self._faults))

    def _close(self, slot: int) -> None:
        self._slots.close(slot)
        if self._open is not None:
            self._open.end(slot)
