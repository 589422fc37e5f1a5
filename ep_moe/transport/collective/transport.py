"""The transport that runs everywhere: all_to_all over gloo or NCCL. The baseline for the faster ones.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, N received rows, P physical experts.

A round is three all-to-alls: headers (counts, error flags), the rows of tokens, and the result rows back to their
source ranks. Headers report bad input to all ranks before any payload is sent: all raise, and the next round works.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Flat, TokenRows, merge_repeats, pack, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing
from ep_moe.transport.agreement import compare_ranks
from ep_moe.transport.base import Dispatched, Handle, Transport
from ep_moe.transport.checks import (
    check_dispatch,
    check_expert_output,
    check_results,
    count_rows,
    first_tokens,
)
from ep_moe.transport.collective.headers import all_to_all, compare_headers, refusal, swap_headers
from ep_moe.transport.collective.row_format import RowFormat
from ep_moe.transport.collective.send_plan import HEADER_WORDS, plan_send
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag
from ep_moe.transport.slots import Slots


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveHandle(Handle):
    """The maps by which a combine returns each received row to its source rank."""

    token_to_row: torch.Tensor  # [N, K] int32
    topk_weights: torch.Tensor  # [N, K] float32, repeats merged
    recv_counts: tuple[int, ...]  # rows received from each rank


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    round: int
    num_rows: int  # rows of x, of which the first `num_tokens` are tokens
    num_tokens: int
    layout: Layout
    scheme: QuantScheme
    row_format: RowFormat
    most: int  # tokens of any rank
    token_to_row: torch.Tensor  # [T, R] int32: a token's row in the send buffer, and in the results' buffer, -1 none
    send_counts: tuple[int, ...]  # rows sent to each rank
    recv_counts: tuple[int, ...]  # rows received from each rank
    recv_pairs: int  # received (token, local expert) pairs
    buffer: torch.Tensor  # destination of the all-to-all in flight
    work: dist.Work | None
    keep: torch.Tensor  # source of the all-to-all in flight, kept alive until it ends

    def settled(self) -> "_Round":
        """The round between its all-to-alls: nothing is in flight, and its buffers are released."""
        nothing = self.buffer.new_empty(0)
        return dataclasses.replace(self, buffer=nothing, keep=nothing, work=None)


class CollectiveTransport(Transport):
    """Exchange by `all_to_all_single`, each token once per destination rank.

    Args:
        group: the ranks; gloo or NCCL, or one rank without a process group.
        placement: which physical experts each rank owns.
        config: sizes and dtype, the same on all ranks.

    The constructor is collective: it compares the configs of all ranks. A dispatch reads the counts back to the host,
    so it cannot be captured in a CUDA graph.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        compare_ranks(group, placement, config)
        if config.on_peer_loss != "raise":
            raise ValueError(
                f"on_peer_loss ({config.on_peer_loss!r}) needs transport 'nvlink': a collective waits for all"
            )
        self.config, self.placement = config, placement
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_rounds = 0
        self._group = group
        self._owner = torch.repeat_interleave(
            torch.arange(group.num_ranks, dtype=torch.int32),
            torch.tensor([placement.num_local_experts(r) for r in range(group.num_ranks)]),
        ).to(group.device)  # [P] int32, physical expert -> rank
        self._slots: Slots[_Round] = Slots(config.num_slots)

    @property
    def open_slots(self) -> tuple[int, ...]:
        """See `Transport.open_slots`. Local."""
        return self._slots.open

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
        """See `Transport.dispatch_send`. Waits for the headers of all ranks; the payload is sent asynchronously."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        device = self.device
        try:
            check_dispatch(
                x,
                routing,
                layout=layout,
                scheme=scheme,
                config=self.config,
                rank=self.rank,
                device=device,
                num_tokens=num_tokens,
                max_num_tokens=max_num_tokens,
                layer=layer,
            )
        except ValueError as error:
            self.refuse(error, slot=slot, num_tokens=count_rows(x))
        num_rows = routing.topk_ids.shape[0]
        if num_tokens is not None:
            try:
                x, routing = first_tokens(x, routing, num_tokens, rank=self.rank)
            except ValueError as error:
                self.refuse(error, slot=slot)
        row_format = RowFormat.of(scheme, self.config.dtype, self.config.hidden, routing.topk_ids.shape[1])
        headers = torch.empty(2, self.num_ranks, HEADER_WORDS, dtype=torch.int64, device=device)
        most = self.config.max_tokens_per_rank if max_num_tokens is None else max_num_tokens
        fingerprint = row_format.fingerprint(most)
        plan = plan_send(routing.topk_ids, self._owner, fingerprint=fingerprint, layer=layer.words, header=headers[0])
        if scheme.payload.quantized and not isinstance(x, Quantized):
            x = quantize(x, scheme)  # here, since it may run out of memory: no rank waits for these rows yet
        round_, self.num_rounds = self.num_rounds, self.num_rounds + 1
        sent, received = swap_headers(self._group, headers, round_)
        compare_headers(
            received,
            rank=self.rank,
            max_tokens_per_rank=self.config.max_tokens_per_rank,
            num_physical=self.placement.num_physical,
            layer=layer,
            row_format=row_format,
            fingerprint=fingerprint,
            round_=round_,
        )
        send_counts, recv_counts = (tuple(header.rows for header in side) for side in (sent, received))
        with self._reporting():
            outgoing, token_to_row = row_format.write(x, routing, plan, sum(send_counts))
            incoming = torch.empty(sum(recv_counts), row_format.row_bytes, dtype=torch.uint8, device=device)
        work = all_to_all(self._group, incoming, outgoing, recv_counts, send_counts)
        state = _Round(
            round=round_,
            num_rows=num_rows,
            num_tokens=routing.topk_ids.shape[0],
            layout=layout,
            scheme=scheme,
            row_format=row_format,
            most=most,
            token_to_row=token_to_row,
            send_counts=send_counts,
            recv_counts=recv_counts,
            recv_pairs=sum(header.pairs for header in received),
            buffer=incoming,
            work=work,
            keep=outgoing,
        )
        self._slots.advance(slot, "dispatch_send", state)

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`."""
        self._group.check_open()
        state = self._slots.expect(slot, "dispatch_recv")
        assert state is not None
        self._wait(state.work, "dispatch", state.round)
        values, scale, routing = state.row_format.read(state.buffer)
        first, last = self.placement.starts[self.rank], self.placement.starts[self.rank + 1]
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights, first=first, last=last)
        packed = pack(
            TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights),
            state.layout,
            scheme=state.scheme,
            dtype=self.config.dtype,
            num_local_experts=last - first,
            capacity=self.num_ranks * state.most,
            alignment=self.config.row_alignment,
            max_rows=state.recv_pairs,
        )
        handle = CollectiveHandle(
            slot=slot,
            round=state.round,
            token_to_row=packed.token_to_row,
            topk_weights=weights,
            recv_counts=state.recv_counts,
        )
        self._slots.advance(slot, "dispatch_recv", state.settled())
        return Dispatched(batch=packed.batch, handle=handle)

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`."""
        handle = dispatched.handle
        assert isinstance(handle, CollectiveHandle)
        state = self._slots.expect(handle.slot, "combine_send", handle.round)
        assert state is not None
        check_expert_output(y, dispatched.batch)
        flat = isinstance(dispatched.batch, Flat)
        outgoing = (y if flat else weighted_sum(y, handle.token_to_row, handle.topk_weights)).contiguous()
        incoming = torch.empty(sum(state.send_counts), self.config.hidden, dtype=self.config.dtype, device=y.device)
        work = all_to_all(self._group, incoming, outgoing, state.send_counts, handle.recv_counts)
        returning = dataclasses.replace(state, buffer=incoming, work=work, keep=outgoing)
        self._slots.advance(handle.slot, "combine_send", returning)

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`."""
        self._group.check_open()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_recv", handle.round)
        assert state is not None
        shape = (state.num_rows, self.config.hidden)
        check_results(shape, self.config, state.buffer.device, shared=shared, out=out)
        self._wait(state.work, "combine", state.round)
        result, tokens = state.buffer.new_empty(shape) if out is None else out, slice(state.num_tokens)
        # a token has at most one row per rank, and ranks are the columns: summed in rank order
        weighted_sum(
            state.buffer,
            state.token_to_row,
            None,
            shared=None if shared is None else shared[tokens],
            out=result[tokens],
        )
        self._slots.advance(handle.slot, "combine_recv", None)
        return result

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. `num_tokens`: this rank's token count in the header."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        round_, self.num_rounds = self.num_rounds, self.num_rounds + 1
        swap_headers(self._group, refusal(num_tokens, self.num_ranks, self.device), round_)
        raise error

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`."""
        self._group.check_open()
        call, state = self._slots.stage(slot)
        if state is None:
            return
        self._group.check()
        if call != "combine_send":
            self._wait(state.work, "abandoned round", state.round)
        if call != "combine_recv":
            shape = (self.config.hidden,)
            like: dict[str, Any] = {"dtype": self.config.dtype, "device": self.device}
            with self._reporting():
                outgoing = torch.full((sum(state.recv_counts), *shape), float("nan"), **like)
                incoming = torch.empty((sum(state.send_counts), *shape), **like)
            work = all_to_all(self._group, incoming, outgoing, state.send_counts, state.recv_counts)
            self._wait(work, "abandoned round", state.round)
        self._slots.close(slot)

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

    def _wait(self, work: dist.Work | None, phase: str, round_: int) -> None:
        if work is not None:
            self._group.wait(work, phase=phase, round=round_)
