"""Kernels that are launched one after the other, over the caller's tensors and those of a workspace."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernel_launch.repeated import Repeat


class LaunchSequence:
    """A sequence of launches for calls of one kind: the first calls pass tensors, later ones addresses.

    Args:
        launches: kernels (a `RepeatedLaunch`, or what is called and repeated as one), with the names of their tensors
            in groups as they take them. A name that is unknown stands for an absent tensor, as None does.
        given: names of the caller's tensors, in the order of their addresses.
        pieces: of the workspace, name -> shape and dtype.
        aliases: other names of tensors, name -> the first name and the dtype that a kernel takes.

    Attributes:
        workspace: one allocation in each call.
        loaded: the kernels, and functions that pick their arguments from all addresses; None before a first call.
    Local; nothing is launched.
    """

    def __init__(
        self,
        launches: Sequence[tuple[Any, tuple[Any, ...]]],
        given: tuple[str, ...],
        pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        *,
        aliases: Mapping[str, tuple[str, torch.dtype]] | None = None,
    ) -> None:
        self.launches = list(launches)
        self.workspace = Workspace(pieces, device)
        self.loaded: list[tuple[Repeat, operator.itemgetter[Any]]] | None = None
        self._names, self._aliases = (*given, *pieces), dict(aliases or {})

    def run(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Launch with these tensors; returns the memory of the workspace. Local, no host sync."""
        memory = self.workspace.allocate()
        there = {**tensors, **self.workspace.views(memory)}
        positions = {name: position for position, name in enumerate(self._names)}
        for alias, (name, dtype) in self._aliases.items():
            if name in there:
                there[alias], positions[alias] = there[name].view(dtype), positions[name]
        for kernel, groups in self.launches:
            kernel(_replaced(groups, there.get))
        repeats = [(kernel.repeat, operator.itemgetter(*_flat(groups, positions))) for kernel, groups in self.launches]
        if all(repeat is not None for repeat, _ in repeats):
            self.loaded = repeats
        return memory

    def repeat(self, addresses: list[int]) -> torch.Tensor | None:
        """`run` with the addresses of all tensors that are given, if the kernels are loaded for them; else None.

        Local, no host sync.
        """
        loaded, workspace = self.loaded, self.workspace
        if loaded is None or functools.reduce(operator.or_, addresses) & 15:
            return None
        memory = workspace.allocate()
        base = memory.data_ptr()
        everything = addresses + [base + offset for offset in workspace.offsets]
        for repeat, pick in loaded:
            repeat(pick(everything))
        return memory


def _replaced(names: Any, find: Callable[[str], Any]) -> Any:
    """What stands for names, in the same tuples."""
    if isinstance(names, tuple):
        found = [_replaced(name, find) for name in names]
        return type(names)(*found) if hasattr(names, "_fields") else tuple(found)
    return None if names is None else find(names)


def _flat(names: Any, positions: Mapping[str, int]) -> list[int]:
    """The positions of the names that have one, in the order of nested tuples."""
    if isinstance(names, tuple):
        return [position for name in names for position in _flat(name, positions)]
    return [positions[names]] if names in positions else []
