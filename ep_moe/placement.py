"""Which rank owns which expert: logical experts at physical positions, and the maps between them.

Letters: T tokens on this rank, K top-k, E logical experts, P physical experts (E + redundant copies), R ranks.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.fields import shown, typed

INT32 = torch.iinfo(torch.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The assignment of experts to ranks.

    Position p (a physical id) holds logical expert `physical_to_logical[p]`; rank r owns positions
    [starts[r], starts[r + 1]). A rank may own none; a logical expert may have several positions, of which those in
    `idle` take no tokens.

    Example: 5 experts round robin on 2 ranks are `Placement((0, 2, 4, 1, 3), (0, 3, 5))`.

    The tensors that the methods return are cached per device and shared: callers must not write to them. The first
    call for a device copies to it and must come before a CUDA graph is captured.

    Args:
        physical_to_logical: P logical ids; every id in [0, E) occurs at least once.
        starts: R + 1 ascending positions from 0 to P.
        idle: ascending positions; every expert has another one.
    Errors: ValueError if one of these does not hold.
    """

    physical_to_logical: tuple[int, ...]
    starts: tuple[int, ...]
    idle: tuple[int, ...] = ()
    _is_identity: bool = dataclasses.field(init=False, repr=False, compare=False)
    _tensors: dict[Any, torch.Tensor] = dataclasses.field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("physical_to_logical", "starts"):
            value = getattr(self, name)
            if type(value) is not tuple or set(map(type, value)) != {int}:  # a plan makes tens of thousands of ints
                object.__setattr__(self, name, typed(value, tuple[int, ...], name))
        num_physical, present = len(self.physical_to_logical), sorted(set(self.physical_to_logical))
        if not present:
            raise ValueError("physical_to_logical () holds no expert; at least 1 is needed")
        if present[0] < 0:
            raise ValueError(f"physical_to_logical holds expert {present[0]}; ids start at 0")
        if present[-1] != len(present) - 1:
            missing = next(expert for expert in itertools.count() if expert not in present)
            raise ValueError(f"physical_to_logical holds expert {present[-1]} but not expert {missing}")
        if len(self.starts) < 2:
            raise ValueError(f"starts {self.starts} has {len(self.starts)} entries; num_ranks + 1, at least 2, needed")
        if self.starts[0] != 0 or self.starts[-1] != num_physical:
            raise ValueError(f"starts {self.starts} must run from 0 to the number of physical experts ({num_physical})")
        for before, after in itertools.pairwise(self.starts):
            if after < before:
                raise ValueError(f"starts {self.starts} descends from {before} to {after}")
        self._check_idle()
        object.__setattr__(self, "_is_identity", self.physical_to_logical == tuple(range(num_physical)))

    def _check_idle(self) -> None:
        if type(self.idle) is not tuple or self.idle:
            object.__setattr__(self, "idle", typed(self.idle, tuple[int, ...], "idle"))
        if not self.idle:
            return
        if not 0 <= self.idle[0] <= self.idle[-1] < self.num_physical or sorted(set(self.idle)) != [*self.idle]:
            raise ValueError(f"idle {shown(self.idle)} must be ascending positions in [0, {self.num_physical})")
        left = {self.physical_to_logical[position] for position in self.active}
        for position in self.idle:
            if self.physical_to_logical[position] not in left:
                raise ValueError(f"idle leaves expert {self.physical_to_logical[position]} without a position")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the tuples: cached tensors belong to this process' devices."""
        return Placement, (self.physical_to_logical, self.starts, self.idle)

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Give each rank neighboring experts; the first num_experts % num_ranks ranks own one more.

        Example: 10 experts on 4 ranks are 0 1 2 | 3 4 5 | 6 7 | 8 9.
        Errors: ValueError if a number is below 1.
        """
        _check_sizes(num_experts, num_ranks)
        each, rest = divmod(num_experts, num_ranks)
        starts = tuple(rank * each + min(rank, rest) for rank in range(num_ranks + 1))
        return cls(tuple(range(num_experts)), starts)

    @classmethod
    def round_robin(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Give logical expert e to rank e % num_ranks.

        Example: 10 experts on 4 ranks are 0 4 8 | 1 5 9 | 2 6 | 3 7.
        Errors: ValueError if a number is below 1.
        """
        _check_sizes(num_experts, num_ranks)
        owned = [tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)]
        return cls(tuple(itertools.chain(*owned)), (0, *itertools.accumulate(len(experts) for experts in owned)))

    @property
    def num_experts(self) -> int:
        """E, logical experts."""
        return max(self.physical_to_logical) + 1

    @property
    def num_physical(self) -> int:
        """P, physical experts."""
        return len(self.physical_to_logical)

    @property
    def active(self) -> list[int]:
        """The positions that take tokens, ascending."""
        idle = set(self.idle)
        return [position for position in range(self.num_physical) if position not in idle]

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.starts) - 1

    @property
    def is_identity(self) -> bool:
        """Whether every physical id is its logical id."""
        return self._is_identity

    def local_expert_offset(self, rank: int) -> int:
        """Return the first physical id of `rank`. Errors: ValueError if rank is not in [0, R)."""
        self._check_rank(rank)
        return self.starts[rank]

    def num_local_experts(self, rank: int) -> int:
        """Return how many physical experts `rank` owns. Errors: ValueError if rank is not in [0, R)."""
        self._check_rank(rank)
        return self.starts[rank + 1] - self.starts[rank]

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Return the logical experts of `rank` in physical order. Errors: ValueError if rank is not in [0, R)."""
        self._check_rank(rank)
        return self.physical_to_logical[self.starts[rank] : self.starts[rank + 1]]

    def owners(self) -> list[list[int]]:
        """The ranks that have each logical expert, ascending, [E]; one that has several copies occurs as often."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank in range(self.num_ranks):
            for expert in self.local_experts(rank):
                found[expert].append(rank)
        return found

    def expert_map(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Map a logical expert to its index among the experts of `rank`, as vLLM's `expert_map` does.

        Returns: [E] int32 on `device` (default: CPU), -1 if another rank owns the expert; the first index if this rank
        has several copies. Errors: ValueError if rank is not in [0, R). Local; the first call for a device copies.
        """

        def local_indices() -> list[int]:
            index_of = _first_index(self.local_experts(rank))
            return [index_of.get(logical, -1) for logical in range(self.num_experts)]

        self._check_rank(rank)
        return self._tensor(("expert_map", rank), device, torch.int32, local_indices)

    def logical_to_physical(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Map a logical expert to its physical id, the first that is not idle if it has several.

        Returns: [E] int64 on `device` (default: CPU). Local; the first call for a device copies.
        """
        return self._tensor("logical_to_physical", device, torch.int64, self._first_positions)

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Map logical ids to physical ids; -1 stays.

        An invalid id stays invalid, so that the transport refuses it on every rank: ids below -1 are kept, ids from E
        on grow by P - E, so that physical id - (P - E) is the caller's id. If int32 cannot hold the result, it is
        another invalid id.

        Args:
            topk_ids: [T, K] int32 or int64, logical, -1 none.
        Returns: the same shape, int32; `topk_ids` itself if nothing changes.
        Errors: ValueError for another dtype.
        Local, no host sync, safe in CUDA graphs after the first call for a device.
        """
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids are {topk_ids.dtype}; int32 or int64 needed")
        physical = topk_ids
        if not self._is_identity:
            # shifts: one for each id in [0, E), one for all ids from E on, and last one for negative ids (index -1)
            shifts = self._tensor("shifts", topk_ids.device, torch.int32, self._shifts)
            physical = topk_ids + shifts[topk_ids.clamp(-1, len(shifts) - 2)]
        if physical.dtype == torch.int64:
            physical = physical.clamp(INT32.min, INT32.max).int()
        return physical

    def _shifts(self) -> list[int]:
        shifts = [physical - logical for logical, physical in enumerate(self._first_positions())]
        return [*shifts, self.num_physical - self.num_experts, 0]

    def _first_positions(self) -> list[int]:
        position_of = {self.physical_to_logical[position]: position for position in reversed(self.active)}
        return [position_of[logical] for logical in range(self.num_experts)]

    def _tensor(
        self, name: Any, device: torch.device | str | None, dtype: torch.dtype, values: Callable[[], list[int]]
    ) -> torch.Tensor:
        where = torch.device("cpu" if device is None else device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        tensor = self._tensors.get((name, where))
        if tensor is None:
            tensor = self._tensors[name, where] = torch.tensor(values(), dtype=dtype, device=where)
        return tensor

    def _check_rank(self, rank: int) -> None:
        if not 0 <= typed(rank, int, "rank") < self.num_ranks:
            raise ValueError(f"rank ({rank}) is not in [0, num_ranks ({self.num_ranks}))")


def _first_index(values: tuple[int, ...]) -> dict[int, int]:
    """Return the first index of each value."""
    return {value: index for index, value in reversed(list(enumerate(values)))}


def _check_sizes(num_experts: int, num_ranks: int) -> None:
    typed(num_experts, int, "num_experts")
    typed(num_ranks, int, "num_ranks")
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}) must be at least 1")
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be at least 1")


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": Placement.linear,
    "round_robin": Placement.round_robin,
}


def create_placement(name: str, num_experts: int, num_ranks: int) -> Placement:
    """Build the placement that a config names, one of `PLACEMENTS`.

    Errors: ValueError for an unknown name or a number below 1. Local; every rank computes the same.
    """
    if typed(name, str, "placement") not in PLACEMENTS:
        raise ValueError(f"placement ({name!r}) is not one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name](num_experts, num_ranks)
