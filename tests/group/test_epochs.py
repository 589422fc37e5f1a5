"""Ranks of a launch form one group after another: without lost ranks, with new processes in their seats, with fewer."""

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.lost import record, recorded

from ep_moe.config import GroupConfig
from ep_moe.environment import LaunchEnv
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.joining import Epoch, _agree_on_seats
from ep_moe.group.parts import split
from ep_moe.group.watch import Watch
from ep_moe.launch import RankFailedError, launch

CONFIG = GroupConfig(timeout_secs=20.0, heartbeat_secs=0.2)
AT_ONCE_SECS = 3.0


def seats_seen(group: EPGroup) -> list[int]:
    """The seats of all ranks, by a collective of the process group, one of the store and one of a part."""
    split(group, (tuple(range(group.num_ranks)),)).barrier()
    group.wait_for_all("see")
    return group.all_gather_object(group.seat)


def until_lost(group: EPGroup, victim: int) -> tuple[tuple[int, ...], str]:
    """Use collectives until a seat, this one's for the victim, is lost; returns whom the error blames."""
    group.barrier()
    if group.seat == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        group.all_reduce_sum(torch.ones(1))
    return caught.value.seats, str(caught.value)


def live_through_epochs(group: EPGroup, folder: Path) -> None:
    """Seats 0 to 4; the process of seat 4 leaves and takes the seat of rank 1, which dies."""
    found: list[Any] = [seats_seen(group)]
    if group.seat == 4:
        group.destroy()
        env = LaunchEnv.from_environ()
        assert env is not None
        while not (folder / "two").exists():
            time.sleep(0.01)
        group = EPGroup.on_standby(dataclasses.replace(env, rank=1), CONFIG, "cpu")
        assert (group.standby, group.num_ranks, group.seats) == (True, 1, (1,))
    else:
        group = group.regroup(1, (0, 1, 2, 3))
        found += [seats_seen(group), until_lost(group, victim=1)]
        start = time.monotonic()
        group = group.regroup(2, (0, 2, 3))
        found += [time.monotonic() - start, seats_seen(group)]
        with pytest.raises(ValueError, match=r"epoch \(2\) must be above 2, the last one of seat"):
            group.regroup(2, (0, 2, 3))
        if group.seat == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start, whole = time.monotonic(), group
        with pytest.raises(PeerLostError, match=r"rank 3 was killed by SIGKILL \(noticed in connect\)"):
            group.regroup(3, (0, 2, 3), deaths=(0, 0, 0))
        found.append(time.monotonic() - start)
        with pytest.raises(RuntimeError, match="has left this group"):
            whole.barrier()
        (folder / "two").touch()
    last = group.regroup(4, (0, 1, 2))
    found += [seats_seen(last), last.rank, last.epoch, until_lost(last, victim=0)]
    assert group.latest is last
    last = last.regroup(5, (1, 2))
    found += [seats_seen(last), (last.local_rank, last.local_num_ranks, last.node)]
    record(folder, last.seat, found)


def test_epochs_of_a_launch(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(live_through_epochs, tmp_path, num_ranks=5, config=CONFIG, device="cpu", grace_secs=60.0)
    lines = caught.value.failures
    assert {rank for rank, line in lines.items() if "was killed by SIGKILL" in line} == {0, 1, 3} == set(lines)
    (tmp_path / "two").unlink()
    new, old = recorded(tmp_path)[1], recorded(tmp_path)[2]
    killed = "rank {0} was killed by SIGKILL (noticed in"
    everyone, whole, (blamed, text), fast, fewer, noticed, *rest = old
    assert (everyone, whole, fewer) == ([0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 2, 3])
    assert (blamed, text.startswith(killed.format(1))) == ((1,), True)
    assert fast < AT_ONCE_SECS
    assert noticed < AT_ONCE_SECS
    for rank, (seen, own, epoch, (lost, words), left, place) in ((1, new[1:]), (2, rest)):
        assert (seen, own, epoch, lost, left) == ([0, 1, 2], rank, 4, (0,), [1, 2])
        assert words.startswith(killed.format(0))
        assert place == (rank - 1, 2, 0)


def regroup_beside_a_slow_rank(group: EPGroup) -> tuple[float, list[int]]:
    """Regroup, rank 1 after it has said late that it is connected; when it said so, or when this rank left."""
    watch, when, late = group.watch, [0.0], group.rank == 1
    assert watch is not None
    if late:
        with watch.waiting("connect", None, 0):  # not yet
            pass
    group.wait_for_all("begin")
    if late:
        time.sleep(0.5)
        when[0] = time.monotonic()
        watch.connected()

    def leave() -> None:
        if not late:
            when[0] = time.monotonic()
        Watch.leave(watch)

    with mock.patch.object(watch, "leave", leave):
        last = group.regroup(1, (0, 1, 2))
    return when[0], seats_seen(last)


def test_no_rank_leaves_a_whole_group_before_all_are_connected() -> None:
    """gloo fails to connect to a rank that is gone already."""
    found = launch(regroup_beside_a_slow_rank, num_ranks=3, config=CONFIG, device="cpu")
    (first, said, last), seen = zip(*found, strict=True)
    assert said < min(first, last)
    assert list(seen) == [[0, 1, 2]] * 3


def test_only_ranks_of_a_launch_regroup() -> None:
    with pytest.raises(RuntimeError, match="a group of 1 rank whose store no launcher serves cannot regroup"):
        EPGroup.single("cpu").regroup(1, (0,))


def test_ranks_agree_on_an_epoch() -> None:
    sizes = {"local_rank": 0, "local_world_size": 4, "master_addr": "", "master_port": 1, "store_is_hosted": True}
    seats = [Epoch.first(LaunchEnv(rank=rank, world_size=4, **sizes)) for rank in range(2)]
    for wrong in ((0, 0), (2, 0), (1, 2), (-1, 0), ()):
        with pytest.raises(ValueError, match="must be ascending, from 0 on, and include 0, this process's own"):
            seats[0].next(1, wrong)
    store: Any = dist.HashStore()
    _agree_on_seats(store, seats[0].next(1, (0, 1, 7)))
    with pytest.raises(ValueError, match=r"epoch 1 has seats \[0, 1, 7\] on another rank, \[0, 1\] on seat 1"):
        _agree_on_seats(store, seats[1].next(1, (0, 1)))
    _agree_on_seats(store, seats[1].next(1, (0, 1, 7)))
    with pytest.raises(ValueError, match="seat 1 has joined epoch 1 before"):
        _agree_on_seats(store, seats[1].next(1, (0, 1, 7)))
