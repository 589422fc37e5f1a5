"""A kernel that is launched repeatedly, with the arguments that its launches share."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ep_moe.kernel_launch.constants import as_constants
from ep_moe.kernel_launch.cuda_driver import DriverLaunch, LaunchMismatchError

Tensors = tuple[tuple[torch.Tensor, ...], ...]  # one inner tuple for each tuple that the kernel takes
_log = logging.getLogger(__name__)


class RepeatedLaunch:
    """The same kernel, grid and constants, launched with other tensors and numbers each time.

    On a GPU a launch skips Triton's front end and launcher: 24 us of host time instead of 76 for a dispatch, 12 instead
    of 37 for a combine (`DriverLaunch`).

    Args:
        kernel: takes `fixed`, then tuples of tensors, then numbers, then its constants. Every pointer is aligned to 16
            bytes and no number is specialized, so that one compiled kernel serves all launches.
        grid: programs. options: of the compiler.
        constants: of the kernel, by name: plain values, or NamedTuples of them (`as_constants`).
        device: of the tensors. On a CPU (the interpreter, or compilation alone) every launch goes through Triton.
    """

    def __init__(
        self,
        kernel: JITFunction,
        grid: int,
        *,
        fixed: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._kernel, self._grid, self._fixed = kernel, grid, fixed
        self._constants = {
            name: as_constants(value, kernel) if hasattr(value, "_fields") else value
            for name, value in constants.items()
        }
        self._options, self._device = options, device
        self._run: Callable[[list[int], int], None] | None = None
        self._current_stream: Callable[[int | None], int] = _no_stream

    @property
    def loaded(self) -> bool:
        """Whether the kernel is loaded: from then on only the addresses of tensors matter, not their dtypes."""
        return self._run is not None

    def compile(self, tensors: Tensors, numbers: tuple[int, ...]) -> Any:
        """Compile for arguments like these; returns Triton's CompiledKernel, which it keeps. Local."""
        arguments = (*self._fixed, *tensors, *numbers)
        return self._kernel.warmup(*arguments, grid=(self._grid,), **self._constants, **self._options)

    def load(self, tensors: Tensors, numbers: tuple[int, ...]) -> None:
        """Load the compiled kernel onto the GPU without launching it. Local; may wait for the whole device."""
        compiled = self.compile(tensors, numbers)
        self._current_stream = triton.runtime.driver.active.get_current_stream
        run = compiled[(self._grid, 1, 1)]  # loads the kernel
        num_last = sum(map(len, tensors)) + len(numbers)
        try:
            arguments = (*self._fixed, *tensors, *numbers)
            self._run = DriverLaunch(compiled, self._grid, arguments, num_last=num_last, device=self._device)
        except LaunchMismatchError as error:
            _log.info("launches go through Triton's launcher, which is slower: %s", error)
            sizes = [len(group) for group in tensors]
            constants = self._constants_in_order(len(self._fixed) + len(sizes) + len(numbers))

            def run_by_triton(last: list[int], stream: int) -> None:
                rest, groups = last, []
                for size in sizes:
                    groups.append(tuple(rest[:size]))
                    rest = rest[size:]
                run(*self._fixed, *groups, *rest, *constants, stream=stream)

            self._run = run_by_triton

    def _constants_in_order(self, given: int) -> list[Any]:
        """The constants in the kernel's order; the first `given` parameters of the kernel are no constants."""
        return [self._constants[name] for name in self._kernel.arg_names[given:]]

    def __call__(self, tensors: Tensors, numbers: tuple[int, ...]) -> None:
        """Launch on the current stream. Local, no host sync; the first call compiles and loads the kernel."""
        if self._run is None:
            if self._device.type != "cuda":
                self._kernel[(self._grid,)](*self._fixed, *tensors, *numbers, **self._constants, **self._options)
                return
            self.load(tensors, numbers)
            assert self._run is not None
        last = [tensor.data_ptr() for group in tensors for tensor in group]
        last += numbers
        self._run(last, self._current_stream(self._device.index))


def _no_stream(device: int | None) -> int:
    raise RuntimeError("the kernel is not loaded yet")
