"""`FusedMoE` as an operator, which torch.compile calls and does not look into."""

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import custom_op

from ep_moe.routing import Routing

if TYPE_CHECKING:
    from ep_moe.functional.sglang.layer import FusedMoE

# an operator takes tensors and plain values only, so a number refers to a layer; the registry keeps no layer alive
_LAYERS: "weakref.WeakValueDictionary[int, FusedMoE]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(layer: "FusedMoE") -> int:
    """The number by which `layer_op` finds a layer, as long as it exists."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


@custom_op("ep_moe::sglang_fused_moe", mutates_args=())
def layer_op(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    found = _LAYERS.get(layer)
    if found is None:
        raise RuntimeError(f"layer {layer} of a compiled graph no longer exists: keep its FusedMoE alive")
    return found.run(x, Routing(topk_ids=topk_ids, topk_weights=topk_weights))


@layer_op.register_fake
def _fake(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    del topk_weights
    found = _LAYERS.get(layer)
    apart = found is not None and found.moe_runner_config.no_combine
    return x.new_empty((x.shape[0], topk_ids.shape[1], x.shape[1]) if apart else x.shape)


_register_effectful_op(torch.ops.ep_moe.sglang_fused_moe.default, _EffectType.ORDERED)
