"""Pairs of a token and an expert: sorted by expert, as rows of one expert each, and their sums.

Letters: T tokens, H hidden, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_moe.functional.call import Written
from ep_moe.functional.formats import Flags
from ep_moe.local_moe.row_gemm import RowLists
from ep_moe.routing import Routing

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    ignore_invalid_expert: bool = False,
    *,
    return_inactive_prefix_count: bool = False,
    pad_expert_ids: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of tokens and experts by expert, and pad each expert's to whole blocks.

    Example: for topk_ids [[1, 0], [1, 1]], block_size 2 and num_experts 2, the pairs are 0, 1, 2 and 3; the sorted ones
    are [1, 4, 0, 2, 3, 4, ...], of blocks of experts [0, 1, 1, ...], and 6 of them count. 4 is none.

    Args:
        topk_ids: [T, K], any integer dtype. Pairs with ids outside of [0, E), as -1, are in blocks of expert -1, which
            come first, or left out if `ignore_invalid_expert`.
        return_inactive_prefix_count: count blocks of expert -1, too. pad_expert_ids: experts behind the last block are
            -1, which they are in any case.
    Returns: sorted_token_ids [M] int32, T * K where there is none; expert_ids [M / block_size] int32;
        num_tokens_post_padded [1] int32, or [2] with the number of blocks of expert -1. M is T * K * block_size for
        T * K <= E, else T * K + (E + 1) * (block_size - 1), rounded up to a multiple of 4.
    Errors: ValueError for sizes below 1, and options that need blocks of expert -1 without these. Local, no host sync.
    """
    if block_size < 1 or num_experts < 1:
        raise ValueError(f"block_size ({block_size}) and num_experts ({num_experts}) must be at least 1")
    for name, option in (
        ("pad_expert_ids", pad_expert_ids),
        ("return_inactive_prefix_count", return_inactive_prefix_count),
    ):
        if option and ignore_invalid_expert:
            raise ValueError(f"{name} and ignore_invalid_expert are both set, which leaves blocks of expert -1 out")
    flat, device = topk_ids.reshape(-1).long(), topk_ids.device
    num_pairs = flat.numel()
    most = num_pairs * block_size if num_pairs <= num_experts else num_pairs + (num_experts + 1) * (block_size - 1)
    most += -most % 4
    valid = (flat >= 0) & (flat < num_experts)
    group = torch.where(valid, flat + 1, num_experts + 1 if ignore_invalid_expert else 0)  # the last is left out
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    padded = (counts[:-1] + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = torch.sort(group, stable=True)
    within = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[order.values]
    firsts = torch.cat([ends - padded, torch.full_like(counts[:1], most)])
    place = torch.where(order.values <= num_experts, firsts[order.values] + within, most)
    sorted_ids = torch.full((most + 1,), num_pairs, dtype=torch.int32, device=device)
    sorted_ids.scatter_(0, place, torch.where(place < most, order.indices, num_pairs).int())
    block = torch.arange(-(-most // block_size), device=device) * block_size
    expert_ids = torch.searchsorted(ends, block, right=True) - 1
    expert_ids = torch.where(block < ends[-1], expert_ids, -1).int()
    counted = torch.stack([ends[-1], padded[0] // block_size]) if return_inactive_prefix_count else ends[-1:]
    return sorted_ids[:most], expert_ids, counted.int()


def moe_sum_reduce_triton(
    input: torch.Tensor,  # noqa: A002 - SGLang's name
    output: torch.Tensor,
    routed_scaling_factor: float,
) -> None:
    """output [T, H] = the sum over K of input [T, K, H], in float32, times the factor. Errors: ValueError. Local."""
    if input.dim() != 3 or output.shape != (input.shape[0], input.shape[2]):
        raise ValueError(f"input is {tuple(input.shape)}, output {tuple(output.shape)}; [T, K, H] and [T, H] needed")
    output.copy_(input.float().sum(1) * routed_scaling_factor)


def moe_sum_reduce_torch_compile(x: torch.Tensor, out: torch.Tensor, routed_scaling_factor: float) -> None:
    """`moe_sum_reduce_triton`, for code that torch.compile traces."""
    moe_sum_reduce_triton(x, out, routed_scaling_factor)


def by_kernels(x: torch.Tensor) -> bool:
    """Whether kernels make rows of tokens like these. Local."""
    return x.is_cuda


def rows_of(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, on_input: bool = False, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights of all T * K pairs, a row each; `on_input`: weights multiply tokens, not results."""
    num_topk, topk_weights = topk_ids.shape[1], topk_weights.float()
    launches = pair_launches(x, topk_ids, topk_weights, on_input=on_input, factor=factor)
    if launches is not None:
        given = dict(zip(launches.given, (x, topk_ids, topk_weights), strict=True))
        found = launches.workspace.views(launches.run(given))
        return found["tokens"], found["ids"], found["weights"]
    if num_topk > 1:
        x = x.repeat_interleave(num_topk, dim=0)
        topk_ids, topk_weights = topk_ids.reshape(-1, 1), topk_weights.reshape(-1, 1)
    if on_input:
        return x * topk_weights.to(x.dtype), topk_ids, torch.full_like(topk_weights, factor)
    return x, topk_ids, topk_weights if factor == 1.0 else topk_weights * factor


def pair_launches(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, on_input: bool, factor: float
) -> "LaunchSequence | None":
    """The launch that does what `rows_of` does with tokens like x; None where torch does. Nothing is launched."""
    (num_tokens, num_topk), hidden, given = topk_ids.shape, x.shape[1], (x, topk_ids, topk_weights)
    if not by_kernels(x) or not num_tokens * num_topk * hidden or any(each.stride(1) != 1 for each in given):
        return None
    from ep_moe.local_moe.pair_rows import pair_rows  # Triton exists only on Linux

    sizes, strides = (num_tokens, num_topk, hidden), (x.stride(0), topk_ids.stride(0), topk_weights.stride(0))
    return pair_rows(*sizes, strides, (x.dtype, topk_ids.dtype), x.device, on_input=on_input, factor=factor)


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


class GemmCall(NamedTuple):
    """The arguments of `invoke_fused_moe_kernel` that have a meaning here, with its config as text."""

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    C: Written
    A_scale: torch.Tensor | None
    B_scale: torch.Tensor | None
    B_zp: torch.Tensor | None
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    mul_routed_weight: bool
    top_k: int
    sizes: str  # such as "BLOCK_SIZE_K=64 BLOCK_SIZE_M=16"
    use_fp8_w8a8: bool
    use_int8_w8a8: bool
    use_int8_w8a16: bool
    use_int4_w4a16: bool
    per_channel_quant: bool
    block_shape: list[int] | None = None
    a_use_tma: bool = False
    c_sorted: bool = False

    @property
    def flags(self) -> Flags:
        """How B and A are stored."""
        return Flags(**{name: getattr(self, name) for name in Flags._fields})

    @property
    def config(self) -> dict[str, int]:
        """The sizes by their keys."""
        pairs = (size.split("=") for size in self.sizes.split())
        return {key: int(size) for key, size in pairs}


class SortedPairs(NamedTuple):
    """The sorted pairs [M] of a call."""

    pair: torch.Tensor  # in [0, P)
    expert: torch.Tensor
    target: torch.Tensor  # rows of C
    valid: torch.Tensor  # whether it is a pair
    of_expert: torch.Tensor  # and of an expert


def sorted_pairs(call: GemmCall, block: int) -> SortedPairs:
    pairs, num_pairs, num_experts = call.sorted_token_ids, call.topk_ids.numel(), call.B.shape[0]
    place = torch.arange(pairs.shape[0], device=pairs.device)
    expert = call.expert_ids.repeat_interleave(block)[: pairs.shape[0]].long()
    valid = (place < call.num_tokens_post_padded.reshape(-1)[0]) & (pairs >= 0) & (pairs < num_pairs)
    pair = pairs.long().clamp(0, max(num_pairs - 1, 0))
    of_expert = valid & (expert >= 0) & (expert < num_experts)
    return SortedPairs(pair, expert, place if call.c_sorted else pair, valid, of_expert)


def row_lists(call: GemmCall, block: int, num_rows: int) -> RowLists:
    """The pairs of each expert, and which rows of C are of no expert, by torch."""
    listed, num_experts = sorted_pairs(call, block), call.B.shape[0]
    key = torch.where(listed.of_expert, listed.expert, num_experts)
    device = key.device
    order = torch.sort(key, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    starts = counts.cumsum(0) - counts
    source = torch.arange(len(key), device=device) if call.a_use_tma else listed.pair // call.top_k
    zeros = None
    if not call.c_sorted:
        zeros = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)
        zeros.index_fill_(0, torch.where(listed.valid & ~listed.of_expert, listed.target, num_rows), True)
        zeros = zeros[:-1]
    return RowLists(
        expert_row_start=starts[:-1].int(),
        expert_num_tokens=counts[:-1].int(),
        source=source[order].int(),
        target=listed.target[order].int(),
        factor=call.topk_weights.reshape(-1).float()[listed.pair[order]] if call.mul_routed_weight else None,
        zeros=zeros,
        expected_rows=max(-(-call.topk_ids.numel() // num_experts), 1),
    )
