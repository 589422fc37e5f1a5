"""A Triton driver of a GPU that is not there: launches compile and are written down, nothing runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.jit import JITFunction


class StubDriver:
    """Answers what Triton asks of a driver before a kernel is loaded."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The only stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of cases are."""
        return torch.device("meta")


@dataclasses.dataclass(kw_only=True, slots=True)
class Recorder:
    """What has been launched and called since compilation was stubbed."""

    launches: list[tuple[JITFunction, Any]] = dataclasses.field(default_factory=list)  # with a CompiledKernel
    failures: list[tuple[JITFunction, Exception]] = dataclasses.field(default_factory=list)
    reached: dict[int, JITFunction] = dataclasses.field(default_factory=dict)  # by id: launched, or called from there

    @property
    def launched(self) -> set[int]:
        """The ids of all kernels whose launch was tried."""
        return {id(kernel) for kernel, _ in (*self.launches, *self.failures)}


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[Recorder]:
    """Make every launch in this block compile for sm_`arch` and not run; one that fails is written down too.

    Triton must start with an empty cache: what it finds there it does not translate, and what that calls goes unseen.
    """
    recorder = Recorder()
    run, call = JITFunction.run, CodeGenerator.call_JitFunction

    def run_stubbed(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        recorder.reached[id(kernel)] = kernel
        try:
            compiled = run(kernel, *args, **{**kwargs, "warmup": True})
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the other kernels still compile
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
        yield recorder
    finally:
        JITFunction.run, CodeGenerator.call_JitFunction = run, call
