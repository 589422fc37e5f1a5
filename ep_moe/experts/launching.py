"""A kernel of the experts, prepared for launches that differ in their tensors alone."""

import dataclasses
import functools
from typing import Any

import torch

_CPU_PROGRAMS = 4  # grid in the interpreter, which runs programs one after the other


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(device: torch.device, per_sm: int, most: int) -> int:
    """The grid of a persistent kernel: one wave of the device, and at most `most` programs."""
    return min(_num_sms(device) * per_sm if device.type == "cuda" else _CPU_PROGRAMS, most)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedKernel:
    """A kernel that takes groups of tensors, then numbers, then constants; called with the groups.

    Args:
        kernel: the jit function. grid: programs.
        numbers: that it takes after the groups. constants: its constants and Triton's launch options, by name.
    """

    kernel: Any
    grid: int
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]

    def __call__(self, *groups: Any) -> None:
        """Launch on the current stream. Local, no host sync."""
        self.kernel[(self.grid,)](*groups, *self.numbers, **self.constants)
