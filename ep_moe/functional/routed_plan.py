"""Calls of routed experts of one kind as one sequence of launches.

Letters: T tokens, H hidden, K top-k, L local experts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ep_moe.experts import Experts
from ep_moe.functional.plans import CopiedScale
from ep_moe.local_moe import repeated_call
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence
    from ep_moe.local_moe.joined import JoinedCall


class RoutedPlan:
    """The launches of a call of `local_moe` that has returned, for calls that differ from it in addresses and values.

    Args:
        joined: the launches. weights: of that call. factor: multiplies the routing weights.
        inner_scale: the caller's static scale of the intermediate, of which `weights` may have copies.
        lists_tokens: tokens are among the lists of `listed`.
    """

    def __init__(
        self,
        joined: "JoinedCall",
        weights: ExpertWeights,
        factor: float,
        inner_scale: torch.Tensor | None,
        *,
        lists_tokens: bool,
    ) -> None:
        self._joined, self._weights, self._factor, self._lists_tokens = joined, weights, factor, lists_tokens
        self._inner_scale = CopiedScale(weights.w2_input_scale, inner_scale)

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        experts: Experts,
        *,
        num_local_experts: int | None = None,
        num_experts: int | None = None,
        dtype: torch.dtype | None = None,
        factor: float = 1.0,
        inner_scale: torch.Tensor | None = None,
        out: torch.Tensor | None,
        before: "LaunchSequence | None" = None,
    ) -> "RoutedPlan | None":
        """The plan of a call of `local_moe` that has returned; None if it was no sequence of loaded launches.

        Args: before: launches that find the routing, and perhaps tokens, as of `repeated_call`; the plan's calls are
            then `listed`.
        Local.
        """
        joined = repeated_call(
            x,
            routing,
            weights,
            experts,
            before=before,
            num_local_experts=num_local_experts,
            num_experts=num_experts,
            dtype=dtype,
            out=out,
        )
        if joined is None or not joined.fix_weights():  # that they lie elsewhere is seen by who keeps the plan
            return None
        lists_tokens = before is not None and "tokens" in before.pieces
        return cls(joined, weights, factor, inner_scale, lists_tokens=lists_tokens)

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        *,
        static_scale: torch.Tensor | None = None,
        inner_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The weighted sum [T, H], or None, with nothing launched, if a tensor is not aligned to 16 bytes.

        Args: static_scale, inner_scale: of the tokens and of the intermediate, if they are static.
        Local, on the current stream, no host sync.
        """
        if topk_weights.dtype != torch.float32:
            topk_weights = topk_weights.float()
        if self._factor != 1.0:
            topk_weights = topk_weights * self._factor
        if not self._inner_scale.update(inner_scale):
            return None
        return self._joined(self._joined.inputs(x, topk_ids, topk_weights, static_scale), out)

    def listed(
        self,
        x: torch.Tensor,
        lists: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        *,
        static_scale: torch.Tensor | None = None,
        inner_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """`__call__` where launches find the routing, which are given `lists`. Local, no host sync.

        Args: x: tokens as the caller has them, also if they are listed.
        """
        if not self._inner_scale.update(inner_scale):
            return None
        first, _, _, *numbers = self._joined.inputs(x, lists[0], lists[0], static_scale)
        return self._joined([*lists, *numbers] if self._lists_tokens else [first, *lists, *numbers], out)
