"""Launchers of the kernels beside the GEMMs: the tile list before them, and requantization between them.

Letters: L local experts, I intermediate, G scale groups, Q row tiles of all experts.
"""

from collections.abc import Callable

import triton

from ep_moe.experts.grouped_gemm import Between, CallShape
from ep_moe.experts.launching import PreparedKernel, num_programs
from ep_moe.kernel_launch.constants import constants
from ep_moe.kernels.gemm.arguments import RowGroups, Rows, Stored, TileList
from ep_moe.kernels.gemm.requantize import _expert_amax_kernel, _requantize_kernel, _requantize_nvfp4_kernel
from ep_moe.kernels.gemm.tile_list import _tile_list_kernel

_LIST_BLOCK = 128  # entries of the tile list that one program writes
_ELEMENTS = 2048  # that one program requantizes at a time, unless a single row has more
_PROGRAMS_PER_SM = 8

Requantize = Callable[[Stored, Stored, Rows, TileList], None]  # from float32 rows to values and scales


def prepare_tile_list(num_experts: int, max_tiles: int, block_m: int) -> PreparedKernel:
    """Prepare the kernel that cuts the tokens of every expert into tiles of `block_m`; it takes `Rows`, `TileList`."""
    return PreparedKernel(
        kernel=_tile_list_kernel,
        grid=triton.cdiv(max_tiles, _LIST_BLOCK),
        numbers=(num_experts, max_tiles),
        constants={"BLOCK_M": block_m, "EXPERTS": triton.next_power_of_2(num_experts), "TILES": _LIST_BLOCK},
    )


def prepare_requantize(shape: CallShape, between: Between, max_tiles: int, block_m: int) -> Requantize | None:
    """Prepare the kernels between the GEMMs; None if the first GEMM does what `between` says."""
    if between.fused:
        return None
    stored, intermediate, rows = shape.scheme.activation, shape.intermediate, max_tiles * block_m
    whole_rows = stored.granularity != "group" or between is Between.NVFP4
    width = intermediate if whole_rows else stored.block[1]
    block = triton.next_power_of_2(width)
    per_program = max(min(_ELEMENTS // block, block_m), 1)
    pieces = constants(RowGroups, BLOCK_M=block_m, ROWS=per_program, BLOCK=block)

    def prepare(kernel: object, most: int, *numbers: int, **options: object) -> PreparedKernel:
        grid = num_programs(shape.device, _PROGRAMS_PER_SM, most)
        return PreparedKernel(
            kernel=kernel, grid=grid, numbers=(intermediate, *numbers), constants={"PIECES": pieces, **options}
        )

    if between is Between.NVFP4:
        num_warps = 4 if block <= 4096 else 16
        return prepare(_requantize_nvfp4_kernel, rows // per_program, GROUP=stored.block[1], num_warps=num_warps)
    options = {"num_warps": 4 if block <= 4096 else 8, "POWER_OF_TWO": stored.power_of_two}
    requantize = prepare(_requantize_kernel, rows // per_program, width, rows, **options)
    if between is not Between.TENSOR:
        return requantize
    find_amax = prepare(_expert_amax_kernel, rows // per_program)

    def requantize_per_expert(inner: Stored, out: Stored, rows: Rows, tiles: TileList) -> None:
        find_amax(inner, rows, tiles)
        requantize(inner, out, rows, tiles)

    return requantize_per_expert
