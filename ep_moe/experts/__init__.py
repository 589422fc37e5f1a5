"""Expert computation. `base` is the seam; `EXPERTS` holds the implementations by name."""

from collections.abc import Callable

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts.base import Experts
from ep_moe.experts.reference import ReferenceExperts, apply_activation

EXPERTS: dict[str, Callable[[ActivationConfig], Experts]] = {"torch": ReferenceExperts}

_AUTO = {"cpu": "torch", "cuda": "torch"}  # by the type of the device


def create_experts(name: str, activation: ActivationConfig, device: torch.device) -> Experts:
    """Build an expert implementation by name; "auto" picks by the device that holds the weights.

    Errors: ValueError lists the names, or the kinds of device. Local.
    """
    if device.type not in _AUTO:
        raise ValueError(f"device ({device}) is not one of {', '.join(_AUTO)}")
    if name == "auto":
        name = _AUTO[device.type]
    if name not in EXPERTS:
        raise ValueError(f"experts ({name!r}) is not one of auto, {', '.join(EXPERTS)}")
    return EXPERTS[name](activation)


__all__ = ["EXPERTS", "Experts", "ReferenceExperts", "apply_activation", "create_experts"]
