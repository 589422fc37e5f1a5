"""Peers' memory takes no atomics, which not every link carries (PCIe): each word that others write has one writer."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.group.symmetric import SymmetricBuffer
from ep_moe.testing import TransportCase, check_round
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.common import on_ranks

CASES = [
    TransportCase(name="compact", tokens=(2, 3), hidden=64, scheme="fp8_block_16x16", num_topk=2),
    TransportCase(name="flat", tokens=(2, 1), hidden=48, layout=Layout.FLAT, routing="repeats"),
]


@triton.jit
def _add_kernel(address):
    tl.atomic_add(address.to(tl.pointer_type(tl.int64)), 0)


class Guard:
    """Atomics of this rank's kernels: they are counted, and those in a peer's window raise."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen, self.windows = rank, 0, list[tuple[tuple[int, ...], int]]()

    def look(self, addresses: Any) -> None:
        self.seen += addresses.size
        for starts, size in self.windows:
            for rank, start in enumerate(starts):
                if rank != self.rank and np.any((addresses >= start) & (addresses < start + size)):
                    raise RuntimeError(f"an atomic in the memory of rank {rank}")

    def mapping(self, make: Callable[..., None]) -> Callable[..., None]:
        def made(buffer: Any, group: EPGroup, num_bytes: int) -> None:
            make(buffer, group, num_bytes)
            self.windows.append((buffer.addresses, buffer.local.numel()))

        return made

    def rmw(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, operation: Any, ptr: Any, value: Any, mask: Any, *order: Any) -> Any:
            self.look(np.asarray(ptr.data)[np.asarray(mask.data, dtype=bool)])
            return run(builder, operation, ptr, value, mask, *order)

        return checked

    def cas(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, ptr: Any, *others: Any) -> Any:
            self.look(np.asarray(ptr.data))
            return run(builder, ptr, *others)

        return checked


def check_on_rank(group: EPGroup) -> int:
    """Rounds of this rank; returns how many atomics there were, none of them in a peer's memory."""
    guard, builder = Guard(group.rank), InterpreterBuilder
    with (
        mock.patch.object(SymmetricBuffer, "__init__", guard.mapping(SymmetricBuffer.__init__)),
        mock.patch.object(builder, "create_atomic_rmw", guard.rmw(builder.create_atomic_rmw)),
        mock.patch.object(builder, "create_atomic_cas", guard.cas(builder.create_atomic_cas)),
    ):
        for case in CASES:
            transport = NvlinkTransport(group, case.make_placement(), case.config)
            check_round(transport, case, group.device, slot=0, halves=(True, True))
            transport.destroy()
        seen, window = guard.seen, guard.windows[-1][0]
        with pytest.raises(Exception, match=f"an atomic in the memory of rank {1 - group.rank}"):
            _add_kernel[(1,)](window[1 - group.rank], enable_fp_fusion=True)
    return seen


def test_no_atomics_in_peers_memory() -> None:
    found = on_ranks(check_on_rank)
    assert min(found) > 0
