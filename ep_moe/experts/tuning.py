"""How the expert kernels cut their work into tiles.

Letters: I intermediate, K columns that a GEMM sums over.
"""

import dataclasses

import torch

_OTHER_SHARED_BYTES = 2048  # of barriers and scales, beside the buffers of the stages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmTiles:
    """Tiles of one grouped GEMM.

    Args:
        block_n, block_k: columns of the result, and of the sum, that a program holds at a time; powers of two.
        swap: weights are the rows of the tensor core's product.
        num_warps, num_stages: as Triton has them.
        programs_per_sm: how many programs share a multiprocessor.
    """

    block_n: int = 128
    block_k: int = 128
    swap: bool = False
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTiles:
    """Tiles of both GEMMs; they share the rows, `block_m` tokens of an expert.

    `group_m` row tiles go through all columns of an expert's weights before the next ones do.
    """

    block_m: int
    first: GemmTiles
    second: GemmTiles
    group_m: int = 16


def choose_tiles(
    expected_rows: int, dtype: torch.dtype, *, gated: bool, group_k: int = 0, whole_blocks: bool = True
) -> ExpertTiles:
    """Choose tiles by the average tokens of an expert, as they were fastest on an H200 (docs/BENCHMARKS.md).

    Few tokens need 16 or 32 of them in a tile, which the tensor cores of Hopper have as columns only: `swap`. The two
    halves of a gated w13 ask for eight warps, and fp8, whose sums are held twice, for no more than 64 tokens.

    Args:
        expected_rows: the host's hint. dtype: of the stored weights. gated: whether w13 has two halves.
        group_k: columns that share a weight scale; a step of the sum never crosses it. 0 where there are none.
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
    """Take stages away until both GEMMs' buffers fit the shared memory of a block. H200 has room for all our choices.

    Example: 128 rows and two halves of 128 columns, 64 bfloat16 of the sum each, are 48 KiB a stage: of four, three fit
    the 163 KiB of an A100.

    Args:
        shared_bytes: that a block may have. itemsize: bytes of a stored number. gated: whether w13 has two halves.
    Errors: RuntimeError where one stage alone does not fit. Local.
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
    most_warps = block_m * block_k // 128  # each thread loads 4 bytes of tokens at least
    tiles = GemmTiles(block_k=block_k, swap=block_m < 64, num_warps=min(4, most_warps), num_stages=3)
    wide = dataclasses.replace(tiles, num_warps=min(8, most_warps), programs_per_sm=1)
    if few:
        first = tiles if expected_rows > 8 and group_k and whole_blocks else wide
        return ExpertTiles(block_m=block_m, first=first, second=dataclasses.replace(tiles, programs_per_sm=4))
    if gated and not group_k:  # nothing asks for 128 columns of the intermediate in one tile
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
