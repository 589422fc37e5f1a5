"""The combine kernel: stores the experts' results into the memory of the tokens' source ranks, and sums them there.

The rank of the experts weights and sums a token's local experts and stores one row at the token's source rank, which
sums the rows of all ranks. No flag says that a row has arrived; rows carry a Lamport-style sentinel instead: the source
rank fills the place of each expected row with all ones, which no stored element is (a NaN is stored as another NaN),
polls until none are left, and restores them after it has read the row. So a row is summed as soon as it arrives, and
nothing is fenced.

Rule: a combine header says that its rank has read all that this round's dispatch sent it; only then may the next
round's dispatch overwrite that. Rule: the combine reads only this slot's own copies of what the dispatch brought, since
peers may send the next round as soon as they have all combine headers. Rule: every rank waits for all combine headers.
Rule: a round's results are sent once: the source rank has restored the sentinel by then, and would take a second copy
for the next round's results. Rule: a rank restores the sentinel before it sends its next dispatch's header, which peers
wait for before they send results again.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import spread, start_early
from ep_moe.kernels.exchange.combine_receive import ResultStrides, Summing, sum_rows
from ep_moe.kernels.exchange.combine_send import return_rows
from ep_moe.kernels.exchange.peers import Exchange, Peer, Piece, order_rows, put_word, region, stage
from ep_moe.kernels.exchange.round_state import (
    ACTIVE,
    BEGUN,
    DONE,
    NUMBER,
    OUT_OF_ORDER,
    OWN_TOKENS,
    RESUME,
    SOURCE_TOKENS,
    VERDICT,
    Round,
    add_waited,
    begin_combine,
    is_active,
    report,
    report_loss,
)
from ep_moe.kernels.exchange.waits import wait_for_words
from ep_moe.kernels.exchange.wire_layout import COMBINE, COMBINE_HEADERS, FINE, make_word


@triton.jit(
    do_not_specialize=[
        "max_tokens_per_rank",
        "senders",
        "first_receiver",
        "shared_stride",
        "out_stride",
        "timeout_ns",
    ]
)
def _combine_kernel(
    links,  # `peers.Links`
    own,  # `round_state.SlotState`
    max_tokens_per_rank,  # M
    senders,
    first_receiver,
    results,  # `Results`
    shared_stride,
    out_stride,
    timeout_ns,
    ranks: tl.constexpr,  # `wire_layout.Ranks`
    combining: tl.constexpr,  # `Combining`
    halves: tl.constexpr,  # `round_state.Halves`
):
    """One round's combine, or one half of it. The first programs send, the last receive, one may do both."""
    start_early()
    exchange = Exchange(links, own)
    R: tl.constexpr = ranks.R
    RANKS: tl.constexpr = ranks.RANKS
    pid = tl.program_id(0)
    epoch = tl.load(own.state_ptr + BEGUN)
    verdict = tl.load(own.state_ptr + VERDICT)
    active = tl.load(own.state_ptr + ACTIVE)
    round_ = Round(epoch, tl.load(own.state_ptr + NUMBER), active, timeout_ns)
    repeated, over = begin_combine(exchange, ranks, epoch, active, halves.SEND, halves.RECEIVE)
    none = tl.zeros([], tl.int32)
    if repeated & (pid == 0):
        report(own, round_.number, none + OUT_OF_ORDER, none, none, none)
    rows_per_rank = max_tokens_per_rank.to(tl.int64)
    source = tl.arange(0, RANKS)
    if halves.SEND:
        if (pid < senders) & (over == 0):
            tokens = tl.load(own.state_ptr + SOURCE_TOKENS + source, mask=source < R, other=0)
            if pid == 0:
                header = make_word(epoch, tl.zeros([], tl.int32))
                stage(exchange, ranks, COMBINE_HEADERS, ranks.RANK, 0, header, None)
                if verdict != FINE:
                    order_rows(ranks.PUTS)  # rows of a refused round, which no rank waits for, arrive before it
                for r in tl.static_range(R):
                    if is_active(active, r):
                        piece = Piece(ranks.RANK, ranks.RANK, 0, 1)
                        put_word(exchange, ranks, Peer(links.bases[r], r), COMBINE_HEADERS, piece, 0, header, None)
            if verdict == FINE:
                return_rows(exchange, ranks, results.y_ptr, tokens, rows_per_rank, pid, senders, combining)
    if halves.RECEIVE:
        if pid >= first_receiver:
            leads = pid == first_receiver
            num_tokens = tl.load(own.state_ptr + OWN_TOKENS)
            if leads:
                tl.store(own.waited_ptr + source, tl.zeros([RANKS], tl.int64), mask=source < R)
            alive = (over == 0).to(tl.int32)
            if alive > 0:
                index = tl.arange(0, spread())
                headers_ptr = region(links.bases[ranks.RANK], links, COMBINE_HEADERS, tl.int64)
                mask = (index < R) & is_active(active, index)
                alive = wait_for_words(exchange, ranks, round_, COMBINE, headers_ptr + index, mask, index, leads)
            alive = tl.where(verdict == FINE, alive, 0)
            receiver = Summing(pid - first_receiver, tl.num_programs(0) - first_receiver, num_tokens, rows_per_rank)
            alive = sum_rows(
                exchange, ranks, round_, results, receiver, alive, ResultStrides(shared_stride, out_stride), combining
            )
            if leads & (repeated == 0):
                add_waited(own.waited_ptr, R, RANKS)
                tl.debug_barrier()  # all warps have read the state
                if epoch == tl.load(own.state_ptr + RESUME):
                    tl.store(own.state_ptr + RESUME, 0)
                tl.store(own.state_ptr + DONE, epoch)
            if alive == 0:
                report_loss(exchange, ranks, active)
