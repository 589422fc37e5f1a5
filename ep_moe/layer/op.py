"""The layer as a custom operator of torch, which torch.compile puts into its graphs without tracing into it.

Ranks wait for each other in a call, so a compiler may neither drop a call nor reorder two calls: the operator has an
ordered effect. Eager calls bypass the operator, since its dispatch takes longer than all the layer's own Python.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import custom_op

from ep_moe.layer.backward import NO_BACKWARD
from ep_moe.layer.base import Layer

# An operator takes tensors and plain values only, so a number refers to a layer; the registry keeps no layer alive.
# The number is a tensor, since a graph would be compiled anew for each int.
_LAYERS: "weakref.WeakValueDictionary[int, Layer]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(layer: Layer) -> torch.Tensor:
    """Register a layer; returns the number by which the operator finds it in this process, [] int64. Local."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


@custom_op("ep_moe::layer", mutates_args=())
def layer_op(
    hidden_states: torch.Tensor,
    router: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    max_num_tokens: int | None,
    trained: torch.Tensor | None,
    layer: torch.Tensor,
) -> torch.Tensor:
    """`ExpertParallelMoE.forward`, or `forward_routed` if there are `topk_weights`.

    Args:
        router: router_logits, or topk_ids. layer: a number that `number_of` returned.
        trained: a weight whose gradient autograd would record, so that backward is refused; it is not read here.
    Errors: those of the layer; RuntimeError if the layer no longer exists. Collective.
    """
    del trained
    found: Layer | None = _LAYERS.get(int(layer))
    if found is None:
        raise RuntimeError(f"layer {int(layer)} of a compiled graph no longer exists: keep its ExpertParallelMoE alive")
    return found.run(
        hidden_states, (router,) if topk_weights is None else (router, topk_weights), num_tokens, max_num_tokens
    )


@layer_op.register_fake
def _layer_fake(hidden_states: torch.Tensor, *others: Any) -> torch.Tensor:
    """The result's shape. It checks nothing: the real call raises errors in the input on all ranks."""
    del others
    return hidden_states.new_empty(hidden_states.shape)


@custom_op("ep_moe::no_backward", mutates_args=())
def no_backward_op(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Raise RuntimeError in a compiled backward pass, where a gradient of this shape is needed."""
    del gradient, shape
    raise RuntimeError(NO_BACKWARD)


@no_backward_op.register_fake
def _no_backward_fake(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return gradient.new_empty(shape)


def _note_shapes(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.shapes = [value.shape if isinstance(value, torch.Tensor) else None for value in inputs]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """torch.compile traces this with the forward pass, so tracing must work: only running it is an error."""
    needed = zip(ctx.shapes, ctx.needs_input_grad, strict=True)
    return tuple(no_backward_op(gradient, shape) if need else None for shape, need in needed)


layer_op.register_autograd(_backward, setup_context=_note_shapes)
_register_effectful_op(torch.ops.ep_moe.layer.default, _EffectType.ORDERED)
