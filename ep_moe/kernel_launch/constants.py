"""Constants of kernels, in groups: a NamedTuple whose fields are annotated as `tl.constexpr` is one argument."""

from typing import Any, TypeVar

import triton.language as tl
from triton.runtime.jit import JITFunction

Group = TypeVar("Group", bound=tuple[Any, ...])


def as_constants(group: Group, kernel: Any, parameter: str) -> Group:
    """A group of plain values, such as TileShape(BLOCK_M=16, ...), as `kernel` takes it for this parameter.

    The compiler needs each field as a constexpr, or it would be a run-time number; so does the interpreter, except for
    a parameter that is annotated as `tl.constexpr`, whose fields it needs as they are.
    """
    if not isinstance(kernel, JITFunction) and kernel.fn.__annotations__.get(parameter) is tl.constexpr:
        return group
    return type(group)(*map(tl.constexpr, group))
