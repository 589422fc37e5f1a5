"""The transport `nvshmem` by puts: survivors name the lost rank, and go on without it."""

import functools
import importlib.util
from pathlib import Path

import pytest

from ep_moe.group import EPGroup
from ep_moe.launch import RankFailedError
from nvlink_faults import test_lost
from nvlink_faults.common import (
    CONFIG,
    INTERPRETING,
    NUM_RANKS,
    SLACK_SECS,
    be_lost,
    check_round,
    make_transport,
    on_ranks,
    record,
    recorded,
    run_round,
)
from nvlink_faults.test_lost import lose_a_rank

pytestmark = pytest.mark.skipif(
    not INTERPRETING and importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed"
)
by_puts = functools.partial(make_transport, nvshmem_stores="puts")


def lose_by_puts(group: EPGroup, victim: int, how: str, folder: Path) -> None:
    """`lose_a_rank` before a combine."""
    test_lost.make_transport = by_puts
    lose_a_rank(group, victim, how, "combine", 0, folder)


@pytest.mark.parametrize(
    ("how", "victim", "within_secs"),
    [
        pytest.param("SIGKILL", 1, SLACK_SECS, id="killed-1"),
        pytest.param("stuck", 0, CONFIG.timeout_secs + SLACK_SECS, id="stuck-0"),
    ],
)
def test_survivors_name_the_lost_rank(tmp_path: Path, how: str, victim: int, within_secs: float) -> None:
    failed = on_ranks(lose_by_puts, victim, how, tmp_path)
    assert isinstance(failed, RankFailedError)
    assert failed.rank == victim
    told = recorded(tmp_path)
    assert set(told) == set(range(NUM_RANKS)) - {victim}
    for ranks, _, again, secs, _ in told.values():
        assert ranks == (victim,)
        assert len(set(again)) == 1
        assert secs < within_secs


def go_on(group: EPGroup, folder: Path) -> None:
    """Rank 1 is killed; the others repeat a round, and later rounds are right, from the outbox as the loss left it."""
    transport = by_puts(group, on_peer_loss="mask")
    check_round(transport, 0)
    group.barrier()
    if group.rank == 1:
        be_lost("SIGKILL")
    for round_ in range(200):
        run_round(transport, round_)
        transport.check()
        if not all(transport.active_ranks):
            break
    for round_ in range(3):
        check_round(transport, round_)
    transport.check()
    record(folder, group.rank, transport.active_ranks)
    transport.destroy()


@pytest.mark.skipif(NUM_RANKS < 3, reason="needs two survivors")
def test_survivors_go_on(tmp_path: Path) -> None:
    on_ranks(go_on, tmp_path)
    assert recorded(tmp_path) == {0: (True, False, True), 2: (True, False, True)}
