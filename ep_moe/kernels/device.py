"""Instructions of a GPU that Triton has no function for, and the limits of a GPU that launches depend on.

With `gemm/pairs` and `hopper/` the only inline assembly.
"""

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from ep_moe.kernels.numerics import INTERPRET

WARP = tl.constexpr(32)  # threads
SPREAD = tl.constexpr(8 * WARP)  # elements, at least one for each thread of a program of at most 8 warps
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
    def early_launch(self) -> bool:
        """Whether kernels may start before the kernel before them has ended, and wait for it by `wait_for_launch`."""
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


@triton.jit
def _only_on_cuda():
    """Refuse to compile: ranks wait for each other's stores by instructions that have never run on AMD GPUs."""
    tl.static_assert(not is_hip(), "this kernel is for NVIDIA GPUs: on others ranks exchange by collectives")


@triton.jit
def clock():
    """Nanoseconds of the GPU's timer; 0 under the interpreter."""
    if INTERPRET:
        return tl.full([], 0, tl.int64)
    _only_on_cuda()
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause():
    """Yield the SM to other warps for a moment, between two polls."""
    if not INTERPRET:
        _only_on_cuda()
        tl.inline_asm_elementwise("nanosleep.u32 40; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence():
    """Order all earlier accesses of this program before its later ones, for every rank.

    The barrier comes first, so that each thread's fence covers the stores of all threads.
    """
    if not INTERPRET:
        _only_on_cuda()
    tl.debug_barrier()
    if not INTERPRET:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_launch(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended, if this one may start early (programmatic dependent launch).

    Rule: nothing is read and nothing published before this.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_dependents_start():
    """Let the next kernel start if it may start early: it waits for this one before it reads what this one stores."""
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
