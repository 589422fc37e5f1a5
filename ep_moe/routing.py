"""From router logits to the chosen experts and their weights, by the routing methods of serving engines.

Letters: T tokens on this rank, E experts, K top-k, H hidden.
"""

import dataclasses
import math

import torch

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.fields import check_tensor
from ep_moe.quant import Quantized

EPSILON = 1e-20  # added to the sum that weights are divided by (DeepSeek-V3, FlashInfer)
MAX_REPLAY_EXPERTS = 32767  # the largest int16
BIASED_METHODS = (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The experts that each token goes to, and their weights.

    Errors: ValueError for another shape, dtype or device. The transport checks the ids' values.
    """

    topk_ids: torch.Tensor  # [T, K] int32 or int64, logical or physical expert, -1 none
    topk_weights: torch.Tensor  # [T, K] float32

    def __post_init__(self) -> None:
        ids, weights = self.topk_ids, self.topk_weights
        check_tensor(ids, "topk_ids")
        check_tensor(weights, "topk_weights")
        if ids.dim() != 2 or ids.shape[1] < 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids are {tuple(ids.shape)} {ids.dtype}; [T, K] int32 or int64 with K >= 1 needed")
        if weights.shape != ids.shape or weights.dtype != torch.float32:
            raise ValueError(
                f"topk_weights are {tuple(weights.shape)} {weights.dtype}; {tuple(ids.shape)} torch.float32, "
                "as topk_ids have it, needed"
            )
        if weights.device != ids.device:
            raise ValueError(f"topk_weights are on {weights.device}, topk_ids on {ids.device}")


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns [T, count] int64 of the largest scores of each row, in descending order.

    Ties go to the lower column, which a stable sort guarantees and `torch.topk` does not. CUDA's sort orders bits:
    -0.0 is made 0.0 first, and NaN of either sign +inf, so that every device chooses alike.
    """
    infinity = float("inf")
    keys = torch.nan_to_num(scores + 0.0, nan=infinity, posinf=infinity, neginf=-infinity)
    return torch.sort(keys, dim=1, descending=True, stable=True).indices[:, :count]


def _choose_biased(choice: torch.Tensor, config: RoutingConfig) -> torch.Tensor:
    """Return the ids [T, K] int64 of the largest `choice` [T, E], for method 2 only within the best groups.

    A group's score is the sum of its two largest scores, or its only one. The experts of the chosen groups are
    gathered rather than the others masked: so no score, not even -inf, lets an expert of another group in.
    """
    if config.num_group == 1:
        return _largest(choice, config.num_topk)
    num_tokens, num_experts = choice.shape
    group_size = num_experts // config.num_group
    grouped = choice.reshape(num_tokens, config.num_group, group_size)
    group_score = grouped.topk(min(2, group_size), dim=2).values.sum(2)
    groups = _largest(group_score, config.topk_group).sort(1).values
    member = torch.arange(group_size, device=choice.device)
    candidates = (groups.unsqueeze(2) * group_size + member).reshape(num_tokens, config.topk_group * group_size)
    return candidates.gather(1, _largest(choice.gather(1, candidates), config.num_topk))


def _check(
    logits: torch.Tensor, config: RoutingConfig, bias: torch.Tensor | None, replay_out: torch.Tensor | None
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router_logits are {tuple(logits.shape)} {logits.dtype}; [T, E] of a float dtype needed")
    num_tokens, num_experts = logits.shape
    candidates = num_experts // config.num_group * config.topk_group
    if config.num_topk > num_experts:
        raise ValueError(f"num_topk ({config.num_topk}) exceeds num_experts ({num_experts})")
    if num_experts % config.num_group:
        raise ValueError(f"num_experts ({num_experts}) is not a multiple of num_group ({config.num_group})")
    if config.num_topk > candidates:
        raise ValueError(
            f"num_topk ({config.num_topk}) exceeds the {candidates} experts in topk_group ({config.topk_group}) groups"
        )
    if bias is not None:
        if config.method not in BIASED_METHODS:
            raise ValueError(f"routing_bias needs routing method 2 or 7, got {config.method.value}")
        if bias.shape != (num_experts,) or not bias.is_floating_point():
            raise ValueError(
                f"routing_bias is {tuple(bias.shape)} {bias.dtype}; ({num_experts},) of a float dtype needed"
            )
    if replay_out is not None:
        if replay_out.dtype != torch.int16:
            raise ValueError(f"routing_replay_out is {replay_out.dtype}; torch.int16 needed")
        if replay_out.dim() != 2 or replay_out.shape[0] < num_tokens or replay_out.shape[1] != config.num_topk:
            raise ValueError(
                f"routing_replay_out is {tuple(replay_out.shape)}; at least {num_tokens} rows of "
                f"num_topk ({config.num_topk}) needed"
            )
        if num_experts > MAX_REPLAY_EXPERTS:
            raise ValueError(
                f"num_experts ({num_experts}) exceeds {MAX_REPLAY_EXPERTS}, the most for routing_replay_out"
            )


def route(
    router_logits: torch.Tensor,
    config: RoutingConfig,
    *,
    routing_bias: torch.Tensor | None = None,
    routing_replay_out: torch.Tensor | None = None,
) -> Routing:
    """Choose K experts for every token and compute their weights, in float32.

    Methods, numbered as FlashInfer's `RoutingMethodType`, with s = sigmoid(logits), sums over the K chosen:
    0 softmax over all; 1 and 4 softmax over the chosen (equal to softmax over all, divided by the sum of the chosen);
    2 and 7 s / (sum + 1e-20) * routed_scaling_factor, chosen by s + bias, 2 only within its `topk_group` best groups
    (DeepSeek-V3, arXiv 2412.19437); 3 and 8 s; 5 the logits; 6 s / (sum + 1e-20). If norm_topk_prob is False, 2 and 6
    do not divide by the sum.
    Softmax and sigmoid are monotonic, so methods other than 2 and 7 choose by the logits themselves, and rounding
    creates no ties. Ties go to the lower expert. A NaN score counts as +inf, so that NaN logits of a token show in its
    output; a NaN in the bias makes the weights of every token NaN. The ids are always valid.

    Args:
        router_logits: [T, E], any float dtype.
        config: the method and its parameters.
        routing_bias: [E], any float dtype, for the choice only, methods 2 and 7 only.
        routing_replay_out: optional [at least T, K] int16; topk_ids are written to rows [0, T).
    Returns: topk_ids [T, K] int32, columns by descending score, and topk_weights.
    Errors: ValueError if shapes, dtypes, the method and its arguments do not fit each other.
    Local, on the current stream, no host sync, safe in CUDA graphs.
    """
    _check(router_logits, config, routing_bias, routing_replay_out)
    logits, method = router_logits.float(), config.method
    if method in BIASED_METHODS:
        scores = torch.sigmoid(logits)
        choice = scores if routing_bias is None else scores + routing_bias.float()
        ids = _choose_biased(choice, config)
        # the weights do not contain the bias: without this, a NaN in it would change the choice and go unnoticed
        weights = scores.gather(1, ids).masked_fill(choice.isnan().any(1, keepdim=True), math.nan)
    else:
        ids = _largest(logits, config.num_topk)
        weights = _weights_of(logits, ids, method)
    if method in (*BIASED_METHODS, RoutingMethod.SIGMOID_RENORM):
        if config.norm_topk_prob:
            weights = weights / (weights.sum(1, keepdim=True) + EPSILON)
        weights = weights * config.routed_scaling_factor
    if routing_replay_out is not None:
        routing_replay_out[: ids.shape[0]].copy_(ids)
    return Routing(topk_ids=ids.int(), topk_weights=weights)


def _weights_of(logits: torch.Tensor, ids: torch.Tensor, method: RoutingMethod) -> torch.Tensor:
    """Return the weights [T, K] of the chosen ids, before any division, for the methods that choose by the logits."""
    if method is RoutingMethod.DEFAULT:
        return torch.softmax(logits, 1).gather(1, ids)
    chosen = logits.gather(1, ids)
    if method in (RoutingMethod.RENORMALIZE, RoutingMethod.RENORMALIZE_NAIVE):
        return torch.softmax(chosen, 1)
    return chosen if method is RoutingMethod.TOPK else torch.sigmoid(chosen)


def apply_weights_to_input(x: torch.Tensor | Quantized, routing: Routing) -> tuple[torch.Tensor | Quantized, Routing]:
    """Multiply each token by its router weight before the experts; the weight that remains for the combine is 1.

    As `apply_router_weight_on_input` of vLLM's BatchedPrepareAndFinalize, but not in place.

    Args:
        x: [T, H], any float dtype, multiplied by the weight in that dtype; of a `Quantized` the scale is multiplied,
            row by row even if the scheme has one scale per tensor.
        routing: K = 1.
    Returns: the scaled tokens, and the routing with weights 1.
    Errors: ValueError if K is not 1 or x has another number of tokens. Local, no host sync, safe in CUDA graphs.
    """
    num_tokens, num_topk = routing.topk_ids.shape
    if num_topk != 1:
        raise ValueError(f"apply_router_weight_on_input needs num_topk 1, got {num_topk}")
    given = x.values if isinstance(x, Quantized) else x
    if given.shape[0] != num_tokens:
        raise ValueError(f"x has {given.shape[0]} tokens, topk_ids {num_tokens}")
    weighed: torch.Tensor | Quantized
    if isinstance(x, Quantized):
        weighed = dataclasses.replace(x, scale=x.scale * routing.topk_weights)
    else:
        weighed = x * routing.topk_weights.to(x.dtype)
    return weighed, dataclasses.replace(routing, topk_weights=torch.ones_like(routing.topk_weights))
