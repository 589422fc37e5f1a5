"""The one-sided transport for ranks with peer memory access: stores into peers, no collective, no host sync.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank, L local experts.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, get_scheme
from ep_moe.routing import Routing
from ep_moe.transport.base import Dispatched, RoundKind, RoundOptions, Transport, no_tokens
from ep_moe.transport.checks import check_expert_output, check_results, compare_ranks, count_rows
from ep_moe.transport.one_sided.combine_launcher import CombineLauncher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher
from ep_moe.transport.one_sided.faults import Faults
from ep_moe.transport.one_sided.memory import check_limits, map_heap, map_peers
from ep_moe.transport.one_sided.occupancy import OpenRounds, most_receivers
from ep_moe.transport.one_sided.round_plan import ExchangeRound, KernelContext, RoundPlans
from ep_moe.transport.one_sided.slot_state import ExchangeStatistics, SlotStates
from ep_moe.transport.one_sided.tuning import Tuning
from ep_moe.transport.one_sided.warmup import warm_up
from ep_moe.transport.slots import CLOSED, Slot, Slots

if TYPE_CHECKING:
    from typing import Unpack

_STILL_IN_USE: list[object] = []  # memory of kernels that did not end: freeing it would break the device for all


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

    name = "peer"
    _connect = staticmethod(map_peers)

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        compare_ranks(group, type(self), placement, config)
        check_limits(self.name, group, placement, config)
        ranks, memory = self._connect(group, placement, config)
        self.config, self.placement = config, placement
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_rounds = 0
        self._group = group
        self._memory = memory
        self._states = SlotStates(config, group.device, ranks)
        if group.alone:  # of a rehearsal only this rank takes part
            self._states.resume([rank == group.rank for rank in range(group.num_ranks)], (0,) * config.num_slots)
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
            waiting=self._faults.waiting,
        )
        self._plans = RoundPlans(config, placement, ranks, tuning, group.device)
        self._dispatches = DispatchLauncher(self._context, self._plans)
        self._combines = CombineLauncher(self._context)
        self._slots: Slots[ExchangeRound] = Slots(config.num_slots)
        self._compiled: set[RoundKind] = set()
        self._open: OpenRounds | None = None
        if self.device.type == "cuda":
            receivers_of = functools.partial(tuning.receivers, num_ranks=group.num_ranks)
            self._open = OpenRounds.on(self.device, receivers_of)

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
        wanted = tuple(map(bool, mask))
        if len(wanted) != self.num_ranks or not any(wanted):
            raise ValueError(f"active ranks {wanted} are not a mask of {self.num_ranks} ranks with at least one True")
        for slot in range(self.config.num_slots):
            self._slots.expect(slot, "dispatch_send")
        self._faults.set_active(wanted)

    def dispatch_send(
        self, x: torch.Tensor | Quantized, routing: Routing, *, slot: int = 0, **options: "Unpack[RoundOptions]"
    ) -> None:
        """See `Transport.dispatch_send`. Local, on the current stream, no host sync."""
        entry, round_ = self._begin(x, routing, slot, options)
        self._dispatches.send(round_)
        self.num_rounds += 1
        entry.next, entry.state = "dispatch_recv", round_

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`. Local, on the current stream, no host sync."""
        self._faults.poll()
        entry = self._slots.expect(slot, "dispatch_recv")
        batch = self._dispatches.receive(entry.state)
        entry.next = "combine_send"
        return Dispatched(batch=batch, handle=entry.state)

    def dispatch(
        self, x: torch.Tensor | Quantized, routing: Routing, *, slot: int = 0, **options: "Unpack[RoundOptions]"
    ) -> Dispatched:
        """`dispatch_send` and `dispatch_recv` in one launch. Local, on the current stream, no host sync.

        If there is no memory for the batch, nothing has been sent and the call may be repeated.
        """
        entry, round_ = self._begin(x, routing, slot, options)
        batch = self._dispatches.receive(round_, send=True)
        self.num_rounds += 1
        entry.next, entry.state = "combine_send", round_
        return Dispatched(batch=batch, handle=round_)

    def _begin(
        self, x: torch.Tensor | Quantized, routing: Routing, slot: int, options: RoundOptions
    ) -> tuple[Slot[ExchangeRound], ExchangeRound]:
        """The slot of a dispatch that may be launched, and its round."""
        self._faults.poll(settle=True)
        entry = self._slots.expect(slot, "dispatch_send")
        try:
            round_ = self._dispatches.begin((slot, self.num_rounds, 0), x, routing, **options)
        except ValueError as error:
            self.refuse(error, slot=slot, num_tokens=count_rows(x))
        if self._open is not None:
            self._open.begin(entry, round_.plan.spec.num_tokens)
        return entry, round_

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
        entry = self._slots.expect(handle.slot, "combine_send", handle.round)
        round_ = entry.state
        plan = round_.plan
        if type(y) is not torch.Tensor or (y.shape, y.dtype, y.device, y.layout) != plan.output:
            check_expert_output(y, dispatched.batch)
        if shared is not None or out is not None:
            check_results((plan.spec.num_tokens, self.config.hidden), self.config, self.device, shared=shared, out=out)
        result = self._combines.receive(round_, y.contiguous(), send=True, shared=shared, out=out)
        entry.next, entry.state = CLOSED
        return result

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`. Local, on the current stream, no host sync."""
        self._faults.poll()
        handle = dispatched.handle
        entry = self._slots.expect(handle.slot, "combine_send", handle.round)
        round_ = entry.state
        if type(y) is not torch.Tensor or (y.shape, y.dtype, y.device, y.layout) != round_.plan.output:
            check_expert_output(y, dispatched.batch)
        round_.sent_y = y.contiguous()
        self._combines.send(round_, round_.sent_y)
        entry.next = "combine_recv"

    def send_nan(self, *, slot: int) -> int:
        """`combine_send` of NaN, also before `dispatch_recv`: experts have failed. It needs no memory.

        Returns the round. Local, on the current stream, no host sync.
        """
        entry = self._slots.find(slot)
        if entry.next == "dispatch_recv":
            self._dispatches.discard(entry.state)
            entry.next = "combine_send"
        round_ = self._slots.expect(slot, "combine_send").state
        self._combines.send(round_, None)
        entry.next = "combine_recv"
        return round_.round

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`. Local, on the current stream, no host sync."""
        self._faults.poll()
        handle = dispatched.handle
        entry = self._slots.expect(handle.slot, "combine_recv", handle.round)
        shape = entry.state.plan.spec.num_tokens, self.config.hidden
        check_results(shape, self.config, self.device, shared=shared, out=out)
        result = self._combines.receive(entry.state, shared=shared, out=out)
        entry.next, entry.state = CLOSED
        return result

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. On the other ranks the round gives NaN, and `check` raises.

        `num_tokens`: this rank's token count in the header.
        """
        self._faults.poll(settle=True)
        entry = self._slots.expect(slot, "dispatch_send")
        x, routing = no_tokens(self.config, 1, self.device)
        count, too_many = None, num_tokens > self.config.max_tokens_per_rank
        if too_many:
            self._faults.note_too_many(num_tokens)
            count = torch.full((1,), num_tokens, dtype=torch.int32, device=self.device)
        place = slot, self.num_rounds, int(not too_many)
        round_ = self._dispatches.begin(place, x, routing, Layout.FLAT, get_scheme("none"), count)
        self.num_rounds += 1
        self._dispatches.receive(round_, send=True)
        entry.next, entry.state = "combine_send", round_  # if the next launch fails, `abandon` continues here
        self._combines.receive(round_, send=True)
        entry.next, entry.state = CLOSED
        raise error

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`. Local, on the current stream, no host sync.

        If a launch fails, it may be called again and continues after the last launch.
        """
        self._faults.poll()
        entry = self._slots.find(slot)
        round_ = entry.state
        if round_ is None:
            return
        if entry.next != "combine_recv":
            self.send_nan(slot=slot)
        self._combines.receive(round_, out=self._combines.unused.expand(round_.plan.spec.num_tokens, -1))
        entry.next, entry.state = CLOSED

    def warmup(self, kinds: Sequence[RoundKind]) -> None:
        """See `Transport.warmup`. Waits for the other ranks without a timeout, since compile times differ."""
        self._slots.check_open()
        if self.device.type == "cuda":
            new = tuple(kind for kind in kinds if kind not in self._compiled)
            warm_up(new, self._dispatches, self._combines)
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


class NvshmemTransport(NvlinkTransport):
    """`NvlinkTransport` over NVSHMEM's symmetric heap, on one node or several; kernels and protocol are the same.

    `TransportConfig.nvshmem_stores` chooses how kernels reach each other rank: by the address at which its heap is
    mapped here, or by NVSHMEM's put-with-signal, from an outbox that takes as much memory again. Kernels with puts link
    NVSHMEM's device code, which takes seconds for each kernel.

    Errors, on all ranks and before anything is sent: RuntimeError if NVSHMEM is absent or of another version, if ranks
    that need it do not reach each other's memory, or if a heap is too small; ValueError for `on_peer_loss` "mask" on
    several nodes. Collective.
    """

    name = "nvshmem"
    _connect = staticmethod(map_heap)
