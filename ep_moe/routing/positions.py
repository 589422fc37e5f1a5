"""Which copy of an expert a token takes, and how often tokens choose each expert: one table on the device.

Letters: T tokens on this rank, K top-k, E logical experts, P physical experts, R ranks.
"""

import torch

from ep_moe.placement import INT32, Placement
from ep_moe.tensors import check_tensor

# multipliers of a hash of 32 bits, which `ep_moe.kernels.route` computes too
_OF_ROW, _OF_EXPERT, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA77, 0x7FEB352D, 0x846CA68B
_LOW = 0xFFFFFFFF
_LANES = 8  # of counts, as in `ep_moe.kernels.route`: rows that follow each other add to different memory


class PositionTable:
    """The positions of each expert as the tokens of one rank see them, and counts of its tokens by expert.

    A token takes the copy on its own rank, else one on its own node, else one of all, but never an idle one. Of several
    it takes one by a hash of its row and the expert, from which ranks count on by their number: the same input gives
    the same choice, and copies get equal shares. The routing kernel, and `to_physical`, read the table; calls that are
    captured in a CUDA graph read what `update` has written since.

    Args:
        placement: the first one. rank: this rank.
        node: first and last + 1 of the ranks of its node; None if all ranks are of one.
        device: of the table. counted: count the experts that tokens choose.
        changing: `update` may follow although the placement has no copies; without it, ids that are positions
            already need no launch. Layers then compare only its sizes between ranks in each round.

    Attributes:
        placement: the one that the table has now.
        words: [E + P + 8 E] int64: for each expert its position, or, if there is a choice, the place of the first among
            the P entries that follow, and their number in the upper half; then those positions; then `lanes`.
    Errors: ValueError for a rank or node that the placement lacks. Local; copies to the device.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        *,
        node: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
        counted: bool = False,
        changing: bool = False,
    ) -> None:
        placement.num_local_experts(rank)  # refuses other ranks
        first, last = (0, placement.num_ranks) if node is None else node
        if not 0 <= first <= rank < last <= placement.num_ranks:
            raise ValueError(f"node ({node}) is no range of {placement.num_ranks} ranks with rank {rank}")
        self.rank, self._node, self.counted, self.changing = rank, (first, last), counted, changing
        self.placement, self.num_experts, self.num_physical = placement, placement.num_experts, placement.num_physical
        self.has_copies = self.num_physical > self.num_experts
        self.maps = self.has_copies or changing or not placement.is_identity
        words = [*self._entries(placement), *[0] * (_LANES * self.num_experts)]
        self.words = torch.tensor(words, dtype=torch.int64, device=device)

    @property
    def counts(self) -> torch.Tensor:
        """[E] int64 on the device: tokens of this rank that chose each expert, since the last `lanes.zero_()`.

        -1, other invalid ids and padding are not counted. It would overflow after 2^63. One launch, no host sync.
        """
        return self.lanes.sum(0)

    @property
    def lanes(self) -> torch.Tensor:
        """[8, E] int64, the counts of rows by their number modulo 8; a view that calls write to."""
        return self.words[self.num_experts + self.num_physical :].view(_LANES, self.num_experts)

    def update(self, placement: Placement) -> None:
        """Replace the placement by one of the same E, P and starts, in place; counts stay.

        Errors: ValueError for other sizes, or if the table was made for placements that do not change.
        Local, on the current stream; one copy from the host, and no host sync.
        """
        sizes = ((p.num_experts, p.starts) for p in (self.placement, placement))
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the new placement has {placement.num_experts} experts and starts {placement.starts}, the table "
                f"{self.num_experts} and {self.placement.starts}"
            )
        if not self.maps:
            raise ValueError("the table maps no ids: it was made with changing=False for positions that are ids")
        entries = torch.tensor(self._entries(placement), dtype=torch.int64, device="cpu")
        self.words[: len(entries)].copy_(entries, non_blocking=True)
        self.placement = placement

    def to_physical(self, topk_ids: torch.Tensor, num_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Map logical ids to physical ones and count them, in torch; `ep_moe.routing.to_physical` is the kernel.

        Args:
            topk_ids: [T, K] int32 or int64, logical, -1 none; invalid ids as in `Placement.to_physical`.
            num_tokens: [1] int32 on the device; rows from there on are not counted.
        Returns: [T, K] int32.
        Errors: ValueError for another shape or dtype. Local, no host sync.
        """
        check_tensor(topk_ids, "topk_ids")
        if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids are {tuple(topk_ids.shape)} {topk_ids.dtype}; [T, K] int32 or int64 needed")
        known = (topk_ids >= 0) & (topk_ids < self.num_experts)
        experts = torch.where(known, topk_ids, 0).long()
        rows = torch.arange(len(topk_ids), device=topk_ids.device)[:, None]
        if self.counted:
            live = known if num_tokens is None else known & (rows < num_tokens)
            place = rows % _LANES * self.num_experts + experts
            self.lanes.view(-1).scatter_add_(0, place.reshape(-1), live.long().reshape(-1))
        if not self.maps:
            return topk_ids if topk_ids.dtype == torch.int32 else topk_ids.clamp(INT32.min, INT32.max).int()
        words = self.words[experts]
        if self.has_copies:
            choices = words >> 32
            place = (words & _LOW) + (_hash(rows, experts) * choices >> 32)
            words = torch.where(choices > 0, self.words[torch.where(choices > 0, place, 0)], words)
        other = topk_ids.long()
        other = torch.where(other < 0, other, other + (self.num_physical - self.num_experts))
        return torch.where(known, words, other).clamp(INT32.min, INT32.max).int()

    def _entries(self, placement: Placement) -> list[int]:
        """The first E + P words for a placement."""
        rank_of = [rank for rank in range(placement.num_ranks) for _ in placement.local_experts(rank)]
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for position in placement.active:
            found[placement.physical_to_logical[position]].append(position)
        first, last = self._node
        words, choices = list[int](), list[int]()
        for positions in found:
            nearest = [p for p in positions if rank_of[p] == self.rank][:1]
            nearest = nearest or [p for p in positions if first <= rank_of[p] < last] or positions
            if len(nearest) == 1:
                words.append(nearest[0])
                continue
            turn = self.rank % len(nearest)  # the same row of neighboring ranks takes another copy
            words.append(len(nearest) << 32 | self.num_experts + len(choices))
            choices += nearest[turn:] + nearest[:turn]
        return [*words, *choices, *[0] * (placement.num_physical - len(choices))]


def _hash(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """An evenly distributed number in [0, 2^32) for each row and expert, int64."""
    value = (rows * _OF_ROW + experts * _OF_EXPERT) & _LOW
    value = ((value ^ value >> 16) * _FIRST) & _LOW
    value = ((value ^ value >> 15) * _SECOND) & _LOW
    return value ^ value >> 16
