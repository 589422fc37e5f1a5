"""The dispatch kernel: stores tokens into the memory of the ranks of their experts, and lays out what arrives there.

The first programs of a launch send headers, some send tokens, the last receive; one program may do all three, in this
order. Only receivers wait. Send and receive may be one launch or two, with any number of programs; receivers must be
resident beside the senders of their launch, or run after them.

A rank sends every rank its header first: a status word (its number of tokens, or why it refuses), the format of its
payload, the layer, and the number of rows for each expert. These are LL words (see `wire_layout`): they need no
fence, and the receiver can compute the place of every row before the first row arrives.

A rank with at most `word_tokens` tokens sends them as LL words too, one for each 32 bits of payload: twice the bytes,
but no fence and no flag. Otherwise a token is a row, stored plainly, and a flag word.

Rule: every rank publishes to every rank in every round and waits for every rank, with zero tokens too. Rule: nothing is
written before the previous round's combine has ended on this rank: only then have the others read all of that round.
Rule: the epoch is the device's own, one more than the last round that has ended on this rank.

Letters: T tokens on this rank, K top-k, H hidden, G scale groups, R ranks, M max_tokens_per_rank, P physical experts, B
blocks of tokens, L the most experts that a rank owns, C rows that share a matrix of scales.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import wait_for_launch
from ep_moe.kernels.exchange.dispatch_receive import Receiver, receive
from ep_moe.kernels.exchange.dispatch_send import Sender, Strides, send_ll, send_rows
from ep_moe.kernels.exchange.headers import Announcer, announce
from ep_moe.kernels.exchange.peers import Exchange
from ep_moe.kernels.exchange.round_state import ACTIVE, DONE, Round, is_off, next_epoch


@triton.jit(
    do_not_specialize=[
        "max_tokens",
        "num_blocks",
        "num_physical",
        "max_tokens_per_rank",
        "word_tokens",
        "height",
        "alignment",
        "fingerprint",
        "refusal",
        "announcers",
        "senders",
        "first_receiver",
        "x_stride",
        "scale_token_stride",
        "scale_group_stride",
        "ids_stride",
        "weights_stride",
        "layer",
        "settings",
        "number",
        "timeout_ns",
    ]
)
def _dispatch_kernel(
    links,  # `peers.Links`
    own,  # `round_state.SlotState`
    max_tokens,  # T, the most if HAS_NUM_TOKENS
    num_blocks,  # B
    num_physical,  # P
    max_tokens_per_rank,  # M
    word_tokens,
    height,  # C
    alignment,  # of an expert's first row if not BATCHED
    fingerprint,  # of the payload's format
    refusal,  # 1 if the host has refused this rank's input
    announcers,
    senders,
    first_receiver,
    tokens,  # `dispatch_send.Tokens`
    batch,  # `batch_rows.Batch`
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    layer,  # `layer` and `settings`: `LayerTag.words` of the round, which ranks compare
    settings,
    number,  # `Round.number`
    timeout_ns,
    ranks: tl.constexpr,  # `wire_layout.Ranks`
    row: tl.constexpr,  # `wire_layout.Row`
    sending: tl.constexpr,  # `dispatch_send.Sending`
    receiving: tl.constexpr,  # `dispatch_receive.Receiving`
    halves: tl.constexpr,  # `round_state.Halves`
):
    """One round's dispatch, or one half of it."""
    wait_for_launch(halves.PDL)
    exchange = Exchange(links, own)
    pid = tl.program_id(0)
    epoch = next_epoch(tl.load(own.state_ptr + DONE))
    active = tl.load(own.state_ptr + ACTIVE)
    enabled = is_off(exchange, ranks, epoch, active) == 0
    round_ = Round(epoch, number, active, timeout_ns, enabled, fingerprint, layer, settings)
    rows_per_rank = max_tokens_per_rank.to(tl.int64)
    if halves.SEND:
        num_tokens = max_tokens
        if sending.HAS_NUM_TOKENS:
            num_tokens = tl.load(tokens.num_tokens_ptr)
        present = tl.where((num_tokens > max_tokens) | (refusal > 0), 0, tl.maximum(num_tokens, 0))
        strides = Strides(x_stride, scale_token_stride, scale_group_stride, ids_stride, weights_stride)
        if pid < announcers:
            announcer = Announcer(pid, announcers, present, num_tokens, max_tokens, num_blocks, num_physical, refusal)
            announce(exchange, ranks, round_, tokens, ids_stride, announcer, row, sending)
        first_sender = tl.minimum(announcers, first_receiver)  # one program alone has all roles
        if (pid >= first_sender) & (pid < first_sender + senders):
            sender = Sender(pid - first_sender, senders, present, num_physical, rows_per_rank, word_tokens)
            as_ll = sending.SEND_LL
            if sending.SEND_LL and sending.SEND_ROWS:
                as_ll = present <= word_tokens
            if as_ll:
                if sending.SEND_LL:
                    send_ll(exchange, ranks, round_, tokens, strides, sender, row, sending)
            elif sending.SEND_ROWS:
                send_rows(exchange, ranks, round_, tokens, strides, sender, row, sending)
    if halves.RECEIVE:
        if pid >= first_receiver:
            receivers = tl.num_programs(0) - first_receiver
            receiver = Receiver(pid - first_receiver, receivers, rows_per_rank, word_tokens, height, alignment)
            receive(exchange, ranks, round_, batch, receiver, row, receiving)
