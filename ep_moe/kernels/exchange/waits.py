"""Bounded waits for the words of peers (`ep_moe.kernels.exchange.wire_layout`).

A word that carries the epoch that a reader waits for is complete. Rows are too long for that: they are stored plainly,
then all threads of the program pass a barrier, each fences at system scope, and a flag word follows (release). The
receiver polls the flag with acquire loads.

Every wait is bounded. It ends when the word arrives, when a rank that takes part has set its abort word here, or after
`Round.timeout_ns`: nanoseconds on a GPU, polls in the interpreter, which has no timer. A rank that times out first sets
its abort word at every rank to the rank that it suspects.

Rule: a value that may change while it is read decides no branch before all warps of the program agree on it (`agree`):
warps that diverge here deadlock at the next barrier.

`exchange` is a `ep_moe.kernels.exchange.peers.Exchange`, `round_` a `ep_moe.kernels.exchange.round_state.Round`.
Letters: R ranks.
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import clock, newest, pause, spread
from ep_moe.kernels.exchange.peers import publish, put_abort
from ep_moe.kernels.exchange.wire_layout import epoch_of, make_abort, payload_of
from ep_moe.kernels.numerics import INTERPRET

LATE = tl.constexpr(1)  # results of one poll, added up
TIMED_OUT = tl.constexpr(2)
OVER = tl.constexpr(4)
SELDOM = tl.constexpr(0 if INTERPRET else 1023)  # the host's word is read in one of these plus one polls


@triton.jit
def give_up(exchange, ranks: tl.constexpr, phase, round_, suspect):
    """Set this rank's abort word at every rank: `suspect` did not answer in a phase of the round."""
    word = make_abort(round_.number, suspect, phase)
    for r in tl.static_range(ranks.R):
        put_abort(exchange, ranks, r, word)


@triton.jit
def timed_out(start, polls, timeout_ns):
    """Whether a wait that began at `start` has lasted too long, as one warp sees it."""
    if INTERPRET:
        return polls > timeout_ns
    return clock() - start > timeout_ns


@triton.jit
def load_aborts(exchange, ranks: tl.constexpr, active, source):
    """The abort words of ranks `source` at this one; 0 for a rank that does not take part, whatever it stores.

    The load does not wait for `active`, which the first one of a launch would cost half a microsecond.
    """
    words = tl.load(
        exchange.links.abort_ptr + source, mask=source < ranks.R, other=0, volatile=True, cache_modifier=newest()
    )
    return tl.where(((active >> source) & 1) > 0, words, 0)


@triton.jit
def troubles(exchange, ranks: tl.constexpr, round_, start, polls, source):
    """Why a wait may end, for each of ranks `source`, as one warp sees it: OVER if that rank's abort word is set, else
    TIMED_OUT, else 0.

    The abort word in host memory is read in few polls, since that is slow, and copied to this rank's own on the device
    unless that is set: the next poll finds it.
    """
    links = exchange.links
    aborts = load_aborts(exchange, ranks, round_.active, source)
    urgent = tl.load(links.urgent_ptr, mask=(polls & SELDOM) == SELDOM, other=0, volatile=True, cache_modifier=newest())
    own = tl.load(links.abort_ptr + ranks.RANK, mask=urgent != 0, other=0, volatile=True, cache_modifier=newest())
    publish(links.abort_ptr + ranks.RANK, urgent, (urgent != 0) & (own == 0))
    return tl.where(aborts != 0, OVER, tl.where(timed_out(start, polls, round_.timeout_ns), TIMED_OUT, 0))


@triton.jit
def trouble(exchange, ranks: tl.constexpr, round_, start, polls):
    """The worst of `troubles`."""
    return tl.max(troubles(exchange, ranks, round_, start, polls, tl.arange(0, ranks.RANKS)), 0)


@triton.jit
def agree(late, what):
    """Return 0 if no element of `late` is true, else LATE + `what`: the same value in all warps of the program.

    `late` has at least one element per thread, so that the reduction spans all warps and synchronizes them.
    """
    return tl.max(tl.where(late, LATE + what, 0), 0)


@triton.jit
def aborted(exchange, ranks: tl.constexpr, active):
    """For each of `spread()` elements whether an abort word is set, int32; all warps have read all words together."""
    return (load_aborts(exchange, ranks, active, tl.arange(0, spread()) % ranks.RANKS) != 0).to(tl.int32)


@triton.jit
def wait_for_words(
    exchange,
    ranks: tl.constexpr,
    round_,
    phase,
    word_ptrs,  # [N >= spread()] pointers to int64
    mask,  # [N], which of them are waited for
    sources,  # [N] int32, the rank that writes each
    measure,  # whether to write to `waited_ptr` how long the words of each rank took
):
    """Wait until all words carry the round's epoch; returns 1, or 0 if the exchange is aborted.

    Relaxed: a word is complete.
    """
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting = tl.full([], LATE, tl.int32)
    here = tl.zeros([], tl.int32)
    while waiting > 0:
        word = tl.load(word_ptrs, mask=mask, other=0, volatile=True, cache_modifier=newest())
        late = mask & (epoch_of(word) != round_.epoch)
        waiting = agree(late, trouble(exchange, ranks, round_, start, polls))
        here = (waiting == 0).to(tl.int32)
        polls += 1
        if measure:
            tl.store(exchange.own.waited_ptr + sources, tl.zeros_like(word) + (clock() - start), mask=late)
        if waiting >= TIMED_OUT:
            if waiting < OVER:
                give_up(exchange, ranks, phase, round_, tl.min(tl.where(late, sources, ranks.R), 0))
            waiting = waiting * 0
        elif waiting > 0:
            pause()
    return here


@triton.jit
def wait_for_flag(exchange, ranks: tl.constexpr, round_, phase, flag_ptr, source):
    """Wait until a word carries the round's epoch; returns its payload, or -1 if the exchange is aborted.

    One thread acquires at system scope, then all pass a barrier: what the writer stored before its fence may be read
    after this.
    """
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting, payload = tl.full([], LATE, tl.int32), tl.zeros([], tl.int32)
    ranks_spread = tl.arange(0, spread()) % ranks.RANKS
    while waiting > 0:
        word = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        payload = tl.where(epoch_of(word) != round_.epoch, -1, payload_of(word))
        waiting = (epoch_of(word) != round_.epoch).to(tl.int32)
        if waiting > 0:
            waiting = tl.max(troubles(exchange, ranks, round_, start, polls, ranks_spread) + LATE, 0)
            polls += 1
            if waiting >= TIMED_OUT:
                if waiting < OVER:
                    give_up(exchange, ranks, phase, round_, source)
                waiting = waiting * 0
            else:
                pause()
    tl.debug_barrier()
    return payload
