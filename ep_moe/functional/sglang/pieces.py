"""Pieces of SGLang's fused experts that callers use by themselves, in torch.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts.
"""

import torch


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


def swiglu_gpt_oss_sigmoid_alpha(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """[..., 2I] of alternating gate and up to [..., I], in the dtype of x: gpt-oss's activation. Local.

    gate <= limit, -limit <= up <= limit, then gate * sigmoid(alpha * gate) * (up + 1).
    """
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * torch.sigmoid(gate * gemm1_alpha) * (up + 1)


def swiglu_no_interleaved_with_alpha_and_limit(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """`swiglu_gpt_oss_sigmoid_alpha` of the halves [gate; up]."""
    return swiglu_gpt_oss_sigmoid_alpha(torch.stack(x.chunk(2, -1), -1).flatten(-2), gemm1_alpha, gemm1_limit)
