"""What calls of one kind share, so that later ones are a lookup and one sequence of launches.

A kind is all that checks and launches depend on: shapes, strides, dtypes and devices of tensors, flags and numbers, and
of weights which tensors they are and where they lie. Values in a GPU's memory are no part of it.
"""

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ep_moe.kernel_launch.plan_cache import PlanCache

_MOST_KEPT = 8192  # of one thread
_MOST_PLANS = 1024  # of one call and thread

Plan = TypeVar("Plan")
_LIKE = operator.attrgetter("shape", "dtype", "device")
_LIES = operator.attrgetter("shape", "dtype")  # where it lies says the device


def kinds(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """All of tensors but their addresses and values, to look plans up by. Local."""
    return (*map(_LIKE, tensors), *map(torch.Tensor.stride, tensors))


def identities(tensors: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """Which tensors these are, where they lie and of which kind; None for one that is absent. Local.

    An id says which tensor it is as long as the plan ends with the tensor (`CallPlans.keep`). Tensors that got other
    memory, or another view of theirs (`tensor.data = ...`), are others.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    lies = *map(torch.Tensor.data_ptr, there), *map(_LIES, there), *map(torch.Tensor.stride, there)
    return (*map(id, tensors), *lies)


@functools.lru_cache(maxsize=64)
def plan_cache(thread: int) -> PlanCache[Any]:
    """What the calls of a thread find again: plans, weights in the runtime's formats, and experts.

    Threads may share launches (`ep_moe.kernel_launch`), but a plan has memory of its own, such as `CopiedScale`, which
    each call writes on its thread's stream.
    """
    del thread
    return PlanCache(_MOST_KEPT)


def keep(key: Hashable, plan: object, device: torch.device, owners: Iterable[torch.Tensor | None]) -> None:
    """Find a plan by a key, in this thread, unless a CUDA graph is captured, whose memory it might have. Local.

    Args:
        device: of the call. owners: tensors whose identities are in the key; the plan ends with the first of them. It
            must not hold them, which would stay alive, but may hold detached views.
    """
    if not capturing(device):
        cache = plan_cache(threading.get_ident())
        cache.keep(key, plan, owners=[tensor for tensor in owners if tensor is not None])


class CallPlans(Generic[Plan]):
    """The plans of one call by the kinds of its arguments, as long as the tensors exist whose ids are in a key."""

    def __init__(self) -> None:
        self._plans: dict[object, Plan] = {}
        self._alive: dict[object, list[weakref.ref[torch.Tensor]]] = {}
        self.get = self._plans.get

    def keep(self, key: object, plan: Plan, device: torch.device, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        """Find this plan by the key from now on, unless a CUDA graph is captured, whose memory it might have.

        Args:
            device: of the call. tensors: whose ids are in the key. A plan must not hold them, which would stay alive,
                but may hold detached views.
        """
        if capturing(device):
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._alive.clear()
        forget = functools.partial(_forget, self._plans, self._alive, key)
        self._alive[key] = [weakref.ref(tensor, forget) for tensor in tensors if tensor is not None]
        self._plans[key] = plan


def _forget(plans: dict[object, Any], alive: dict[object, Any], key: object, _: object) -> None:
    plans.pop(key, None)
    alive.pop(key, None)


@functools.lru_cache(maxsize=64)
def plans_of(call: str, thread: int) -> CallPlans[Any]:
    """The plans of the calls of a name in one thread. Threads may share launches (`ep_moe.kernel_launch`), but a plan
    has memory of its own, such as `CopiedScale`, which each call writes on its thread's stream."""
    del call, thread
    return CallPlans()


class CopiedScale:
    """A caller's static scale, of which kernels read a copy for each expert, made again in each call.

    Args: own: what kernels read, None without. given: the caller's.
    """

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
