"""Memory of the group, which peers write to: how a rank reaches it, and the only stores to other ranks.

What is stored to a peer goes through `put_rows`, `put_word`, `signal` and `put_abort`, and is ordered by `order_rows`;
`stage` comes before puts of values that all ranks are sent, `store_rows` and `store_word` stage what one rank is sent.
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
from ep_moe.kernels.exchange.puts import SIGNAL_SET, order_puts, put_flag, put_staged, signal_op
from ep_moe.kernels.exchange.wire_layout import ENTRIES, FLAGS
from ep_moe.kernels.numerics import INTERPRET


class Links(NamedTuple):
    """How a rank reaches the others, for one slot."""

    bases: tuple[int, ...]  # R addresses: each rank's memory of the slot as mapped here, this rank's own for puts
    offsets: tuple[int, ...]  # of the regions in it
    aborts_ptr: Any  # [R] int64, addresses of every rank's abort words; 0 if they are not mapped here
    abort_ptr: Any  # [R] int64, this rank's own, by the rank that writes them
    urgent_ptr: Any  # [1] int64 in this rank's host memory: an abort word that the host has written, or 0
    outbox: int | None = None  # bytes from this rank's memory of the slot to its outbox, None without puts


class Exchange(NamedTuple):
    """Arguments of all device functions of the exchange."""

    links: Any  # `Links`
    own: Any  # `round_state.SlotState`


class Peer(NamedTuple):
    """A rank that this one stores to."""

    base: Any  # of `Links.bases`
    rank: Any


class Piece(NamedTuple):
    """Elements of a region at a peer, and those of the outbox that a put sends there."""

    first: Any  # element, from which others are counted
    staged: Any  # the same in the outbox
    begin: Any = 0  # of the put
    count: Any = 0  # of the put; none if a later put sends these elements


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
def _place(base, links, name: tl.constexpr, first, dtype: tl.constexpr):
    """Element `first` of a region of the rank at `base`."""
    return region(base, links, name, dtype) + first


@triton.jit
def _outbox(exchange, ranks: tl.constexpr, name: tl.constexpr, first, dtype: tl.constexpr):
    """Element `first` of a region of this rank's outbox."""
    base = exchange.links.bases[ranks.RANK].to(tl.int64) + exchange.links.outbox
    return region(base, exchange.links, name, dtype) + first


@triton.jit
def stage(exchange, ranks: tl.constexpr, name: tl.constexpr, first, index, values, mask):
    """Write `values` to elements `first` + `index` of a region of the outbox, if any rank is reached by puts."""
    if ranks.PUTS != 0:
        tl.store(_outbox(exchange, ranks, name, first, values.dtype) + index, values, mask=mask)


@triton.jit
def _put(exchange, ranks: tl.constexpr, peer, name: tl.constexpr, piece, to):
    """Send a piece that was staged. to: where its elements are counted from at the peer."""
    staged = _outbox(exchange, ranks, name, piece.staged, to.dtype.element_ty)
    put_staged(exchange.links, to + piece.begin, staged + piece.begin, piece.count, peer.rank)


@triton.jit
def publish(pointers, values, mask):
    """Store what other ranks, or the host, poll: strong at system scope, each 32 or 64 bits in one piece.

    Triton has no scoped stores; the machine's instruction for `.wt` is that for `st.relaxed.sys` (STG.STRONG.SYS), and
    the compile check looks for it. A vector of words may arrive in parts: each word carries its own epoch.
    """
    tl.store(pointers, values, mask=mask, cache_modifier=".wt")


@triton.jit
def put_rows(exchange, ranks: tl.constexpr, peer, name: tl.constexpr, piece, index, values, mask):
    """Store `values` at elements `index` of a piece at a peer; by puts, send the piece, which was staged.

    Announced by a `signal` after `order_rows`.
    """
    PUTS: tl.constexpr = ranks.PUTS
    to = _place(peer.base, exchange.links, name, piece.first, values.dtype)
    if PUTS == 0:
        tl.store(to + index, values, mask=mask)
    elif ((PUTS >> peer.rank) & 1) > 0:
        _put(exchange, ranks, peer, name, piece, to)
    else:
        tl.store(to + index, values, mask=mask)


@triton.jit
def put_word(exchange, ranks: tl.constexpr, peer, name: tl.constexpr, piece, index, word, mask):
    """Store what is polled, LL words or results over a sentinel, as `put_rows` does."""
    PUTS: tl.constexpr = ranks.PUTS
    to = _place(peer.base, exchange.links, name, piece.first, word.dtype)
    if PUTS == 0:
        publish(to + index, word, mask)
    elif ((PUTS >> peer.rank) & 1) > 0:
        _put(exchange, ranks, peer, name, piece, to)
    else:
        publish(to + index, word, mask)


@triton.jit
def store_rows(exchange, ranks: tl.constexpr, peer, name: tl.constexpr, piece, index, values, mask):
    """`stage`, if the peer is reached by puts, and `put_rows`: of values that differ between ranks."""
    if ranks.PUTS != 0:
        if ((ranks.PUTS >> peer.rank) & 1) > 0:
            stage(exchange, ranks, name, piece.staged, index, values, mask)
    put_rows(exchange, ranks, peer, name, piece, index, values, mask)


@triton.jit
def store_word(exchange, ranks: tl.constexpr, peer, name: tl.constexpr, piece, index, word, mask):
    """`stage`, if the peer is reached by puts, and `put_word`: of words that differ between ranks."""
    if ranks.PUTS != 0:
        if ((ranks.PUTS >> peer.rank) & 1) > 0:
            stage(exchange, ranks, name, piece.staged, index, word, mask)
    put_word(exchange, ranks, peer, name, piece, index, word, mask)


@triton.jit
def signal(exchange, ranks: tl.constexpr, peer, first, word, entries):
    """Store flag `first` of rows that were put before `order_rows`; by puts, with their entries, a piece."""
    to = _place(peer.base, exchange.links, FLAGS, first, tl.int64)
    if ranks.PUTS == 0:
        publish(to, word, None)
    elif ((ranks.PUTS >> peer.rank) & 1) > 0:
        to_entries = _place(peer.base, exchange.links, ENTRIES, entries.first, tl.int32)
        staged = _outbox(exchange, ranks, ENTRIES, entries.staged, tl.int32)
        put_flag(exchange.links, to, word, to_entries, staged, entries.count, peer.rank)
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
def put_abort(exchange, ranks: tl.constexpr, rank, word):
    """Set the abort word that this rank has at a rank. It orders nothing else."""
    links = exchange.links
    address = tl.load(links.aborts_ptr + rank)
    if links.outbox is not None and not INTERPRET:
        if address == 0:
            own_ptr = links.abort_ptr + ranks.RANK
            signal_op(own_ptr.to(tl.int64), word, SIGNAL_SET, rank + tl.zeros([], tl.int32))
        else:
            publish(as_pointer(address, tl.int64) + ranks.RANK, word, None)
    else:
        publish(as_pointer(address, tl.int64) + ranks.RANK, word, None)
