"""Memory that all ranks map: every rank reaches every part, files are removed, and a lack of room is reported."""

import ctypes
import errno
import os
import stat
import threading
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from ep_moe.group import EPGroup, PeerLostError, symmetric
from ep_moe.group.symmetric import SHARED_FOLDER, SymmetricBuffer, why_unreachable
from nvlink.common import on_ranks

NUM_BYTES = 3000  # not a multiple of the alignment


def name_files(name: str, rank: int) -> None:
    """Give the files of this rank's buffers a name that the test knows."""
    symmetric.uuid = types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=f"{name}_{rank}"))


def left_behind(name: str) -> list[str]:
    """Remaining files of buffers with these names."""
    return [path.name for path in Path(SHARED_FOLDER).glob(f"ep_moe_{name}_*")]


def write_to_each_other(group: EPGroup, name: str) -> tuple[str, list[str], list[int], list[int]]:
    """The content of every rank's memory as mapped by this rank, and of its own part."""
    name_files(name, group.rank)
    buffer = SymmetricBuffer(group, NUM_BYTES)
    files = left_behind(name)
    zero = int(buffer.local.sum())
    assert (zero, buffer.local.numel() >= NUM_BYTES) == (0, True)
    group.barrier()
    buffer.local[NUM_BYTES - 1] = 100 + group.rank
    for peer, address in enumerate(buffer.addresses):
        ctypes.c_uint8.from_address(address + group.rank).value = 10 * (peer + 1) + group.rank
    group.barrier()
    seen = [ctypes.c_uint8.from_address(address + NUM_BYTES - 1).value for address in buffer.addresses]
    written = buffer.local[: group.num_ranks].tolist()
    group.barrier()
    buffer.destroy()
    buffer.destroy()
    return why_unreachable(group), files, seen, written


def test_ranks_map_each_other() -> None:
    name = f"map{os.getpid()}"
    told = on_ranks(write_to_each_other, name, num_ranks=3)
    for rank, (reason, files, seen, written) in enumerate(told):
        assert (reason, files) == ("", [])
        assert seen == [100, 101, 102]
        assert written == [10 * (rank + 1) + source for source in range(3)]
    assert left_behind(name) == []


def modes_of_files(group: EPGroup, masks: tuple[int, ...]) -> list[str]:
    """The permissions of a buffer's file while it has a name, from its creation on, under each umask."""
    modes = []

    def looked_at(descriptor: int, offset: int, size: int) -> None:
        modes.append(oct(stat.S_IMODE(os.fstat(descriptor).st_mode)))
        os.posix_fallocate(descriptor, offset, size)

    symmetric.os = types.SimpleNamespace(**{**vars(os), "posix_fallocate": looked_at})
    for mask in masks:
        before = os.umask(mask)
        SymmetricBuffer(group, NUM_BYTES).destroy()
        os.umask(before)
    return modes


def test_nobody_else_can_open_the_files() -> None:
    assert on_ranks(modes_of_files, (0, 0o022, 0o777), num_ranks=2) == [["0o600"] * 3] * 2


def without_room(group: EPGroup, name: str) -> tuple[str, int]:
    """A rank's error if rank 1 has no room, and the number of ranks in a gather afterwards."""
    name_files(name, group.rank)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if group.rank == 1:
        symmetric.os = types.SimpleNamespace(**{**vars(os), "posix_fallocate": full})
    with pytest.raises(RuntimeError) as caught:
        SymmetricBuffer(group, NUM_BYTES)
    return str(caught.value), len(group.all_gather_object(0))


def test_no_room_is_told_on_every_rank() -> None:
    name = f"full{os.getpid()}"
    told = on_ranks(without_room, name, num_ranks=3)
    words = f"{SHARED_FOLDER} has no room for 3072 bytes on rank 1: [Errno {errno.ENOSPC}] No space left on device"
    assert told == [(words, 3)] * 3
    assert left_behind(name) == []


def test_a_rank_that_joins_later_meets_the_others() -> None:
    """torch's exchanges, as symmetric memory makes them on GPUs: numbered from 17 on one rank, from 3 on the other."""
    keys, found = dist.HashStore(), dict[int, list[bytes]]()
    group = types.SimpleNamespace(
        connect_store=lambda: keys, check=lambda: None, config=types.SimpleNamespace(timeout_secs=20.0)
    )

    def exchange(rank: int, number: int) -> None:
        python = symmetric._Rendezvous(group)  # type: ignore[arg-type]
        store = dist.PrefixStore("torch", python)  # calls it from C++
        store.set(f"Memory/{number}/{rank}", f"of {rank}")
        store.wait([f"Memory/{number}/{1 - rank}"])
        found[rank] = [store.get(f"Memory/{number}/{each}") for each in range(2)]
        assert store.multi_get([f"Memory/{number}/{each}" for each in range(2)]) == found[rank]
        store.set(f"Memory/{number + 1}/{rank}", "")
        store.wait([f"Memory/{number + 1}/{1 - rank}"])

    threads = [threading.Thread(target=exchange, args=args) for args in ((0, 17), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: [b"of 0", b"of 1"] for rank in range(2)}


def test_a_rendezvous_ends_when_a_rank_is_lost() -> None:
    def check() -> None:
        raise PeerLostError((1,), "connect", 0, "was killed")

    group = types.SimpleNamespace(
        connect_store=dist.HashStore, check=check, config=types.SimpleNamespace(timeout_secs=20.0)
    )
    python = symmetric._Rendezvous(group)  # type: ignore[arg-type]
    with pytest.raises(PeerLostError, match="rank 1 was killed"):
        dist.PrefixStore("torch", python).wait(["Memory/1/1"])
