"""triton_kernels' routing data, which list pairs by expert, as the routing of tokens.

Letters: T tokens, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_moe.functional.plans import constant, quotients
from ep_moe.routing import Routing

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence

_ALL_BITS = 2**63 - 1  # a number below zero becomes a large one


def by_kernels(x: torch.Tensor) -> bool:
    """Whether kernels find the routing of tokens like these. Local."""
    return x.is_cuda


class ByExpert(NamedTuple):
    """Routing data: place i has weight gate_scal[i], reads the row of pair source[i], and goes to pair target[i]."""

    gate_scal: torch.Tensor  # [G]
    expt_hist: torch.Tensor  # [E], places of each expert
    source: torch.Tensor  # [G], -1 none
    target: torch.Tensor  # [G], -1 none

    @property
    def own_rows(self) -> bool:
        """Whether source and target are one tensor, so that a pair's row is that of its token."""
        return self.source.data_ptr() == self.target.data_ptr()

    def lists(self, expert_map: torch.Tensor | None) -> list[torch.Tensor]:
        """What `launches` are given."""
        found = [self.expt_hist, self.target, self.gate_scal]
        return found if expert_map is None else [*found, expert_map]

    def launches(self, x: torch.Tensor, num_topk: int, expert_map: torch.Tensor | None) -> "LaunchSequence | None":
        """The launches that find the routing of tokens like x, None where torch finds it.

        They read lists without gaps, on a GPU, whose source and target are one tensor. Local; nothing is launched.
        """
        there = self.lists(expert_map)
        if not by_kernels(x) or not x.shape[0] or not num_topk or not all(each.is_contiguous() for each in there):
            return None
        from ep_moe.layout.listed_pairs import MOST_EXPERTS, ragged_pairs  # Triton exists only on Linux

        num_experts = self.expt_hist.shape[0]
        if not 0 < num_experts <= MOST_EXPERTS or self.target.shape[0] != x.shape[0] * num_topk:
            return None
        return ragged_pairs(x.shape[0], num_topk, num_experts, x.device, mapped=expert_map is not None)

    def check(self, num_tokens: int, num_topk: int) -> None:
        """Raise ValueError for other shapes; values are not read."""
        num_pairs = num_tokens * num_topk
        for name in ("gate_scal", "source", "target"):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != (num_pairs,):
                argument = {"source": "gather_indx.src_indx", "target": "scatter_indx.dst_indx"}.get(name, name)
                raise ValueError(
                    f"{argument} is {tuple(tensor.shape)}; ({num_pairs},) needed for {num_tokens} tokens and "
                    f"n_expts_act {num_topk}"
                )


class Pairs(NamedTuple):
    """Tensors of pairs, each with one entry more, which is no pair's."""

    ids: torch.Tensor  # [G + 1] int32, an expert, -1 none
    weights: torch.Tensor  # [G + 1] float32, undefined where there is no expert
    pair_of: torch.Tensor  # [G] int64, the pair of each place, G none

    def routing(self, num_tokens: int, num_topk: int) -> Routing:
        """The same as [T, K]; weights are 0 where there is no expert. Local."""
        ids, weights = (flat[:-1].view(num_tokens, num_topk) for flat in (self.ids, self.weights))
        return Routing(topk_ids=ids, topk_weights=weights.masked_fill(ids < 0, 0.0))


def sort_pairs(data: ByExpert, expert_map: torch.Tensor | None) -> Pairs:
    """The pairs of data that are checked, by torch; places behind the last one of an expert count as none.

    Args: expert_map: [E], which expert each is, -1 none.
    Local, on the current stream, no host sync.
    """
    count, num_experts, device = data.target.shape[0], data.expt_hist.shape[0], data.target.device
    place = quotients(1, count, device)[1, :count]
    ends = torch.cumsum(data.expt_hist, 0, dtype=torch.int32)
    expert = torch.searchsorted(ends, place, right=True, out_int32=True)
    index = torch.bitwise_and(data.target, constant(_ALL_BITS, device)).clamp_(max=count)
    index.masked_fill_(torch.eq(expert, num_experts), count)
    if not data.own_rows:
        index.masked_fill_(data.source < 0, count)
    if expert_map is not None:
        expert = torch.index_select(expert_map, 0, expert.clamp_(max=num_experts - 1)).int()
    ids = torch.full((count + 1,), -1, dtype=torch.int32, device=device).scatter_(0, index, expert)
    weights = torch.empty(count + 1, dtype=torch.float32, device=device)
    return Pairs(ids, weights.scatter_(0, index, data.gate_scal.float()), index)


def routed_pairs(num_tokens: int, routing_data: Any, gather_indx: Any, scatter_indx: Any) -> Routing:
    """The routing [T, K] of pairs whose rows are those of their tokens.

    Errors: ValueError for other shapes, and indices that are not the same tensor, so that rows might be others.
    """
    data = ByExpert(routing_data.gate_scal, routing_data.expt_hist, gather_indx.src_indx, scatter_indx.dst_indx)
    if not data.own_rows:
        raise ValueError("gather_indx.src_indx and scatter_indx.dst_indx are not the same tensor")
    num_topk = routing_data.n_expts_act
    data.check(num_tokens, num_topk)
    return sort_pairs(data, None).routing(num_tokens, num_topk)
