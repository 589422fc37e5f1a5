"""Allocation of tensors whose shapes are known beforehand, and of several in one piece of memory."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ALIGNMENT = 256  # of each piece, as the caching allocator's


@functools.cache
def _quick_allocation() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] | None:
    """The function by which Inductor's code allocates on the current GPU, None if this torch has another one or none.

    2.5 us of host time, where `torch.empty_strided` takes 4.3 (torch 2.11); it takes plain tuples only.
    """
    found: Any = torch._C
    for name in ("_dynamo", "guards", "_empty_strided_cuda"):
        found = getattr(found, name, None)
    try:
        works = found is not None and found((2, 1), (1, 1), torch.int32).shape == (2, 1)
    except (RuntimeError, TypeError):
        works = False
    return found if works else None


def allocator(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that allocates an uninitialized tensor of this shape, from torch's caching allocator. Local."""
    shape, strides = tuple(shape), tuple(strides)  # a torch.Size is no plain tuple

    def allocate() -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    if device.type != "cuda":
        return allocate
    quick, current_device, index = _quick_allocation(), torch._C._cuda_getDevice, device.index or 0
    if quick is None:
        return allocate

    def allocate_quickly() -> torch.Tensor:
        return quick(shape, strides, dtype) if current_device() == index else allocate()

    return allocate_quickly


class Workspace:
    """Tensors in one allocation: those that a call needs until it returns, or those of an object that it returns.

    Args:
        pieces: name -> shape and dtype.

    Attributes:
        allocate: allocates the memory, [bytes] uint8.
        offsets: of the pieces, in bytes, in their order.
        device: of the memory.
    """

    def __init__(self, pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._pieces, self.device = dict(pieces), device
        self.offsets: list[int] = []
        end = 0
        for shape, dtype in self._pieces.values():
            self.offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.allocate = allocator((end,), (1,), torch.uint8, device)
        self._offset_of = dict(zip(self._pieces, self.offsets, strict=True))

    def offset_of(self, name: str) -> int:
        """The offset of a piece, in bytes."""
        return self._offset_of[name]

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """One piece of allocated memory. Errors: KeyError for an unknown name."""
        (shape, dtype), offset = self._pieces[name], self._offset_of[name]
        return memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The pieces of allocated memory, by name."""
        return {name: self.view(memory, name) for name in self._pieces}
