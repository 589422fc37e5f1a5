"""What a first call finds for later ones of its kind, which are a lookup and one sequence of launches.

A kind is all that checks and launches depend on: shapes, strides, dtypes and devices of tensors, flags and numbers, and
the identities and addresses of weights. Values in a GPU's memory are no part of it.

Letters: T tokens, H hidden, K top-k, L local experts.
"""

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ep_moe.experts import Experts
from ep_moe.kernel_launch.plan_cache import PlanCache
from ep_moe.local_moe import repeated_call
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence
    from ep_moe.local_moe.joined import JoinedCall

_MOST_KEPT = 8192  # of one thread
_VERSION = operator.attrgetter("_version")


@functools.lru_cache(maxsize=64)
def plan_cache(thread: int) -> PlanCache[Any]:
    """What the calls of a thread find again: plans, which have memory of their own, weights in our formats, experts."""
    del thread
    return PlanCache(_MOST_KEPT)


def keep(key: Hashable, plan: object, device: torch.device, owners: Iterable[torch.Tensor | None]) -> None:
    """Find a plan by a key, in this thread, unless a CUDA graph is captured, whose memory it might have. Local.

    Args: owners: tensors whose ids are in the key; the plan ends with the first, and may hold detached views alone.
    """
    if not capturing(device):
        cache = plan_cache(threading.get_ident())
        cache.keep(key, plan, owners=[tensor for tensor in owners if tensor is not None])


class CopiedScale:
    """A caller's static scale, of which kernels read a copy for each expert, written again in each call."""

    def __init__(self, own: torch.Tensor | None, given: torch.Tensor | None) -> None:
        copied = own is not None and given is not None and own.data_ptr() != given.data_ptr()
        self._own = own if copied else None

    def update(self, given: torch.Tensor | None) -> bool:
        """Copy the scale of a call; False if that may not be written now: by a CUDA graph, which would write memory of
        others, or a tensor of inference mode outside of it. Local."""
        if self._own is None:
            return True
        assert given is not None
        if capturing(given.device) or (self._own.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        self._own.copy_(given.reshape(-1))
        return True


def writes(tensors: Sequence[torch.Tensor | None]) -> tuple[int, ...] | None:
    """How often torch has written each tensor; None if that is unknown, or while a CUDA graph is captured. Local."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return ()
    if True in map(torch.Tensor.is_inference, present):
        return None
    if present[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return (*map(_VERSION, present),)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured, which is replayed when a plan may have ended. Local."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _tables() -> dict[object, torch.Tensor]:
    """Tensors that are the same in all calls, which captured graphs may read forever."""
    return {}


def _kept(key: object, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    tables = _tables()
    found = tables.get(key)
    if found is None:
        found = make()
        if not capturing(device):  # it would be the graph's memory
            tables[key] = found
    return found


def quotients(divisor: int, count: int, device: torch.device) -> torch.Tensor:
    """[2, at least `count`] int32: i // divisor, and i. The same memory for all counts up to a power of two. Local."""
    size = 1 << max(count - 1, 63).bit_length()

    def make() -> torch.Tensor:
        place = torch.arange(size, dtype=torch.int32, device=device)
        return torch.stack([torch.div(place, divisor, rounding_mode="floor"), place])

    return _kept((divisor, size, device), device, make)


def multiples(step: int, count: int, device: torch.device) -> torch.Tensor:
    """[count] int32: i * step, the same memory in all calls. Local."""

    def make() -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=device) * step

    return _kept((step, count, device, "multiples"), device, make)


class RoutedPlan:
    """The launches of a call of `local_moe` that has returned, for calls that differ from it in addresses and values.

    Args:
        factor: multiplies the routing weights. inner_scale: the caller's static scale of the intermediate, of which
            `weights` may have copies. lists_tokens: tokens are among the lists of `listed`.
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
        factor: float = 1.0,
        inner_scale: torch.Tensor | None = None,
        before: "LaunchSequence | None" = None,
        **options: Any,
    ) -> "RoutedPlan | None":
        """The plan of a call of `local_moe` that has returned; None if it was no sequence of loaded launches.

        Args: before: as of `repeated_call`; the plan's calls are then `listed`. options: the others of that call.
        """
        joined = repeated_call(x, routing, weights, experts, before=before, **options)
        if joined is None or not joined.fix_weights():  # the key of a plan holds the weights' addresses
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
        """The weighted sum [T, H], or None, with nothing launched, if a tensor is not aligned to 16 bytes."""
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
        """`__call__` with launches that find the routing in `lists`, and the tokens of x if these are among them."""
        if not self._inner_scale.update(inner_scale):
            return None
        first, _, _, *numbers = self._joined.inputs(x, lists[0], lists[0], static_scale)
        return self._joined([*lists, *numbers] if self._lists_tokens else [first, *lists, *numbers], out)
