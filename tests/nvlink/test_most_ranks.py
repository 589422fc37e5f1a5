"""The most ranks allowed, in one process: rank 31's bit is the sign of an int32.

Every half of a round runs on all ranks before the next half does, so that no kernel ever waits.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quick_interpreter import hurry

from ep_moe.config import GroupConfig, Layout, TransportConfig
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import poisoned_memory
from ep_moe.transport.one_sided import NvlinkTransport
from ep_moe.transport.one_sided.memory import MOST_RANKS
from nvlink.common import patched

HIDDEN, NUM_TOPK = 16, 3
LAST = MOST_RANKS - 1
BUSY = (0, 1, 30, LAST)  # ranks with tokens


class Meeting:
    """The collectives of a group whose ranks are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(MOST_RANKS, timeout=60)
        self.said: list[Any] = [None] * MOST_RANKS

    def gather(self, rank: int, word: Any) -> list[Any]:
        self.said[rank] = word
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        return said


def group_of(meeting: Meeting, rank: int) -> Any:
    """A stand-in for a group, with the parts that a transport uses."""
    return SimpleNamespace(
        rank=rank,
        num_ranks=MOST_RANKS,
        node=0,
        device=torch.device("cpu"),
        config=GroupConfig(),
        watch=None,
        failure=None,
        alone=False,
        destroyed=False,
        all_gather_object=lambda word: meeting.gather(rank, word),
        barrier=meeting.barrier.wait,
        wait_for_all=lambda name: meeting.barrier.wait(),
        waiting=lambda phase, round_: contextlib.nullcontext(),
    )


@contextlib.contextmanager
def all_ranks() -> Iterator[list[NvlinkTransport]]:
    """The transports of all ranks."""
    meeting, placement = Meeting(), Placement.linear(MOST_RANKS, MOST_RANKS)
    config = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=2, max_topk=NUM_TOPK, dtype=torch.float32, num_slots=1)
    made: dict[int, NvlinkTransport] = {}

    def make(rank: int) -> None:
        made[rank] = NvlinkTransport(group_of(meeting, rank), placement, config)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(MOST_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len(made) == MOST_RANKS
        yield [made[rank] for rank in range(MOST_RANKS)]
    finally:
        for transport in made.values():
            transport.destroy()


def inputs(rank: int, round_: int) -> tuple[torch.Tensor, Routing]:
    """Two tokens per busy rank: one to the last rank, its neighbor and another; one to rank 3 and its own rank."""
    tokens = 2 if rank in BUSY else 0
    x = (torch.arange(HIDDEN) + 100 * torch.arange(tokens)[:, None] + 1000 * rank + 1 + round_).float()
    ids = torch.tensor([[LAST, rank // 2, LAST - 1], [3, -1, rank]], dtype=torch.int32)[:tokens]
    weights = torch.tensor([[1.0, 0.5, 2.0], [0.25, 7.0, 1.0]])[:tokens]
    return x, Routing(topk_ids=ids, topk_weights=weights)


def expected(rank: int, round_: int) -> torch.Tensor:
    """The sum over a token's experts, of which number e multiplies by e + 2. Exact in any order."""
    x, routing = inputs(rank, round_)
    factors = torch.where(routing.topk_ids >= 0, (routing.topk_ids + 2) * routing.topk_weights, 0.0)
    return x * factors.sum(1, keepdim=True)


def run_round(
    transports: list[NvlinkTransport],
    round_: int,
    change: Callable[[int, Routing], Routing] = lambda _, routing: routing,
) -> list[torch.Tensor]:
    """A round of all ranks by halves, with outputs filled with NaN."""
    options: dict[str, Any] = {"layout": Layout.COMPACT, "scheme": get_scheme("none")}
    for rank, transport in enumerate(transports):
        x, routing = inputs(rank, round_)
        transport.dispatch_send(x, change(rank, routing), **options)
    with poisoned_memory():
        batches = [transport.dispatch_recv() for transport in transports]
        for rank, (transport, dispatched) in enumerate(zip(transports, batches, strict=True)):
            transport.combine_send(dispatched.batch.x * (rank + 2), dispatched)
        return [transport.combine_recv(batch) for transport, batch in zip(transports, batches, strict=True)]


def check_round(transports: list[NvlinkTransport], round_: int) -> None:
    """A round is right on all ranks."""
    for rank, out in enumerate(run_round(transports, round_)):
        assert torch.equal(out, expected(rank, round_)), (rank, out)


@pytest.mark.matrix
def test_the_most_ranks_by_rows() -> None:
    hurry()
    with patched(WORD_TOKENS=0), all_ranks() as transports:
        check_round(transports, 0)


def test_the_most_ranks_by_words() -> None:
    hurry()
    with all_ranks() as transports:
        check_round(transports, 0)
        fewer = run_round(transports, 1, lambda rank, routing: cut(routing) if rank == LAST else routing)
        assert all(bool(out.isnan().all()) for out in fewer)
        for rank, transport in enumerate(transports[:-1]):
            with pytest.raises(ValueError, match=f": rank {LAST} not as rank {rank};"):
                transport.check()
        with pytest.raises(ValueError, match=f": rank 0 and rank 1 and .* not as rank {LAST};"):
            transports[-1].check()


def cut(routing: Routing) -> Routing:
    """The same routing without the last expert of each token."""
    return Routing(topk_ids=routing.topk_ids[:, :2].contiguous(), topk_weights=routing.topk_weights[:, :2].contiguous())
