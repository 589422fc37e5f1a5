"""on_peer_loss "mask": survivors go on without the lost rank, and ranks can be taken out and brought back."""

import os
import signal
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
    DEVICE,
    LOST_ROUND,
    NO_RANK_LOST,
    NUM_RANKS,
    be_lost,
    begin,
    blindfolded,
    check_round,
    expected,
    expected_counts,
    finish,
    make_transport,
    on_ranks,
    run_round,
    send,
)
from nvlink_faults.test_lost import ADDRESSES, BY_ADDRESSES, PUTS, SHORT, WITH_NVSHMEM

ROUNDS = LOST_ROUND + 6
ALL = (True,) * NUM_RANKS


def go_on(group: EPGroup, victim: int, how: str, where: str, options: dict[str, Any], folder: Path) -> None:
    """Run rounds; the victim is lost in one; survivors record the result of each round.

    If it is lost between two ranks, rank 1 has received its combine and begins the next round, rank 0 still waits.
    """
    from ep_moe.kernels.exchange import round_state as device_code

    transport = make_transport(group, on_peer_loss="mask", **options)
    seen = []
    for round_ in range(ROUNDS):
        if round_ == LOST_ROUND:
            group.barrier()  # all have the round before: a loss may spoil what is still under way
        if (group.rank, round_) == (victim, LOST_ROUND):
            if where != "dispatch":
                dispatched = begin(transport, round_)
            if where == "between":
                transport._states.slots[0].state_ptr[device_code.ACTIVE.value] = 0b110
                finish(transport, dispatched)
            be_lost(how, CONFIG.timeout_secs + 4.0)
            transport.abandon()
            with pytest.raises(PeerLostError, match=f"rank {victim} was given up by the other ranks"):
                begin(transport, round_ + 1)
            transport.destroy()
            return
        start = time.monotonic()
        dispatched = begin(transport, round_)
        active = transport.active_ranks
        seen.append((round_, active, *finish(transport, dispatched), time.monotonic() - start))
    transport.check()
    transport.destroy()
    record(folder, group.rank, seen)


def judge(rank: int, victim: int, seen: list[Any]) -> None:
    """All rounds before the loss are right, and the last ones without the victim; between them a token may be NaN."""
    without = tuple(rank != victim for rank in range(NUM_RANKS))
    right = []
    for round_, active, out, counts, _ in seen:
        wanted = expected(rank, round_, active)
        whole = torch.equal(out, wanted)
        right.append(whole and counts == expected_counts(rank, round_, active))
        rows = torch.isnan(out).all(1) | (out == expected(rank, round_, ALL)).all(1)
        assert whole or bool(rows.all()), (rank, round_, out, wanted)
        assert active in (ALL, without)
    assert right[:LOST_ROUND] == [True] * LOST_ROUND, (rank, right)
    assert right[-3:] == [True] * 3, (rank, right)
    assert not all(right), rank
    assert [active for _, active, *_ in seen[-3:]] == [without] * 3


@pytest.mark.parametrize(
    ("how", "victim", "where", "options"),
    [
        pytest.param("SIGKILL", 0, "dispatch", {}, id="killed-0-before-dispatch"),
        pytest.param("SIGKILL", 2, "between", {}, id="killed-2-between-two-ranks"),
        pytest.param("stuck", 1, "combine", {}, id="stuck-1-before-combine"),
        pytest.param("SIGKILL", 1, "combine", PUTS, marks=WITH_NVSHMEM, id="killed-1-by-puts"),
        pytest.param("SIGKILL", 1, "combine", ADDRESSES, marks=BY_ADDRESSES, id="killed-1-by-addresses"),
    ],
)
def test_survivors_go_on(tmp_path: Path, how: str, victim: int, where: str, options: dict[str, Any]) -> None:
    if victim >= NUM_RANKS:
        pytest.skip(f"needs a rank {victim}")
    ended = on_ranks(go_on, victim, how, where, options, tmp_path)
    assert isinstance(ended, RankFailedError) == (how == "SIGKILL"), ended
    told = recorded(tmp_path)
    assert set(told) == set(range(NUM_RANKS)) - {victim}
    for rank, seen in told.items():
        judge(rank, victim, seen)


def wait_for(file: Path) -> None:
    """Wait until a file is there."""
    while not file.exists():
        time.sleep(0.01)


def send_now(transport: Any, round_: int, bound: int) -> None:
    """The sending half of a round, whose kernel has ended."""
    send(transport, round_, max_num_tokens=bound)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def wake_up(group: EPGroup, folder: Path) -> None:
    """Rank 1 is stopped before a dispatch, masked out, and continued while the others are in a round.

    It sends the round that it was about to send, of another bound, times out, and tells the others.
    """
    from ep_moe.transport.one_sided import dispatch_launcher, round_plan

    round_plan.WORD_TOKENS = dispatch_launcher.WORD_TOKENS = 0  # rows
    transport = make_transport(group, on_peer_loss="mask", max_tokens_per_rank=48)
    check_round(transport, 0)
    stopped = group.all_gather_object(os.getpid())[1]
    if group.rank == 1:
        with blindfolded(transport):
            transport._faults._watchdog.stop()
            os.kill(os.getpid(), signal.SIGSTOP)
            transport._context.timeout_ns = SHORT
            send_now(transport, 1, 32)
            transport.abandon()
        (folder / "late").touch()
        with pytest.raises(PeerLostError, match="rank 1 was given up by the other ranks"):
            begin(transport, 2)
        transport.destroy()
        return
    for round_ in range(1, 100):
        run_round(transport, round_)
        transport.check()
        if not transport.active_ranks[1]:
            break
    assert not transport.active_ranks[1]
    send_now(transport, 100, 16)
    (folder / f"sent{group.rank}").touch()
    if group.rank == 0:
        for rank in range(2, NUM_RANKS):
            wait_for(folder / f"sent{rank}")
        os.kill(stopped, signal.SIGCONT)
    wait_for(folder / "late")
    out, counts = finish(transport, transport.dispatch_recv())
    assert counts == expected_counts(group.rank, 100, transport.active_ranks)
    assert torch.equal(out, expected(group.rank, 100, transport.active_ranks)), out
    for round_ in (101, 102):
        check_round(transport, round_)
    transport.check()
    record(folder / "seen", group.rank, transport.active_ranks)
    transport.destroy()


@pytest.mark.skipif(NUM_RANKS < 3, reason="needs two survivors")
def test_a_rank_that_wakes_up(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    ended = on_ranks(wake_up, tmp_path)
    assert ended == [None] * NUM_RANKS, ended
    assert recorded(tmp_path / "seen") == {rank: (True, False, *ALL[2:]) for rank in range(NUM_RANKS) if rank != 1}


def choose_ranks(group: EPGroup) -> None:
    """Take the last rank out, go on, bring it back; then ask for different ranks."""
    with torch.inference_mode():  # later calls are not in it
        transport = make_transport(group, on_peer_loss="mask")
    last = group.num_ranks - 1
    check_round(transport, 0)
    transport.set_active_ranks([rank != last for rank in range(group.num_ranks)])
    assert transport.active_ranks == (True,) * last + (False,)
    if group.rank == last:
        with pytest.raises(RuntimeError, match=f"rank {last} is not among the active ranks"):
            begin(transport, 1)
    else:
        for round_ in (1, 2):
            check_round(transport, round_)
    group.barrier()
    transport.set_active_ranks(ALL)
    for round_ in (3, 4):
        check_round(transport, round_)
    with pytest.raises(ValueError, match="ranks ask for different active ranks"):
        transport.set_active_ranks([rank >= int(group.rank == 0) for rank in range(group.num_ranks)])
    check_round(transport, 5)
    with pytest.raises(ValueError, match=f"are not a mask of {NUM_RANKS} ranks"):
        transport.set_active_ranks([True])
    dispatched = begin(transport, 6)
    with pytest.raises(RuntimeError, match="slot 0 waits for combine_send"):
        transport.set_active_ranks(ALL)
    finish(transport, dispatched)
    transport.destroy()
    strict = make_transport(group)
    with pytest.raises(ValueError, match="needs on_peer_loss 'mask', this transport has 'raise'"):
        strict.set_active_ranks(ALL)
    strict.destroy()


def test_active_ranks_can_be_chosen() -> None:
    ended = on_ranks(choose_ranks, config=NO_RANK_LOST)
    assert ended == [None] * NUM_RANKS, ended
