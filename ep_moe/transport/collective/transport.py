"""The transport that runs everywhere: all_to_all over gloo or NCCL. The baseline for the faster ones.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, N received rows, P physical experts.

A round is three all-to-alls: headers (counts, error flags), the rows of tokens, and the result rows back to their
source ranks. Headers report bad input to all ranks before any payload is sent: all raise, and the next round works.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin_all_to_all
from ep_moe.layout import Packed, TokenRows, merge_repeats
from ep_moe.placement import Placement
from ep_moe.transport.base import Dispatched
from ep_moe.transport.collective.send_plan import owners, plan_send, write_rows
from ep_moe.transport.headers import HEADER_WORDS, refusal, swap_headers
from ep_moe.transport.host_sync import HostSyncTransport, OpenRound, Tokens, sum_experts
from ep_moe.transport.payload import RowFormat


@dataclasses.dataclass(kw_only=True, slots=True)
class CollectiveRound(OpenRound):
    """A round whose rows are in an all-to-all."""

    row_format: RowFormat
    token_to_row: torch.Tensor  # [T, R] int32: a token's row in the send buffer, and in the results' buffer, -1 none
    send_counts: tuple[int, ...]  # rows sent to each rank
    recv_pairs: int | None  # received (token, local expert) pairs; None if the host does not know
    work: dist.Work | None
    buffers: tuple[torch.Tensor, ...]  # source and destination of the all-to-all in flight, kept alive until it ends
    sums: torch.Tensor  # [rows received, H], of this rank's experts; `abandon` has no memory to allocate it
    results: torch.Tensor  # [rows sent, H], the sums that come back; the same


class CollectiveTransport(HostSyncTransport[CollectiveRound]):
    """Exchange by `all_to_all_single`, each token once per destination rank.

    Args:
        group: the ranks; gloo or NCCL, or one rank without a process group.
        placement: which physical experts each rank owns.
        config: sizes and dtype, the same on all ranks.

    The constructor is collective: it compares the configs of all ranks. A dispatch waits for the headers of all ranks;
    the payload is sent asynchronously.
    """

    _waiting = "a collective"

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        super().__init__(group, placement, config)
        self._owner = owners([placement.num_local_experts(r) for r in range(group.num_ranks)], group.device)

    def _send(self, tokens: Tokens, slot: int) -> CollectiveRound:
        sizes, ids, device = tokens.sizes, tokens.routing.topk_ids, self.device
        row_format = RowFormat.of(sizes.scheme, self.config.dtype, self.config.hidden, ids.shape[1])
        headers = torch.empty(2, self.num_ranks, HEADER_WORDS, dtype=torch.int64, device=device)
        fingerprint = row_format.fingerprint(sizes.most)
        plan = plan_send(ids, self._owner, fingerprint=fingerprint, layer=tokens.layer.words, header=headers[0])
        x = tokens.quantized()
        round_ = self._count_round()
        sent, received = swap_headers(self._group, headers, round_)
        self._compare(received, round_, row_format)
        send_counts, recv_counts = (tuple(header.rows for header in side) for side in (sent, received))
        with self._reporting():
            outgoing = torch.empty(sum(send_counts), row_format.row_bytes, dtype=torch.uint8, device=device)
            token_to_row = write_rows(row_format, x, tokens.routing, plan, outgoing)
            incoming = outgoing.new_empty(sum(recv_counts), row_format.row_bytes)
            like: dict[str, Any] = {"dtype": self.config.dtype, "device": device}
            sums, results = (torch.empty(sum(n), self.config.hidden, **like) for n in (recv_counts, send_counts))
        work = begin_all_to_all(self._group, incoming, outgoing, recv_counts, send_counts)
        return CollectiveRound(
            round=round_,
            sizes=sizes,
            row_format=row_format,
            token_to_row=token_to_row,
            send_counts=send_counts,
            recv_counts=recv_counts,
            recv_pairs=sum(header.pairs for header in received),
            work=work,
            buffers=(outgoing, incoming),
            sums=sums,
            results=results,
        )

    def _receive(self, state: CollectiveRound) -> Packed:
        self._wait(state, "dispatch")
        values, scale, routing = state.row_format.read(state.buffers[1])
        first, last = self.placement.starts[self.rank], self.placement.starts[self.rank + 1]
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights, first=first, last=last)
        rows = TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights)
        packed = self._pack(rows, state.sizes, state.recv_pairs)
        state.work, state.buffers = None, ()
        return packed

    def _send_results(self, state: CollectiveRound, y: torch.Tensor, dispatched: Dispatched) -> None:
        self._send_sums(state, sum_experts(y, dispatched, out=state.sums).contiguous())

    def send_nan(self, *, slot: int) -> int:
        """`combine_send` of NaN, also before `dispatch_recv`: experts have failed. It needs no memory.

        Returns the round. Collective.
        """
        entry = self._slots.find(slot)
        if entry.next == "dispatch_recv":
            self._wait(entry.state, "dispatch")
            entry.next = "combine_send"
        state = self._slots.expect(slot, "combine_send").state
        self._send_sums(state, state.sums.fill_(float("nan")))
        entry.next = "combine_recv"
        return state.round

    def _send_sums(self, state: CollectiveRound, sums: torch.Tensor) -> None:
        state.work = begin_all_to_all(self._group, state.results, sums, state.send_counts, state.recv_counts)
        state.buffers = (sums,)

    def _receive_results(self, state: CollectiveRound) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait(state, "combine")
        return state.results, state.token_to_row  # a token has at most one row per rank: summed in rank order

    def _send_refusal(self, num_tokens: int, round_: int) -> None:
        swap_headers(self._group, refusal(num_tokens, self.num_ranks, self.device), round_)

    def _end(self, state: CollectiveRound, call: str, slot: int) -> None:
        if call != "combine_recv":
            self.send_nan(slot=slot)
        self._wait(state, "abandoned round")

    def _wait(self, state: CollectiveRound, phase: str) -> None:
        if state.work is not None:
            self._group.wait(state.work, phase=phase, round=state.round)
