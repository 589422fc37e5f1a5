"""The memory of a slot that no peer sees: its state, verdicts on rounds, and tensors that the batch's fields refer to.

Letters: R ranks, M max_tokens_per_rank, L the most experts that a rank owns, K top-k.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import fence, newest, spread
from ep_moe.kernels.exchange.peers import publish
from ep_moe.kernels.exchange.waits import aborted, load_aborts
from ep_moe.kernels.exchange.wire_layout import make_word

# words of a slot's state, int32, this rank's own
DONE = tl.constexpr(0)  # the last round that has ended: a dispatch reads it, the combine's end writes it
BEGUN = tl.constexpr(1)  # the last round whose dispatch was received: a combine reads it, one receiver writes it
OWN_TOKENS = tl.constexpr(2)
VERDICT = tl.constexpr(3)  # of this round: FINE, or why there is nothing to combine
SOURCE_TOKENS = tl.constexpr(4)  # [R], R at most 32
RESUME = tl.constexpr(40)  # the first round that is exchanged again after a loss, 0 if there is none
ACTIVE = tl.constexpr(41)  # a bit for each rank that takes part
SENT = tl.constexpr(42)  # the last round whose dispatch was sent, or skipped: the host reads it
RUNS = tl.constexpr(43)  # the sum that programs of this round's combine add to (`begin_combine`): 0 after a dispatch
SENT_ONCE = tl.constexpr(1 << 14)  # the part of a whole launch that sends; also the most programs of a launch
NUMBER = tl.constexpr(44)  # of the round whose dispatch was received last, see `Round`
RECEIVED_ONCE = tl.constexpr(1 << 29)  # the part of one that receives

# verdicts on a round, beside the codes of `wire_layout`
MISMATCH = tl.constexpr(4)  # another format
LOST = tl.constexpr(5)  # a rank did not answer
OUT_OF_ORDER = tl.constexpr(6)  # a dispatch before the combine of the round before it, or a combine twice
OTHER_LAYER = tl.constexpr(7)  # another layer, or one of other settings


class SlotState(NamedTuple):
    """The memory of a slot on its own rank."""

    state_ptr: Any  # int32 words, see above
    dest_rank_mask_ptr: Any  # [M] int32: a bit for each rank that the token was sent to
    rows_ptr: Any  # [R * M, K] int32: the rows of the batch that a pool row has, then -1
    weights_ptr: Any  # [R * M, K] float32, of the same rows
    num_rows_ptr: Any  # [L] int32, the batch's
    row_start_ptr: Any  # [L] int32, the batch's
    rows_seen_ptr: Any  # [L] int64: rows of each expert in all rounds
    waited_ptr: Any  # [2, R] int64: nanoseconds that each rank was waited for, in this round and in all
    token_to_row_ptr: Any  # [R * M, K] int32, a field of FLAT batches, as the next three
    local_ids_ptr: Any  # [R * M, K] int32
    pooled_weights_ptr: Any  # [R * M, K] float32
    row_index_ptr: Any  # [R * M * min(K, L)] int32
    report_ptr: Any  # [3] int64, of the host: the slot's `report`
    news_ptr: Any  # [2] int64, of the host, for all slots: not 0 if there is news; an abort word, or 0


class Halves(NamedTuple):
    """The halves of a dispatch or combine that are in one launch: constants of a kernel."""

    SEND: tl.constexpr
    RECEIVE: tl.constexpr


class Round(NamedTuple):
    """A round, as the programs of a launch see it; the fields with a default are for those of a dispatch."""

    epoch: Any  # counted on the device, slot by slot
    number: Any  # that errors name: the transport's count of rounds, modulo 2^31; a replay has that of its capture
    active: Any  # a bit for each rank that takes part
    timeout_ns: Any  # of a wait
    enabled: Any = True  # false if the round is skipped
    fingerprint: Any = 0  # of the payload's format, as `layer` and `settings` compared between ranks
    layer: Any = 0
    settings: Any = 0


@triton.jit
def is_active(active, r):
    """Whether rank r takes part. Nothing is sent to a rank that does not, nor read or awaited from it."""
    return ((active >> (r & 31)) & 1) > 0


@triton.jit
def next_epoch(done):
    """The epoch after `done`; never 0, the value of memory that was never written."""
    return tl.where(done == -1, 1, done + 1)


@triton.jit
def is_off(exchange, ranks: tl.constexpr, epoch, active):
    """Whether a round is skipped: an abort word is set, or the ranks have agreed to resume with a later round.

    The same in all warps of all programs of a rank, except at the moment in which the abort word is set.
    """
    return (tl.max(aborted(exchange, ranks, active), 0) > 0) | _is_before_resumption(exchange.own, epoch)


@triton.jit
def _is_before_resumption(own, epoch):
    """Whether the ranks have agreed to resume later than with this round."""
    resume = tl.load(own.state_ptr + RESUME)
    return (resume != 0) & (epoch - resume < 0)


@triton.jit
def begin_combine(exchange, ranks: tl.constexpr, epoch, active, SEND: tl.constexpr, RECEIVE: tl.constexpr):
    """Return whether this half of the round's combine has been launched already, and whether the round is skipped.

    The first is the same in all programs of a launch: each reads the sum, and only then adds its part. The parts of a
    launch add up to a constant, whatever its number of programs: no program of the first launch finds the sum complete,
    and every program of a second one does. Relaxed: it orders nothing else. Example: 3 programs that send add 16382, 1
    and 1.
    """
    UNIT: tl.constexpr = (1 if SEND else 0) + (RECEIVED_ONCE // SENT_ONCE if RECEIVE else 0)
    own, everywhere = exchange.own, tl.arange(0, spread()) * 0
    runs = tl.load(own.state_ptr + RUNS + everywhere, volatile=True, cache_modifier=newest())
    if SEND:
        complete = (runs & (2 * SENT_ONCE - 1)) >= SENT_ONCE
    else:
        complete = runs >= RECEIVED_ONCE
    found = tl.max(
        aborted(exchange, ranks, active) + 2 * complete.to(tl.int32), 0
    )  # all warps have read all words here
    repeated = found >= 2
    part = tl.where(tl.program_id(0) == 0, SENT_ONCE - tl.num_programs(0) + 1, 1)
    tl.atomic_add(own.state_ptr + RUNS, part * UNIT, mask=found < 2, sem="relaxed", scope="gpu")
    return repeated, (found > 0) | _is_before_resumption(own, epoch)


@triton.jit
def pick(vector, index, N: tl.constexpr):
    """vector[index], of N numbers."""
    return tl.sum(tl.where(tl.arange(0, N) == index, vector, 0), 0)


@triton.jit
def report(own, number, verdict, source, value, own_value):
    """Report a failed round to the host; a report of this slot that the host has not read yet stays.

    Release at system scope: the host reads `news_ptr` first, then the word, then the numbers.
    """
    unread = tl.load(own.report_ptr + tl.arange(0, spread()) * 0, volatile=True, cache_modifier=newest())
    if tl.max((unread != 0).to(tl.int32), 0) == 0:  # the same in all warps, which meet in the fence
        tl.store(own.report_ptr + 1, value.to(tl.int64))
        tl.store(own.report_ptr + 2, own_value.to(tl.int64))
        fence()
        publish(own.report_ptr, make_word(number, (verdict << 8 | source).to(tl.int32)), None)
        fence()
        publish(own.news_ptr, tl.full([], 1, tl.int64), None)


@triton.jit
def report_loss(exchange, ranks: tl.constexpr, active):
    """Report the smallest abort word to the host, if one is set. It says all in one piece, so any program may."""
    own, words = exchange.own, load_aborts(exchange, ranks, active, tl.arange(0, ranks.RANKS))
    smallest = tl.min((words - 1).to(tl.uint64, bitcast=True), 0).to(tl.int64, bitcast=True) + 1  # 0 if none is set
    publish(own.news_ptr + 1, smallest, smallest != 0)
    fence()
    publish(own.news_ptr, tl.full([], 1, tl.int64), smallest != 0)


class Report(NamedTuple):
    """The fields of a report's first word."""

    number: int  # of the round
    verdict: int
    source: int  # the rank that caused it


def read_report(word: int) -> Report:
    """Unpack the first word of a `report`."""
    return Report(word >> 32 & 0xFFFFFFFF, word >> 8 & 0xFF, word & 0xFF)


@triton.jit
def add_waited(waited_ptr, R: tl.constexpr, RANKS: tl.constexpr):
    """Add the nanoseconds of this round to those of all."""
    source = tl.arange(0, RANKS)
    waited = tl.load(waited_ptr + source, mask=source < R) + tl.load(waited_ptr + R + source, mask=source < R)
    tl.store(waited_ptr + R + source, waited, mask=source < R)
