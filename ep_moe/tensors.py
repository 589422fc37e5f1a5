"""Checks and alignment of tensors; checks of a config's fields are in `fields`, which imports without torch."""

from typing import Any

import torch

from ep_moe.fields import shown


def check_tensor(value: Any, name: str) -> None:
    """Raise ValueError unless a value is a dense tensor of this rank alone, neither sparse nor distributed.

    Local, no host sync.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided:  # distributed tensors are a subclass
        return
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__} ({shown(value)}), not a tensor")
    if value.layout is not torch.strided or hasattr(value, "to_local"):
        raise ValueError(f"{name} is a {type(value).__name__} of layout {value.layout}, not dense")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is not aligned to 16 bytes, as kernels need every pointer. Local."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
