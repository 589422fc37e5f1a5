"""The collective transport whose rounds a CUDA graph can hold: two collectives of a fixed size, and no counts.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, B bound of a round on the tokens of each rank.

A round is an all-gather of messages, each a header and the rank's tokens, and an all-to-all of a result row for each of
them. Every rank gets all tokens: with few tokens that costs less than to tell each rank how many it gets.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ep_moe.group.collectives import begin_all_gather
from ep_moe.layout import Packed, TokenRows
from ep_moe.transport.base import Dispatched
from ep_moe.transport.checks import check_results
from ep_moe.transport.collective.messages import (
    head_rows,
    header_of,
    new_kept,
    read_messages,
    take_kept,
    write_message,
)
from ep_moe.transport.collective.transport import CollectiveRound, CollectiveTransport
from ep_moe.transport.headers import HEADER_WORDS, Header, swap_headers
from ep_moe.transport.host_sync import Tokens
from ep_moe.transport.payload import RowFormat

GATHERED_TOKENS = 1024  # of all ranks: up to so many it was compared with `collective` on 2 H200


@dataclasses.dataclass(kw_only=True, slots=True)
class GatheredRound(CollectiveRound):
    """A round of messages of a fixed size."""

    head: int  # rows of a message before its tokens
    num_tokens: torch.Tensor | None  # of the dispatch, on the device
    captured: bool


class GatheredTransport(CollectiveTransport):
    """Exchange by an all-gather of all tokens and an all-to-all of all results, on NCCL or gloo.

    Args: as of `CollectiveTransport`.

    An eager dispatch waits for the headers of all ranks, as that of `collective` does, and finds what `collective`
    finds. On a stream that is captured nothing waits on the host: replays may have other ids, weights and `num_tokens`;
    all ranks capture the same rounds and replay them together. Where they disagree then, or an input is bad, the round
    gives NaN, and `check` raises on every rank. A rank that calls another round, or one of another bound, while others
    replay breaks the group: they get `PeerLostError` after the timeout. NCCL ends a communicator only once no graph
    holds its operations: delete graphs before the group is destroyed.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept = new_kept(self.num_ranks, self.device)
        self._captured = False  # whether a round was

    def _in_graph(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _reads_counts(self, most: int) -> bool:
        return False

    def _send(self, tokens: Tokens, slot: int) -> CollectiveRound:
        sizes, ids, device, captured = tokens.sizes, tokens.routing.topk_ids, self.device, self._in_graph()
        row_format = RowFormat.of(sizes.scheme, self.config.dtype, self.config.hidden, ids.shape[1])
        head = head_rows(row_format)
        height = head + sizes.most
        messages = torch.empty(self.num_ranks + 1, height, row_format.row_bytes, dtype=torch.uint8, device=device)
        like: dict[str, Any] = {"dtype": self.config.dtype, "device": device}
        sums = torch.empty(self.num_ranks * height, self.config.hidden, **like)
        results = torch.empty(self.num_ranks * height + 1, self.config.hidden, **like)
        x, mine = tokens.quantized(), messages[-1]
        write_message(
            row_format,
            x,
            tokens.routing,
            mine,
            fingerprint=row_format.fingerprint(sizes.most),
            layer=tokens.layer.words,
            num_physical=self.placement.num_physical,
            num_tokens=tokens.num_tokens,
        )
        round_ = self._count_round()
        if captured:
            self._captured = True
        else:
            headers = torch.empty(2, self.num_ranks, HEADER_WORDS, dtype=torch.int64, device=device)
            headers[0] = header_of(mine)
            self._judge(swap_headers(self._group, headers, round_)[1], round_, row_format)
        return GatheredRound(
            round=round_,
            sizes=sizes,
            row_format=row_format,
            token_to_row=ids.new_empty(len(ids), 0, dtype=torch.int32),  # until messages are read
            head=head,
            num_tokens=None if tokens.num_tokens is None else tokens.num_tokens.clone(),  # the caller may reuse it
            captured=captured,
            send_counts=(height,) * self.num_ranks,
            recv_counts=(height,) * self.num_ranks,
            recv_pairs=None,
            work=begin_all_gather(self._group, messages[:-1].view(-1), mine.view(-1)),
            buffers=(mine, messages[:-1]),
            sums=sums,
            results=results,
        )

    def _judge(self, headers: Sequence[Header], round_: int, row_format: object) -> None:
        """Raise ValueError, on every rank alike, if the headers of a round do not go together. Local."""
        own = headers[self.rank]
        if own.refused:
            raise ValueError(f"num_tokens ({own.num_tokens}) is not in [0, rows of x] on rank {self.rank}")
        self._compare(headers, round_, row_format)

    def _receive(self, state: CollectiveRound) -> Packed:
        assert isinstance(state, GatheredRound)
        self._wait(state, "dispatch")
        received, row_format = state.buffers[1], state.row_format
        values, scale, _ = row_format.read(received.view(-1, received.shape[-1]))
        state.token_to_row = received.new_empty(state.sizes.num_rows, self.num_ranks + 1, dtype=torch.int32)
        ids, weights, place = read_messages(
            received,
            row_format,
            rank=self.rank,
            head=state.head,
            columns=state.token_to_row,
            owner=self._owner,
            own=(self.placement.starts[self.rank], self.placement.starts[self.rank + 1]),
            kept=self._kept,
            nan_row=state.results[-1],
        )
        rows = TokenRows(
            x=values,
            scale=scale,
            local_topk_ids=ids,
            topk_weights=weights,
            max_expert_rows=self.num_ranks * state.sizes.most,  # a header is no row of an expert
        )
        packed = self._pack(rows, state.sizes, place=place)
        state.work, state.buffers = None, ()
        return packed

    def _send_sums(self, state: CollectiveRound, sums: torch.Tensor) -> None:
        whole = state.results
        state.results = whole[:-1]  # behind them is a row of NaN, which tokens get in a bad round
        super()._send_sums(state, sums)
        state.results = whole

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`."""
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_recv", handle.round).state
        if not isinstance(state, GatheredRound) or state.num_tokens is None or out is None:
            return super().combine_recv(dispatched, shared=shared, out=out)
        check_results((state.sizes.num_rows, self.config.hidden), self.config, self.device, shared=shared, out=out)
        written = torch.arange(len(out), device=self.device) < state.num_tokens.view(())
        written |= state.token_to_row[:, -1] >= 0  # all rows of a bad round
        found = super().combine_recv(dispatched, shared=shared)  # of all rows
        return torch.where(written[:, None], found, out, out=out)

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. While a graph is captured no other rank waits."""
        if self._in_graph():
            self._slots.expect(slot, "dispatch_send")
            raise error
        super().refuse(error, slot=slot, num_tokens=num_tokens)

    def check(self) -> None:
        """See `Transport.check`. Once a round was captured, host sync of the current stream, on which graphs are
        replayed; not while one is captured."""
        super().check()
        if not self._captured or self._in_graph():
            return
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._group.wait(event, phase="check", round=self.num_rounds)
        headers = take_kept(self._kept)
        if headers:
            self._judge(headers, self.num_rounds, "captured rows")

    def _wait(self, state: CollectiveRound, phase: str) -> None:
        if isinstance(state, GatheredRound) and state.captured:
            if state.work is not None:
                state.work.wait()  # the stream waits, not the host
            return
        super()._wait(state, phase)
