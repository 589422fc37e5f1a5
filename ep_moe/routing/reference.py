"""Routing in torch: for CPUs, for training, and the reference of the kernel.

Letters: T tokens on this rank, E experts, K top-k.
"""

import math

import torch

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.routing.base import BIASED_METHODS, EPSILON, Options, Routing
from ep_moe.routing.positions import PositionTable


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

    A group's score is the sum of its `group_best` largest scores, or its only one. The experts of the chosen groups are
    gathered rather than the others masked: so no score, not even -inf, lets an expert of another group in.
    """
    if config.num_group == 1:
        return _largest(choice, config.num_topk)
    num_tokens, num_experts = choice.shape
    group_size = num_experts // config.num_group
    grouped = choice.reshape(num_tokens, config.num_group, group_size)
    group_score = grouped.topk(min(config.group_best, group_size), dim=2).values.sum(2)
    groups = _largest(group_score, config.topk_group).sort(1).values
    member = torch.arange(group_size, device=choice.device)
    candidates = (groups.unsqueeze(2) * group_size + member).reshape(num_tokens, config.topk_group * group_size)
    return candidates.gather(1, _largest(choice.gather(1, candidates), config.num_topk))


def _weights_of(logits: torch.Tensor, ids: torch.Tensor, method: RoutingMethod) -> torch.Tensor:
    """Return the weights [T, K] of the chosen ids, before any division, for the methods that choose by the logits."""
    if method is RoutingMethod.DEFAULT:
        return torch.softmax(logits, 1).gather(1, ids)
    chosen = logits.gather(1, ids)
    if method in (RoutingMethod.RENORMALIZE, RoutingMethod.RENORMALIZE_NAIVE):
        return torch.softmax(chosen, 1)
    return chosen if method is RoutingMethod.TOPK else torch.sigmoid(chosen)


def route(router_logits: torch.Tensor, options: Options) -> Routing:
    """`ep_moe.routing.route`. Local, on the current stream, no host sync."""
    config, bias, replay_out, placement, weights_dtype, num_tokens = options
    logits, method = router_logits.float(), config.method
    if method in BIASED_METHODS:
        scores = torch.softmax(logits, 1) if config.scoring == "softmax" else torch.sigmoid(logits)
        choice = scores if bias is None else scores + bias.float()
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
    weights = weights.to(weights_dtype).float()
    if replay_out is not None:
        replay_out[: ids.shape[0]].copy_(ids)
    ids = ids.int()
    if isinstance(placement, PositionTable):
        ids = placement.to_physical(ids, num_tokens)
    elif placement is not None:
        ids = placement.to_physical(ids)
    return Routing(topk_ids=ids, topk_weights=weights)
