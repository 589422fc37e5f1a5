"""Constants of kernels, in groups: one constexpr for each field, or the whole group as one `tl.constexpr` argument."""

from typing import Any, TypeVar

import triton.language as tl
from triton.runtime.jit import JITFunction

Group = TypeVar("Group", bound=tuple[Any, ...])


def constants(group: type[Group], **values: Any) -> Group:
    """A group for a parameter without annotation, such as `TileShape`. Example: constants(TileShape, BLOCK_M=16, ...).

    Each value is wrapped, for the interpreter too: a plain number in such a group would be a run-time argument.
    """
    return group(**{name: tl.constexpr(value) for name, value in values.items()})


def as_constants(group: Group, kernel: Any) -> Group:
    """A group of plain values for a parameter of `kernel` that is annotated as `tl.constexpr`.

    The compiler needs each field as a constexpr, or attributes of the group would be run-time numbers; the interpreter
    needs plain values.
    """
    if not isinstance(kernel, JITFunction):
        return group
    return type(group)(*map(tl.constexpr, group))
