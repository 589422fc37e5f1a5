"""on_peer_loss "raise": every survivor names the same lost rank within the timeout."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lost import record, recorded

from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError
from nvlink_faults.common import (
    CONFIG,
    INTERPRETING,
    LOST_ROUND,
    NO_RANK_LOST,
    NUM_RANKS,
    SLACK_SECS,
    be_lost,
    begin,
    check_round,
    finish,
    make_transport,
    on_ranks,
    run_round,
)

GIVEN_UP_SECS = 20.0
STUCK_SECS = CONFIG.timeout_secs + SLACK_SECS
ADDRESSES, PUTS = {"nvshmem_stores": "addresses"}, {"nvshmem_stores": "puts"}  # of the transport `nvshmem`
WITH_NVSHMEM = pytest.mark.skipif(
    not INTERPRETING and importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed"
)
BY_ADDRESSES = (WITH_NVSHMEM, pytest.mark.matrix)  # the kernels of `peer`


def lose_a_rank(
    group: EPGroup, victim: int, how: str, where: str, polls: int, options: dict[str, Any], folder: Path
) -> None:
    """Run rounds until the victim is lost; survivors record the blamed rank, the time, and later errors."""
    with torch.inference_mode(where == "combine"):  # as decode passes; the watchdog's thread is never in it
        run_until_lost(group, victim, how, where, polls, options, folder)


def run_until_lost(
    group: EPGroup, victim: int, how: str, where: str, polls: int, options: dict[str, Any], folder: Path
) -> None:
    """See `lose_a_rank`."""
    transport = make_transport(group, **options)
    start = time.monotonic()
    try:
        for round_ in range(2000):
            if round_ == LOST_ROUND:
                group.barrier()  # all have the round before: a loss may spoil what is still under way
            if (group.rank, round_) == (victim, LOST_ROUND):
                if where == "combine":
                    begin(transport, round_)
                be_lost(how)
            if round_ < LOST_ROUND:
                check_round(transport, round_)
                continue
            if round_ == LOST_ROUND:
                transport._context.timeout_ns = polls or transport._context.timeout_ns
                start = time.monotonic()
            run_round(transport, round_)
    except PeerLostError as error:
        secs = time.monotonic() - start
        assert transport._faults._watchdog._thread.is_alive()
        again = []
        for call in (transport.check, lambda: begin(transport, 0), lambda: transport.abandon()):
            with pytest.raises(PeerLostError) as caught:
                call()
            again.append(str(caught.value))
        transport.destroy()
        record(folder, group.rank, (error.ranks, str(error), again, secs, time.monotonic() - start - secs))
        raise


@pytest.mark.parametrize(
    ("how", "victim", "where", "polls", "options", "within_secs"),
    [
        pytest.param("SIGKILL", 0, "dispatch", 0, {}, SLACK_SECS, id="killed-0-before-dispatch"),
        pytest.param("SIGKILL", 1, "combine", 0, {}, SLACK_SECS, id="killed-1-before-combine"),
        pytest.param("SIGSTOP", 1, "dispatch", 0, {}, STUCK_SECS, id="stopped-1-before-dispatch"),
        pytest.param("stuck", 0, "combine", 0, {}, STUCK_SECS, id="stuck-0-before-combine"),
        pytest.param("stuck", 1, "dispatch", 50, {}, CONFIG.timeout_secs - 1, id="stuck-1-found-by-a-kernel"),
        pytest.param("SIGKILL", 1, "combine", 0, PUTS, SLACK_SECS, marks=WITH_NVSHMEM, id="killed-1-by-puts"),
        pytest.param("stuck", 0, "combine", 0, PUTS, STUCK_SECS, marks=WITH_NVSHMEM, id="stuck-0-by-puts"),
        pytest.param("SIGKILL", 1, "combine", 0, ADDRESSES, SLACK_SECS, marks=BY_ADDRESSES, id="killed-1-by-addresses"),
        pytest.param("stuck", 0, "combine", 0, ADDRESSES, STUCK_SECS, marks=BY_ADDRESSES, id="stuck-0-by-addresses"),
    ],
)
def test_survivors_name_the_lost_rank(
    tmp_path: Path, how: str, victim: int, where: str, polls: int, options: dict[str, Any], within_secs: float
) -> None:
    if polls and not INTERPRETING:
        pytest.skip("on a GPU kernels find whoever is stuck")
    failed = on_ranks(lose_a_rank, victim, how, where, polls, options, tmp_path)
    assert isinstance(failed, RankFailedError)
    assert failed.rank == victim
    told = recorded(tmp_path)
    assert set(told) == set(range(NUM_RANKS)) - {victim}
    assert len({text for _, text, *_ in told.values()}) == 1, told
    for ranks, text, again, secs, afterwards_secs in told.values():
        assert ranks == (victim,)
        assert f"{where} of round" in text or how == "SIGKILL", text
        assert again == [text] * 3
        assert secs < within_secs
        assert afterwards_secs < SLACK_SECS


def come_late(group: EPGroup, folder: Path) -> None:
    """Rank 1 never joins the first round."""
    transport = make_transport(group)
    if group.rank == 1:
        be_lost("stuck")
    dispatched = begin(transport, 0)
    with pytest.raises(PeerLostError) as caught:
        transport.check()
    with pytest.raises(PeerLostError, match="rank 1 did not arrive in dispatch of round 0"):
        finish(transport, dispatched)
    record(folder, group.rank, (caught.value.ranks, dispatched.batch.expert_num_tokens.tolist()))
    raise caught.value


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    failed = on_ranks(come_late, tmp_path, num_ranks=2)
    assert failed.rank == 1
    assert recorded(tmp_path) == {0: ((1,), [0, 0])}


SHORT = 50 if INTERPRETING else 100_000_000  # polls, or ns in which ranks that share a GPU have had several turns


def tell(group: EPGroup, phase: str) -> int:
    """The last rank does not join, and only rank 0 times out: returns this rank's abort word.

    No watchdog runs, no rank asks the group, and the other ranks' timeouts are too long to end: their waits end because
    rank 0's kernel sets their abort words, or by the timer here, which names no rank.
    """
    transport, stuck = make_transport(group), group.num_ranks - 1
    transport._faults._watchdog.stop()
    transport._context.timeout_ns = 10**15
    finish(transport, begin(transport, 0))
    group.barrier()  # kernels are compiled
    if phase == "combine":
        dispatched = begin(transport, 1)
        group.barrier()  # all have it
    timer = threading.Timer(GIVEN_UP_SECS, transport._memory.end_waits, ((),))
    timer.start()
    if group.rank == 0:
        transport._context.timeout_ns = SHORT
    if group.rank != stuck and phase == "combine":
        finish(transport, dispatched)
    elif group.rank != stuck:
        begin(transport, 1)
    deadline = time.monotonic() + GIVEN_UP_SECS
    while not int(transport._memory.abort[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    timer.cancel()
    word = int(transport._memory.abort[0])
    group.barrier()  # no rank frees memory while another writes to it
    transport.destroy()
    return word & 0xFFFFFFFF


@pytest.mark.parametrize(("phase", "number"), [("dispatch", 0), ("combine", 1)])
def test_a_kernel_that_gives_up_tells_every_rank(phase: str, number: int) -> None:
    said = NUM_RANKS + 256 * number  # the last rank's number, plus 1
    assert on_ranks(tell, phase, config=NO_RANK_LOST) == [said] * NUM_RANKS
