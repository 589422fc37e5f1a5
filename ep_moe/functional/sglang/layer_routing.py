"""What `FusedMoE` takes as `topk_output`: chosen experts, routing data by expert, or logits.

Letters: T tokens, H hidden, K top-k, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.functional.sglang.ragged_pairs import routed_pairs
from ep_moe.routing import Routing, route


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TopKConfig:
    """The options of SGLang's class of this name that routing reads; any object with these attributes serves."""

    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    num_fused_shared_experts: int = 0
    custom_routing_function: Callable[..., Any] | None = None
    correction_bias: torch.Tensor | None = None
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False


class BypassedTopKOutput(NamedTuple):
    """Logits that the layer routes itself, as SGLang's class of this name; any object with these attributes serves."""

    hidden_states: torch.Tensor  # not read
    router_logits: torch.Tensor  # [T, E]
    topk_config: Any


def routing_config(options: Any, num_experts: int) -> RoutingConfig:
    """The routing that SGLang's options describe: softmax, or with a bias sigmoid and groups.

    Errors: ValueError for groups without a bias, and fused shared experts, which the router has no logits of.
    """
    if options.num_fused_shared_experts:
        raise ValueError(
            f"topk_config.num_fused_shared_experts ({options.num_fused_shared_experts}) is not routed here"
        )
    if options.correction_bias is None:
        if options.use_grouped_topk:
            raise ValueError("topk_config.use_grouped_topk is set without a correction_bias, which is not routed here")
        method = RoutingMethod.RENORMALIZE if options.renormalize else RoutingMethod.DEFAULT
        return RoutingConfig(method=method, num_topk=options.top_k)
    groups = (options.num_expert_group, options.topk_group) if options.use_grouped_topk else (None, None)
    if num_experts % (groups[0] or 1):
        raise ValueError(f"topk_config.num_expert_group ({groups[0]}) does not divide {num_experts} experts")
    return RoutingConfig(
        method=RoutingMethod.DEEPSEEK_V3,
        num_topk=options.top_k,
        num_group=groups[0] or 1,
        topk_group=groups[1] or 1,
        norm_topk_prob=options.renormalize,
    )


def chosen(hidden_states: torch.Tensor, topk_output: Any) -> Routing:
    """The experts of tokens. Errors: ValueError for another output. Local, no host sync."""
    options = getattr(topk_output, "topk_config", None)
    if options is not None:
        return _routed(hidden_states, topk_output.router_logits, options)
    parts = tuple(topk_output)
    if len(parts) == 3 and hasattr(parts[0], "expt_hist"):
        return routed_pairs(hidden_states.shape[0], *parts)
    if len(parts) not in (2, 3) or not all(isinstance(part, torch.Tensor) for part in parts[:2]):
        raise ValueError(f"topk_output ({type(topk_output).__name__}) is not (topk_weights, topk_ids, router_logits)")
    weights, ids = parts[:2]
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids are {tuple(ids.shape)}, topk_weights {tuple(weights.shape)}; both ({hidden_states.shape[0]}, K) "
            "needed"
        )
    return Routing(topk_ids=ids, topk_weights=weights.float())


def _routed(hidden_states: torch.Tensor, logits: torch.Tensor, options: Any) -> Routing:
    if options.custom_routing_function is not None:
        weights, ids = options.custom_routing_function(
            hidden_states=hidden_states,
            gating_output=logits,
            topk=options.top_k,
            renormalize=options.renormalize,
        )
        routing = Routing(topk_ids=ids, topk_weights=weights.float())
    else:
        config = routing_config(options, logits.shape[-1])
        routing = route(logits, config, routing_bias=options.correction_bias)
    factor = options.routed_scaling_factor if options.apply_routed_scaling_factor_on_output else None
    if factor is None:
        return routing
    return Routing(topk_ids=routing.topk_ids, topk_weights=routing.topk_weights * factor)
