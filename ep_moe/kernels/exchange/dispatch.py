"""The dispatch kernel: stores tokens into the memory of the ranks of their experts, and lays out what arrives there.

The first programs of a launch send headers, some send tokens, the last receive; one program may do all three, in this
order. Only receivers wait. Send and receive may be one launch or two, with any number of programs; receivers must be
resident beside the senders of their launch, or run after them.

A rank sends every rank its header first: a status word (its number of tokens, or why it refuses), the format of its
payload, the layer, and the number of rows for each expert. These are LL words (see `signals`): they need no fence, and
the receiver can compute the place of every row before the first row arrives.

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

from ep_moe.kernels.exchange.dispatch_receive import receive
from ep_moe.kernels.exchange.dispatch_send import announce, send_rows, send_words
from ep_moe.kernels.exchange.round_state import ACTIVE, DONE, is_off, next_epoch
from ep_moe.kernels.exchange.signals import wait_for_launch


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
        "first_sender",
        "senders",
        "first_receiver",
        "x_stride",
        "scale_token_stride",
        "scale_group_stride",
        "ids_stride",
        "weights_stride",
        "layer",
        "settings",
        "timeout_ns",
    ]
)
def _dispatch_kernel(
    links,  # `exchange.Links`
    own,  # `exchange.Own`
    max_tokens,  # T, the most where COUNTED
    num_blocks,  # B
    num_physical,  # P
    max_tokens_per_rank,  # M
    word_tokens,
    height,  # C
    alignment,  # of an expert's first row where not BATCHED
    fingerprint,  # of the payload's format
    refusal,  # 1 where the host has refused this rank's input
    announcers,
    first_sender,
    senders,
    first_receiver,
    tokens,  # `dispatch_send.Tokens`
    batch,  # `dispatch_receive.Batch`
    x_stride,
    scale_token_stride,
    scale_group_stride,
    ids_stride,
    weights_stride,
    layer,  # this round's, two words of 32 bits that ranks compare
    settings,
    timeout_ns,
    H: tl.constexpr,  # numbers of a row of x where QUANTIZE, else its words
    GROUP: tl.constexpr,  # numbers that share a scale, where QUANTIZE
    G: tl.constexpr,
    GROUPS: tl.constexpr,  # G rounded up
    SENT_WORDS: tl.constexpr,  # of a row's values, rounded up
    WORD_BLOCK: tl.constexpr,  # words of a token that one program sends at a time as words
    WORD_GROUPS: tl.constexpr,  # scales of those, where QUANTIZE, else GROUPS
    TAKEN_WORDS: tl.constexpr,  # words of a row's values that one program takes at a time
    VALUE_WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    ENTRY: tl.constexpr,  # int32 of an entry, 2 * max_topk
    TOKENS_PER_FENCE: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    STARTS: tl.constexpr,  # R + 1 numbers, the first physical expert of each rank
    RANKS: tl.constexpr,  # R rounded up, and so on
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    L: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEADER_SPAN: tl.constexpr,
    TOKENS: tl.constexpr,  # of a block, T rounded up where not PLANNED
    COUNTED_EXPERTS: tl.constexpr,
    QUANTIZE: tl.constexpr,  # by the sender: "" or how
    COUNTED: tl.constexpr,  # the device says how many tokens there are
    PLANNED: tl.constexpr,  # ids are counted already
    BATCHED: tl.constexpr,
    POOLED: tl.constexpr,
    WORDY: tl.constexpr,  # words may come
    TAKE_ROWS: tl.constexpr,  # and rows
    SEND_WORDS: tl.constexpr,  # this rank may send words
    SEND_ROWS: tl.constexpr,  # and rows
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One round's dispatch, or one half of it."""
    wait_for_launch(PDL)
    pid = tl.program_id(0)
    epoch = next_epoch(tl.load(own.state_ptr + DONE))
    active = tl.load(own.state_ptr + ACTIVE)
    over = is_off(links, own, epoch)
    slots = max_tokens_per_rank.to(tl.int64)
    if SEND:
        num_tokens = max_tokens
        if COUNTED:
            num_tokens = tl.load(tokens.num_tokens_ptr)
        present = tl.where((num_tokens > max_tokens) | (refusal > 0), 0, tl.maximum(num_tokens, 0))
        if pid < announcers:
            announce(
                links,
                own,
                tokens,
                pid,
                announcers,
                present,
                num_tokens,
                max_tokens,
                num_blocks,
                num_physical,
                ids_stride,
                epoch,
                over == 0,
                active,
                fingerprint,
                layer,
                settings,
                refusal,
                R,
                RANK,
                STARTS,
                K,
                L,
                TOKENS,
                COUNTED_EXPERTS,
                PLANNED,
            )
        if (pid >= first_sender) & (pid < first_sender + senders):
            wordy = SEND_WORDS
            if SEND_WORDS and SEND_ROWS:
                wordy = present <= word_tokens
            if wordy:
                if SEND_WORDS:
                    send_words(
                        links,
                        own,
                        tokens,
                        pid - first_sender,
                        senders,
                        present,
                        num_physical,
                        x_stride,
                        scale_token_stride,
                        scale_group_stride,
                        ids_stride,
                        weights_stride,
                        word_tokens,
                        epoch,
                        over == 0,
                        active,
                        H,
                        GROUP,
                        G,
                        WORD_GROUPS,
                        WORD_BLOCK,
                        VALUE_WORDS,
                        UNIT,
                        R,
                        RANK,
                        STARTS,
                        K,
                        COLUMNS,
                        TOKENS,
                        QUANTIZE,
                        PLANNED,
                    )
            elif SEND_ROWS:
                send_rows(
                    links,
                    own,
                    tokens,
                    pid - first_sender,
                    senders,
                    present,
                    num_physical,
                    x_stride,
                    scale_token_stride,
                    scale_group_stride,
                    ids_stride,
                    weights_stride,
                    slots,
                    epoch,
                    over == 0,
                    active,
                    H,
                    GROUP,
                    G,
                    GROUPS,
                    SENT_WORDS,
                    VALUE_WORDS,
                    UNIT,
                    ENTRY,
                    TOKENS_PER_FENCE,
                    R,
                    RANK,
                    STARTS,
                    K,
                    COLUMNS,
                    TOKENS,
                    QUANTIZE,
                    PLANNED,
                )
    if RECEIVE:
        if pid >= first_receiver:
            receive(
                links,
                own,
                batch,
                pid - first_receiver,
                tl.num_programs(0) - first_receiver,
                slots,
                word_tokens,
                height,
                alignment,
                fingerprint,
                layer,
                settings,
                epoch,
                over,
                active,
                timeout_ns,
                G,
                GROUPS,
                TAKEN_WORDS,
                VALUE_WORDS,
                ENTRY,
                R,
                RANK,
                STARTS,
                RANKS,
                K,
                COLUMNS,
                L,
                EXPERTS,
                HEADER_SPAN,
                BATCHED,
                POOLED,
                WORDY,
                TAKE_ROWS,
            )
