"""Routings as SGLang has them: chosen experts, lists of pairs by expert, or logits.

Letters: T tokens, H hidden, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.functional.sglang.pairs import ByExpert, sort_pairs
from ep_moe.routing import Routing, route


class StandardTopKOutput(NamedTuple):
    """The experts of each token, as SGLang's class of this name; any tuple in this order serves."""

    topk_weights: torch.Tensor  # [T, K]
    topk_ids: torch.Tensor  # [T, K]
    router_logits: torch.Tensor | None  # not read


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedTensorMetadata:
    """How many pairs each expert has, as triton_kernels' class of this name; any object with slice_sizes serves."""

    slice_sizes: torch.Tensor  # [E] int32
    slice_offs: torch.Tensor | None = None  # not read, as those below: they follow from slice_sizes
    block_offs_data: torch.Tensor | None = None
    block_schedule_data: torch.Tensor | None = None


class TritonKernelTopKOutput(NamedTuple):
    """The routing of tokens, as SGLang's class of this name; any tuple in this order serves."""

    a_ragged_metadata: Any
    gather_indx: torch.Tensor  # [G], the token of each pair in the order of experts
    scatter_indx: torch.Tensor  # [G], its number, -1 none
    gate_scal: torch.Tensor  # [G], its weight
    n_expts_act: int  # K


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpertsConfig:
    """The shared experts that a router chooses for all tokens, as SGLang's class of this name."""

    fusion_disabled: bool = False  # not read
    num_fused_shared_experts: int = 0
    use_waterfill: bool = False

    @property
    def num_shared_topk_slots(self) -> int:
        """How many of a token's experts are shared ones."""
        return 0 if self.use_waterfill else self.num_fused_shared_experts


@dataclasses.dataclass(frozen=True, slots=True)
class TopKConfig:
    """The options of SGLang's class of this name; any object with these attributes serves.

    Where logits are routed and by which kernel is not read: torch_native, output_format, runner_backend and those after
    scoring_func.
    """

    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    shared_experts: Any = SharedExpertsConfig()
    custom_routing_function: Callable[..., Any] | None = None
    correction_bias: torch.Tensor | None = None
    torch_native: bool = False
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    fused_shared_experts_scaling_factor: float | None = None  # of shared experts
    output_format: Any = None
    runner_backend: Any = None
    routing_method_type: Any = None
    scoring_func: str = "softmax"
    sqrtsoftplus_log1p: bool = False
    fused_gate_packed_ids: bool = False
    allow_routed_experts_capture: bool = True
    layer_id: int | None = None


class BypassedTopKOutput(NamedTuple):
    """Logits that the layer routes itself, as SGLang's class of this name; any object with these attributes serves."""

    hidden_states: torch.Tensor  # not read
    raw_router_logits: torch.Tensor  # [T, E]
    topk_config: Any
    num_token_non_padded: torch.Tensor | None = None  # [1], tokens from this one on get no expert
    expert_location_dispatch_info: Any = None  # other numbers of experts: None

    @property
    def router_logits(self) -> torch.Tensor:
        """[T, E]."""
        return self.raw_router_logits


def routing_config(options: Any, num_experts: int) -> RoutingConfig:
    """The routing that SGLang's options describe: by scoring_func, in groups, with a correction_bias for the choice.

    Errors: ValueError for other functions, and shared experts, which the router has no logits of.
    """
    of_release = "shared_experts" if hasattr(options, "shared_experts") else "num_fused_shared_experts"
    shared = getattr(options, of_release, 0)
    if getattr(shared, "num_shared_topk_slots", shared):
        raise ValueError(f"topk_config.{of_release} ({shared}) are not routed here")
    scores, biased = getattr(options, "scoring_func", "softmax"), options.correction_bias is not None
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"topk_config.scoring_func ({scores!r}) is not one of softmax, sigmoid")
    if not biased and not options.use_grouped_topk:
        if scores == "softmax":
            method = RoutingMethod.RENORMALIZE if options.renormalize else RoutingMethod.DEFAULT
            return RoutingConfig(method=method, num_topk=options.top_k)
        method = RoutingMethod.SIGMOID_RENORM
        return RoutingConfig(method=method, num_topk=options.top_k, norm_topk_prob=options.renormalize)
    groups = (options.num_expert_group or 1, options.topk_group or 1) if options.use_grouped_topk else (1, 1)
    if num_experts % groups[0]:
        raise ValueError(f"topk_config.num_expert_group ({groups[0]}) does not divide {num_experts} experts")
    return RoutingConfig(
        method=RoutingMethod.DEEPSEEK_V3,
        num_topk=options.top_k,
        num_group=groups[0],
        topk_group=groups[1],
        group_best=2 if biased else 1,
        scoring="sigmoid" if biased and options.use_grouped_topk else scores,  # DeepSeek-V3's, whatever the function
        norm_topk_prob=options.renormalize,
    )


def chosen(hidden_states: torch.Tensor, topk_output: Any) -> tuple[torch.Tensor, Routing]:
    """The tokens and their experts; of routing data by expert a row for each pair. Errors: ValueError. No host sync."""
    options = getattr(topk_output, "topk_config", None)
    if options is not None:
        return hidden_states, _routed(hidden_states, topk_output, options)
    parts = tuple(topk_output)
    if len(parts) == 5 and hasattr(parts[0], "slice_sizes"):
        data = ByExpert(parts[0].slice_sizes, *parts[1:])
        if data.scatter is None:
            raise ValueError("scatter_indx is None, which says nothing about the tokens that rows are summed for")
        data.check(hidden_states.shape[0])
        routing, tokens = sort_pairs(data, None, hidden_states.shape[0])
        return hidden_states[tokens], routing
    if len(parts) not in (2, 3, 4) or not all(isinstance(part, torch.Tensor) for part in parts[:2]):
        raise ValueError(f"topk_output ({type(topk_output).__name__}) is not (topk_weights, topk_ids, router_logits)")
    weights, ids = parts[:2]
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids are {tuple(ids.shape)}, topk_weights {tuple(weights.shape)}; both ({hidden_states.shape[0]}, K) "
            "needed"
        )
    return hidden_states, Routing(topk_ids=ids, topk_weights=weights.float())


def _routed(hidden_states: torch.Tensor, topk_output: Any, options: Any) -> Routing:
    if getattr(topk_output, "expert_location_dispatch_info", None) is not None:
        raise ValueError("topk_output.expert_location_dispatch_info is given, logits are of the experts as they lie")
    logits, num_tokens = topk_output.router_logits, getattr(topk_output, "num_token_non_padded", None)
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
    ids, weights = routing.topk_ids, routing.topk_weights
    if num_tokens is not None:
        padding = torch.arange(len(ids), device=ids.device) >= num_tokens
        ids = ids.masked_fill(padding[:, None], -1)
    return Routing(topk_ids=ids, topk_weights=weights if factor is None else weights * factor)


def routing_from_topk(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> TritonKernelTopKOutput:
    """The same routing [T, K] as data by expert; ids outside of [0, num_experts) are left out. Local, no host sync."""
    flat, num_topk = topk_ids.reshape(-1).long(), topk_ids.shape[1]
    valid = (flat >= 0) & (flat < num_experts)
    expert = torch.where(valid, flat, num_experts)
    order = torch.sort(expert, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    pairs, tokens = torch.where(valid[order], order, -1).int(), (order // num_topk).int()
    data = RaggedTensorMetadata(counts[:-1])
    return TritonKernelTopKOutput(data, tokens, pairs, topk_weights.reshape(-1)[order], num_topk)
