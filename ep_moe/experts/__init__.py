"""Expert computation. `base` has the protocol, `create_experts` makes the implementations by name, `formats` lists what
those that are kernels compute.
"""

import functools
import logging
import weakref
from typing import TYPE_CHECKING

import torch

from ep_moe.config import ActivationConfig
from ep_moe.environment import tiles_dir
from ep_moe.experts.base import Experts, experts_name
from ep_moe.experts.formats import KERNELS, kernels_compute, row_of
from ep_moe.experts.hopper.shapes import has_gluon, is_hopper
from ep_moe.experts.reference import ReferenceExperts, apply_activation
from ep_moe.quant import QuantScheme

if TYPE_CHECKING:  # it imports Triton
    from ep_moe.experts.grouped_gemm import Backend
    from ep_moe.experts.tuning import ExpertTiles

_DEVICES = ("cpu", "cuda")
_log = logging.getLogger(__name__)
_in_use = weakref.WeakValueDictionary[tuple[object, ...], Experts]()  # with kernels, by what they are made of


@functools.cache
def _log_once(level: int, line: str) -> None:
    _log.log(level, "%s", line)


def kernel_backends(name: str) -> "list[Backend]":
    """The GEMMs of the experts of this name in `KERNELS`, those that are asked first. Local.

    Imports Triton only on demand: it exists only on Linux, and not every Triton has Gluon, without which "hopper" are
    "triton".
    """
    from ep_moe.experts.triton import TritonGemms

    if name == "hopper" and has_gluon():
        from ep_moe.experts.hopper.gemms import HopperGemms

        return [HopperGemms(), TritonGemms()]
    if name == "hopper":
        _log_once(logging.INFO, "Triton's kernels serve calls that Hopper's do not: this Triton has no Gluon")
    return [TritonGemms()]


def create_experts(
    name: str,
    activation: ActivationConfig,
    device: torch.device,
    *,
    scheme: QuantScheme | None = None,
    tiles: "ExpertTiles | None" = None,
) -> Experts:
    """An expert implementation by name; "auto" chooses by the device that holds the weights.

    Kernels are prepared for each shape of a call: layers that compute alike, with the same `tiles`, get the same
    object, so that a model prepares them once. Without `tiles` tables choose them; "torch" has none.

    On a GPU, "auto" is "triton" if its kernels compute `scheme`, else "torch", with one warning for each scheme in
    the log; on a CPU it is "torch". A named one that does not compute `scheme` raises; without `scheme`, the first call
    with such weights raises.

    "hopper", which "auto" takes for "triton" on a GPU of compute capability 9.0, has faster kernels, in 16 bits for 2
    rows of an expert and more, with weights that are decoded two at once for 2 or 17; if rows are gathered (FLAT) for
    64, in 16 bits for 96. "triton" serves the calls that these do not take; the log has the reason once.

    Kernels read tables of tiles in the folder that EP_MOE_TILES_DIR names before those of the package
    (`ep_moe.experts.tile_tables`).

    "triton" on a CPU is for tests; it needs TRITON_INTERPRET=1 in the environment before Triton is imported.

    Errors: ValueError lists the names or device types, or names the scheme; RuntimeError for "triton" if Triton is not
    installed, or on a CPU without its interpreter. Local.
    """
    if device.type not in _DEVICES:
        raise ValueError(f"device ({device}) is not one of {', '.join(_DEVICES)}")
    if name == "auto":
        name = "torch"
        if device.type == "cuda" and (scheme is None or kernels_compute(scheme)):
            name = "hopper" if is_hopper(device) else "triton"
        elif device.type == "cuda" and scheme is not None:
            slow = f"no kernel computes scheme '{scheme.name}' on this GPU: 'torch' experts serve it slowly, in float32"
            _log_once(logging.WARNING, slow)
    if name == "torch":
        return ReferenceExperts(activation)
    if name not in KERNELS:
        raise ValueError(f"experts ({name!r}) is not one of auto, torch, {', '.join(KERNELS)}")
    if scheme is not None:
        row_of(scheme, name)
    _require_triton(device)
    from ep_moe.experts.kernels import KernelExperts

    chosen = tiles or tiles_dir()
    made_of = name, activation, device, chosen
    found = _in_use.get(made_of)
    if found is None:
        found = _in_use[made_of] = KernelExperts(activation, kernel_backends(name), tiles=chosen)
    return found


def _require_triton(device: torch.device) -> None:
    """Raise RuntimeError if Triton is not installed, or if the device is a CPU and its interpreter is off."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"experts 'triton' need Triton, which is not installed: {error}") from None
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("experts 'triton' on a CPU need TRITON_INTERPRET=1 in the environment; 'torch' does not")


__all__ = [
    "KERNELS",
    "Experts",
    "ReferenceExperts",
    "apply_activation",
    "create_experts",
    "experts_name",
    "kernel_backends",
    "kernels_compute",
    "row_of",
]
