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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import start_early
from ep_moe.kernels.exchange.dispatch_receive import Receiver, receive
from ep_moe.kernels.exchange.dispatch_send import Sender, send_ll, send_rows
from ep_moe.kernels.exchange.headers import Announcer, announce
from ep_moe.kernels.exchange.peers import Exchange
from ep_moe.kernels.exchange.round_state import ACTIVE, DONE, Round, is_off, next_epoch


class Sizes(NamedTuple):
    """Numbers of tokens, experts and rows."""

    max_tokens: Any  # T, the most if HAS_NUM_TOKENS
    num_blocks: Any  # B
    num_physical: Any  # P
    max_tokens_per_rank: Any  # M
    word_tokens: Any  # the most that are sent as LL words
    height: Any  # C
    alignment: Any  # of an expert's first row if not BATCHED


class Header(NamedTuple):
    """What this rank says of its input to all ranks, besides counts."""

    fingerprint: Any  # of the payload's format
    refusal: Any  # 1 if the host has refused it


class Roles(NamedTuple):
    """The programs of a launch by what they do."""

    announcers: Any  # how many send headers
    senders: Any  # how many send tokens
    first_receiver: Any


class Layer(NamedTuple):
    """`LayerTag.words` of the round, which ranks compare."""

    layer: Any
    settings: Any


# Triton specializes numbers in tuples nevertheless, so `Kernel` compiles for others in their place
@triton.jit(do_not_specialize=["sizes", "header", "roles", "strides", "layer", "number", "timeout_ns"])
def _dispatch_kernel(
    links,  # `peers.Links`
    own,  # `round_state.SlotState`
    sizes,  # Sizes
    header,  # Header
    roles,  # Roles
    tokens,  # `dispatch_send.Tokens`
    batch,  # `batch_rows.Batch`
    strides,  # `dispatch_send.Strides`
    layer,  # Layer
    number,  # `Round.number`
    timeout_ns,
    ranks: tl.constexpr,  # `wire_layout.Ranks`
    row: tl.constexpr,  # `wire_layout.Row`
    sending: tl.constexpr,  # `dispatch_send.Sending`
    receiving: tl.constexpr,  # `dispatch_receive.Receiving`
    halves: tl.constexpr,  # `round_state.Halves`
):
    """One round's dispatch, or one half of it."""
    start_early()
    exchange = Exchange(links, own)
    pid = tl.program_id(0)
    epoch = next_epoch(tl.load(own.state_ptr + DONE))
    active = tl.load(own.state_ptr + ACTIVE)
    enabled = is_off(exchange, ranks, epoch, active) == 0
    round_ = Round(epoch, number, active, timeout_ns, enabled, header.fingerprint, layer.layer, layer.settings)
    rows_per_rank, num_physical = sizes.max_tokens_per_rank.to(tl.int64), sizes.num_physical
    if halves.SEND:
        max_tokens, announcers = sizes.max_tokens, roles.announcers
        num_tokens = max_tokens
        if sending.HAS_NUM_TOKENS:
            num_tokens = tl.load(tokens.num_tokens_ptr)
        present = tl.where((num_tokens > max_tokens) | (header.refusal > 0), 0, tl.maximum(num_tokens, 0))
        if pid < announcers:
            announcer = Announcer(
                pid, announcers, present, num_tokens, max_tokens, sizes.num_blocks, num_physical, header.refusal
            )
            announce(exchange, ranks, round_, tokens, strides.ids, announcer, row, sending)
        first_sender = tl.minimum(announcers, roles.first_receiver)  # one program alone has all roles
        if (pid >= first_sender) & (pid < first_sender + roles.senders):
            sender = Sender(pid - first_sender, roles.senders, present, num_physical, rows_per_rank, sizes.word_tokens)
            as_ll = sending.SEND_LL
            if sending.SEND_LL and sending.SEND_ROWS:
                as_ll = present <= sizes.word_tokens
            if as_ll:
                if sending.SEND_LL:
                    send_ll(exchange, ranks, round_, tokens, strides, sender, row, sending)
            elif sending.SEND_ROWS:
                send_rows(exchange, ranks, round_, tokens, strides, sender, row, sending)
    if halves.RECEIVE:
        if pid >= roles.first_receiver:
            index, receivers = pid - roles.first_receiver, tl.num_programs(0) - roles.first_receiver
            receiver = Receiver(index, receivers, rows_per_rank, sizes.word_tokens, sizes.height, sizes.alignment)
            receive(exchange, ranks, round_, batch, receiver, row, receiving)
