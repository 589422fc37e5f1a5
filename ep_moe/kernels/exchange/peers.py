"""Memory of the group, which peers write to: how a rank reaches it, and the only stores to other ranks.

What is stored to a peer goes through `put_rows`, `put_word`, `signal` and `put_abort`, and is ordered by `fence`. Here
every rank's memory is mapped, and these are plain stores and atomics; another kind of memory replaces them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INTERPRET


class Links(NamedTuple):
    """How a rank reaches the others, for one slot."""

    bases: tuple[int, ...]  # R addresses: where each rank's memory of the slot is mapped here
    offsets: tuple[int, ...]  # of the regions in it
    aborts_ptr: Any  # [R] int64, addresses of every rank's abort word
    abort_ptr: Any  # [1] int64, this rank's own
    urgent_ptr: Any  # [1] int64 in this rank's host memory: an abort word that the host has written, or 0


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
def put_rows(to, index, values, mask):
    """Store `values` at elements `index` from a `target` on, in its dtype.

    Plain stores, announced by a `signal` after a `fence`, or by the sentinel that they overwrite.
    """
    tl.store(to + index, values, mask=mask)


@triton.jit
def put_word(to, index, word, mask):
    """Store LL words at words `index` from a `target` on, each in one piece."""
    tl.store(to + index, word, mask=mask)


@triton.jit
def signal(to, word, mask):
    """Store the flag words of rows that were put before a `fence`."""
    tl.store(to, word, mask=mask)


@triton.jit
def put_abort(links, rank, word):
    """Set the abort word of a rank unless it is set already. Relaxed: it orders nothing else."""
    abort_ptr = as_pointer(tl.load(links.aborts_ptr + rank), tl.int64)
    tl.atomic_cas(abort_ptr, tl.zeros([], tl.int64), word, sem="relaxed", scope="sys")


@triton.jit
def fence():
    """Order all earlier accesses of this program before its later ones, for every rank.

    The barrier comes first, so that each thread's fence covers the stores of all threads.
    """
    tl.debug_barrier()
    if not INTERPRET:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
