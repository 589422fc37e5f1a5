"""The result of routing, the checks of its input, and what both implementations share.

Letters: T tokens on this rank, E experts, K top-k.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import torch

from ep_moe.config import DTYPES, RoutingConfig, RoutingMethod
from ep_moe.placement import Placement
from ep_moe.routing.positions import PositionTable
from ep_moe.tensors import check_tensor

EPSILON = 1e-20  # added to the sum that weights are divided by (DeepSeek-V3, FlashInfer)
MAX_REPLAY_EXPERTS = 32767  # the largest int16
MAX_KERNEL_EXPERTS = 1024  # whose scores one warp holds
BIASED_METHODS = (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts that each token goes to, and their weights.

    It has no slots, so that `make_routing` sets all fields at once.
    Errors: ValueError for another shape, dtype or device. The transport checks the ids' values.
    """

    topk_ids: torch.Tensor  # [T, K] int32 or int64, logical or physical expert, -1 none
    topk_weights: torch.Tensor  # [T, K] float32

    # shape, dtype and device of the ids, if both tensors are known to be contiguous; found once for many routings
    signature: ClassVar[tuple[torch.Size, torch.dtype, torch.device] | None] = None

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


def make_routing(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    signature: tuple[torch.Size, torch.dtype, torch.device] | None = None,
) -> Routing:
    """A `Routing` of tensors that are known to fit, without its checks. signature: see `Routing`. Local."""
    routing = object.__new__(Routing)
    fields = routing.__dict__
    fields["topk_ids"], fields["topk_weights"], fields["signature"] = topk_ids, topk_weights, signature
    return routing


class Options(NamedTuple):
    """The arguments of `ep_moe.routing.route` beside the logits, as it describes them."""

    config: RoutingConfig
    bias: torch.Tensor | None = None
    replay_out: torch.Tensor | None = None
    placement: Placement | PositionTable | None = None
    weights_dtype: torch.dtype = torch.float32
    num_tokens: torch.Tensor | None = None


def check(logits: torch.Tensor, options: Options) -> None:
    """Raise ValueError for arguments of `ep_moe.routing.route` that do not fit each other. Local, no host sync.

    Only shapes, dtypes and devices are checked, so equal ones need no further check.
    """
    config, bias, replay_out, placement, weights_dtype, num_tokens = options
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router_logits are {tuple(logits.shape)} {logits.dtype}; [T, E] of a float dtype needed")
    if weights_dtype not in DTYPES.values():
        raise ValueError(f"weights_dtype is {weights_dtype}; one of {', '.join(DTYPES)} needed")
    rows, num_experts = logits.shape
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
        if replay_out.dim() != 2 or replay_out.shape[0] < rows or replay_out.shape[1] != config.num_topk:
            raise ValueError(
                f"routing_replay_out is {tuple(replay_out.shape)}; at least {rows} rows of "
                f"num_topk ({config.num_topk}) needed"
            )
        if num_experts > MAX_REPLAY_EXPERTS:
            raise ValueError(
                f"num_experts ({num_experts}) exceeds {MAX_REPLAY_EXPERTS}, the most for routing_replay_out"
            )
    if num_tokens is not None and (num_tokens.dtype != torch.int32 or num_tokens.numel() != 1):
        raise ValueError(f"num_tokens is {tuple(num_tokens.shape)} {num_tokens.dtype}; 1 number of int32 needed")
    optional = {"routing_bias": bias, "routing_replay_out": replay_out, "num_tokens": num_tokens}
    for name, tensor in optional.items():
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, router_logits on {logits.device}")
    if placement is not None and _num_logical(placement, logits.device) != num_experts:
        raise ValueError(f"the placement has {placement.num_experts} experts, router_logits have {num_experts}")


def _num_logical(placement: Placement | PositionTable, device: torch.device) -> int:
    """E of a placement, without the loop of `num_experts` over all positions."""
    if isinstance(placement, PositionTable):
        return placement.num_experts
    return placement.num_physical if placement.is_identity else len(placement.logical_to_physical(device))
