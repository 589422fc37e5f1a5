"""Constants of kernels, in groups."""

from typing import Any, TypeVar

import triton.language as tl

Group = TypeVar("Group", bound=tuple[Any, ...])


def constants(group: type[Group], **values: Any) -> Group:
    """A group of a kernel's constants, such as `TileShape`. Example: constants(TileShape, BLOCK_M=16, ...).

    Each is wrapped: a plain number in a group would be one of run time.
    """
    return group(**{name: tl.constexpr(value) for name, value in values.items()})
