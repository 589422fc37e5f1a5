"""The expert of each pair, from lists that name pairs by expert.

Letters: T tokens, H hidden, P pairs, M places of a list, E experts.
"""

import torch
import triton

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.local.pairs import _fill_pairs_kernel, _ragged_pairs_kernel, _sorted_pairs_kernel
from ep_moe.local_moe.pair_rows import pair_copies

_BLOCK = 1024  # pairs or places of a program
_COMPARISONS = 16384  # of places and experts by one program, at most
MOST_EXPERTS = 1024  # of `ragged_pairs`


def sorted_pairs(num_pairs: int, num_places: int, height: int, device: torch.device) -> LaunchSequence:
    """The expert of pairs that stand in blocks of one expert each, as `moe_align_block_size` sorts them.

    Args:
        num_pairs: P, at least 1. num_places: M. height: places of a block.
    Returns: launches over "pairs" [M] and "experts" [blocks], int32 or int64, pairs outside [0, P) are none, and "end"
        [1], how many places count. Its workspace has "ids" [P] int32, -1 for pairs that are not listed, and "listed"
        [P] uint8.
    Local; nothing is launched.
    """
    pieces = {"ids": ((num_pairs,), torch.int32), "listed": ((num_pairs,), torch.uint8)}
    list_them = Kernel(
        _sorted_pairs_kernel,
        triton.cdiv(num_places, _BLOCK),
        settings=(num_places, num_pairs),
        constants={"HEIGHT": height, "BLOCK": _BLOCK},
        device=device,
    )
    fill, given = _fill(num_pairs, device), ("pairs", "experts", "end")
    launches = [(fill, ("ids", "listed")), (list_them, (*given, "ids", "listed"))]
    return LaunchSequence(launches, given, pieces, device)


def ragged_pairs(
    x: torch.Tensor, num_pairs: int, num_experts: int, *, placed: bool, mapped: bool, on_input: bool
) -> LaunchSequence:
    """The rows of pairs that are listed expert by expert without gaps, as triton_kernels' routing data.

    Args:
        x: [T, H] float32, bfloat16 or float16, rows without gaps; T at least 1. num_pairs: P, at least 1. num_experts:
            E, at most MOST_EXPERTS. placed: pairs have other numbers than their places. mapped: experts have other
            numbers. on_input: factors multiply tokens, as of `pair_rows`.
    Returns: launches over "x", "counts" [E] int32, "rows" [P] int32 or int64, the tokens of pairs, others than [0, T)
        are none; if `placed` "pairs" [P], the same of [0, P); "factors" [P] in any float dtype and, if `mapped`, "map"
        [E] int32 or int64. Its workspace has "tokens" [P, H], "ids" [P, 1] int32, -1 for pairs that are not listed,
        and "weights" [P, 1] float32, undefined for those.
    Local; nothing is launched.
    """
    (num_tokens, hidden), device = x.shape, x.device
    experts = triton.next_power_of_2(num_experts)
    block = min(max(_COMPARISONS // experts, 16), 256)
    list_them = Kernel(
        _ragged_pairs_kernel,
        triton.cdiv(num_pairs, block),
        settings=(num_pairs, num_tokens),
        constants={"E": num_experts, "EXPERTS": experts, "BLOCK": block},
        device=device,
    )
    copy = pair_copies(num_pairs, 1, hidden, (x.stride(0), 1, 1), device, on_input=on_input, factor=1.0)
    optional = "pairs" if placed else None, "map" if mapped else None
    names = "counts", "rows", optional[0], "factors", optional[1]
    listed = "listed_ids", "listed_factors", "sources"
    pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "listed_ids": ((num_pairs,), torch.int32),
        "listed_factors": ((num_pairs,), torch.float32),
        "sources": ((num_pairs,), torch.int32),
        "tokens": ((num_pairs, hidden), x.dtype),
        "ids": ((num_pairs, 1), torch.int32),
        "weights": ((num_pairs, 1), torch.float32),
    }
    launches = [
        (_fill(num_pairs, device), ("listed_ids", None)),
        (list_them, (*names, *listed)),
        (copy, ("x", "sources", "listed_ids", "listed_factors", "tokens", "ids", "weights")),
    ]
    return LaunchSequence(launches, ("x", *(name for name in names if name is not None)), pieces, device)


def _fill(num_pairs: int, device: torch.device) -> Kernel:
    return Kernel(
        _fill_pairs_kernel,
        triton.cdiv(num_pairs, _BLOCK),
        settings=(num_pairs,),
        constants={"BLOCK": _BLOCK},
        device=device,
    )
