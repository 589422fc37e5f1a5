"""The expert of each pair, from lists that name pairs by expert, in two launches.

Letters: T tokens, K top-k, P = T * K pairs, M places of a list, E experts.
"""

import torch
import triton

from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.rows.pairs import _fill_pairs_kernel, _ragged_pairs_kernel, _sorted_pairs_kernel

_BLOCK = 1024  # pairs or places of a program
_COMPARISONS = 16384  # of places and experts by one program, at most
MOST_EXPERTS = 1024  # of `ragged_pairs`


def sorted_pairs(
    num_pairs: int, num_places: int, height: int, device: torch.device, *, flagged: bool
) -> LaunchSequence:
    """The expert of pairs that stand in blocks of one expert each, as `moe_align_block_size` sorts them.

    Args:
        num_pairs: P, at least 1. num_places: M. height: places of a block. flagged: say which pairs are listed.
    Returns: launches over "pairs" [M] and "experts" [blocks], int32 or int64, pairs outside [0, P) are none, and "end"
        [1], how many places count. Its workspace has "ids" [P] int32, -1 for pairs that are not listed, and, if
        `flagged`, "listed" [P] uint8.
    Local; nothing is launched.
    """
    listed = "listed" if flagged else None
    pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"ids": ((num_pairs,), torch.int32)}
    if flagged:
        pieces["listed"] = (num_pairs,), torch.uint8
    list_them = RepeatedLaunch(
        _sorted_pairs_kernel,
        triton.cdiv(num_places, _BLOCK),
        settings=(num_places, num_pairs),
        constants={"HEIGHT": height, "BLOCK": _BLOCK},
        options={},
        device=device,
    )
    launches = [(_fill(num_pairs, device), ("ids", listed)), (list_them, ("pairs", "experts", "end", "ids", listed))]
    return LaunchSequence(launches, ("pairs", "experts", "end"), pieces, device)


def ragged_pairs(
    num_tokens: int, num_topk: int, num_experts: int, device: torch.device, *, mapped: bool
) -> LaunchSequence:
    """The routing of pairs that are listed expert by expert without gaps, as triton_kernels' routing data.

    Args:
        num_tokens, num_topk: T and K, at least 1. num_experts: E, at most MOST_EXPERTS. mapped: experts have other
            numbers.
    Returns: launches over "counts" [E] int32, "pairs" [P] int32 or int64, others than [0, P) are none, "factors" [P] in
        any float dtype and, if `mapped`, "map" [E] int32 or int64. Its workspace has "ids" [T, K] int32, -1 for pairs
        that are not listed, and "weights" [T, K] float32, undefined for those.
    Local; nothing is launched.
    """
    num_pairs, experts = num_tokens * num_topk, triton.next_power_of_2(num_experts)
    block = min(max(_COMPARISONS // experts, 16), 256)
    list_them = RepeatedLaunch(
        _ragged_pairs_kernel,
        triton.cdiv(num_pairs, block),
        settings=(num_pairs,),
        constants={"E": num_experts, "EXPERTS": experts, "BLOCK": block},
        options={},
        device=device,
    )
    shape = num_tokens, num_topk
    given = "counts", "pairs", "factors", *(("map",) if mapped else ())
    names = "counts", "pairs", "factors", "map" if mapped else None, "ids", "weights"
    launches = [(_fill(num_pairs, device), ("ids", None)), (list_them, names)]
    return LaunchSequence(launches, given, {"ids": (shape, torch.int32), "weights": (shape, torch.float32)}, device)


def _fill(num_pairs: int, device: torch.device) -> RepeatedLaunch:
    return RepeatedLaunch(
        _fill_pairs_kernel,
        triton.cdiv(num_pairs, _BLOCK),
        settings=(num_pairs,),
        constants={"BLOCK": _BLOCK},
        options={},
        device=device,
    )
