"""Expert computation. `base` has the protocol, `EXPERTS` the implementations by name, `SERVES` what those that are
kernels compute.
"""

import functools
import logging
from collections.abc import Callable

import torch

from ep_moe.config import ActivationConfig
from ep_moe.environment import tiles_dir
from ep_moe.experts.base import Experts
from ep_moe.experts.hopper.shapes import has_gluon, is_hopper, say_once
from ep_moe.experts.reference import ReferenceExperts, apply_activation
from ep_moe.experts.serves import SERVES, Serves
from ep_moe.quant import QuantScheme


def _triton_experts(activation: ActivationConfig) -> Experts:
    """Import Triton only on demand: it exists only on Linux."""
    from ep_moe.experts.triton import TritonExperts

    return TritonExperts(activation, tiles=tiles_dir())


def _hopper_experts(activation: ActivationConfig) -> Experts:
    """Import Gluon only on demand: not every Triton has it."""
    if not has_gluon():
        say_once("this Triton has no Gluon")
        return _triton_experts(activation)
    from ep_moe.experts.hopper.experts import HopperExperts

    return HopperExperts(activation, tiles=tiles_dir())


EXPERTS: dict[str, Callable[[ActivationConfig], Experts]] = {
    "torch": ReferenceExperts,
    "triton": _triton_experts,
    "hopper": _hopper_experts,
}

_DEVICES = ("cpu", "cuda")
_log = logging.getLogger(__name__)


@functools.cache
def _tell_slow(scheme: str) -> None:
    """Say, once for each scheme, that no kernel computes it."""
    _log.warning("no kernel computes scheme '%s' on this GPU: 'torch' experts serve it slowly, in float32", scheme)


def create_experts(
    name: str, activation: ActivationConfig, device: torch.device, *, scheme: QuantScheme | None = None
) -> Experts:
    """Build an expert implementation by name; "auto" chooses by the device that holds the weights.

    On a GPU, "auto" is the first of `SERVES` that computes `scheme`, else "torch", with one warning for each scheme in
    the log; on a CPU it is "torch". A named one that does not compute `scheme` raises; without `scheme`, the first call
    with such weights raises.

    "hopper", which "auto" takes for "triton" on a GPU of compute capability 9.0, has faster kernels for 64 rows of an
    expert and more, in 16 bits from 96. "triton" serves the calls that these do not take; the log says once why.

    Kernels read tables of tiles in the folder that EP_MOE_TILES_DIR names before those of the package
    (`ep_moe.experts.tile_tables`).

    "triton" on a CPU is for tests; it needs TRITON_INTERPRET=1 in the environment before Triton is imported.

    Errors: ValueError lists the names or device types, or names the scheme; RuntimeError for "triton" if Triton is not
    installed, or on a CPU without its interpreter. Local.
    """
    if device.type not in _DEVICES:
        raise ValueError(f"device ({device}) is not one of {', '.join(_DEVICES)}")
    if name == "auto":
        kernels = (serves.name for serves in SERVES.values() if scheme is None or serves.computes(scheme))
        found = next(kernels, None) if device.type == "cuda" else "torch"
        if found is None and scheme is not None:
            _tell_slow(scheme.name)
        name = "hopper" if found == "triton" and is_hopper(device) else found or "torch"
    if name not in EXPERTS:
        raise ValueError(f"experts ({name!r}) is not one of auto, {', '.join(EXPERTS)}")
    if name in SERVES:
        if scheme is not None:
            SERVES[name].check(scheme, activation=activation.kind)
        _require_triton(device)
    return EXPERTS[name](activation)


def _require_triton(device: torch.device) -> None:
    """Raise RuntimeError if Triton is not installed, or if the device is a CPU and its interpreter is off."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"experts 'triton' need Triton, which is not installed: {error}") from None
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("experts 'triton' on a CPU need TRITON_INTERPRET=1 in the environment; 'torch' does not")


__all__ = ["EXPERTS", "SERVES", "Experts", "ReferenceExperts", "Serves", "apply_activation", "create_experts"]
