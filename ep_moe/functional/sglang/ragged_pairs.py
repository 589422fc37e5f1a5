"""triton_kernels' routing data, which list pairs by expert, as the routing of tokens.

Letters: T tokens, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import Any, NamedTuple

import torch

from ep_moe.functional.plans import constant, quotients
from ep_moe.routing import Routing

_ALL_BITS = 2**63 - 1  # a number below zero becomes a large one


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


class PairSorter:
    """Finds the pairs of routing data with G entries and E experts, in about 10 operations of torch. Local."""

    def __init__(self, num_pairs: int, num_experts: int, device: torch.device) -> None:
        self._num_pairs, self._num_experts = num_pairs, num_experts
        self._place, self._all_bits = quotients(1, num_pairs, device)[1, :num_pairs], constant(_ALL_BITS, device)

    def __call__(self, data: ByExpert, expert_map: torch.Tensor | None) -> Pairs:
        """The pairs of data that are checked; places behind the last one of an expert count as none.

        Args: expert_map: [E], which expert each is, -1 none.
        Local, on the current stream, no host sync.
        """
        count, device = self._num_pairs, data.target.device
        ends = torch.cumsum(data.expt_hist, 0, dtype=torch.int32)
        expert = torch.searchsorted(ends, self._place, right=True, out_int32=True)
        index = torch.bitwise_and(data.target, self._all_bits).clamp_(max=count)
        index.masked_fill_(torch.eq(expert, self._num_experts), count)
        if not data.own_rows:
            index.masked_fill_(data.source < 0, count)
        if expert_map is not None:
            expert = torch.index_select(expert_map, 0, expert.clamp_(max=self._num_experts - 1)).int()
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
    sorter = PairSorter(num_tokens * num_topk, data.expt_hist.shape[0], data.target.device)
    return sorter(data, None).routing(num_tokens, num_topk)
