"""What calls of all libraries need: checks of tensors, and the scheme and the experts that compute a call."""

import functools
import logging
import threading

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts import Experts, create_experts, kernels_compute
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.functional.plans import plan_cache
from ep_moe.quant import QuantScheme, get_scheme

_log = logging.getLogger(__name__)


def check_like(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless a tensor has this shape and one of these dtypes. Local."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; {shape} {needed} needed")


def mapped_ids(ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Ids by a map [E] of them, and -1 for those outside of it. Local, no host sync."""
    valid = (ids >= 0) & (ids < expert_map.shape[0])
    mapped: torch.Tensor = torch.where(valid, expert_map[torch.where(valid, ids, 0).long()].to(ids.dtype), -1)
    return mapped


@functools.lru_cache(maxsize=64)
def served_scheme(names: tuple[str, ...], device: torch.device) -> QuantScheme:
    """The first of these schemes that kernels compute on a GPU; the first one if none is, and on a CPU. Local."""
    schemes = [get_scheme(name) for name in names]
    if device.type == "cuda":
        return next(filter(kernels_compute, schemes), schemes[0])
    return schemes[0]


def experts_for(
    activation: ActivationConfig, scheme: QuantScheme, device: torch.device, tiles: ExpertTiles | None = None
) -> Experts:
    """The experts for a scheme, kept for later calls of this thread; `tiles` are those of kernels, None of the tables.

    A log line at level WARNING says if a GPU has no kernel for the scheme, so that torch computes it.
    """
    kept, key = plan_cache(threading.get_ident()), ("experts", activation, scheme, device, tiles)
    found: Experts | None = kept.get(key)
    return kept.keep(key, _new_experts(activation, scheme, device, tiles)) if found is None else found


def _new_experts(
    activation: ActivationConfig, scheme: QuantScheme, device: torch.device, tiles: ExpertTiles | None
) -> Experts:
    if device.type == "cuda" and not kernels_compute(scheme):
        _log.warning("no kernel computes experts of scheme '%s': torch does, slowly", scheme.name)
    return create_experts("auto", activation, device, scheme=scheme, tiles=tiles)
