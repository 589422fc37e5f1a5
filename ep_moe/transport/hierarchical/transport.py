"""The transport for several nodes: a token crosses the network once for each node, and its results come back summed.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, N nodes, G ranks of a node, P physical experts.

1. Headers: every rank tells every other how many rows it has for that rank's node, or that it refuses.
2. Rows: a token is sent once to every node that needs it, to the rank that has this rank's number there (its relay), in
   chunks. The relay forwards each chunk inside the node while the next one travels.
3. Results: each rank sums a token's local experts and returns a row to the relay, which sums the rows of its node in
   rank order in float32, rounds to the model's dtype and sends one row back. The source rank adds the nodes' rows in
   node order in float32.
All that needs other ranks is sent by dispatch_send and combine_send: no rank waits for another's receiving half.
Rounds of few tokens are `ep_moe.transport.hierarchical.gathered`'s, of the same bits.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Packed, TokenRows, merge_repeats
from ep_moe.placement import Placement
from ep_moe.transport.base import Dispatched, RoundKind
from ep_moe.transport.collective import GATHERED_TOKENS
from ep_moe.transport.collective.send_plan import owners, plan_send, write_rows
from ep_moe.transport.collective.transport import CollectiveRound
from ep_moe.transport.headers import HEADER_WORDS, swap_headers
from ep_moe.transport.hierarchical.gathered import NodesGatheredTransport
from ep_moe.transport.hierarchical.network import Message, Network
from ep_moe.transport.hierarchical.relay import Forwarded, make_relay
from ep_moe.transport.host_sync import Tokens, maps_of, sum_experts
from ep_moe.transport.payload import RowFormat


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round(CollectiveRound):
    """An open round over relays. Its tensors live until it ends, since other streams and the backend use them.

    Counts are of nodes in the place of ranks, and the results are the nodes' sums.
    """

    chunks: int  # messages to the other nodes in either direction, the same on all ranks
    sent: torch.Tensor  # [rows sent, row_bytes] uint8
    pool: torch.Tensor  # [rows received, row_bytes] uint8, without rounds inside the node
    received: list[torch.Tensor]  # by node, [rows, row_bytes] uint8
    forwarded: list[Forwarded]  # rounds inside the node
    messages: list[Message]
    kept: tuple[torch.Tensor | None, ...] = ()


class HierarchicalTransport(NodesGatheredTransport):
    """Exchange between nodes by NCCL or gloo, each token once per node; inside a node one-sided or by collectives.

    Args:
        group: the ranks, numbered node by node, as many on each node.
        placement: which physical experts each rank owns.
        config: sizes and dtype, the same on all ranks; `ranks_per_node` may declare nodes, `chunk_rows` is the size of
            messages between them, which changes no result.
        inside: the transport inside nodes: "peer", "collective", or "auto": the first if ranks of a node reach each
            other's memory. On a CPU "peer" needs TRITON_INTERPRET=1.

    Attributes:
        most_gathered: tokens of all ranks up to which a round, by its bound, goes to every rank in messages of a fixed
            size (`NodesGatheredTransport`): no count is read back to the host, and a CUDA graph can hold it.

    The constructor is collective: it compares the configs of all ranks. The dispatch of a larger round waits for the
    headers of all ranks; where rounds inside a node are collective, dispatch_send and combine_send also wait for the
    rows that this rank forwards. On GPUs forwarding runs on a stream of its own.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig, *, inside: str = "auto") -> None:
        super().__init__(group, placement, config)
        self.most_gathered = GATHERED_TOKENS
        self._network = Network(group, self.nodes)
        self._relay = make_relay(group, self.nodes, placement, config, inside)
        self._node_of = owners([last - first for first, last in self.nodes.experts(placement)], group.device)
        on_gpu = group.device.type == "cuda" and self._relay is not None
        self._stream = torch.cuda.Stream(group.device) if on_gpu else None

    def gathers(self, most: int) -> bool:
        """Whether rounds of up to so many tokens on each rank are of a fixed size. Local."""
        return most * self.num_ranks <= self.most_gathered

    def _reads_counts(self, most: int) -> bool:
        return not self.gathers(most)

    def _send(self, tokens: Tokens, slot: int) -> CollectiveRound:
        if self.gathers(tokens.sizes.most):
            return super()._send(tokens, slot)
        sizes, ids, device = tokens.sizes, tokens.routing.topk_ids, self.device
        row_format = RowFormat.of(sizes.scheme, self.config.dtype, self.config.hidden, ids.shape[1])
        num_nodes, per_node = self.nodes.num_nodes, self.nodes.ranks_per_node
        to_nodes = torch.empty(num_nodes, HEADER_WORDS, dtype=torch.int64, device=device)
        fingerprint = row_format.fingerprint(sizes.most)
        plan = plan_send(ids, self._node_of, fingerprint=fingerprint, layer=tokens.layer.words, header=to_nodes)
        headers = torch.stack([to_nodes.repeat_interleave(per_node, dim=0)] * 2)
        x = tokens.quantized()
        round_ = self._count_round()
        sent, received = swap_headers(self._group, headers, round_)
        self._count_headers()
        self._compare(received, round_, row_format)
        send_counts = tuple(header.rows for header in sent[::per_node])
        by_relay = tuple(
            tuple(header.rows for header in received[node * per_node : (node + 1) * per_node])
            for node in range(num_nodes)
        )
        with self._reporting():
            outgoing = torch.empty(sum(send_counts), row_format.row_bytes, dtype=torch.uint8, device=device)
            token_to_row = write_rows(row_format, x, tokens.routing, plan, outgoing)
            recv_counts = tuple(counts[self.nodes.local_rank] for counts in by_relay)
            like: dict[str, Any] = {"dtype": self.config.dtype, "device": device}
            sums, results = (torch.empty(sum(n), self.config.hidden, **like) for n in (recv_counts, send_counts))
            state = _Round(
                round=round_,
                sizes=sizes,
                row_format=row_format,
                chunks=-(-max(header.num_tokens for header in received) // self.config.chunk_rows),
                token_to_row=token_to_row,
                send_counts=send_counts,
                recv_counts=recv_counts,
                recv_pairs=sum(header.pairs for header in received),
                work=None,
                buffers=(),
                sent=outgoing,
                pool=outgoing[:0],
                received=[],
                forwarded=[] if self._relay is None else self._relay.plan(slot, by_relay),
                messages=[],
                results=results,
                sums=sums,
            )
            self._send_rows(state)
        return state

    def _send_rows(self, state: _Round) -> None:
        """Begin to send rows to the other nodes, and forward inside this node what is here or arrives."""
        own, outgoing = self.nodes.node, list(state.sent.split(state.send_counts))
        if self._relay is None:  # the rows are the batch's pool, in one piece
            state.pool = state.sent.new_empty(sum(state.recv_counts), state.sent.shape[1])
            state.received = list(state.pool.split(state.recv_counts))
            state.received[own].copy_(outgoing[own])
        else:
            sizes = [(count, state.sent.shape[1]) for count in state.recv_counts]
            state.received = [outgoing[own] if n == own else state.sent.new_empty(s) for n, s in enumerate(sizes)]
        for chunk in range(state.chunks):
            self._exchange(state, chunk, state.received, outgoing, dispatch=True)
        relay, messages = self._relay, list(state.messages)
        if relay is None:
            return
        with self._relaying("dispatch", state.round):
            arrived = 0
            for forwarded in state.forwarded:
                chunk = forwarded.rows.start // self.config.chunk_rows
                while forwarded.node != own and arrived <= chunk:
                    if relay.waits_on_host:
                        self._network.wait(messages[arrived : arrived + 1], "dispatch", state.round)
                    else:
                        messages[arrived].work.wait()  # orders the stream; `dispatch_recv` waits with a deadline
                    arrived += 1
                relay.send(forwarded, state.received[forwarded.node], state.row_format, state.sizes.scheme)

    def _exchange(
        self,
        state: _Round,
        chunk: int,
        incoming: Sequence[torch.Tensor],
        outgoing: Sequence[torch.Tensor],
        *,
        dispatch: bool,
    ) -> None:
        """Begin to exchange one chunk with the other nodes, and count what leaves this one."""
        if self.nodes.num_nodes == 1:
            return
        rows = slice(chunk * self.config.chunk_rows, (chunk + 1) * self.config.chunk_rows)
        sends = [tensor[rows] for tensor in outgoing]
        state.messages.append(self._network.exchange([tensor[rows] for tensor in incoming], sends))
        crossing = [tensor for node, tensor in enumerate(sends) if node != self.nodes.node]
        count, num_bytes = sum(map(len, crossing)), sum(tensor.numel() * tensor.element_size() for tensor in crossing)
        traffic = self.traffic
        if dispatch:
            payload = count * state.row_format.payload_bytes
            traffic.dispatch_rows += count
            traffic.dispatch_bytes += payload
            traffic.metadata_bytes += num_bytes - payload
        else:
            traffic.combine_rows += count
            traffic.combine_bytes += num_bytes

    def _receive(self, state: CollectiveRound) -> Packed:
        if not isinstance(state, _Round):
            return super()._receive(state)
        first, last = self.placement.starts[self.rank], self.placement.starts[self.rank + 1]
        rows = self._receive_rows(state, first, last)
        num_rows, columns = rows.local_topk_ids.shape
        assert state.recv_pairs is not None
        return self._pack(rows, state.sizes, min(state.recv_pairs, num_rows * min(columns, last - first)))

    def _receive_rows(self, state: _Round, first: int, last: int) -> TokenRows:
        """Wait for this rank's rows, of experts [first, last), ordered by source rank and token."""
        self._network.wait(state.messages, "dispatch", state.round)
        relay = self._relay
        values, scale, routing = state.row_format.read(state.pool)
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights, first=first, last=last)
        rows = TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights)
        if relay is not None:
            self._join()
            relay.enter("dispatch", state.round)
            relay.receive(state.forwarded)
            rows = relay.gather(state.forwarded, rows)
        state.messages.clear()
        return rows

    def _send_results(self, state: CollectiveRound, y: torch.Tensor, dispatched: Dispatched) -> None:
        if not isinstance(state, _Round):
            super()._send_results(state, y, dispatched)
            return
        with self._reporting():
            self._send_back(state, y, dispatched)

    def _send_back(self, state: _Round, y: torch.Tensor | None, dispatched: Dispatched | None) -> None:
        """Sum this rank's rows, then its node's, and begin to send the sums back. y: None sends NaN for this rank's."""
        own, relay = self.nodes.node, self._relay
        incoming = list(state.results.split(state.send_counts))
        sums = state.sums
        if relay is None:
            if y is None or dispatched is None:
                sums.fill_(float("nan"))
            else:
                sums = sum_experts(y, dispatched, out=sums).contiguous()
            outgoing = list(sums.split(state.recv_counts))
            incoming[own].copy_(outgoing[own])
            for chunk in range(state.chunks):
                self._exchange(state, chunk, incoming, outgoing, dispatch=False)
            state.kept = (sums,)
            return
        outgoing = [incoming[n] if n == own else rows for n, rows in enumerate(sums.split(state.recv_counts))]
        state.kept = (y, sums)
        maps = None if dispatched is None else maps_of(dispatched)
        with self._relaying("combine", state.round):
            for forwarded in state.forwarded:
                relay.send_back(forwarded, y, maps)
            remote = [forwarded for forwarded in state.forwarded if forwarded.node != own]
            for chunk in range(state.chunks):
                for forwarded in remote:
                    if forwarded.rows.start == chunk * self.config.chunk_rows:
                        relay.sum(forwarded, outgoing[forwarded.node][forwarded.rows])
                self._exchange(state, chunk, incoming, outgoing, dispatch=False)
            for forwarded in state.forwarded:
                if forwarded.node == own:  # last, while the others' sums travel
                    relay.sum(forwarded, outgoing[own][forwarded.rows])

    def _receive_results(self, state: CollectiveRound) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(state, _Round):
            return super()._receive_results(state)
        self._network.wait(state.messages, "combine", state.round)
        self._join()
        return state.results, state.token_to_row  # a token has at most one row per node: summed in node order

    def _end(self, state: CollectiveRound, call: str, slot: int) -> None:
        """What this rank forwards for others still reaches them."""
        if not isinstance(state, _Round):
            super()._end(state, call, slot)
            return
        with self._reporting():
            if call == "dispatch_recv":
                self._network.wait(state.messages, "dispatch", state.round)
                state.messages.clear()
            if call != "combine_recv":
                self._send_back(state, None, None)
        self._network.wait(state.messages, "abandoned round", state.round)
        self._join()

    def warmup(self, kinds: Sequence[RoundKind]) -> None:
        """See `Transport.warmup`: kernels of the rounds inside a node, if they are one-sided."""
        self._slots.check_open()
        if self._relay is not None:
            self._relay.warmup(kinds)

    def check(self) -> None:
        """See `Transport.check`, as of `GatheredTransport`, and of the rounds inside the node."""
        super().check()
        if self._relay is not None and self._relay.inner is not None:
            self._relay.inner.check()

    def destroy(self) -> None:
        """See `Transport.destroy`. Open rounds are dropped; the group stays."""
        super().destroy()
        if self._relay is not None and self._relay.inner is not None:
            self._relay.inner.destroy()

    @contextlib.contextmanager
    def _relaying(self, phase: str, round_: int) -> Iterator[None]:
        """Forward in this block, on a GPU on the stream for it, behind all work of the current stream."""
        assert self._relay is not None
        self._relay.enter(phase, round_)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _join(self) -> None:
        """Order the current stream behind all forwarding so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
