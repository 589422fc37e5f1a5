"""RMS norms of a transformers model as one operation of torch instead of the eight that transformers launches.

The modules, their parameters and hooks stay. torch multiplies by the weight in float32 and rounds once; most models of
transformers round before they multiply too, so that bfloat16 and float16 results may differ in their last bits.
"""

import copy
from typing import Any

import torch

Norm = Any  # a torch.nn.Module with the attributes of its class in transformers
_SUFFIX = "RMSNorm"  # of the classes' names
_PROBES = 16  # rows on which a class is compared with torch
_SEED = 20240608
_RTOL, _ATOL = 1e-5, 1e-6  # in float32


class NormForward:
    """The forward of a norm over the last dimension: [.., H] to the same shape and dtype.

    Args: norm: the module; its weight [H] is read in each call.
    """

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self._shape, self._eps = tuple(norm.weight.shape), float(norm.variance_epsilon)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Called by transformers. Local, no host sync."""
        weight = self._norm._parameters["weight"]
        if weight.dtype != hidden_states.dtype:  # then the class decides on the dtype of the result
            result: torch.Tensor = type(self._norm).forward(self._norm, hidden_states)
            return result
        return torch.nn.functional.rms_norm(hidden_states, self._shape, weight, self._eps)


def replace_norms(model: torch.nn.Module) -> int:
    """Compute RMS norms of a model by torch's operation if their class computes the same: weight * x / sqrt(mean(x^2) +
    eps). Others, such as those that add 1 to the weight, and norms with a forward of their own stay.

    Args: model: changed in place. Returns: the number of norms replaced. Local.
    """
    same: dict[object, bool] = {}  # by class
    count = 0
    for module in model.modules():
        if not type(module).__name__.endswith(_SUFFIX) or "forward" in vars(module):
            continue
        weight, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", None)
        if weight is None or weight.dim() != 1 or not isinstance(eps, float):
            continue
        key = (type(module), weight.shape, eps)
        if key not in same:
            same[key] = _compare(module)
        if same[key]:
            module.__dict__["forward"] = NormForward(module)
            count += 1
    return count


@torch.no_grad()
def _compare(norm: Norm) -> bool:
    """Whether a norm's class gives what torch gives, for random weights and rows in float32 on the CPU."""
    (width,) = norm.weight.shape
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    probe, random = copy.copy(norm), torch.Generator().manual_seed(_SEED)
    vars(probe)["_parameters"] = dict(norm._parameters) | {"weight": torch.randn(width, generator=random, **like)}
    rows = torch.randn(_PROBES, width, generator=random, **like)
    rows *= torch.logspace(-4, 2, _PROBES, **like)[:, None]  # of such size that eps matters in some of them
    try:
        expected = type(norm).forward(probe, rows)
    except (AttributeError, TypeError, RuntimeError):
        return False
    found = NormForward(probe)(rows)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=_RTOL, atol=_ATOL)
