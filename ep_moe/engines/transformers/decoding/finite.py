"""A model that computes NaN or infinity is found at the first logits, and the layer where it begins is named."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ep_moe.engines.transformers.decoding.sequences import BROKEN


@contextlib.contextmanager
def first_not_finite(model: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Check the last position of each decoder layer's first output in the block, a prefill.

    Yields: a call that returns the name of the first layer whose output was not finite, "" if there is none; it waits
    for the device. Local, no host sync in the block.
    """
    finite: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            hidden = output[0] if isinstance(output, tuple) else output
            if name not in finite and isinstance(hidden, torch.Tensor):
                finite[name] = hidden[:, -1].isfinite().all()

        return hook

    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, GradientCheckpointingLayer)]
    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in layers]
    try:
        yield lambda: next((name for name, all_are in finite.items() if not all_are), "")
    finally:
        for hook in hooks:
            hook.remove()


def check_finite(tokens: torch.Tensor, name: Callable[[], str] = str) -> None:
    """Raise RuntimeError if a token [passes, B], on the host, is BROKEN. Local.

    Args:
        name: of `first_not_finite`.
    """
    broken = (tokens == BROKEN).nonzero()
    if broken.shape[0]:
        raise RuntimeError(not_finite(name(), f" of row {int(broken[0, 1])}"))


def not_finite(layer: str = "", where: str = "") -> str:
    """The message about logits that are not finite."""
    first = f"; the first layer whose output is not finite is {layer}" if layer else ""
    return f"the model computes NaN or infinity: the logits{where} are not finite{first}"
