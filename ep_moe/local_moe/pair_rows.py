"""Each pair of a token and an expert as a row of its own, in one launch.

Letters: T tokens, K top-k, H hidden, P = T * K pairs.
"""

import functools

import torch
import triton

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.local.pairs import _pair_rows_kernel

_COLUMNS = 1024  # of a row that one program copies, at most
_COLUMNS_OF_THREAD = 8
_MOST_KINDS = 512


@functools.lru_cache(maxsize=_MOST_KINDS)
def pair_rows(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    strides: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    *,
    on_input: bool,
    factor: float,
) -> LaunchSequence:
    """Rows of pairs, in the order of tokens.

    Args:
        num_tokens, num_topk, hidden: T, K and H, at least 1. strides: between rows of tokens, ids and weights, whose
            columns are next to each other. dtypes: of tokens, which are float32, bfloat16 or float16, and of ids.
        on_input: the pair's weight, rounded to the dtype of tokens, multiplies its row, and `factor` takes its place;
            else `factor` multiplies it.
    Returns: launches over "x" [T, H], "topk_ids" [T, K] and "topk_weights" [T, K] float32. Its workspace has "tokens"
        [P, H], "ids" [P, 1] and "weights" [P, 1] float32.
    Local; nothing is launched.
    """
    pairs = num_tokens * num_topk
    copy = pair_copies(num_tokens, num_topk, hidden, strides, device, on_input=on_input, factor=factor)
    x, *of_pairs = given = "x", "topk_ids", "topk_weights"
    pieces = {"tokens": ((pairs, hidden), dtypes[0]), "ids": ((pairs, 1), dtypes[1])}
    pieces["weights"] = (pairs, 1), torch.float32
    return LaunchSequence([(copy, (x, None, *of_pairs, *pieces))], given, pieces, device)


def pair_copies(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    strides: tuple[int, int, int],
    device: torch.device,
    *,
    on_input: bool,
    factor: float,
) -> Kernel:
    """The launch of `pair_rows`, over tokens, perhaps the token of each pair, ids and weights, and what it writes."""
    block = min(triton.next_power_of_2(hidden), _COLUMNS)
    return Kernel(
        _pair_rows_kernel,
        (num_tokens, triton.cdiv(hidden, block)),
        settings=(*strides, factor),
        constants={
            "H": hidden,
            "K": num_topk,
            "COLUMNS": triton.next_power_of_2(num_topk),
            "BLOCK": block,
            "ON_INPUT": on_input,
        },
        options={"num_warps": max(block // (32 * _COLUMNS_OF_THREAD), 1)},
        device=device,
    )
