"""Memory of a rank that all ranks of its group can load from and store to.

On GPUs it is torch's symmetric memory over peer access, within one machine; on a CPU a file in /dev/shm that every
rank maps, for Triton's interpreter. Letters: R ranks.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.environment import shares_gpus, switch_on
from ep_moe.group.base import EPGroup

SHARED_FOLDER = "/dev/shm"
ALIGNMENT_BYTES = 1024  # of a buffer's size


def _open_private(path: str, flags: int) -> int:
    """Open a new file that only its owner may read and write, whatever the umask."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a umask may have removed a permission that the other ranks need
    return descriptor


def why_unreachable(group: EPGroup, *, inside_nodes: bool = False) -> str:
    """The reason why the ranks of a group cannot map each other's memory; "" if they can. Collective.

    inside_nodes: only ranks of the same node need to. In a rehearsal the others are taken to be on any GPUs that this
    process sees.
    """
    if group.device.type == "cuda" and torch.version.hip is not None:
        return "the kernels that store into it have never run on AMD GPUs"
    if group.device.type == "cuda":
        mine = str(torch.cuda.get_device_properties(group.device).uuid)
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    else:
        mine, visible = "", {}
    if group.alone:
        others = [other for uuid_, other in visible.items() if uuid_ != mine and group.num_ranks > 1]
        far = [other for other in others if not torch.cuda.can_device_access_peer(group.device, other)]
        return f"{group.device} has no access to the memory of cuda:{far[0]}" if far else ""
    of_ranks = group.all_gather_object((group.node, mine))
    reasons = [
        _why_not(group, rank, *place, mine=mine, visible=visible)
        for rank, place in enumerate(of_ranks)
        if place[0] == group.node or not inside_nodes
    ]
    found = group.all_gather_object(next((reason for reason in reasons if reason), ""))
    return next((reason for reason in found if reason), "")


def _why_not(group: EPGroup, rank: int, node: int, theirs: str, *, mine: str, visible: dict[str, int]) -> str:
    """Why this rank does not reach the GPU of another; that one finds out by itself whether it reaches this rank's."""
    pair = f"rank {group.rank} and rank {rank}"
    if node != group.node:
        return f"{pair} are on different machines"
    if rank == group.rank or group.device.type != "cuda":
        return ""
    if theirs == mine:
        return "" if shares_gpus() else f"{pair} share a GPU (EP_MOE_SHARED_GPU=1 allows it, for tests)"
    if theirs not in visible:
        return f"rank {group.rank} does not see the GPU of rank {rank} (CUDA_VISIBLE_DEVICES)"
    if not torch.cuda.can_device_access_peer(group.device, visible[theirs]):
        return f"the GPUs of {pair} have no peer access"
    return ""


class _Rendezvous(dist.Store):
    """The keys of one rendezvous of torch's symmetric memory; waits for them end when the group fails.

    torch numbers its exchanges by those that the process has made so far (`StoreExchange` in
    torch/csrc/distributed/c10d/symm_mem), of which a rank that has joined later has made fewer. Here each rank's first
    number is 0.

    Errors: PeerLostError; RuntimeError after the group's timeout.
    """

    def __init__(self, group: EPGroup) -> None:
        super().__init__()
        self._group, self._store = group, group.connect_store()
        self._numbers: dict[str, str] = {}

    def _own(self, key: str) -> str:
        parts = key.split("/")  # "CUDASymmetricMemory", the number, for some keys a rank
        place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            parts[place] = self._numbers.setdefault(parts[place], str(len(self._numbers)))
        return "/".join(parts)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub has str
        self._store.set(self._own(key), value)

    def add(self, key: str, value: int) -> int:
        found: int = self._store.add(self._own(key), value)
        return found

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._store.get(self._own(key)) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._store.check([self._own(key) for key in keys])
        return found

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        del timeout  # torch's own
        deadline = time.monotonic() + self._group.config.timeout_secs
        while not self.check(keys):
            self._group.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank has not mapped memory within {self._group.config.timeout_secs} s")
            time.sleep(1e-4)


@contextlib.contextmanager
def _registered(group: EPGroup) -> Iterator[Any]:
    """The name of a process group of these ranks for one rendezvous, with its own keys. Collective, no wait."""
    name: Any = f"ep_moe/{uuid.uuid4().hex}"
    store = _Rendezvous(group)
    process_group = dist.ProcessGroup(store, group.rank, group.num_ranks)
    torch._C._distributed_c10d._register_process_group(name, process_group)
    try:
        with group.explained():
            yield name
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)


class SymmetricBuffer:
    """A zero-initialized buffer of the same size on every rank of a group, mapped by all of them.

    Args:
        group: of ranks that reach each other (`why_unreachable`), on GPUs or CPUs.
        num_bytes: per rank; the same on all.

    Attributes:
        local: [num_bytes] uint8, this rank's part. addresses: of each rank's part as mapped here, by rank.
    Errors: RuntimeError if the machine lacks the memory. Collective.
    """

    def __init__(self, group: EPGroup, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._mapped: object = None
        if group.device.type == "cuda" and not group.alone:
            from torch.distributed import _symmetric_memory  # only on GPUs: the CPU has none

            if shares_gpus():
                switch_on("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
            with torch.cuda.device(group.device), _registered(group) as name:
                self.local = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=group.device)
                handle = _symmetric_memory.rendezvous(self.local, name)
            self._mapped, self.addresses = handle, tuple(handle.buffer_ptrs)
            self.local.zero_()
            torch.cuda.synchronize(group.device)
        elif group.alone:
            self.local = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device)
            self.addresses = (self.local.data_ptr(),) * group.num_ranks
        else:
            self._map_files(group, num_bytes)
        group.barrier()  # no rank stores before all buffers are zero

    def _map_files(self, group: EPGroup, num_bytes: int) -> None:
        path, error = os.path.join(SHARED_FOLDER, f"ep_moe_{uuid.uuid4().hex}"), ""
        paths = group.all_gather_object(path)  # first: the file of a rank that is lost has to be unlinked too
        try:
            try:
                with open(path, "xb", opener=_open_private) as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as cause:
                error = f"{SHARED_FOLDER} has no room for {num_bytes} bytes on rank {group.rank}: {cause}"
            broken = next(filter(None, group.all_gather_object(error)), "")
            if broken:
                raise RuntimeError(broken)
            parts = [torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p in paths]
            group.barrier()  # the files may be unlinked once all ranks have mapped them
        finally:
            for each in (path,) if group.failure is None else paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each)
        self._mapped, self.local = parts, parts[group.rank]
        self.addresses = tuple(part.data_ptr() for part in parts)

    def part(self, rank: int) -> torch.Tensor:
        """[num_bytes] uint8, the part of a rank as mapped here. Local."""
        if isinstance(self._mapped, list):
            mapped: torch.Tensor = self._mapped[rank]
            return mapped
        if self._mapped is None:
            return self.local
        handle: Any = self._mapped  # of torch's symmetric memory
        found: torch.Tensor = handle.get_buffer(rank, (self.local.numel(),), torch.uint8)
        return found

    def destroy(self) -> None:
        """Unmap all parts here; memory is freed once every rank has done so. Local; calling it twice is fine."""
        self._mapped, self.addresses = None, ()
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")
