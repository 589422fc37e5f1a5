"""A Triton driver without a GPU: launches compile and are recorded, nothing runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.jit import JITFunction

from compile_check.case import Target
from ep_moe.kernels.device import Device

SHARED_BYTES: dict[Target, int] = {  # of a block, with opt-in
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}


def limits_of(arch: Target) -> Device:
    """The limits of a GPU of sm_`arch`; numbers of SMs, registers and threads matter to launches alone."""
    return Device(
        capability=(9, 4 if arch == "gfx942" else 5) if isinstance(arch, str) else divmod(arch, 10),
        num_sms=132,
        shared_bytes=SHARED_BYTES[arch],
        registers=65536,
        threads=1536,
        hip=isinstance(arch, str),
    )


class StubDriver:
    """The driver's methods that Triton calls before a kernel is loaded."""

    def __init__(self, arch: Target) -> None:
        self.target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The only stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of the cases' tensors."""
        return torch.device("meta")


@dataclasses.dataclass(kw_only=True, slots=True)
class Recorder:
    """The launches and calls of jit functions since compilation was stubbed."""

    launches: list[tuple[JITFunction, Any]] = dataclasses.field(default_factory=list)  # with a CompiledKernel
    failures: list[tuple[JITFunction, Exception]] = dataclasses.field(default_factory=list)
    reached: dict[int, JITFunction] = dataclasses.field(default_factory=dict)  # by id: launched, or called from there
    launched: set[int] = dataclasses.field(default_factory=set)  # ids of all kernels whose launch was attempted
    idle: bool = False  # launches are noted, and do not compile


@contextlib.contextmanager
def compile_only(arch: Target) -> Iterator[Recorder]:
    """Make every launch in this block compile for sm_`arch`, in its limits, and not run; failed ones are recorded too.

    Triton's cache must be empty: a cached kernel is not compiled, so its calls of jit functions would not be recorded.
    """
    recorder = Recorder()
    run, call = JITFunction.run, CodeGenerator.call_JitFunction

    def run_stubbed(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        recorder.reached[id(kernel)] = kernel
        recorder.launched.add(id(kernel))
        if recorder.idle:
            return None
        try:
            if "enable_fp_fusion" not in kwargs:
                raise ValueError("the launch does not say enable_fp_fusion, and Triton 3.10 changes its default")
            compiled = run(kernel, *args, **{**kwargs, "warmup": True})
        except Exception as error:  # noqa: BLE001 - any error is reported, and the other kernels still compile
            recorder.failures.append((kernel, error))
            return None
        recorder.launches.append((kernel, compiled))
        return compiled

    def call_recorded(generator: CodeGenerator, callee: JITFunction, *args: Any, **kwargs: Any) -> Any:
        recorder.reached[id(callee)] = callee
        return call(generator, callee, *args, **kwargs)

    triton.runtime.driver.set_active(StubDriver(arch))
    JITFunction.run, CodeGenerator.call_JitFunction = run_stubbed, call_recorded
    try:
        with mock.patch.object(Device, "of", return_value=limits_of(arch)):
            yield recorder
    finally:
        JITFunction.run, CodeGenerator.call_JitFunction = run, call
