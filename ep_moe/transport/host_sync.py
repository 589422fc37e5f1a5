"""What transports share that pack rows on arrival: `local`, `collective`, `gathered`, `hierarchical` and `deepep`.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, N received rows.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, TypeVar

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Flat, Packed, Place, TokenRows, pack, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing
from ep_moe.transport.base import Dispatched, Handle, RoundOptions, Transport
from ep_moe.transport.checks import (
    DispatchArguments,
    check_dispatch,
    check_expert_output,
    check_results,
    compare_ranks,
    count_rows,
    first_tokens,
)
from ep_moe.transport.headers import Header, compare_headers
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.transport.slots import CLOSED, Slots

if TYPE_CHECKING:
    from typing import Unpack


@dataclasses.dataclass(kw_only=True, slots=True)
class PackedHandle(Handle):
    """The maps by which a combine sums the experts' rows of each received token."""

    token_to_row: torch.Tensor  # [N, K] int32
    topk_weights: torch.Tensor  # [N, K] float32, repeats merged
    recv_counts: tuple[int, ...]  # of `OpenRound`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundSizes:
    """What the calls after `dispatch_send` need of its arguments."""

    num_rows: int  # rows of x, of which the first `num_tokens` are tokens
    num_tokens: int
    layout: Layout
    scheme: QuantScheme
    most: int  # tokens of any rank


class Tokens(NamedTuple):
    """The checked tokens of a dispatch, without rows behind the last token."""

    x: torch.Tensor | Quantized  # [T, H]
    routing: Routing  # of T tokens
    sizes: RoundSizes
    layer: LayerTag
    num_tokens: torch.Tensor | None = None  # on the device, if the host does not read it

    def quantized(self) -> torch.Tensor | Quantized:
        """`x` as the scheme sends it. It may run out of memory, so it comes before other ranks wait for this one."""
        x, payload = self.x, self.sizes.scheme.payload
        if not payload.quantized or isinstance(x, Quantized):
            return x
        if self.num_tokens is not None and payload.granularity == "tensor":  # other rows have no part in the scale
            x = x.masked_fill((torch.arange(len(x), device=x.device) >= self.num_tokens)[:, None], 0.0)
        return quantize(x, self.sizes.scheme)


@dataclasses.dataclass(kw_only=True, slots=True)
class OpenRound:
    """A round between its calls; each transport adds what it needs."""

    round: int
    sizes: RoundSizes
    recv_counts: tuple[int, ...] = ()  # rows received from each rank; `hierarchical`: from each node


def maps_of(dispatched: Dispatched) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`token_to_row` and `topk_weights` of a round; None for FLAT, in which the experts have summed. Local."""
    handle = dispatched.handle
    assert isinstance(handle, PackedHandle)
    return None if isinstance(dispatched.batch, Flat) else (handle.token_to_row, handle.topk_weights)


def sum_experts(y: torch.Tensor, dispatched: Dispatched, out: torch.Tensor | None = None) -> torch.Tensor:
    """[N, H], each received token's weighted sum of its experts' rows of y, by default in new memory; in FLAT y itself.

    Local, no host sync on a GPU.
    """
    maps = maps_of(dispatched)
    return y if maps is None else weighted_sum(y, *maps, out=out)


State = TypeVar("State", bound=OpenRound)


class HostSyncTransport(Transport, Generic[State]):
    """Checks, slots, packing and the last sum of a transport; what moves between ranks is the subclass's.

    A dispatch reads counts back to the host, so it cannot be captured in a CUDA graph; that of `gathered` does not.
    """

    _waiting = ""  # what waits for every rank, so that rounds do not continue without a lost one

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        compare_ranks(group, type(self), placement, config)
        if self._waiting and config.on_peer_loss != "raise":
            reason = f"needs transport 'peer': {self._waiting} waits for all"
            raise ValueError(f"on_peer_loss ({config.on_peer_loss!r}) {reason}")
        self.config, self.placement = config, placement
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_rounds = 0
        self._group = group
        self._slots: Slots[State] = Slots(config.num_slots)

    @abc.abstractmethod
    def _send(self, tokens: Tokens, slot: int) -> State:
        """Begin a round with checked tokens. Errors: as of `Transport.dispatch_send`. Collective."""

    @abc.abstractmethod
    def _receive(self, state: State) -> Packed:
        """The tokens that came for this rank's experts, by source rank and token, packed. Collective."""

    @abc.abstractmethod
    def _send_results(self, state: State, y: torch.Tensor, dispatched: Dispatched) -> None:
        """Sum this rank's experts for each token and begin to send the sums back. Collective."""

    @abc.abstractmethod
    def _receive_results(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums that came back [rows, H], and by column what is added for each token [T, columns] int32, -1 none.

        Collective.
        """

    @abc.abstractmethod
    def _send_refusal(self, num_tokens: int, round_: int) -> None:
        """Send the other ranks the header of a refused round with so many tokens. Collective."""

    def _reads_counts(self, most: int) -> bool:
        """Whether the host reads `num_tokens` in a round of this bound; else `_send` gets it with all rows."""
        return True

    def _check_tokens(self, arguments: DispatchArguments) -> None:
        """Raise ValueError for bad input. Local."""
        check_dispatch(arguments, self.config, self.rank, self.device)

    def _pack(
        self, rows: TokenRows, sizes: RoundSizes, max_rows: int | None = None, place: Place | None = None
    ) -> Packed:
        """Pack rows of this rank's experts into the batch of a round; the last two as of `layout.pack`. Local."""
        return pack(
            rows,
            sizes.layout,
            scheme=sizes.scheme,
            dtype=self.config.dtype,
            num_local_experts=self.placement.num_local_experts(self.rank),
            capacity=self.num_ranks * sizes.most,
            alignment=self.config.row_alignment,
            max_rows=max_rows,
            place=place,
        )

    def _compare(self, headers: Sequence[Header], round_: int, row_format: object) -> None:
        """Raise ValueError, on every rank alike, if the headers of a round do not go together. Local."""
        compare_headers(
            headers,
            rank=self.rank,
            round_=round_,
            max_tokens_per_rank=self.config.max_tokens_per_rank,
            num_physical=self.placement.num_physical,
            row_format=row_format,
        )

    def _count_round(self) -> int:
        """The number of the round that begins now."""
        self.num_rounds += 1
        return self.num_rounds - 1

    @property
    def open_slots(self) -> tuple[int, ...]:
        """See `Transport.open_slots`. Local."""
        return self._slots.open

    def dispatch_send(
        self, x: torch.Tensor | Quantized, routing: Routing, *, slot: int = 0, **options: "Unpack[RoundOptions]"
    ) -> None:
        """See `Transport.dispatch_send`. Host sync, and it waits for the headers of all ranks."""
        self._group.check()
        entry = self._slots.expect(slot, "dispatch_send")
        try:
            tokens = self._checked(DispatchArguments(x, routing, **options))
        except ValueError as error:
            self.refuse(error, slot=slot, num_tokens=count_rows(x))
        entry.state = self._send(tokens, slot)
        entry.next = "dispatch_recv"

    def _checked(self, arguments: DispatchArguments) -> Tokens:
        """The tokens of a dispatch. Errors: ValueError. Local; host sync for `num_tokens`."""
        self._check_tokens(arguments)
        x, routing, most, count = arguments.x, arguments.routing, arguments.max_num_tokens, arguments.num_tokens
        most = self.config.max_tokens_per_rank if most is None else most
        if count is not None and self._reads_counts(most):
            x, routing = first_tokens(x, routing, count, rank=self.rank)
            count = None
        sizes = RoundSizes(
            num_rows=arguments.routing.topk_ids.shape[0],
            num_tokens=routing.topk_ids.shape[0],
            layout=arguments.layout,
            scheme=arguments.scheme,
            most=most,
        )
        return Tokens(x, routing, sizes, arguments.layer, count)

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`."""
        self._group.check_open()
        entry = self._slots.expect(slot, "dispatch_recv")
        state = entry.state
        packed = self._receive(state)
        entry.next = "combine_send"
        handle = PackedHandle(
            slot=slot,
            round=state.round,
            token_to_row=packed.token_to_row,
            topk_weights=packed.topk_weights,
            recv_counts=state.recv_counts,
        )
        return Dispatched(batch=packed.batch, handle=handle)

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`."""
        self._group.check()
        handle = dispatched.handle
        entry = self._slots.expect(handle.slot, "combine_send", handle.round)
        check_expert_output(y, dispatched.batch)
        self._send_results(entry.state, y, dispatched)
        entry.next = "combine_recv"

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`."""
        self._group.check_open()
        handle = dispatched.handle
        entry = self._slots.expect(handle.slot, "combine_recv", handle.round)
        state = entry.state
        shape = (state.sizes.num_rows, self.config.hidden)
        check_results(shape, self.config, self.device, shared=shared, out=out)
        sums, columns = self._receive_results(state)
        result, tokens = sums.new_empty(shape) if out is None else out, slice(state.sizes.num_tokens)
        added = None if shared is None else shared[tokens]
        weighted_sum(sums, columns, None, shared=added, out=result[tokens])
        entry.next, entry.state = CLOSED
        return result

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. `num_tokens`: this rank's token count in the header."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        self._send_refusal(num_tokens, self._count_round())
        raise error

    @abc.abstractmethod
    def _end(self, state: State, call: str, slot: int) -> None:
        """Do what is left of an open round that waits for `call`, with NaN for this rank's results. Collective."""

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`."""
        self._group.check_open()
        entry = self._slots.find(slot)
        if entry.state is not None:
            self._group.check()
            self._end(entry.state, entry.next, slot)
            entry.next, entry.state = CLOSED

    def check(self) -> None:
        """See `Transport.check`. A round's errors are raised by its own calls; this raises the group's."""
        self._slots.check_open()
        self._group.check()

    def destroy(self) -> None:
        """See `Transport.destroy`. Open rounds are dropped; the group stays."""
        self._slots.destroy()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error inside to the other ranks: they wait for rows that this rank announced and cannot send."""
        try:
            yield
        except Exception as error:
            self._group.report_failure(error)
            raise
