"""NVSHMEM's heap with a stand-in for nvshmem4py: errors before anything is allocated, lost ranks, memory that is freed.

The transport itself runs in the interpreter (`nvlink/test_puts.py`) and on GPUs (below).
"""

import ctypes
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.environment import NvshmemEnv
from ep_moe.group import EPGroup, PeerLostError, nvshmem_heap
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from ep_moe.transport import create_transport

TESTS = Path(__file__).parent.parent
SIZES = TransportConfig(hidden=16, max_tokens_per_rank=1)


class FakeLibrary:
    """What `nvshmem_heap` calls of nvshmem4py, cuda.core and cuda.pathfinder, in this process."""

    def __init__(self, folder: Path, version: str = "3.4.5", full: bool = False, hangs: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._full, self._hangs = full, hangs
        (folder / "libnvshmem_device.bc").touch()
        core = types.SimpleNamespace(
            get_version=lambda: types.SimpleNamespace(libnvshmem_version=version),
            get_unique_id=self.unique_id,
            init=self.init,
        )
        bindings = types.SimpleNamespace(malloc=self.malloc, free=lambda at: self.calls.append(("free", at)))
        device = types.SimpleNamespace(set_current=lambda: None)
        library = types.SimpleNamespace(abs_path=str(folder / "libnvshmem_host.so.3"))
        self.modules: dict[str, Any] = {
            "nvshmem": types.SimpleNamespace(core=core, bindings=bindings),
            "nvshmem.core": core,
            "nvshmem.bindings": bindings,
            "cuda": types.ModuleType("cuda"),
            "cuda.core": types.SimpleNamespace(Device=lambda index: device),
            "cuda.pathfinder": types.SimpleNamespace(load_nvidia_dynamic_lib=lambda name: library),
        }

    def unique_id(self, empty: bool) -> Any:
        """An id of 128 bytes at `ptr`, as that of nvshmem4py."""
        memory = ctypes.create_string_buffer(b"none" if empty else b"of rank 0", 128)
        return types.SimpleNamespace(ptr=ctypes.addressof(memory), memory=memory)

    def init(self, **options: Any) -> None:
        """Start, or wait for ranks that do not come."""
        self.calls.append(("init", options["uid"].memory.value, options["rank"], options["nranks"]))
        if self._hangs:
            threading.Event().wait(100)

    def malloc(self, size: int) -> int:
        """An address, the same on all ranks; 0 if the heap is full."""
        self.calls.append(("malloc", size))
        return 0 if self._full else 4096 * len(self.calls)

    def install(self) -> "FakeLibrary":
        """Let this process import it."""
        sys.modules.update(self.modules)
        return self


def on_ranks(check: Any, *args: Any, config: GroupConfig | None = None) -> list[Any]:
    """Run `check(group, *args)` on two CPU ranks."""
    return launch(check, *args, num_ranks=2, config=config or GroupConfig(timeout_secs=30), device="cpu")


def said_by(call: Any, *args: Any) -> str:
    """The error of a call."""
    try:
        call(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def find_on_rank(group: EPGroup, folder: Path) -> list[str]:
    """What `check_nvshmem` says: nothing installed on rank 1, another version there, no device code there, all well."""
    missing = folder / "missing"
    missing.mkdir(exist_ok=True)
    said = []
    if group.rank == 0:
        FakeLibrary(folder).install()
    said.append(said_by(nvshmem_heap.check_nvshmem, group))
    for version, there in (("3.8.0", folder), ("3.4.5", missing), ("3.4.5", folder)):
        library = FakeLibrary(there, version if group.rank == 1 else "3.4.5").install()
        if there == missing:
            (missing / "libnvshmem_device.bc").unlink(missing_ok=True)
            group.barrier()
        said.append(said_by(nvshmem_heap.check_nvshmem, group))
        assert library.calls == []
    return said


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is not None, reason="nvshmem4py is installed")
def test_what_is_missing_is_said_by_all_ranks(tmp_path: Path) -> None:
    said, others = on_ranks(find_on_rank, tmp_path)
    assert said == others
    absent, version, device_code, nothing = said
    assert absent.startswith("transport 'nvshmem' cannot run on rank 1: nvshmem4py is not installed")
    assert (
        "rank 1: NVSHMEM is version 3.8.0, and only 3.4.5 is supported: pip install 'ep-moe[nvshmem-cu13]'" in version
    )
    assert "NVSHMEM's device code is missing" in device_code
    assert nothing == ""


def allocate_on_rank(group: EPGroup, folder: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The errors of allocations that a heap does not hold, and all calls of the library."""
    library = FakeLibrary(folder).install()
    started, said = nvshmem_heap._start(group), []
    assert nvshmem_heap._start(group) is started
    number, _ = nvshmem_heap._allocate(group, started, 3000)
    if group.rank == 1:
        os.environ["NVSHMEM_MAX_MEMORY_PER_GPU"] = "4K"
    said.append(said_by(nvshmem_heap._allocate, group, started, 2000))
    if group.rank == 1:
        os.environ["NVSHMEM_MAX_MEMORY_PER_GPU"] = "much"
    said.append(said_by(nvshmem_heap._allocate, group, started, 2000))
    os.environ.pop("NVSHMEM_MAX_MEMORY_PER_GPU", None)
    library._full = group.rank == 0
    said.append(said_by(nvshmem_heap._allocate, group, started, 2000))
    library._full = False
    if group.rank == 0:
        started.released.add(number)
    nvshmem_heap._free_released(group, started)  # rank 1 still has it
    started.released.add(number)
    nvshmem_heap._free_released(group, started)
    nvshmem_heap._free_released(group, started)
    started.num_ranks = 3
    said.append(said_by(nvshmem_heap._start, group))
    return said, library.calls


def test_a_heap_that_is_too_small_allocates_nothing(tmp_path: Path) -> None:
    (said, calls), (others, other_calls) = on_ranks(allocate_on_rank, tmp_path)
    assert said == others
    small, bad, full, other_ranks = said
    assert small == (
        "transport 'nvshmem' needs 2000 bytes of NVSHMEM's symmetric heap on rank 1, beside 3000 in use, which exceeds "
        "its limit of 4096 (environment variable NVSHMEM_MAX_MEMORY_PER_GPU)"
    )
    assert bad == "environment variable NVSHMEM_MAX_MEMORY_PER_GPU ('much') is not a number of bytes"
    assert full == "NVSHMEM's symmetric heap has no room for 2000 bytes on rank 0"
    assert other_ranks.startswith("NVSHMEM was started for other ranks than the 2 of this group")
    # the full heap was asked; the memory is freed once, when both have given it up
    assert calls == [("init", b"of rank 0", 0, 2), ("malloc", 3000), ("malloc", 2000), ("free", 8192)]
    assert other_calls == [("init", b"of rank 0", 1, 2), *calls[1:]]


@pytest.mark.parametrize(
    ("environ", "limit", "variable"),
    [
        ({}, 128 * 2**30, "NVSHMEM_MAX_MEMORY_PER_GPU"),
        ({"NVSHMEM_MAX_MEMORY_PER_GPU": "1.5g"}, 3 * 2**29, "NVSHMEM_MAX_MEMORY_PER_GPU"),
        ({"NVSHMEM_DISABLE_CUDA_VMM": "1"}, 2**30, "NVSHMEM_SYMMETRIC_SIZE"),
        ({"NVSHMEM_DISABLE_CUDA_VMM": "true", "NVSHMEM_SYMMETRIC_SIZE": "512M"}, 2**29, "NVSHMEM_SYMMETRIC_SIZE"),
    ],
)
def test_the_heaps_limit(environ: dict[str, str], limit: int, variable: str) -> None:
    assert NvshmemEnv.from_environ(environ) == NvshmemEnv(variable=variable, heap_bytes=limit)


def wait_for_the_lost(group: EPGroup, folder: Path, how: str) -> None:
    """Rank 1 is lost before it starts NVSHMEM; rank 0 records the error and the time."""
    FakeLibrary(folder, hangs=True).install()
    if group.rank == 1:
        nvshmem_heap._collectively = lambda *_: (
            time.sleep(100) if how == "stuck" else os.kill(os.getpid(), signal.SIGKILL)
        )
    start = time.monotonic()
    try:
        nvshmem_heap.START_SECS = 0.0
        nvshmem_heap._start(group)
    except PeerLostError as error:
        (folder / "said").write_text(f"{error.ranks} {time.monotonic() - start}")
        raise


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_a_rank_that_is_lost_meanwhile_is_named(tmp_path: Path, how: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        on_ranks(wait_for_the_lost, tmp_path, how, config=GroupConfig(timeout_secs=3, heartbeat_secs=0.25))
    assert caught.value.rank == 1
    ranks, secs = (tmp_path / "said").read_text().rsplit(" ", 1)
    assert ranks == "(1,)"
    assert float(secs) < 6


def wait_again_for_the_stuck(group: EPGroup, folder: Path) -> None:
    """Rank 1 comes to the first allocation and not to the second; rank 0 records the error."""
    library = FakeLibrary(folder).install()
    started = nvshmem_heap._start(group)
    nvshmem_heap._allocate(group, started, 3000)
    if group.rank == 1:
        nvshmem_heap._collectively = lambda *_: time.sleep(100)
    library.modules["nvshmem.bindings"].malloc = lambda _: threading.Event().wait(100)
    try:
        nvshmem_heap.START_SECS = 0.0
        nvshmem_heap._allocate(group, started, 3000)
    except PeerLostError as error:
        (folder / "said").write_text(f"{error.ranks}")
        raise


def test_a_rank_that_came_to_an_earlier_allocation_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        on_ranks(wait_again_for_the_stuck, tmp_path, config=GroupConfig(timeout_secs=2, heartbeat_secs=0.25))
    assert caught.value.rank == 1
    assert (tmp_path / "said").read_text() == "(1,)"


def map_without_an_address(group: EPGroup) -> str:
    """The error of memory in which rank 0 has no address of rank 1's part."""
    from ep_moe.group.symmetric import SymmetricBuffer
    from ep_moe.transport.one_sided.memory import PeerMemory, ranks_of, regions_of

    def make(group: EPGroup, num_bytes: int) -> SymmetricBuffer:
        buffer = SymmetricBuffer(group, num_bytes)
        if group.rank == 0:
            buffer.addresses = (buffer.addresses[0], 0)
        return buffer

    ranks = ranks_of(Placement.linear(4, 2), group.rank)
    return said_by(lambda: PeerMemory(group, regions_of(SIZES, ranks), 1, make_buffer=make))


def test_a_peer_without_an_address_is_an_error_on_every_rank() -> None:
    pytest.importorskip("triton")
    expected = "rank 0 has no address of the memory of rank 1, and is to store there"
    assert on_ranks(map_without_an_address) == [expected] * 2


def test_on_a_cpu_it_says_what_it_needs() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="transport 'nvshmem' on a CPU needs TRITON_INTERPRET=1"):
        create_transport("nvshmem", EPGroup.single("cpu"), Placement.linear(8, 1), SIZES)
    with pytest.raises(ValueError, match=r"nvshmem_stores \('get'\) is not one of auto, addresses, puts"):
        dataclasses.replace(SIZES, nvshmem_stores="get")


def device_code() -> Path | None:
    """NVSHMEM's device code, if its wheel is installed."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        found = None
    files = (
        [Path(folder) / "lib/libnvshmem_device.bc" for folder in (found.submodule_search_locations or ())]
        if found
        else []
    )
    return next((file for file in files if file.is_file()), None)


COMPILED = r"""
import re, sys
from compile_check.exchange_cases import small_round
from compile_check.stub import compile_only
with compile_only(int(sys.argv[1])) as recorder:
    small_round(device_code=sys.argv[2]).launch()
for _, error in recorder.failures:
    raise error
for kernel, compiled in recorder.launches:
    ptx = compiled.asm["ptx"]
    state = "nvshmemi_device_state_d" in ptx
    absent = re.findall(r"\.extern \.func [^;]*nvshmem\w*", ptx)
    print(kernel.fn.__name__, len(compiled.asm["cubin"]) > 0, state, len(absent))
"""


@pytest.mark.parametrize("target", [90, 100])
def test_kernels_with_puts_compile(target: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    library = device_code()
    if library is None:
        pytest.skip("NVSHMEM's device code is not installed: pip install --no-deps nvidia-nvshmem-cu13==3.4.5")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED, str(target), str(library)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    found = [line.split() for line in done.stdout.splitlines()]
    wanted = [[kernel, "True", "True", "0"] for kernel in ("_dispatch_kernel", "_combine_kernel")]
    assert found == wanted, done.stderr[-3000:]


NUM_GPUS = num_gpu_ranks()
ON_TWO_GPUS = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, there are {NUM_GPUS}"),
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed"),
    pytest.mark.timeout(1800),  # every scheme and layout compiles its own kernels
]


NUM_SHARES = 6  # most of the time is compilation


def check_on_rank(group: EPGroup, stores: str, share: tuple[int, int]) -> dict[str, str]:
    """A share of all checks of the transport on this rank."""
    from ep_moe.testing import check_transport
    from ep_moe.transport.one_sided import NvshmemTransport

    def make(group: EPGroup, placement: Placement, config: TransportConfig) -> Any:
        return NvshmemTransport(group, placement, dataclasses.replace(config, nvshmem_stores=stores))

    return check_transport(make, group, share=share)


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("stores", [pytest.param(stores, marks=ON_TWO_GPUS) for stores in ("addresses", "puts")])
def test_carries_every_case(stores: str, share: int) -> None:
    config, part = GroupConfig(timeout_secs=120), (share, NUM_SHARES)
    outcomes = launch(check_on_rank, stores, part, num_ranks=2, config=config, device="cuda")
    assert [text for said in outcomes for text in said.values() if text] == []
    assert len(outcomes[0]) > 40 // NUM_SHARES
