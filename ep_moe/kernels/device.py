"""Instructions of a GPU that Triton has no function for, and the limits of a GPU that launches depend on.

With `gemm/pairs` and `hopper/` the only inline assembly.
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from ep_moe.kernels.numerics import INTERPRET

WARP = tl.constexpr(32)  # threads
SPREAD = tl.constexpr(8 * WARP)  # elements, at least one for each thread of a program of at most 8 warps
EARLY_LAUNCH_CAPABILITY = (9, 0)  # programmatic dependent launch
_REGISTERS_OF_AN_SM = 65536  # if torch does not report it: the same on all GPUs since compute capability 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The limits of a GPU."""

    capability: tuple[int, int]
    num_sms: int
    registers: int  # of a multiprocessor (SM)
    threads: int  # that an SM holds at once

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> "Device":
        """The limits that CUDA reports for a GPU. Local."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            capability=(found.major, found.minor),
            num_sms=found.multi_processor_count,
            registers=getattr(found, "regs_per_multiprocessor", _REGISTERS_OF_AN_SM),
            threads=found.max_threads_per_multi_processor,
        )

    @property
    def early_launch(self) -> bool:
        """Whether kernels may start before the kernel before them has ended, and wait for it by `wait_for_launch`."""
        return self.capability >= EARLY_LAUNCH_CAPABILITY


@triton.jit
def clock():
    """Nanoseconds of the GPU's timer; 0 under the interpreter."""
    if INTERPRET:
        return tl.full([], 0, tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause():
    """Yield the SM to other warps for a moment, between two polls."""
    if not INTERPRET:
        tl.inline_asm_elementwise("nanosleep.u32 40; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence():
    """Order all earlier accesses of this program before its later ones, for every rank.

    The barrier comes first, so that each thread's fence covers the stores of all threads.
    """
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
    """Bring the sectors of these pointers into the L2 cache."""
    address = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def use(x):
    """Return x, float32, by an instruction that needs its values: the compiler waits for what computes them."""
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
