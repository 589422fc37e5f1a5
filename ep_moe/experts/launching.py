"""Grids of the experts' persistent kernels, and tensors as they read them."""

import torch

from ep_moe.kernels.device import Device

_CPU_PROGRAMS = 4  # grid in the interpreter, which runs programs one after the other


def num_programs(device: torch.device, per_sm: int, most: int) -> int:
    """The grid of a persistent kernel: one wave of the device, and at most `most` programs."""
    return min(Device.of(device).num_sms * per_sm if device.type == "cuda" else _CPU_PROGRAMS, most)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it has gaps or is not at a multiple of 16 bytes, as kernels rely on. Local."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
