"""Launches that are kept are alike: on a GPU the later ones change addresses and numbers alone.

In the interpreter each launch reads its tensors anew, so that one kept for tensors of another kind would not be seen.
"""

from typing import Any

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.tensor_map import is_descriptor

KIND = "_kind_of_first_launch"


def what_is(argument: Any) -> Any:
    """What a compiled kernel depends on: which tensors there are, and their dtypes."""
    if isinstance(argument, tuple):
        return tuple(what_is(each) for each in argument)
    return what_is(argument.base) if is_descriptor(argument) else getattr(argument, "dtype", None)


def watch() -> None:
    """Make a launch of other kinds of tensors than the first of the same `Kernel` an AssertionError."""
    run = Kernel.through_triton
    if hasattr(run, "watched"):
        return

    def through_triton(self: Kernel, tensors: Any, numbers: tuple[int, ...] = ()) -> None:
        kind, first = what_is(tensors), getattr(self, KIND, None)
        assert first in (None, kind), f"a launch kept for {first} is given {kind}"
        setattr(self, KIND, kind)
        run(self, tensors, numbers)

    through_triton.watched = True  # type: ignore[attr-defined]
    Kernel.through_triton = through_triton  # type: ignore[method-assign]
