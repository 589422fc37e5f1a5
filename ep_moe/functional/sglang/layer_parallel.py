"""The ranks that share a layer of SGLang's, in place of SGLang's global state."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoeParallel:
    """The ranks that share a layer: rank r has the experts of r // tp_size and the columns of r % tp_size.

    Args:
        group: of torch.distributed, of ep_size * tp_size ranks; None is the default group, or none for one rank.
        ep_size: ranks that share the experts. tp_size: ranks that share the intermediate size of each expert.
    Errors: ValueError for a group of another size.
    """

    group: Any = None
    ep_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.ep_size < 1 or self.tp_size < 1:
            raise ValueError(f"ep_size ({self.ep_size}) and tp_size ({self.tp_size}) must be at least 1")
        if self.size > 1 and torch.distributed.get_world_size(self.group) != self.size:
            ranks = torch.distributed.get_world_size(self.group)
            raise ValueError(f"the group has {ranks} ranks, ep_size ({self.ep_size}) * tp_size ({self.tp_size}) needed")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ep_size * self.tp_size

    @property
    def rank(self) -> int:
        """This rank."""
        return torch.distributed.get_rank(self.group) if self.size > 1 else 0
