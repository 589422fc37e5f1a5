"""A kernel with the constants of its launches: the first compiles it, the others go round Triton's front end.

The front end looks at every argument of every launch, which takes the host longer than a small exchange takes the GPU.
"""

from collections.abc import Callable
from typing import Any

from triton.runtime.jit import JITFunction


class Launch:
    """A launch that is repeated: the same kernel, grid and constants, other tensors and numbers.

    Args:
        kernel: whose runtime arguments come first and are all exempt from specialisation, or of 16-byte alignment.
        grid: programs. constants: of the kernel, by name. options: of the compiler.
        direct: on a GPU; else, in the interpreter or where nothing runs, every launch goes through Triton.
    """

    def __init__(
        self, kernel: JITFunction, grid: int, *, constants: dict[str, Any], options: dict[str, Any], direct: bool
    ) -> None:
        self._kernel, self._grid, self._constants, self._options = kernel, grid, constants, options
        self._direct = direct
        self._run: Callable[..., None] | None = None
        self._last: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream with the runtime arguments in the kernel's order. Local, no host sync."""
        if self._run is not None:
            self._run(*arguments, *self._last)
            return
        compiled = self._kernel[(self._grid,)](*arguments, **self._constants, **self._options)
        if self._direct:
            self._last = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self._run = compiled[(self._grid, 1, 1)]
