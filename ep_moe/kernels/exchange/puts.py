"""Stores to ranks whose memory is not mapped, by NVSHMEM: a rank stages what it sends in its outbox, and puts it.

The external functions are those of NVSHMEM's libnvshmem_device.bc (`extern_libs`); all threads of a program make each
call. Addresses are symmetric: of this rank's own heap, for the same place in a peer's. The interpreter has a stand-in:
it copies over memory that is mapped. Source: NVSHMEM 3.4.5, API reference and device headers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language import core

from ep_moe.kernels.numerics import INTERPRET

SIGNAL_SET = core.constexpr(9)  # NVSHMEM_SIGNAL_SET
COPIED = tl.constexpr(64)  # elements that the interpreter copies at a time
_I32, _I64 = core.dtype("int32"), core.dtype("int64")


@core.extern
def put_block(dest, source, num_bytes, rank, _semantic=None):
    """Begin to store `num_bytes` from `source` at `dest` of a rank; barriers of the program before and after.

    dest, source, num_bytes: int64. `source` is read until the data has arrived.
    """
    types = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_nbi_block", _I32)}
    return core.extern_elementwise("", "", [dest, source, num_bytes, rank], types, is_pure=False, _semantic=_semantic)


@core.extern
def put_signal_block(dest, source, num_bytes, flag, word, operation, rank, _semantic=None):
    """`put_block`, then store an int64 word at `flag` of the rank, which arrives after the data."""
    types = {(_I64, _I64, _I64, _I64, _I64, _I32, _I32): ("nvshmemx_putmem_signal_nbi_block", _I32)}
    given = [dest, source, num_bytes, flag, word, operation, rank]
    return core.extern_elementwise("", "", given, types, is_pure=False, _semantic=_semantic)


@core.extern
def signal_op(flag, word, operation, rank, _semantic=None):
    """Store an int64 word at `flag` of a rank; every thread of the program does."""
    types = {(_I64, _I64, _I32, _I32): ("nvshmemx_signal_op", _I32)}
    return core.extern_elementwise("", "", [flag, word, operation, rank], types, is_pure=False, _semantic=_semantic)


@core.extern
def fence_puts(_semantic=None):
    """Order each thread's puts to a rank before its later puts to the same rank; a fence at system scope besides."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _I32)}, is_pure=False, _semantic=_semantic)


class Parcel(NamedTuple):
    """The elements of the outbox that a put sends; none if they go with those of a later put."""

    staged: Any  # pointer, moved as the target's
    first: Any
    count: Any
    rank: Any


@triton.jit
def put_parcel(links, to, parcel):
    """Send a parcel to a rank, if it has elements: the same in all warps, which meet here."""
    if parcel.count > 0:
        if INTERPRET:
            there = _mapped(links, to, parcel.rank)
            for first in range(0, parcel.count, COPIED):
                index = first + tl.arange(0, COPIED)
                part = tl.load(parcel.staged + parcel.first + index, mask=index < parcel.count)
                tl.store(there + parcel.first + index, part, mask=index < parcel.count)
        else:
            put_block(
                (to + parcel.first).to(tl.int64),
                (parcel.staged + parcel.first).to(tl.int64),
                _num_bytes(to, parcel),
                parcel.rank + tl.zeros([], tl.int32),
            )


@triton.jit
def _num_bytes(to, parcel):
    """Bytes of a parcel, int64."""
    return (parcel.count + tl.zeros([], tl.int64)) * (to.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _mapped(links, to, rank):
    """A pointer to a rank's memory, of one to the same place in this rank's; for the interpreter."""
    shift = tl.load(links.aborts_ptr + rank) - links.abort_ptr.to(tl.int64)
    return (to.to(tl.int64) + shift).to(to.dtype)


@triton.jit
def put_flag(links, to, word, to_rows, parcel):
    """Send a parcel, which has elements, to a rank, then a flag word at `to`, which arrives after the parcel."""
    if INTERPRET:
        put_parcel(links, to_rows, parcel)
        tl.store(_mapped(links, to, parcel.rank), word)
    else:
        put_signal_block(
            (to_rows + parcel.first).to(tl.int64),
            (parcel.staged + parcel.first).to(tl.int64),
            _num_bytes(to_rows, parcel),
            to.to(tl.int64),
            word,
            SIGNAL_SET,
            parcel.rank + tl.zeros([], tl.int32),
        )


@triton.jit
def order_puts():
    """Order what this program has put, or stored at ranks by address, before its later puts and stores."""
    tl.debug_barrier()
    if not INTERPRET:
        fence_puts()
