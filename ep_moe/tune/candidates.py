"""Tiles to try: those of the same backend that differ in one number from others, and fit the scheme and the GPU.

Letters: K columns that a GEMM sums over.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.prepared_rows import shuffles
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles, GemmTiles, stage_bytes
from ep_moe.kernels.device import Device

_MOST_ACCUMULATORS = 224  # float32 registers of a thread for sums; more would spill
_BLOCK_M, _BLOCK_N, _BLOCK_K, _WARPS = (16, 128), (32, 256), (16, 256), (2, 8)
_STAGES, _PROGRAMS, _GROUP_M = (2, 6), (1, 6), (1, 64)


def neighbours(tiles: ExpertTiles, shape: CallShape) -> Iterator[ExpertTiles]:
    """Tiles that differ in one number of one GEMM, or in their row tiles, and that the GPU can launch. Local."""
    for group_m in _doubled(tiles.group_m, _GROUP_M):
        yield from _fitting(dataclasses.replace(tiles, group_m=group_m), shape)
    if tiles.backend == HOPPER_TILES.backend:  # whose tiles follow from the rows
        return
    rows = 2 * max(shape.expected_rows - 1, 1).bit_length()
    for block_m in _doubled(tiles.block_m, _BLOCK_M):
        if block_m <= 16 or block_m < 1 << rows:
            changed = dataclasses.replace(tiles, block_m=block_m)
            yield from _fitting(changed, shape)
            if (block_m >= 64) != (tiles.block_m >= 64):  # the tensor core takes 64 rows of its left operand
                swapped = {
                    name: dataclasses.replace(getattr(tiles, name), swap=block_m < 64) for name in ("first", "second")
                }
                yield from _fitting(dataclasses.replace(changed, **swapped), shape)
    for gemm in _gemms(tiles.first):
        yield from _fitting(dataclasses.replace(tiles, first=gemm), shape)
    for gemm in _gemms(tiles.second):
        yield from _fitting(dataclasses.replace(tiles, second=gemm), shape)


def _doubled(value: int, limits: tuple[int, int]) -> Iterator[int]:
    """Half and twice the value, within limits."""
    return (other for other in (value // 2, value * 2) if limits[0] <= other <= limits[1])


def _gemms(gemm: GemmTiles) -> Iterator[GemmTiles]:
    for name, limits in (("block_n", _BLOCK_N), ("block_k", _BLOCK_K), ("num_warps", _WARPS)):
        yield from (_changed(gemm, **{name: value}) for value in _doubled(getattr(gemm, name), limits))
    for name, (least, most) in (("num_stages", _STAGES), ("programs_per_sm", _PROGRAMS)):
        value = getattr(gemm, name)
        yield from (_changed(gemm, **{name: other}) for other in (value - 1, value + 1) if least <= other <= most)
    yield dataclasses.replace(gemm, swap=not gemm.swap)
    if gemm.block_k < _BLOCK_K[1] and gemm.num_stages // 2 >= _STAGES[0]:  # the same bytes in flight, in wider steps
        yield dataclasses.replace(gemm, block_k=2 * gemm.block_k, num_stages=gemm.num_stages // 2)


def _changed(gemm: GemmTiles, **changes: Any) -> GemmTiles:
    return dataclasses.replace(gemm, **changes)


def _fitting(tiles: ExpertTiles, shape: CallShape) -> Iterator[ExpertTiles]:
    """The tiles, if a GPU can hold their sums and stages, no step crosses from one scale to the next, and weights that
    are decoded are read in whole words: others are decoded one by one.

    Those of Hopper's kernels do all three.
    """
    if tiles.backend == HOPPER_TILES.backend:
        yield tiles
        return
    width, device = shape.scheme.weight.group_width, Device.of(shape.device)
    for gemm, halves in ((tiles.first, 2 if shape.activation.kind.gated else 1), (tiles.second, 1)):
        sums = halves * tiles.block_m * gemm.block_n // (32 * gemm.num_warps)
        if sums > _MOST_ACCUMULATORS or gemm.num_warps * 32 * gemm.programs_per_sm > device.threads:
            return
        if width and width % gemm.block_k and not (shape.decodes and gemm.block_k % width == 0):
            return
        if shape.decodes and not shuffles(shape, gemm):
            return
        row_bits = 8 * shape.row_dtype.itemsize
        buffers = gemm.num_stages if device.warp_groups else gemm.num_stages - 1  # one is in registers
        stages = buffers * stage_bytes(tiles.block_m, gemm, row_bits, shape.weight_bits, halves=halves)
        if stages * gemm.programs_per_sm > device.shared_bytes:
            return
    yield tiles
