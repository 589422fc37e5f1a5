"""triton_kernels' routing data, which list pairs by expert, as rows of one expert each.

Letters: T tokens, H hidden, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_moe.routing import Routing

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence


def by_kernels(x: torch.Tensor) -> bool:
    """Whether kernels find the rows of tokens like these. Local."""
    return x.is_cuda


class ByExpert(NamedTuple):
    """Routing data: place i has weight gate_scal[i], reads token gather[i], and its row is the result's scatter[i]."""

    slice_sizes: torch.Tensor  # [E] int32, places of each expert
    gather: torch.Tensor  # [G], others than [0, T) none
    scatter: torch.Tensor | None  # [G], others than [0, G) none; None: i
    gate_scal: torch.Tensor  # [G]
    n_expts_act: int  # K

    def lists(self, x: torch.Tensor, expert_map: torch.Tensor | None) -> list[torch.Tensor]:
        """What `launches` are given."""
        found = x, self.slice_sizes, self.gather, self.scatter, self.gate_scal, expert_map
        return [tensor for tensor in found if tensor is not None]

    def launches(self, x: torch.Tensor, expert_map: torch.Tensor | None, *, on_input: bool) -> "LaunchSequence | None":
        """The launches that find the rows of tokens like x, None where torch finds them.

        They read lists without gaps, on a GPU. Args: on_input: weights multiply tokens. Local; nothing is launched.
        """
        if not by_kernels(x) or not all(each.is_contiguous() and each.numel() for each in self.lists(x, expert_map)):
            return None
        from ep_moe.local_moe.listed_pairs import MOST_EXPERTS, ragged_pairs  # Triton exists only on Linux

        num_experts, sizes = self.slice_sizes.shape[0], (self.gather.shape[0], self.slice_sizes.shape[0])
        if num_experts > MOST_EXPERTS:
            return None
        flags = {"placed": self.scatter is not None, "mapped": expert_map is not None, "on_input": on_input}
        return ragged_pairs(x, *sizes, **flags)

    def check(self, num_tokens: int) -> None:
        """Raise ValueError for other shapes; values are not read."""
        if self.n_expts_act < 1 or self.slice_sizes.dim() != 1 or not self.slice_sizes.numel():
            raise ValueError(
                f"n_expts_act is {self.n_expts_act}, a_ragged_metadata.slice_sizes {tuple(self.slice_sizes.shape)}; at "
                "least 1 and [E] needed"
            )
        needed = (num_tokens * self.n_expts_act,)
        for name, tensor in (
            ("gather_indx", self.gather),
            ("scatter_indx", self.scatter),
            ("gate_scal", self.gate_scal),
        ):
            if tensor is not None and tuple(tensor.shape) != needed:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}; {needed} needed for {num_tokens} tokens and n_expts_act "
                    f"{self.n_expts_act}"
                )


def sort_pairs(data: ByExpert, expert_map: torch.Tensor | None, num_tokens: int) -> tuple[Routing, torch.Tensor]:
    """The routing [G, 1] of data that are checked, and the token [G] of each row, by torch.

    Places behind the last one of an expert have none, as indices of no token and of no row.
    Args: expert_map: [E], which expert each is, -1 none.
    Local, on the current stream, no host sync.
    """
    count, num_experts, device = data.gather.shape[0], data.slice_sizes.shape[0], data.gather.device
    place = torch.arange(count, dtype=torch.int32, device=device)
    ends = torch.cumsum(data.slice_sizes, 0, dtype=torch.int32)
    expert = torch.searchsorted(ends, place, right=True, out_int32=True)
    target = place if data.scatter is None else data.scatter
    there = (expert < num_experts) & (target >= 0) & (target < count) & (data.gather >= 0) & (data.gather < num_tokens)
    target = torch.where(there, target, count).long()  # the last entry of the new tensors is no row's
    if expert_map is not None:
        expert = torch.index_select(expert_map, 0, expert.clamp_(max=num_experts - 1)).int()
    ids = torch.full((count + 1,), -1, dtype=torch.int32, device=device).scatter_(0, target, expert)
    weights = torch.zeros(count + 1, dtype=torch.float32, device=device).scatter_(0, target, data.gate_scal.float())
    tokens = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_(0, target, data.gather.long())[:-1]
    return Routing(topk_ids=ids[:-1, None], topk_weights=weights[:-1, None]), tokens
