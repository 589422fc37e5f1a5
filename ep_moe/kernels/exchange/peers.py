"""Memory of the group, which peers write to: how a rank reaches it, and the only stores to other ranks.

What is stored to a peer goes through `put_rows`, `put_word`, `signal` and `put_abort`, and is ordered by `order_rows`.
What others poll is stored by `publish`. Rule: every word that others poll has one writer, a rank: no rank needs atomics
on another's memory. Abort words are no exception: each rank has one at every rank.
There are two ways to reach a rank, a constant of the kernel for each (`Ranks.PUTS`):
- by address: its memory is mapped here, and these are stores;
- by puts: NVSHMEM's device functions send it what was staged in this rank's outbox, and a flag with the last rows.
The interpreter copies what a put sends over memory that is mapped.

The outbox has the regions of a slot (`wire_layout`) once more; where ranks are sent different things, its first index
is the rank that they are sent to. Rule: a word of the outbox is written again only after its last put has arrived. What
a dispatch has put has arrived once all peers' combine headers are here, and what a combine has put once all peers'
headers of the next dispatch are here; a rank waits for these before it sends the same again. Only rows of a refused
round may still be on their way then: such a put takes what is staged now to where it is sent anyway, and arrives before
what is put there later, because of the fence.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import fence
from ep_moe.kernels.exchange.puts import SIGNAL_SET, order_puts, put_flag, put_parcel, signal_op
from ep_moe.kernels.numerics import INTERPRET


class Links(NamedTuple):
    """How a rank reaches the others, for one slot."""

    bases: tuple[int, ...]  # R addresses: each rank's memory of the slot as mapped here, this rank's own for puts
    offsets: tuple[int, ...]  # of the regions in it
    aborts_ptr: Any  # [R] int64, addresses of every rank's abort words; 0 if they are not mapped here
    abort_ptr: Any  # [R] int64, this rank's own, by the rank that writes them
    urgent_ptr: Any  # [1] int64 in this rank's host memory: an abort word that the host has written, or 0
    outbox: int | None = None  # bytes from this rank's memory of the slot to its outbox, None without puts


@triton.jit
def as_pointer(address, dtype: tl.constexpr):
    """A pointer of an address that is a multiple of 16; the compiler forgets that in the cast."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), 16)  # a CPU's may fit 32 bits


@triton.jit
def region(base, links, name: tl.constexpr, dtype: tl.constexpr):
    """The start of a region in the memory of a rank, which is mapped at `base`."""
    return as_pointer(base.to(tl.int64) + links.offsets[name], dtype)


@triton.jit
def base_of(links, rank, R: tl.constexpr):
    """`links.bases` of a rank that is known at run time."""
    base = links.bases[0]
    for r in tl.static_range(1, R):
        base = tl.where(rank == r, links.bases[r], base)
    return base


@triton.jit
def target(base, links, name: tl.constexpr, first, dtype: tl.constexpr):
    """Element `first` of a region of the rank at `base`, as the functions that store there take it."""
    return region(base, links, name, dtype) + first


@triton.jit
def outbox(links, name: tl.constexpr, first, dtype: tl.constexpr, ranks: tl.constexpr):
    """Element `first` of a region of this rank's outbox, for `stage`; without puts a pointer that nothing uses."""
    base = links.bases[ranks.RANK]
    if ranks.PUTS == 0:
        staged = region(base, links, name, dtype)
    else:
        staged = region(base.to(tl.int64) + links.outbox, links, name, dtype) + first
    return staged


@triton.jit
def stage(staged, index, values, mask, BY_PUT: tl.constexpr):
    """Write `values` to elements `index` from an `outbox` pointer on, for puts after it."""
    if BY_PUT:
        tl.store(staged + index, values, mask=mask)


@triton.jit
def publish(pointers, values, mask):
    """Store what other ranks, or the host, poll: strong at system scope, each 32 or 64 bits in one piece.

    Triton has no scoped stores; the machine's instruction for `.wt` is that for `st.relaxed.sys` (STG.STRONG.SYS), and
    the compile check looks for it. A vector of words may arrive in parts: each word carries its own epoch.
    """
    tl.store(pointers, values, mask=mask, cache_modifier=".wt")


@triton.jit
def put_rows(links, to, index, values, mask, parcel, BY_PUT: tl.constexpr):
    """Store `values` at elements `index` from a `target` on, in its dtype; by puts, send a parcel that was staged.

    Announced by a `signal` after `order_rows`.
    """
    if BY_PUT:
        put_parcel(links, to, parcel)
    else:
        tl.store(to + index, values, mask=mask)


@triton.jit
def put_word(links, to, index, word, mask, parcel, BY_PUT: tl.constexpr):
    """Store what is polled, LL words or results over a sentinel, as `put_rows` does."""
    if BY_PUT:
        put_parcel(links, to, parcel)
    else:
        publish(to + index, word, mask)


@triton.jit
def signal(links, to, word, to_rows, parcel, BY_PUT: tl.constexpr):
    """Store the flag word of rows that were put before `order_rows`; by puts, with their last parcel."""
    if BY_PUT:
        put_flag(links, to, word, to_rows, parcel)
    else:
        publish(to, word, None)


@triton.jit
def order_rows(PUTS: tl.constexpr):
    """Order all rows that this program has put before the `signal` that follows."""
    if PUTS == 0:
        fence()
    else:
        order_puts()


@triton.jit
def put_abort(links, rank, word, RANK: tl.constexpr):
    """Set the abort word that this rank, RANK, has at a rank. It orders nothing else."""
    address = tl.load(links.aborts_ptr + rank)
    if links.outbox is not None and not INTERPRET:
        if address == 0:
            own_ptr = links.abort_ptr + RANK
            signal_op(own_ptr.to(tl.int64), word, SIGNAL_SET, rank + tl.zeros([], tl.int32))
        else:
            publish(as_pointer(address, tl.int64) + RANK, word, None)
    else:
        publish(as_pointer(address, tl.int64) + RANK, word, None)
