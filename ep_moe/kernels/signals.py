"""Words that ranks write into each other's memory, and bounded waits for them.

A word is 64 bits, the epoch of its round above 32 bits of payload, and is written in one piece: whoever finds the epoch
that it waits for has the payload too, without any fence, and never needs the word to be cleared. Rows that are too long
for words are stored plainly; then all threads of the program meet, each fences at system scope, and the word that says
that the row is there follows (release). Who waits for such a word polls it with acquire loads.

Every wait ends: by the word, by another rank's news that the exchange is over (`abort`), or when `timeout_ns` is used
up, in nanoseconds on a GPU and in looks under the interpreter, which has no timer. The first rank to lose timeout_ns
tells all others whom it suspects, and they take that over.

Rule: what may change while it is looked at decides nothing before all warps of a program agree on it (`agree`): warps
that part ways never meet again.

Functions that take `links` read of it what tells of aborts (`ep_moe.kernels.exchange.Links`). Letters: R ranks.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INTERPRET

DISPATCH = tl.constexpr(0)  # phases, as an abort word names them
COMBINE = tl.constexpr(1)
LATE = tl.constexpr(1)  # what a look finds, added up
OVER = tl.constexpr(2)
TIMED_OUT = tl.constexpr(4)
SELDOM = tl.constexpr(0 if INTERPRET else 1023)  # looks at the host's memory: one of these plus one
SPREAD = tl.constexpr(256)  # elements that are spread over all threads of a program, of 8 warps at most


@triton.jit
def make_word(epoch, payload):
    """A word of `epoch` int32 and `payload` int32, of any shape; epoch -1 and payload 5 give 0xFFFFFFFF00000005."""
    return (epoch.to(tl.int64) << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def epoch_of(word):
    """The epoch of a word, int32."""
    return (word >> 32).to(tl.int32)


@triton.jit
def payload_of(word):
    """The payload of a word, int32: the lower half, whose sign comes back with it."""
    return ((word << 32) >> 32).to(tl.int32)


@triton.jit
def as_pointer(address, dtype: tl.constexpr):
    """A pointer of an address that is a multiple of 16; the compiler forgets that in the cast."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), 16)  # a CPU's may fit 32 bits


@triton.jit
def clock():
    """Nanoseconds of the GPU's timer; 0 under the interpreter."""
    if INTERPRET:
        return tl.full([], 0, tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def fence():
    """Order all earlier accesses of this program before its later ones, for every rank.

    All threads meet, so that each one's fence covers what the others have stored.
    """
    tl.debug_barrier()
    if not INTERPRET:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_launch(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended, where this one may start early (programmatic dependent launch).

    Rule: nothing is read and nothing published before this.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def give_up(links, phase, epoch, suspect, R: tl.constexpr):
    """Say that `suspect` did not answer in a phase of a round. What was said first stays, here and at every rank.

    The word is (epoch, suspect + 1 + 256 * phase). Compare-and-swap at system scope, relaxed: nothing else hangs on it.
    """
    word = make_word(epoch, (suspect + 1 + 256 * phase).to(tl.int32))
    zero = tl.zeros([], tl.int64)
    first = tl.atomic_cas(links.abort_ptr, zero, word, sem="relaxed", scope="sys")
    if first == 0:
        for r in tl.static_range(R):
            peer = as_pointer(tl.load(links.aborts_ptr + r), tl.int64)
            tl.atomic_cas(peer, zero, word, sem="relaxed", scope="sys")


@triton.jit
def pause():
    """Leave the processor to others for a moment, between two looks."""
    if not INTERPRET:
        tl.inline_asm_elementwise("nanosleep.u32 40; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def timed_out(start, polls, timeout_ns):
    """Whether a wait that began at `start` has lasted too long, as one warp sees it."""
    if INTERPRET:
        return polls > timeout_ns
    return clock() - start > timeout_ns


@triton.jit
def trouble(links, start, polls, timeout_ns):
    """What may end a wait, as one warp sees it: OVER where a rank has given up, TIMED_OUT, both or 0.

    Now and then, for it is far away, the word of this rank's host is looked at too, and taken over unless a rank has
    given up already: the next look finds it.
    """
    abort = tl.load(links.abort_ptr, volatile=True)
    urgent = tl.load(links.urgent_ptr, mask=(polls & SELDOM) == SELDOM, other=0, volatile=True)
    tl.store(links.abort_ptr, urgent, mask=(urgent != 0) & (abort == 0))
    over = tl.where(abort != 0, OVER, 0)
    return over + tl.where(timed_out(start, polls, timeout_ns), TIMED_OUT, 0)


@triton.jit
def agree(late, what):
    """Return 0 where no element of `late` is true, else LATE + `what`, the same in all warps of the program.

    `late` has an element per thread at least, so that the reduction is one over all warps, which meet in it.
    """
    return tl.max(tl.where(late, LATE + what, 0), 0)


@triton.jit
def is_over(abort_ptr):
    """Whether a rank has given up, the same in all warps. Loads a word per thread."""
    index = tl.arange(0, SPREAD)
    return tl.max((tl.load(abort_ptr + index * 0, volatile=True) != 0).to(tl.int32), 0) > 0


@triton.jit
def wait_for_words(
    word_ptrs,  # [N >= SPREAD] pointers to int64
    mask,  # [N], which of them are waited for
    sources,  # [N] int32, the rank that writes each
    epoch,
    links,
    timeout_ns,
    phase,
    waited_ptr,  # [R] int64, out where `measure`: nanoseconds until the words of each rank were there
    measure,
    R: tl.constexpr,
):
    """Wait until all words carry `epoch`; returns 1, or 0 where the exchange is over. Relaxed: a word says it all."""
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting = tl.full([], LATE, tl.int32)
    here = tl.zeros([], tl.int32)
    while waiting > 0:
        word = tl.load(word_ptrs, mask=mask, other=0, volatile=True)
        late = mask & (epoch_of(word) != epoch)
        waiting = agree(late, trouble(links, start, polls, timeout_ns))
        here = (waiting == 0).to(tl.int32)
        polls += 1
        if measure:
            tl.store(waited_ptr + sources, tl.zeros_like(word) + (clock() - start), mask=late)
        if waiting >= OVER:
            if waiting >= TIMED_OUT:
                give_up(links, phase, epoch, tl.min(tl.where(late, sources, R), 0), R)
            waiting = waiting * 0
        elif waiting > 0:
            pause()
    return here


@triton.jit
def wait_for_flag(flag_ptr, source, epoch, links, timeout_ns, phase, R: tl.constexpr):
    """Wait until a word carries `epoch`; returns its payload, or -1 where the exchange is over.

    Acquire at system scope by one thread, which then meets the others: what the writer stored before its fence may be
    read after this.
    """
    start, polls = clock(), tl.zeros([], tl.int64)
    waiting, payload = tl.full([], LATE, tl.int32), tl.zeros([], tl.int32)
    everywhere = tl.arange(0, SPREAD) >= 0
    while waiting > 0:
        word = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        payload = tl.where(epoch_of(word) != epoch, -1, payload_of(word))
        waiting = (epoch_of(word) != epoch).to(tl.int32)
        if waiting > 0:
            waiting = agree(everywhere, trouble(links, start, polls, timeout_ns))
            polls += 1
            if waiting >= OVER:
                if waiting >= TIMED_OUT:
                    give_up(links, phase, epoch, source, R)
                waiting = waiting * 0
            else:
                pause()
    tl.debug_barrier()
    return payload
