"""Launches that are repeated with addresses in the interpreter, as they are on a GPU."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ep_moe.kernel_launch.kernel import Kernel, mapped, present
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.layout.base import packable
from ep_moe.local_moe import calls
from ep_moe.local_moe.routed import RoutedPacking, _shape_of
from ep_moe.routing import Routing


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor of the same kind at an address."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (extent * like.element_size())).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def rebuilt(arguments: Any, values: Iterator[int]) -> Any:
    return mapped(arguments, lambda each: at(next(values), each) if isinstance(each, torch.Tensor) else next(values))


class Recorder:
    """Stands for a kernel: records addresses, of tensors in first calls, given as such in later ones."""

    driver = None

    def __init__(self) -> None:
        self.first: list[int] = []
        self.repeated: list[int] = []

    def __call__(self, tensors: tuple[Any, ...]) -> None:
        self.first += [tensor.data_ptr() for tensor in present(tensors)]

    def run(self, addresses: tuple[int, ...]) -> None:
        self.repeated += addresses


def recorded(sequence: LaunchSequence) -> list[Recorder]:
    """Recorders in place of a sequence's kernels, which all take the same workspace."""
    memory, recorders = sequence.workspace.allocate(), [Recorder() for _ in sequence.launches]
    sequence.launches = list(zip(recorders, [names for _, names in sequence.launches], strict=True))
    sequence.workspace.allocate, sequence.loaded = lambda: memory, None
    return recorders


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Launches are repeated with addresses, as on a GPU; returns the number of launches of each repeated sequence."""
    run, repeat, found = Kernel.through_triton, LaunchSequence.repeat, list[int]()

    def through_triton(self: Kernel, tensors: Any, numbers: tuple[int, ...] = ()) -> None:
        run(self, tensors, numbers)
        kinds = mapped(tensors, _shape_of)

        def again(values: Sequence[int]) -> None:
            run(self, *rebuilt((kinds, numbers), iter(values)))

        self.run = again

    def counted(self: LaunchSequence, addresses: list[int], fixed: list[int] | None = None) -> torch.Tensor | None:
        memory = repeat(self, addresses, fixed)
        if memory is not None:
            found.append(len(self.launches))
        return memory

    def new_packing(x: Any, routing: Routing, sizes: Any) -> RoutedPacking | None:
        given = x, routing.topk_ids, routing.topk_weights, sizes
        return RoutedPacking(*given) if packable(*given) else None

    monkeypatch.setattr(Kernel, "through_triton", through_triton)
    monkeypatch.setattr(LaunchSequence, "repeat", counted)
    monkeypatch.setattr(calls, "_new_packing", new_packing)
    calls._plans.cache_clear()
    yield found
    calls._plans.cache_clear()
