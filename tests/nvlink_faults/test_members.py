"""The agreement of ranks on the active ranks: threads over one store, without kernels."""

import copy
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.membership import Decision, Members, earlier_epoch, later_epoch
from ep_moe.placement import Placement
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink_faults.common import DEVICE, HIDDEN, inputs, send

CONFIG = GroupConfig(timeout_secs=3.0, heartbeat_secs=0.05)
GRACE_SECS = 0.2
SOON_SECS = 2.5  # on a busy machine, and no timeout
YES, NO = True, False


class Group(SimpleNamespace):
    """A stand-in for a group, with the parts that `Members` uses."""

    def connect_store(self) -> dist.Store:
        return self.store.clone()


def members(store: dist.Store, num_ranks: int, gone: tuple[int, ...] = ()) -> list[Members]:
    """The `Members` of all ranks."""
    known = {"num_ranks": num_ranks, "config": CONFIG, "gone_ranks": gone, "left_ranks": (), "store": store}
    return [Members(Group(rank=rank, **known)) for rank in range(num_ranks)]


def together(calls: dict[int, Any]) -> tuple[dict[int, Decision], float]:
    """The result of each rank's concurrent call, and the time of all."""
    decided: dict[int, Decision] = {}
    start = time.monotonic()
    threads = [threading.Thread(target=lambda r=r, c=c: decided.update({r: c()})) for r, c in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return decided, time.monotonic() - start


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    ("epochs", "after"),
    [((3, 5, 4), 6), ((0, 0), 1), ((-1, -2), 1), ((-1, 2), 3), ((2, -1), 3), ((2**31 - 1, 2**31 - 2), -(2**31))],
    ids=["last", "none", "never-0", "wrapped", "wrapped-back", "signed"],
)
def test_epochs(epochs: tuple[int, ...], after: int) -> None:
    assert later_epoch(epochs) == after
    assert later_epoch([earlier_epoch(after)]) == after
    assert earlier_epoch(after) != 0


@pytest.mark.parametrize(
    ("suspects", "voters", "gone", "active", "within"),
    [
        pytest.param({0: [1], 2: [1]}, (0, 1, 2), (), (YES, YES, YES), (0, SOON_SECS), id="who-votes-is-alive"),
        pytest.param({0: [1], 2: [0]}, (0, 2), (), (YES, NO, YES), (GRACE_SECS, SOON_SECS), id="suspect-is-silent"),
        pytest.param({0: [2]}, (0, 2), (), (YES, NO, YES), (3.0, 8.0), id="another-is-silent"),
        pytest.param({0: [1], 2: [1]}, (0, 2), (1,), (YES, NO, YES), (0, SOON_SECS), id="suspect-is-dead"),
        pytest.param({}, (0, 1, 2), (1,), (YES, NO, YES), (0, SOON_SECS), id="has-died-since-it-voted"),
    ],
)
def test_who_is_lost(
    store: dist.Store,
    suspects: dict[int, list[int]],
    voters: tuple[int, ...],
    gone: tuple[int, ...],
    active: tuple[bool, ...],
    within: tuple[float, float],
) -> None:
    ranks = members(store, 3, gone)
    assert not any(rank.called() for rank in ranks)
    calls = {r: lambda r=r: ranks[r].decide(suspects.get(r, ()), (4 + r, 7 - r)) for r in voters}
    decided, secs = together(calls)
    resume = (5 + max(r for r in voters), 8 - min(voters))
    assert list(decided.values()) == [Decision(active=active, resume=resume, as_wanted=False, error="")] * len(voters)
    assert within[0] <= secs < within[1]
    assert [ranks[r].active for r in voters] == [active] * len(voters)
    staying = [r for r in voters if active[r]]
    met, _ = together({r: ranks[r].meet for r in staying})
    assert met == dict.fromkeys(staying, ())


def test_a_late_vote_does_not_count(store: dist.Store) -> None:
    ranks = members(store, 2)
    assert ranks[0].decide((1,), (3,)).active == (YES, NO)
    assert ranks[1].decide((), (9,)) == Decision(active=(YES, NO), resume=(4,), as_wanted=False, error="")


def test_who_does_not_come_to_the_meeting(store: dist.Store) -> None:
    ranks = members(store, 3)
    together({r: lambda r=r: ranks[r].decide((), (1,)) for r in range(3)})
    ranks[2].leave()
    met, secs = together({r: ranks[r].meet for r in (0, 1)})
    assert met == {0: (2,), 1: (2,)}
    assert secs < SOON_SECS


def test_a_loss_is_decided_before_a_wish(store: dist.Store) -> None:
    ranks = members(store, 3)
    wish = (NO, YES, YES)
    calls = {0: lambda: ranks[0].decide((), (1,), wish), 1: lambda: ranks[1].decide((2,), (1,))}
    decided, _ = together(calls)
    assert decided[0] == decided[1] == Decision(active=(YES, YES, NO), resume=(2,), as_wanted=False, error="")
    decided, _ = together({r: lambda r=r: ranks[r].decide((), (2,), wish) for r in (0, 1)})
    assert decided[0].active == (NO, YES, NO)
    assert decided[0].as_wanted


def test_an_inactive_rank_decides_nothing_alone(store: dist.Store) -> None:
    ranks, everyone = members(store, 3), (YES, YES, YES)
    together({r: lambda r=r: ranks[r].decide((), (1,), (YES, YES, NO)) for r in range(3)})
    for wish in (everyone, (YES, YES, NO)):
        with pytest.raises(PeerLostError, match="rank 0 and rank 1 did not arrive in agreement: rank 2 is inactive"):
            ranks[2].decide((), (1,), wish)
    assert ranks[0].decide((1,), (2,)).active == (YES, NO, NO)
    decided, _ = together({r: lambda r=r: ranks[r].decide((), (3,), (YES, NO, YES)) for r in (0, 2)})
    assert decided[0] == decided[2] == Decision(active=(YES, NO, YES), resume=(4,), as_wanted=True, error="")


def test_the_store_is_gone() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = served.port
    (rank,) = members(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1)
    del served
    with pytest.raises(PeerLostError, match="the launcher's store is gone"):
        rank.decide((), (1,))


def test_a_round_out_of_order() -> None:
    with EPGroup.single(DEVICE) as group:
        config = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=4, max_topk=2, dtype=inputs(0, 0, 1)[0].dtype)
        transport = NvlinkTransport(group, Placement.linear(2, 1), config)
        send(transport, 0)
        replayed = copy.copy(transport._slots.find(0).state)
        transport.dispatch_recv()
        transport._dispatches.receive(replayed, send=True)  # as a graph would
        with pytest.raises(RuntimeError, match="rank 0 has run round 0 out of order"):
            transport.check()
        transport.abandon()
        transport.destroy()
