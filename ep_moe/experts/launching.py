"""Grids of the experts' persistent kernels."""

import functools

import torch

_CPU_PROGRAMS = 4  # grid in the interpreter, which runs programs one after the other


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(device: torch.device, per_sm: int, most: int) -> int:
    """The grid of a persistent kernel: one wave of the device, and at most `most` programs."""
    return min(_num_sms(device) * per_sm if device.type == "cuda" else _CPU_PROGRAMS, most)
