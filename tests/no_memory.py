"""Memory that is full and stays full: what allocates fails."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoMemory(TorchDispatchMode):
    """Raises OutOfMemoryError in place of a tensor with elements and memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_memory_of(value) for value in tree_leaves((args, kwargs))} | {None}
        if any(_memory_of(value) not in known for value in tree_leaves(result)):
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return result


def _memory_of(value: Any) -> int | None:
    there = isinstance(value, torch.Tensor) and value.device.type != "meta" and value.numel()
    return value.untyped_storage().data_ptr() if there else None


def abandoning_without_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of the same transports, in whose `abandon` nothing is allocated."""

    def made(*args: Any, **options: Any) -> Any:
        transport = make(*args, **options)
        abandon = transport.abandon

        @functools.wraps(abandon)
        def without_memory(*, slot: int = 0) -> None:
            with NoMemory():
                abandon(slot=slot)

        transport.abandon = without_memory
        return transport

    return made
