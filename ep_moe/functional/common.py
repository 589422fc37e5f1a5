"""What calls of all libraries need: experts for a scheme, weights of earlier calls, checks of tensors."""

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts import Experts, create_experts, kernels_compute
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.functional.plans import plan_cache
from ep_moe.quant import QuantScheme, get_scheme

_MOST_EXPERTS = 64  # implementations for activations, schemes, devices and threads

_VERSION = operator.attrgetter("_version")

Kept = TypeVar("Kept")
_log = logging.getLogger(__name__)


def check_like(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless a tensor has this shape and one of these dtypes. Local."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; {shape} {needed} needed")


def mapped_ids(ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Ids by a map [E] of them, and -1 for those outside of it. Local, no host sync."""
    valid = (ids >= 0) & (ids < expert_map.shape[0])
    mapped: torch.Tensor = torch.where(valid, expert_map[torch.where(valid, ids, 0).long()].to(ids.dtype), -1)
    return mapped


_KINDS: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    str: "str",
    str | None: "str?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    float | None: "float?",
    list[int]: "int[]",
    list[int] | None: "int[]?",
}


def operator_arguments(call: type, written: str | None = None) -> str:
    """The arguments of an operator that takes the fields of a NamedTuple, for its schema. Local.

    Args: written: the field that the operator writes.
    """
    kinds = {name: _KINDS[kind] for name, kind in call.__annotations__.items()}
    if written is not None:
        kinds[written] = "Tensor(a!)"
    return ", ".join(f"{kind} {name}" for name, kind in kinds.items())


@functools.lru_cache(maxsize=_MOST_EXPERTS)
def served_scheme(names: tuple[str, ...], device: torch.device) -> QuantScheme:
    """The first of these schemes that kernels compute on a GPU; the first one if none is, and on a CPU. Local."""
    schemes = [get_scheme(name) for name in names]
    if device.type == "cuda":
        return next(filter(kernels_compute, schemes), schemes[0])
    return schemes[0]


def experts_for(
    activation: ActivationConfig, scheme: QuantScheme, device: torch.device, tiles: ExpertTiles | None = None
) -> Experts:
    """The experts for a scheme, kept for later calls of this thread, which find their launches prepared. Local.

    A log line at level WARNING says if a GPU has no kernel for the scheme, so that torch computes it.

    Args: tiles: of the kernels, None for those of the tables. Experts in torch have none.
    """
    kept, key = plan_cache(threading.get_ident()), ("experts", activation, scheme, device, tiles)
    found: Experts | None = kept.get(key)
    return kept.keep(key, _new_experts(activation, scheme, device, tiles)) if found is None else found


class KeptWeights:
    """What was made of the weights of earlier calls, as long as the first tensor of each exists.

    Experts find their prepared launches by the `ExpertWeights`, so the same tensors should give the same object. What
    is kept must hold no tensor itself, which would stay alive: views, or copies. Tensors whose memory has moved
    (`module.to`) are others, and if there are copies, so are tensors that torch has written since. Copies are made in
    each call while a CUDA graph is captured, which is replayed after later writes, and of tensors of inference mode,
    whose writes torch does not count.
    """

    def __init__(self) -> None:
        self._kept: dict[
            int, tuple[list[Callable[[], object]], list[int], object, Any]
        ] = {}  # by the first tensor's id

    def get(
        self,
        tensors: Sequence[torch.Tensor | None],
        key: object,
        make: Callable[[], Kept],
        *,
        copied: bool = False,
    ) -> Kept:
        """What `make` returned for the same tensors and an equal key, or returns now; the latest per first tensor.

        Args: copied: it has copies of some of them.
        """
        first = tensors[0]
        assert first is not None
        versions = writes(tensors) if copied else ()
        if versions is None:
            return make()
        kept = self._kept.get(id(first))
        if kept is not None:
            alive, addresses, old_key, made = kept
            same = old_key == (key, versions) and all(map(operator.is_, tensors, [tensor() for tensor in alive]))
            if same and addresses == _addresses(tensors):
                return made
        made = make()
        forget = functools.partial(_forget, self._kept, id(first))
        references: list[Callable[[], object]] = [
            _nothing if tensor is None else weakref.ref(tensor) for tensor in tensors[1:]
        ]
        self._kept[id(first)] = [weakref.ref(first, forget), *references], _addresses(tensors), (key, versions), made
        return made


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def writes(tensors: Sequence[torch.Tensor | None]) -> tuple[int, ...] | None:
    """How often torch has written each tensor; None if that is unknown, or while a CUDA graph is captured. Local."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return ()
    if True in map(torch.Tensor.is_inference, there):
        return None
    if there[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return (*map(_VERSION, there),)


def _nothing() -> None:
    """Stands for the reference to a tensor that is absent."""


def _forget(kept: dict[int, Any], key: int, _: object) -> None:
    kept.pop(key, None)


@functools.lru_cache(maxsize=_MOST_EXPERTS)
def kept_weights(call: str, thread: int) -> KeptWeights:
    """Those of the calls of this name in one thread."""
    del call, thread
    return KeptWeights()


def _new_experts(
    activation: ActivationConfig, scheme: QuantScheme, device: torch.device, tiles: ExpertTiles | None
) -> Experts:
    if device.type == "cuda" and not kernels_compute(scheme):
        _log.warning("no kernel computes experts of scheme '%s': torch does, slowly", scheme.name)
    experts = create_experts("auto", activation, device, scheme=scheme)
    if tiles is not None and hasattr(experts, "tiles"):
        experts.tiles = tiles
    return experts
