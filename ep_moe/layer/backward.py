"""The refusal of a backward pass, so that no training continues with missing gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

NO_BACKWARD = "expert-parallel layers of ep_moe have no backward pass: they are for inference"


class _NoBackward(torch.autograd.Function):
    """Runs a forward without a graph and refuses the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        del ctx, inputs
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx, gradients
        raise RuntimeError(NO_BACKWARD)


def recorded(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values` whose gradient autograd would record. Local."""
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def refuse_backward(run: Callable[[], torch.Tensor], inputs: Iterable[Any]) -> torch.Tensor:
    """Call `run`; if autograd records one of its inputs, a backward pass through the result is a RuntimeError.

    Args:
        inputs: tensors and parameters that `run` reads; they are not iterated outside of grad mode, so a generator
            can be lazy. Values that are not tensors are ignored.
    Local.
    """
    if not torch.is_grad_enabled():
        return run()
    trained = recorded(inputs)
    if trained:
        return _NoBackward.apply(run, *trained)
    return refuse_result(run())


def refuse_result(result: torch.Tensor) -> torch.Tensor:
    """Refuse a backward pass through a result that autograd has recorded from tensors that the layer does not know: of
    shared experts that are a function, for example. Local."""
    return _NoBackward.apply(result.detach, result) if result.requires_grad else result
