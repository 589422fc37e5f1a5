"""A kernel with the arguments that its launches share: compiled, loaded, launched."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ep_moe.kernel_launch.cuda_driver import DriverKernel, Launches, LaunchMismatchError
from ep_moe.kernel_launch.tensor_map import Address, address_of, is_descriptor
from ep_moe.kernels.device import Device

Tensors = tuple[Any, ...]  # tensors, tuples of them, or descriptors of them; None for those that are absent
Numbers = tuple[Any, ...]  # integers, or tuples of them
Run = Callable[[Sequence[int]], object]  # launches with addresses and numbers in one sequence
Group = TypeVar("Group", bound=tuple[Any, ...])
_MOST_COMPILERS = 8  # threads
_ahead = contextvars.ContextVar("compiling_ahead", default=False)
_log = logging.getLogger(__name__)


class Kernel:
    """The same kernel, grid and constants, launched with other tensors and numbers each time.

    On a GPU a launch skips Triton's front end and launcher: 24 us of host time instead of 76 for a dispatch, 12 instead
    of 37 for a combine (`Launches`).

    Args:
        kernel: takes `fixed`, then tensors in tuples or one by one, or their descriptors one by one, then numbers in
            tuples or one by one, then `settings`, then its constants.
            Numbers are not specialized, so one compiled kernel serves all launches whose tensors have the same dtypes,
            are aligned to 16 bytes, and are absent (None) in the same places. Others go through Triton.
        grid: programs, along one axis or several. options: of the compiler.
        fixed, settings: arguments that are the same in all launches; the compiler may specialize them.
        constants: of the kernel, by name: plain values, or NamedTuples of them (`as_constants`).
        prepare: called with the compiled kernel each time that it has been loaded, before its first launch.
        early: the kernel begins with `start_early`, or waits in its own way. A GPU that can starts it before the kernel
            ahead of it has ended (programmatic dependent launch).
        device: of the tensors. On a CPU (the interpreter, or compilation alone) every launch goes through Triton.

    Attributes:
        run: launches with the addresses of the tensors that are present and the numbers, in one sequence, once the
            kernel is loaded: from then on only addresses matter, not dtypes; None before that. Addresses are aligned
            to 16 bytes, or the kernel is not specialized by their alignment. On the current stream, no host sync.
        driver: the loaded kernel, for `Launches` of several; None if `run` goes through Triton's launcher.
    """

    def __init__(
        self,
        kernel: JITFunction,
        grid: int | tuple[int, ...],
        *,
        constants: dict[str, Any],
        device: torch.device,
        options: dict[str, Any] | None = None,
        fixed: tuple[Any, ...] = (),
        settings: tuple[int | float, ...] = (),
        prepare: Callable[[Any], None] | None = None,
        early: bool = False,
    ) -> None:
        self._kernel, self._fixed, self._settings = kernel, fixed, settings
        along = (grid,) if isinstance(grid, int) else grid
        self._grid: tuple[int, int, int] = (*along, 1, 1)[:3]  # type: ignore[assignment]
        self._constants = constants_of(kernel, constants)
        # Triton 3.10 changes the default of fusion, and with it the bits of results
        self._options = {"enable_fp_fusion": True, **Device.of(device).compiler_options, **(options or {})}
        if early and Device.of(device).early_launch and isinstance(kernel, JITFunction):  # not the interpreter's
            self._options["launch_pdl"] = True
        self._device, self._prepare = device, prepare
        self.run: Run | None = None
        self.driver: DriverKernel | None = None

    def compile(self, tensors: Tensors, numbers: Numbers = ()) -> Any:
        """Compile for arguments like these; returns Triton's CompiledKernel, which it keeps. Local."""
        arguments = _unspecialized(self._kernel, (*self._fixed, *tensors, *numbers, *self._settings))
        with self._on_device(), without_hooks():
            return self._kernel.warmup(*arguments, grid=self._grid, **self._constants, **self._options)

    def load(self, tensors: Tensors, numbers: Numbers = ()) -> None:
        """Load the compiled kernel onto the GPU without launching it. Local; may wait for the whole device."""
        compiled = self.compile(tensors, numbers)
        with self._on_device():
            run = compiled[self._grid]  # loads the kernel
            if self._prepare is not None:
                self._prepare(compiled)
        start = len(self._fixed)
        end = start + len(tensors) + len(numbers)
        current_stream = triton.runtime.driver.active.get_current_stream
        try:
            self.driver = DriverKernel(
                compiled,
                self._grid,
                (*self._fixed, *tensors, *numbers, *self._settings),
                changing=slice(start, end),
                device=self._device,
                current_stream=current_stream,
            )
            count = len(self.driver.changing)
            self.run = Launches([(self.driver, range(count))], count)
        except LaunchMismatchError as error:
            _log.info("launches go through Triton's launcher, which is slower: %s", error)
            # the kernel's parameters in their order: constants come last
            constants = [self._constants[name] for name in self._kernel.arg_names[end + len(self._settings) :]]
            tensors = _with_values(tensors, iter([0] * len(present(tensors))))  # which are absent, without their memory

            def run_by_triton(values: Sequence[int]) -> None:
                changing = _with_values((*tensors, *numbers), iter(values))
                with self._on_device():
                    stream = current_stream(self._device.index)
                    run(*self._fixed, *changing, *self._settings, *constants, stream=stream)

            self.run = run_by_triton

    def through_triton(self, tensors: Tensors, numbers: Numbers = ()) -> None:
        """Launch through Triton, which compiles anew for what it specializes on, on the current stream. Local.

        Without a GPU it only compiles, unless in the interpreter.
        """
        if isinstance(self._kernel, JITFunction) and self._device.type != "cuda":
            self.compile(tensors, numbers)
            return
        arguments = (*self._fixed, *tensors, *numbers, *self._settings)
        if self._prepare is not None and self._device.type == "cuda":
            self.load(tensors, numbers)  # of these arguments, which may be specialized otherwise
        with self._on_device(), without_hooks():
            self._kernel[self._grid](*arguments, **self._constants, **self._options)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Makes the GPU of the tensors the current one, which Triton launches on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def __call__(self, tensors: Tensors, numbers: Numbers = ()) -> None:
        """Launch on the current stream, but for `compiling_ahead`. Local, no host sync; the first call compiles and
        loads the kernel."""
        if _ahead.get():
            if self.run is None and isinstance(self._kernel, JITFunction):
                self.compile(tensors, numbers)
            return
        addresses = [*map(address_of, present(tensors))]
        if self._device.type != "cuda" or any(address % 16 for address in addresses):
            self.through_triton(tensors, numbers)
            return
        if self.run is None:
            self.load(tensors, numbers)
            assert self.run is not None
        self.run([*addresses, *present(numbers)])


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Compile unseen by others' hooks of compilations, such as vLLM's while it serves: Triton gives them a kernel's
    constants as JSON, and fails (3.6 to 3.8) if one is a group of constants."""
    runtime = triton.knobs.runtime
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    if hooks == (None, None):
        yield
        return
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """In the context, kernels that this thread calls are compiled, in other threads, and not launched: outputs keep
    what their memory has. All are compiled at its end. Errors: those of the compiler. Local."""
    pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1))
    before = _ahead.set(True)
    try:
        with without_hooks(), pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _ahead.reset(before)


def present(tensors: Tensors) -> list[Any]:
    """The tensors that are not absent (None), flattened. Local."""
    found: list[Any] = []
    for each in tensors:
        if isinstance(each, tuple):
            found += present(each)
        elif each is not None:
            found.append(each)
    return found


def _unspecialized(kernel: JITFunction, arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments like these to compile for.

    Triton specializes numbers in tuples, also of a parameter in `do_not_specialize`: in these, each is replaced by one
    of the same width that is neither 1 nor a multiple of 16.
    """

    def replaced(each: Any) -> Any:
        return each | 3 if isinstance(each, int) else each

    return [
        mapped(each, replaced) if isinstance(each, tuple) and parameter.do_not_specialize else each
        for parameter, each in zip(kernel.params, arguments, strict=False)
    ]


def mapped(nested: Any, function: Callable[[Any], Any]) -> Any:
    """The same tuples, named or not, with the function's result in place of each object that is not None. Local."""
    if isinstance(nested, tuple):
        found = [mapped(each, function) for each in nested]
        return type(nested)(*found) if hasattr(nested, "_fields") else tuple(found)
    return None if nested is None else function(nested)


def _with_values(arguments: Any, values: Iterator[int]) -> Any:
    """Values from an iterator in place of the arguments that are present, in the same tuples."""

    def replaced(each: Any) -> Any:
        if is_descriptor(each):
            return dataclasses.replace(each, base=Address(next(values), each.base.dtype))
        return next(values)

    return mapped(arguments, replaced)


def constants_of(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Constants by parameter, the NamedTuples among them as of `as_constants`. Local."""
    return {
        name: as_constants(value, kernel, name) if hasattr(value, "_fields") else value
        for name, value in constants.items()
    }


def as_constants(group: Group, kernel: Any, parameter: str) -> Group:
    """A group of plain values, such as TileShape(BLOCK_M=16, ...), as `kernel` takes it for this parameter.

    The compiler needs each field as a constexpr, or it would be a run-time number; so does the interpreter, except for
    a parameter that is annotated as `tl.constexpr`, whose fields it needs as they are.
    """
    if not isinstance(kernel, JITFunction) and kernel.fn.__annotations__.get(parameter) is tl.constexpr:
        return group
    return type(group)(*map(tl.constexpr, group))
