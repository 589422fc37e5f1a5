"""Instructions of a GPU that Triton has no function for, and the limits of a GPU that launches depend on.

With `gemm/pairs` and `hopper/` the only inline assembly.
"""

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_hip

from ep_moe.kernels.numerics import INTERPRET

FP8_CAPABILITY = (8, 9)  # conversions to and from e4m3, and products of it
EARLY_LAUNCH_CAPABILITY = (9, 0)  # programmatic dependent launch
_WARP_GROUP_MAJORS = (9, 10, 11)  # 12 has the instructions of 8.9 and those of TMA
_REGISTERS_OF_AN_SM = 65536  # if torch does not report it: the same on all GPUs since compute capability 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The limits of a GPU, and the instructions that it lacks."""

    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int  # of a thread block, at most
    registers: int  # of a multiprocessor (SM)
    threads: int  # that an SM holds at once
    hip: bool = False  # an AMD GPU, whose capability says nothing about instructions

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> "Device":
        """The limits that CUDA or HIP reports for a GPU; of any other device those of Triton's interpreter. Local."""
        if device.type != "cuda":
            return _INTERPRETER
        found = torch.cuda.get_device_properties(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(
            capability=(found.major, found.minor),
            num_sms=found.multi_processor_count,
            shared_bytes=triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"],
            registers=getattr(found, "regs_per_multiprocessor", _REGISTERS_OF_AN_SM),
            threads=found.max_threads_per_multi_processor,
            hip=torch.version.hip is not None,
        )

    @property
    def warp_size(self) -> int:
        """Threads of a warp, 64 on AMD's GPUs for data centers."""
        return 64 if self.hip else 32

    @property
    def early_launch(self) -> bool:
        """Whether kernels may start before the kernel before them has ended, and wait for it by `start_early`."""
        return not self.hip and self.capability >= EARLY_LAUNCH_CAPABILITY

    @property
    def fp8(self) -> bool:
        """Whether it has instructions for e4m3; else kernels convert it by integers, and multiply it as float16."""
        return not self.hip and self.capability >= FP8_CAPABILITY

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton for all kernels: e4m3 is a type of memory also where it has no instructions."""
        return {} if self.fp8 or self.hip else {"supported_fp8_dtypes": ("fp8e4nv",)}

    @property
    def warp_groups(self) -> bool:
        """Whether tensor cores read operands from shared memory (wgmma, tcgen05), not from registers (mma.sync)."""
        return not self.hip and self.capability[0] in _WARP_GROUP_MAJORS

    @property
    def lacking(self) -> list[str]:
        """The instructions that it lacks and that kernels use on other GPUs, in words."""
        found = {"fp8": self.fp8, "early launch": self.early_launch, "wgmma or tcgen05": self.warp_groups}
        return [name for name, has in found.items() if not has]


# no limit of shared memory, and all of Triton's types
_INTERPRETER = Device(
    capability=EARLY_LAUNCH_CAPABILITY, num_sms=4, shared_bytes=1 << 40, registers=_REGISTERS_OF_AN_SM, threads=2048
)


@triton.constexpr_function
def warp_size():
    """`Device.warp_size` of the GPU that a kernel is compiled for."""
    return 64 if not INTERPRET.value and is_hip() else 32  # the interpreter has no GPU to ask, which takes its time


@triton.constexpr_function
def spread():
    """Elements, at least one for each thread of a program of at most 8 warps."""
    return 8 * warp_size()


@triton.constexpr_function
def newest():
    """The cache modifier of a volatile load, which AMD's compiler takes from the caches without one."""
    return ".cv" if not INTERPRET.value and is_hip() else ""


@triton.jit
def _machine(CUDA: tl.constexpr, HIP: tl.constexpr):
    """Run instructions of NVIDIA's GPUs, or of AMD's, in the order of the accesses around them."""
    if is_hip():
        tl.inline_asm_elementwise(HIP, "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise(CUDA, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clock():
    """Nanoseconds of the GPU's timer; 0 under the interpreter. AMD's counts 100 MHz."""
    if INTERPRET:
        return tl.full([], 0, tl.int64)
    if is_hip():
        return 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause():
    """Yield the SM to other warps for a moment, between two polls."""
    if not INTERPRET:
        _machine("nanosleep.u32 40; mov.u32 $0, 0;", "s_sleep 1\nv_mov_b32 $0, 0")


@triton.jit
def fence():
    """Order all earlier accesses of this program before its later ones, for every rank.

    The barrier comes first, so that each thread's fence covers the stores of all threads. AMD's writes the L2 cache
    back, waits, and drops what the caches hold of other GPUs' memory (LLVM's memory model of gfx942).
    """
    tl.debug_barrier()
    if not INTERPRET:
        _machine(
            "fence.acq_rel.sys; mov.u32 $0, 0;",
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0) lgkmcnt(0)\nbuffer_inv sc0 sc1\nv_mov_b32 $0, 0",
        )


@triton.constexpr_function
def _launches_early():
    """`Device.early_launch` of the GPU that a kernel is compiled for."""
    return not INTERPRET.value and cuda_capability_geq(*EARLY_LAUNCH_CAPABILITY)


@triton.jit
def start_early():
    """The first statement of a kernel of `Kernel(early=True)`: wait until the kernel before this one has ended.

    Rule: nothing is read and nothing published before this.
    """
    if _launches_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_dependents_start():
    """Let the next kernel start if it may start early: it waits for this one before it reads what this one stores."""
    if _launches_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch(pointers):
    """Bring the sectors of these pointers into the L2 cache, on NVIDIA's GPUs."""
    if not is_hip():
        address = pointers.to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def use(x):
    """Return x, float32, by an instruction that needs its values: the compiler waits for what computes them."""
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
