"""NVSHMEM's symmetric heap: memory that all ranks of a group allocate alike, on one machine or on several.

It is set up through nvshmem4py. A process starts NVSHMEM once, for one group of ranks, and does not end it: ending is
collective, and would wait for a lost rank. NVSHMEM 3.4.5, API reference; nvshmem4py 0.4.1. Letters: R ranks.
"""

import ctypes
import dataclasses
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ep_moe.environment import NvshmemEnv
from ep_moe.group.base import EPGroup

NVSHMEM_VERSION = "3.4.5"
DEVICE_LIBRARY = "libnvshmem_device"
START_SECS = 60.0  # at least, for all ranks to start NVSHMEM: ranks that are lost are noticed earlier
_ALIGNMENT_BYTES = 1024  # of a buffer's size
_UNIQUE_ID_BYTES = 128  # nvshmemx_uniqueid_v1
_POLL_SECS = 5e-3
_INSTALL = "pip install 'ep-moe[nvshmem-cu13]' (or nvshmem-cu12)"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _DeviceMemory:
    """Memory of a GPU by its address, as torch.as_tensor takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@dataclasses.dataclass(slots=True)
class _Started:
    """NVSHMEM, as this process has started it."""

    token: str  # the same on all its ranks
    rank: int
    num_ranks: int
    library: Path  # of device code
    allocated: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # number -> address, bytes
    released: set[int] = dataclasses.field(default_factory=set)  # numbers of buffers that this rank has destroyed
    count: int = 0  # of allocations, the same on all ranks


_started: _Started | None = None
_prepared: "weakref.WeakSet[Any]" = weakref.WeakSet()  # kernels that have NVSHMEM's state


def why_no_nvshmem() -> str:
    """The reason why this process cannot start NVSHMEM, "" if it can. Local."""
    try:
        import nvshmem.core
    except (ImportError, OSError, RuntimeError) as error:
        return f"nvshmem4py is not installed or does not load ({error}): {_INSTALL}"
    try:
        version = str(nvshmem.core.get_version().libnvshmem_version)
    except Exception as error:  # noqa: BLE001 - a library that is absent or broken is reported in many ways
        return f"NVSHMEM {NVSHMEM_VERSION} is not installed or does not load ({error}): {_INSTALL}"
    if version != NVSHMEM_VERSION:
        return f"NVSHMEM is version {version}, and only {NVSHMEM_VERSION} is supported: {_INSTALL}"
    library = _device_library()
    return "" if library.is_file() else f"NVSHMEM's device code is missing, {library} does not exist: {_INSTALL}"


def check_nvshmem(group: EPGroup) -> None:
    """Check that all ranks can start NVSHMEM. Errors: RuntimeError says which rank cannot, and why. Collective."""
    of_ranks = group.all_gather_object(why_no_nvshmem())
    for rank, reason in enumerate(of_ranks):
        if reason:
            raise RuntimeError(f"transport 'nvshmem' cannot run on rank {rank}: {reason}")


def _device_library() -> Path:
    """NVSHMEM's device code as LLVM bitcode, beside the library that is loaded. Local."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return Path(str(load_nvidia_dynamic_lib("nvshmem_host").abs_path)).parent / f"{DEVICE_LIBRARY}.bc"


class NvshmemBuffer:
    """A zero-initialized buffer of the same size on every rank of a group, in NVSHMEM's symmetric heap.

    Args:
        group: of GPU ranks; all buffers of a process belong to groups of the same ranks.
        num_bytes: per rank; the same on all.

    Attributes:
        local: [num_bytes] uint8, this rank's part. addresses: of each rank's part as mapped here, 0 for a rank that is
            reached by puts alone. libraries: device code that kernels with puts link, name -> file.
    Errors: RuntimeError if a rank lacks NVSHMEM or memory, or NVSHMEM was started for other ranks; ValueError for a bad
    environment variable; PeerLostError. All ranks raise, before anything is allocated. Collective.
    """

    def __init__(self, group: EPGroup, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._started = _start(group)
        _free_released(group, self._started)
        self.libraries = {DEVICE_LIBRARY: str(self._started.library)}
        self._number, address = _allocate(group, self._started, num_bytes)
        bindings = _bindings()
        self.addresses = tuple(int(bindings.ptr(address, rank)) for rank in range(group.num_ranks))
        self.local = torch.as_tensor(_DeviceMemory(address, num_bytes), device=group.device)
        if self.local.data_ptr() != address:
            raise RuntimeError(f"torch copied NVSHMEM's memory at {address:#x} to {self.local.data_ptr():#x}")
        self.local.zero_()
        torch.cuda.synchronize(group.device)
        group.barrier()  # no rank stores before all buffers are zero

    @staticmethod
    def prepare(compiled: Any) -> None:
        """Give a kernel that has been loaded NVSHMEM's state, before its first launch. Local; may wait for the GPU."""
        if compiled in _prepared:
            return
        status = _bindings().cumodule_init(compiled.module)
        if status:
            raise RuntimeError(f"NVSHMEM cannot initialize a kernel's module (status {status})")
        _prepared.add(compiled)

    def destroy(self) -> None:
        """Give this part up; memory is freed by the next buffer that is made once every rank has. Local, repeatable."""
        self.addresses = ()
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._started.released.add(self._number)


def _bindings() -> Any:
    import nvshmem.bindings

    return nvshmem.bindings


def _start(group: EPGroup) -> _Started:
    """Start NVSHMEM for these ranks, or check that it runs for them. Errors: RuntimeError. Collective."""
    global _started
    mine = None if _started is None else (_started.token, _started.rank, _started.num_ranks)
    of_ranks = group.all_gather_object(mine)
    if any(of_ranks):
        token = next(each for each in of_ranks if each)[0]
        if of_ranks != [(token, rank, group.num_ranks) for rank in range(group.num_ranks)]:
            raise RuntimeError(
                f"NVSHMEM was started for other ranks than the {group.num_ranks} of this group: a process starts it "
                "once, for one group of ranks"
            )
        assert _started is not None
        return _started
    import nvshmem.core
    from cuda.core import Device

    uid = nvshmem.core.get_unique_id(empty=group.rank != 0)
    content = ctypes.string_at(uid.ptr, _UNIQUE_ID_BYTES)
    content, token = group.all_gather_object((content, uuid.uuid4().hex))[0]
    ctypes.memmove(uid.ptr, content.ljust(_UNIQUE_ID_BYTES), _UNIQUE_ID_BYTES)
    index = group.device.index or 0

    def start() -> None:
        device = Device(index)
        device.set_current()
        nvshmem.core.init(device=device, uid=uid, rank=group.rank, nranks=group.num_ranks, initializer_method="uid")

    _collectively(group, "start of NVSHMEM", start)
    _started = _Started(token, group.rank, group.num_ranks, _device_library())
    return _started


def _free_released(group: EPGroup, started: _Started) -> None:
    """Free the buffers that every rank has destroyed. Collective."""
    of_ranks = group.all_gather_object(frozenset(started.released))
    for number in sorted(frozenset.intersection(*of_ranks)):
        address, _ = started.allocated[number]
        _collectively(group, "nvshmem_free", lambda address=address: _bindings().free(address))  # type: ignore[misc]
        del started.allocated[number]
        started.released.discard(number)


def _allocate(group: EPGroup, started: _Started, num_bytes: int) -> tuple[int, int]:
    """Allocate on every rank; returns the allocation's number and its address here. Collective."""
    mine = "", ""
    try:
        mine = "RuntimeError", _why_too_small(group, started, num_bytes)
    except ValueError as error:
        mine = "ValueError", str(error)
    kind, reason = next((each for each in group.all_gather_object(mine) if each[1]), mine)
    if reason:
        raise (ValueError if kind == "ValueError" else RuntimeError)(reason)
    address = _collectively(group, "nvshmem_malloc", lambda: int(_bindings().malloc(num_bytes)))
    failed = [rank for rank, done in enumerate(group.all_gather_object(bool(address))) if not done]
    if failed:
        names = " and ".join(f"rank {rank}" for rank in failed)
        raise RuntimeError(f"NVSHMEM's symmetric heap has no room for {num_bytes} bytes on {names}")
    started.count += 1
    started.allocated[started.count] = address, num_bytes
    return started.count, address


def _why_too_small(group: EPGroup, started: _Started, num_bytes: int) -> str:
    """The reason why a rank's heap cannot hold a buffer, "" if it can. Local.

    Errors: ValueError for a bad environment variable.
    """
    env = NvshmemEnv.from_environ()
    used = sum(size for _, size in started.allocated.values())
    needs = f"transport 'nvshmem' needs {num_bytes} bytes of NVSHMEM's symmetric heap on rank {group.rank}"
    if used + num_bytes > env.heap_bytes:
        return (
            f"{needs}, beside {used} in use, which exceeds its limit of {env.heap_bytes} (environment variable "
            f"{env.variable})"
        )
    free, total = torch.cuda.mem_get_info(group.device) if group.device.type == "cuda" else (num_bytes, num_bytes)
    if num_bytes > free:
        return f"{needs}, and its GPU has {free} of {total} bytes free"
    return ""


def _collectively(group: EPGroup, phase: str, call: Callable[[], T]) -> T:
    """Make a call of NVSHMEM that waits for all ranks, in a thread: it has no timeout of its own.

    Errors: PeerLostError names the ranks that are lost, or that do not come within the timeout; the thread is left
    behind. Collective.
    """
    done = threading.Event()
    outcome: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            if group.device.type == "cuda":
                torch.cuda.set_device(group.device)
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
        done.set()

    group.check()
    round_ = group._next_round(phase)  # so that a rank that was here for an earlier call is found missing
    threading.Thread(target=run, name="ep_moe-nvshmem", daemon=True).start()
    deadline = time.monotonic() + max(group.config.timeout_secs, START_SECS)
    with group.waiting(phase, round_):
        while not done.wait(_POLL_SECS):
            group.check()
            if time.monotonic() > deadline:
                ranks, reason = group.find_missing(phase, round_)
                raise group.blame(ranks, phase, None, reason)
    if errors:
        raise RuntimeError(f"{phase} failed on rank {group.rank}: {errors[0]}") from errors[0]
    return outcome[0]
