"""NVSHMEM's device functions that the exchange calls, from NVSHMEM's libnvshmem_device.bc (`extern_libs`).

All threads of a program make each call. Addresses are symmetric: of this rank's own heap, for the same place in a
peer's. Not for the interpreter. Source: NVSHMEM 3.4.5, API reference and device headers.
"""

from triton.language import core

SIGNAL_SET = core.constexpr(9)  # NVSHMEM_SIGNAL_SET
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
