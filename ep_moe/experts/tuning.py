"""Tile sizes of the expert kernels.

Letters: I intermediate, K columns that a GEMM sums over.
"""

import dataclasses

import torch

_OTHER_SHARED_BYTES = 2048  # shared memory for barriers and scales, besides the stages' buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmTiles:
    """Tiles of one grouped GEMM.

    Args:
        block_n, block_k: columns of the result, and of the reduction, that a program holds at a time; powers of two.
        swap: the weights are the left operand (rows) of the tensor core's product.
        num_warps, num_stages: Triton's launch options.
        programs_per_sm: programs that share an SM.
    """

    block_n: int = 128
    block_k: int = 128
    swap: bool = False
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTiles:
    """Tiles of both GEMMs, which share the row tiles of `block_m` tokens of an expert.

    Tiles are ordered in groups of `group_m` row tiles, each of which covers all columns before the next group.
    """

    block_m: int
    first: GemmTiles
    second: GemmTiles
    group_m: int = 16


def choose_tiles(
    expected_rows: int, dtype: torch.dtype, *, gated: bool, group_k: int = 0, whole_blocks: bool = True
) -> ExpertTiles:
    """Choose tiles by the average tokens of an expert, as measured fastest on an H200 (docs/BENCHMARKS.md).

    Few tokens want tiles of 16 or 32 tokens, which Hopper's tensor cores support only as columns: `swap`. The two
    halves of a gated w13 want eight warps; fp8, with two sets of accumulators, at most 64 tokens.

    Args:
        expected_rows: the batch's hint. dtype: of the stored weights. gated: whether w13 has two halves.
        group_k: columns that share a weight scale, which no step of the reduction crosses; 0 without block scales.
        whole_blocks: whether 128 rows of a weight lie in one block of its scales; else each row loads its own.
    Local.
    """
    if dtype == torch.float32:
        tiles = GemmTiles(block_n=64, block_k=32, num_stages=3)
        return ExpertTiles(block_m=16 if expected_rows <= 16 else 32, first=tiles, second=tiles)
    if dtype.itemsize == 1:
        return _fp8_tiles(expected_rows, group_k, gated=gated, whole_blocks=whole_blocks)
    return _half_tiles(expected_rows, gated=gated)


def fit_stages(tiles: ExpertTiles, shared_bytes: int, itemsize: int, *, gated: bool) -> ExpertTiles:
    """Reduce num_stages until both GEMMs' buffers fit a block's shared memory. An H200 fits all of `choose_tiles`.

    Example: 128 rows and two halves of 128 columns with a bfloat16 block_k of 64 take 48 KiB a stage: three stages fit
    the 163 KiB of an A100.

    Args:
        shared_bytes: available to a thread block. itemsize: bytes of a stored value. gated: whether w13 has two halves.
    Errors: RuntimeError if one stage alone does not fit. Local.
    """

    def fitted(gemm: GemmTiles, halves: int) -> GemmTiles:
        stage_bytes = (tiles.block_m + halves * gemm.block_n) * gemm.block_k * itemsize
        most = (shared_bytes - _OTHER_SHARED_BYTES) // stage_bytes
        if most < 1:
            raise RuntimeError(
                f"a stage of {stage_bytes} bytes does not fit the {shared_bytes} bytes of a block's shared memory"
            )
        return dataclasses.replace(gemm, num_stages=min(gemm.num_stages, most))

    return dataclasses.replace(tiles, first=fitted(tiles.first, 2 if gated else 1), second=fitted(tiles.second, 1))


def _fp8_tiles(expected_rows: int, group_k: int, *, gated: bool, whole_blocks: bool) -> ExpertTiles:
    few, block_k = expected_rows <= 16, 128 if whole_blocks else 64
    if group_k:
        block_k = min(group_k & -group_k, block_k)
    block_m = 16 if few or block_k < 32 else 64 if whole_blocks else 32
    most_warps = block_m * block_k // 128  # each thread loads at least 4 bytes of tokens
    tiles = GemmTiles(block_k=block_k, swap=block_m < 64, num_warps=min(4, most_warps), num_stages=3)
    wide = dataclasses.replace(tiles, num_warps=min(8, most_warps), programs_per_sm=1)
    if few:
        first = tiles if expected_rows > 8 and group_k and whole_blocks else wide
        return ExpertTiles(block_m=block_m, first=first, second=dataclasses.replace(tiles, programs_per_sm=4))
    if gated and not group_k:  # no scale group needs 128 columns of the intermediate in one tile
        wide = dataclasses.replace(tiles, block_n=64, block_k=64, num_stages=5)
    return ExpertTiles(block_m=block_m, first=wide if gated else tiles, second=tiles)


def _half_tiles(expected_rows: int, *, gated: bool) -> ExpertTiles:
    """Tiles of bfloat16 and float16."""
    tiles = GemmTiles(block_k=64, swap=expected_rows <= 32, num_stages=3)
    wide = dataclasses.replace(tiles, num_warps=8, num_stages=4, programs_per_sm=1)
    if expected_rows <= 16:
        return ExpertTiles(block_m=16, first=tiles, second=tiles)
    if expected_rows <= 128:
        return ExpertTiles(block_m=32 if tiles.swap else 64, first=wide if gated else tiles, second=tiles)
    second = dataclasses.replace(tiles, num_warps=8)
    return ExpertTiles(block_m=128, first=wide if gated else second, second=second)
