"""The transport `nvshmem` in the interpreter: the same kernels and cases, by puts from an outbox.

What a put sends is copied over memory that is mapped; NVSHMEM itself is not there.
"""

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernels.exchange.wire_layout import FLAGS
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import check_round
from ep_moe.testing.rounds import expert_function
from ep_moe.transport.one_sided import NvshmemTransport
from nvlink.common import on_ranks, patched
from nvlink.reference import compute
from nvlink.test_cases import cases, check_on_rank


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_every_case_by_puts(num_ranks: int) -> None:
    for rank, outcomes in enumerate(on_ranks(check_on_rank, "puts", num_ranks=num_ranks)):
        assert {name: text for name, text in outcomes.items() if text} == {}, f"rank {rank}"


REFUSED, SMALLER = 32, 16  # bounds of a round that rank 2 refuses, and of the next


def hold_back(memory: Any, until: Path) -> None:
    """What this rank puts at rank 0 arrives in order, but for its first header only once there is a file `until`."""
    from triton._C.libtriton import interpreter
    from triton.runtime.interpreter import interpreter_builder

    builder, held, lock, released = type(interpreter_builder), list[Any](), threading.Lock(), threading.Event()
    store, start = builder.create_masked_store, memory._buffer.addresses[0]
    header = start + memory._offsets[FLAGS.value]  # where it ends

    def create_masked_store(self: Any, pointers: Any, values: Any, mask: Any, *options: Any) -> Any:
        at = int(pointers.data[mask.data].flat[0]) if mask.data.any() else 0
        with lock:
            if released.is_set() or not start <= at < start + memory.num_bytes or (at < header and not held):
                return store(self, pointers, values, mask, *options)
            return held.append((pointers.data.copy(), values.data.copy(), mask.data.copy()))

    def release() -> None:
        while not until.exists():
            time.sleep(0.01)
        with lock:
            for arguments in held:
                interpreter.store(*arguments)
            released.set()

    builder.create_masked_store = create_masked_store
    threading.Thread(target=release, daemon=True).start()


def refuse_then_shrink(group: EPGroup, folder: Path) -> bool:
    """Whether a round is right in which rows of a refused round arrive, of another source and bound."""
    tokens, until = 12, folder / "late"
    sizes = TransportConfig(hidden=16, max_tokens_per_rank=48, max_topk=1, dtype=torch.float32, num_slots=1)
    config = dataclasses.replace(sizes, nvshmem_stores="puts")
    transport = NvshmemTransport(group, Placement.linear(3, 3), config)
    if group.rank == 1:
        hold_back(transport._memory, until)
    for bound in (REFUSED, SMALLER):
        x = torch.arange(tokens * 16.0).reshape(tokens, 16) + 1000 * group.rank + bound
        ids = torch.zeros(tokens, 1, dtype=torch.int32)  # all go to rank 0
        if (bound, group.rank) == (REFUSED, 2):
            ids[0] = 1000
        routing = Routing(topk_ids=ids, topk_weights=torch.ones(tokens, 1))
        options = {"layout": Layout.COMPACT, "scheme": get_scheme("none"), "max_num_tokens": bound}
        transport.dispatch_send(x, routing, **options)
        if (bound, group.rank) == (SMALLER, 2):
            until.touch()
        dispatched = transport.dispatch_recv()
        out = transport.combine(compute(dispatched.batch, group.rank), dispatched)
    with pytest.raises(ValueError, match="topk_ids has 1 ids outside"):
        transport.check()
    group.barrier()
    transport.destroy()
    return torch.equal(out, expert_function(x, 0, torch.float32))


def refuse_on_rank(group: EPGroup, folder: Path) -> bool:
    """`refuse_then_shrink` with tokens that are sent as rows."""
    with patched(WORD_TOKENS=0):
        return refuse_then_shrink(group, folder)


def test_late_puts_of_a_refused_round(tmp_path: Path) -> None:
    assert on_ranks(refuse_on_rank, tmp_path, num_ranks=3) == [True] * 3


def by_nodes(group: EPGroup) -> list[int]:
    """What ranks 0 and 1 on one node, and 2 on another, reach by puts, and a round that they are right in."""
    group.node = group.rank // 2
    found = []
    for stores in ("auto", "puts"):
        case = cases(group.num_ranks)["compact-one-token"]
        config = dataclasses.replace(case.config, nvshmem_stores=stores)
        transport = NvshmemTransport(group, case.make_placement(), config)
        check_round(transport, case, group.device)
        found.append(transport._context.ranks.PUTS)
        group.barrier()
        transport.destroy()
    for options, said in (
        (
            {"nvshmem_stores": "addresses"},
            r"memory that all ranks reach, but rank \d and rank \d are on different mach",
        ),
        ({"on_peer_loss": "mask"}, r"on_peer_loss \('mask'\) needs ranks on one node, got 2"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            NvshmemTransport(group, case.make_placement(), dataclasses.replace(case.config, **options))
    return found


def test_nodes_are_reached_by_puts() -> None:
    assert on_ranks(by_nodes, num_ranks=3) == [[0b100, 0b110], [0b100, 0b101], [0b011, 0b011]]
