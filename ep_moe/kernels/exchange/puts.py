"""Stores to ranks whose memory is not mapped, by NVSHMEM: a rank stages what it sends in its outbox, and puts it.

The external functions are those of NVSHMEM's libnvshmem_device.bc (`extern_libs`); all threads of a program make each
call. Addresses are symmetric: of this rank's own heap, for the same place in a peer's. The interpreter has a stand-in:
it copies over memory that is mapped. Source: NVSHMEM 3.4.5, API reference and device headers.
"""

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
    arguments = [dest, source, num_bytes, flag, word, operation, rank]
    return core.extern_elementwise("", "", arguments, types, is_pure=False, _semantic=_semantic)


@core.extern
def signal_op(flag, word, operation, rank, _semantic=None):
    """Store an int64 word at `flag` of a rank; every thread of the program does."""
    types = {(_I64, _I64, _I32, _I32): ("nvshmemx_signal_op", _I32)}
    return core.extern_elementwise("", "", [flag, word, operation, rank], types, is_pure=False, _semantic=_semantic)


@core.extern
def fence_puts(_semantic=None):
    """Order each thread's puts to a rank before its later puts to the same rank; a fence at system scope besides."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _I32)}, is_pure=False, _semantic=_semantic)


@triton.jit
def _num_bytes(to, count):
    """Bytes of `count` elements, int64."""
    return (count + tl.zeros([], tl.int64)) * (to.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _mapped(links, to, rank):
    """The place at a rank of a pointer to this rank's memory; for the interpreter."""
    shift = tl.load(links.aborts_ptr + rank) - links.abort_ptr.to(tl.int64)
    return (to.to(tl.int64) + shift).to(to.dtype)


@triton.jit
def put_staged(links, to, staged, count, rank):
    """Send `count` staged elements to a rank, if there are any: the same in all warps, which meet here."""
    if count > 0:
        if INTERPRET:
            mapped = _mapped(links, to, rank)
            for first in range(0, count, COPIED):
                index = first + tl.arange(0, COPIED)
                part = tl.load(staged + index, mask=index < count)
                tl.store(mapped + index, part, mask=index < count)
        else:
            rank_ = rank + tl.zeros([], tl.int32)
            put_block(to.to(tl.int64), staged.to(tl.int64), _num_bytes(to, count), rank_)


@triton.jit
def put_flag(links, flag, word, to, staged, count, rank):
    """`put_staged`, of one element or more, then store a flag word, which arrives after them."""
    if INTERPRET:
        put_staged(links, to, staged, count, rank)
        tl.store(_mapped(links, flag, rank), word)
    else:
        put_signal_block(
            to.to(tl.int64),
            staged.to(tl.int64),
            _num_bytes(to, count),
            flag.to(tl.int64),
            word,
            SIGNAL_SET,
            rank + tl.zeros([], tl.int32),
        )


@triton.jit
def order_puts():
    """Order what this program has put, or stored at ranks by address, before its later puts and stores."""
    tl.debug_barrier()
    if not INTERPRET:
        fence_puts()
