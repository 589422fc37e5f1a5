"""Kernels that are launched one after the other, over the caller's tensors and those of a workspace."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernel_launch.cuda_driver import Launches
from ep_moe.kernel_launch.kernel import Run, mapped

Pieces = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # of a workspace, name -> shape and dtype


class LaunchSequence:
    """A sequence of launches for calls of one kind: the first calls pass tensors, later ones addresses.

    Args:
        launches: each a `Kernel`, or an object with its `__call__`, `run` and `driver`, and the names of its tensors in
            groups as it takes them. Unknown names and None stand for absent tensors; integers, which only `load` reads,
            are numbers that are the same in all calls.
        given: names of the caller's tensors, in the order of their addresses.
        pieces: of the workspace.
        aliases: other names of tensors, name -> the first name and the dtype that a kernel takes.

    Attributes:
        workspace: one allocation in each call.
        loaded: launches all with the addresses of the caller's tensors and those of the workspace; None before a first
            call.
    Local; nothing is launched.
    """

    def __init__(
        self,
        launches: Sequence[tuple[Any, tuple[Any, ...]]],
        given: tuple[str, ...],
        pieces: Pieces,
        device: torch.device,
        *,
        aliases: Mapping[str, tuple[str, torch.dtype]] | None = None,
    ) -> None:
        self.launches = list(launches)
        self.given, self.pieces, self.aliases = given, dict(pieces), dict(aliases or {})
        self.workspace = Workspace(pieces, device)
        self.loaded: Run | None = None
        self._numbers: list[int] = []
        self._placed: tuple[int, list[int]] = (0, [])  # a workspace's address, those of its pieces, and the numbers

    def run(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Launch with these tensors; returns the memory of the workspace. Local, no host sync."""
        memory, launches = self.bound(tensors)
        for launch in launches:
            launch()
        self.load()
        return memory

    def bound(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[Callable[[], None]]]:
        """The memory of one workspace, and each launch with these tensors and those in it, to be called in any order.

        Local."""
        memory = self.workspace.allocate()
        there = {**tensors, **self.workspace.views(memory)}
        for alias, (name, dtype) in self.aliases.items():
            if name in there:
                there[alias] = there[name].view(dtype)
        return memory, [functools.partial(kernel, mapped(groups, there.get)) for kernel, groups in self.launches]

    def behind(self, count: int) -> "LaunchSequence":
        """The same without its first launches, over the same tensors. Local."""
        device = self.workspace.device
        return LaunchSequence(self.launches[count:], self.given, self.pieces, device, aliases=self.aliases)

    def load(self) -> bool:
        """Make `repeat` work if all kernels are loaded; returns whether it does. Local."""
        names = [*self.given, *self.pieces]
        positions = {name: position for position, name in enumerate(names)}
        positions |= {alias: positions[name] for alias, (name, _) in self.aliases.items() if name in positions}
        numbers: list[int] = []
        places = [_flat(groups, positions, len(names), numbers) for _, groups in self.launches]
        if all(kernel.run is not None for kernel, _ in self.launches):
            self._placed = (0, [])
            kernels = [kernel for kernel, _ in self.launches]
            self._numbers, self.loaded = numbers, _together(kernels, places, len(names) + len(numbers))
        return self.loaded is not None

    def repeat(self, addresses: list[int], fixed: list[int] | None = None) -> torch.Tensor | None:
        """`run` with the addresses of the caller's tensors, if the kernels are loaded and all are aligned; else None.

        Args: fixed: the last of these addresses, which are not checked again. Local, no host sync.
        """
        loaded, workspace = self.loaded, self.workspace
        if loaded is None or functools.reduce(operator.or_, addresses) & 15:
            return None
        memory = workspace.allocate()
        base, (known, places) = memory.data_ptr(), self._placed
        if base != known:  # the allocator often gives the same memory again
            places = [*[base + offset for offset in workspace.offsets], *self._numbers]
            self._placed = base, places
        loaded([*addresses, *places] if fixed is None else [*addresses, *fixed, *places])
        return memory


def joined(
    parts: Sequence[tuple[LaunchSequence, Mapping[str, str]]],
    launches: Sequence[tuple[Any, tuple[Any, ...]]],
    given: tuple[str, ...],
    pieces: Pieces,
    device: torch.device,
) -> LaunchSequence:
    """The launches of several sequences as one, with one workspace for all.

    Args:
        parts: each with the names that its tensors have in the whole, if they have others there: name -> name. Names
            that are in no such mapping become "<number of the part>:<name>".
        launches: behind them. given: names of the caller's tensors. pieces: of the workspace, beside those of the
            parts.
    Returns: a sequence for `load` and `repeat`. Local; nothing is launched.
    """
    all_launches: list[tuple[Any, tuple[Any, ...]]] = []
    all_pieces, aliases = dict(pieces), dict[str, tuple[str, torch.dtype]]()
    for number, (part, names) in enumerate(parts):

        def whole(name: Any, number: int = number, names: Mapping[str, str] = names) -> Any:
            return names.get(name, f"{number}:{name}") if isinstance(name, str) else name

        all_pieces |= {whole(name): piece for name, piece in part.pieces.items()}
        aliases |= {whole(alias): (whole(name), dtype) for alias, (name, dtype) in part.aliases.items()}
        all_launches += [(kernel, mapped(groups, whole)) for kernel, groups in part.launches]
    return LaunchSequence([*all_launches, *launches], given, all_pieces, device, aliases=aliases)


def _together(kernels: Sequence[Any], places: Sequence[Sequence[int]], num_values: int) -> Run:
    """A function that launches all with the values of a call; `places` are the positions of those of each kernel."""
    if all(kernel.driver is not None for kernel in kernels):
        return Launches(
            [(kernel.driver, of_kernel) for kernel, of_kernel in zip(kernels, places, strict=True)], num_values
        )
    runs = [kernel.run for kernel in kernels]

    def one_by_one(values: Sequence[int]) -> None:
        for run, of_kernel in zip(runs, places, strict=True):
            run([values[place] for place in of_kernel])

    return one_by_one


def _flat(names: Any, positions: Mapping[str, int], num_names: int, numbers: list[int]) -> list[int]:
    """The positions of the names that have one, in the order of nested tuples; numbers, which are added, follow."""
    if isinstance(names, tuple):
        return [position for name in names for position in _flat(name, positions, num_names, numbers)]
    if isinstance(names, int):
        numbers.append(names)
        return [num_names + len(numbers) - 1]
    return [positions[names]] if names in positions else []
