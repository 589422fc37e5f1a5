"""Launchers of the kernels beside the GEMMs: the tile list before them, and requantization between them.

Letters: L local experts, I intermediate, G scale groups, Q row tiles of all experts.
"""

from typing import Any, NamedTuple

import torch
import triton

from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.launching import num_programs
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.gemm.arguments import RowGroups
from ep_moe.kernels.gemm.requantize import _expert_amax_kernel, _requantize_kernel, _requantize_nvfp4_kernel
from ep_moe.kernels.gemm.tile_list import _tile_list_kernel

_LIST_BLOCK = 128  # entries of the tile list that one program writes
_ELEMENTS = 2048  # that one program requantizes at a time, unless a single row has more
_PROGRAMS_PER_SM = 8


class Requantize(NamedTuple):
    """The kernels between the GEMMs, each None if there is none."""

    find_amax: Kernel | None  # takes `Stored` float32 rows, `Rows` and `TileList`, whose amax it writes
    requantize: Kernel | None  # takes `Stored` float32 rows, `Stored` values and scales, `Rows`, `TileList`


def prepare_tile_list(num_experts: int, max_tiles: int, block_m: int, device: torch.device) -> Kernel:
    """Prepare the kernel that cuts the tokens of every expert into tiles of `block_m`; it takes `Rows`, `TileList`."""
    return Kernel(
        _tile_list_kernel,
        triton.cdiv(max_tiles, _LIST_BLOCK),
        settings=(num_experts, max_tiles),
        constants={"BLOCK_M": block_m, "EXPERTS": triton.next_power_of_2(num_experts), "TILES": _LIST_BLOCK},
        options={},
        device=device,
    )


def prepare_requantize(
    shape: CallShape, between: Between, max_tiles: int, block_m: int, *, width: int, order: int
) -> Requantize:
    """Prepare the kernels between the GEMMs; none if the first GEMM fuses `between`.

    Args:
        width: columns of the rows that they store. order: `Epilogue.ORDER` of these, of whole rows only.
    """
    if between.fused:
        return Requantize(None, None)
    stored, intermediate, rows = shape.scheme.activation, shape.intermediate, max_tiles * block_m
    whole_rows = stored.granularity != "group" or between is Between.NVFP4
    group_width = intermediate if whole_rows else stored.block[1]
    block = triton.next_power_of_2(width if whole_rows else group_width)
    per_program = max(min(_ELEMENTS // block, block_m), 1)
    pieces = RowGroups(BLOCK_M=block_m, ROWS=per_program, BLOCK=block)

    def prepare(kernel: Any, most: int, *numbers: int, num_warps: int = 4, **others: int) -> Kernel:
        return Kernel(
            kernel,
            num_programs(shape.device, _PROGRAMS_PER_SM, most),
            settings=(intermediate, *numbers),
            constants={"PIECES": pieces, **others},
            options={"num_warps": num_warps},
            device=shape.device,
        )

    if between is Between.NVFP4:
        options: dict[str, Any] = {"num_warps": 4 if block <= 4096 else 16, "GROUP": stored.block[1], "ORDER": order}
        return Requantize(None, prepare(_requantize_nvfp4_kernel, rows // per_program, width, **options))
    options = {"num_warps": 4 if block <= 4096 else 8, "POWER_OF_TWO": stored.power_of_two, "ORDER": order}
    find_amax = None
    if between is Between.TENSOR:
        find_amax = prepare(_expert_amax_kernel, rows // per_program)
    return Requantize(find_amax, prepare(_requantize_kernel, rows // per_program, width, group_width, rows, **options))
