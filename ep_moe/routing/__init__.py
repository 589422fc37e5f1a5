"""From router logits to the chosen experts and their weights, by the routing methods of serving engines.

`reference` computes them in torch, `triton` in one kernel; the device of the logits selects one.

Letters: T tokens on this rank, E experts, K top-k, H hidden.
"""

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ep_moe.config import RoutingConfig
from ep_moe.placement import Placement
from ep_moe.quant import Quantized
from ep_moe.routing import reference
from ep_moe.routing.base import BIASED_METHODS, MAX_KERNEL_EXPERTS, Options, Routing, check, make_routing
from ep_moe.routing.positions import PositionTable

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence


def route(
    router_logits: torch.Tensor,
    config: RoutingConfig,
    *,
    routing_bias: torch.Tensor | None = None,
    routing_replay_out: torch.Tensor | None = None,
    placement: Placement | PositionTable | None = None,
    weights_dtype: torch.dtype = torch.float32,
    num_tokens: torch.Tensor | None = None,
) -> Routing:
    """Choose K experts for every token and compute their weights, in float32.

    Methods, numbered as FlashInfer's `RoutingMethodType`, with s = sigmoid(logits), sums over the K chosen:
    0 softmax over all; 1 and 4 softmax over the chosen (equal to softmax over all, divided by the sum of the chosen);
    2 and 7 s / (sum + 1e-20) * routed_scaling_factor, chosen by s + bias, 2 only within its `topk_group` best groups
    (DeepSeek-V3, arXiv 2412.19437); 3, 8 and 9 s; 5 the logits; 6 s / (sum + 1e-20). If norm_topk_prob is False, 2
    and 6 do not divide by the sum. With `scoring="softmax"` s is the softmax over all.
    Softmax and sigmoid are monotonic, so methods other than 2 and 7 choose by the logits themselves, and rounding
    creates no ties. Ties go to the lower expert. A NaN score counts as +inf, so that NaN logits of a token show in its
    output; a NaN in the bias makes the weights of every token NaN. The ids are always valid.

    Args:
        router_logits: [T, E], any float dtype.
        config: the method and its parameters.
        routing_bias: [E], any float dtype, for the choice only, methods 2 and 7 only.
        routing_replay_out: optional [at least T, K] int16; logical ids are written to rows [0, T).
        placement: of the E experts; with one, topk_ids are physical ids, by `placement.to_physical`, else logical ones.
            A `Placement` takes the first copy of an expert; a `PositionTable` chooses, and may count.
        weights_dtype: float32, bfloat16 or float16; the float32 weights have values of this dtype, as in models that
            round theirs.
        num_tokens: [1] int32 on the device: rows from there on are padding, which a table does not count.
    Returns: topk_ids [T, K] int32, columns by descending score, and topk_weights.
    Errors: ValueError if shapes, dtypes, devices, the method and its arguments do not fit each other.
    Local, on the current stream, no host sync. On a GPU one kernel, safe in CUDA graphs once a call of the same kind
    has loaded it; for more than 1024 experts, or if autograd records the logits, the kernels of torch.
    """
    options = Options(config, routing_bias, routing_replay_out, placement, weights_dtype, num_tokens)
    recorded = router_logits.requires_grad and torch.is_grad_enabled()
    small = router_logits.dim() == 2 and router_logits.shape[1] <= MAX_KERNEL_EXPERTS
    if router_logits.is_cuda and small and not recorded:
        routing: Routing = _kernels().route(router_logits, options)
        return routing
    check(router_logits, options)
    return reference.route(router_logits, options)


def loaded_sequence(
    router_logits: torch.Tensor, config: RoutingConfig, routing_bias: torch.Tensor | None = None
) -> "LaunchSequence | None":
    """The launch of earlier calls of `route` with the same config object and tensors like these, for longer sequences.

    Given are "logits" and, if there is one, "bias"; its workspace has "ids" [T, K] int32 and "weights" [T, K] float32.
    Returns: None if such calls are not one kernel that reads the tensors in place. Local; nothing is launched.
    """
    if not router_logits.is_cuda:
        return None
    found: LaunchSequence | None = _kernels().loaded_sequence(router_logits, Options(config, routing_bias))
    return found


@functools.cache
def _kernels() -> ModuleType:
    """The launchers of kernels. Triton exists only on Linux and is slow to import."""
    from ep_moe.routing import triton

    return triton


def to_physical(
    topk_ids: torch.Tensor, placement: Placement | PositionTable, *, num_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """`placement.to_physical` for ids [T, K] that the caller brings; on a GPU in one kernel.

    Args: num_tokens: as in `route`.
    Errors: ValueError for another dtype. Local, on the current stream, no host sync; safe in CUDA graphs once
    a call of the same kind has loaded the kernel.
    """
    if topk_ids.is_cuda and topk_ids.dim() == 2 and topk_ids.dtype in (torch.int32, torch.int64):
        return _kernels().to_physical(topk_ids, placement, num_tokens)
    if isinstance(placement, PositionTable):
        return placement.to_physical(topk_ids, num_tokens)
    return placement.to_physical(topk_ids)


def apply_weights_to_input(x: torch.Tensor | Quantized, routing: Routing) -> tuple[torch.Tensor | Quantized, Routing]:
    """Multiply each token by its router weight before the experts; the weight that remains for the combine is 1.

    As `apply_router_weight_on_input` of vLLM's BatchedPrepareAndFinalize, but not in place.

    Args:
        x: [T, H], any float dtype, multiplied by the weight in that dtype; of a `Quantized` the scale is multiplied,
            row by row even if the scheme has one scale per tensor.
        routing: K = 1.
    Returns: the scaled tokens, and the routing with weights 1.
    Errors: ValueError if K is not 1, or x has another number of tokens or scales of one byte.
    Local, no host sync, safe in CUDA graphs.
    """
    num_tokens, num_topk = routing.topk_ids.shape
    if num_topk != 1:
        raise ValueError(f"apply_router_weight_on_input needs num_topk 1, got {num_topk}")
    values = x.values if isinstance(x, Quantized) else x
    if values.shape[0] != num_tokens:
        raise ValueError(f"x has {values.shape[0]} tokens, topk_ids {num_tokens}")
    weighted: torch.Tensor | Quantized
    if isinstance(x, Quantized):
        if x.scale.element_size() == 1:
            raise ValueError(f"x is in scheme '{x.scheme.name}', whose scales of one byte cannot be multiplied")
        weighted = dataclasses.replace(x, scale=x.scale * routing.topk_weights)
    else:
        weighted = x * routing.topk_weights.to(x.dtype)
    return weighted, dataclasses.replace(routing, topk_weights=torch.ones_like(routing.topk_weights))


__all__ = [
    "BIASED_METHODS",
    "PositionTable",
    "Routing",
    "apply_weights_to_input",
    "loaded_sequence",
    "make_routing",
    "route",
    "to_physical",
]
