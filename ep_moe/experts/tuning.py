"""Tile sizes of the expert kernels; `ep_moe.experts.tile_tables` chooses them.

Letters: I intermediate, K columns that a GEMM sums over.
"""

import dataclasses

_OTHER_SHARED_BYTES = 2048  # shared memory for barriers and scales, besides the stages' buffers
_PAIRED_BITS = 512  # of a row of weights that are decoded two at once, for one product


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
    """Tiles of both GEMMs, which share the row tiles of `block_m` tokens of an expert, and who computes with them.

    Tiles are ordered in groups of `group_m` row tiles, each of which covers all columns before the next group.

    Args:
        backend: the name of the backend that these tiles are for; "" are Triton's, and leave the choice.
    """

    block_m: int
    first: GemmTiles
    second: GemmTiles
    group_m: int = 16
    backend: str = ""


_HOPPER_GEMM = GemmTiles(block_n=128, block_k=128, num_warps=4, num_stages=4, programs_per_sm=1)
# Hopper's kernels choose `block_m` by the rows (`ep_moe.kernels.hopper.arguments`); `group_m` alone may be another
HOPPER_TILES = ExpertTiles(block_m=128, first=_HOPPER_GEMM, second=_HOPPER_GEMM, group_m=8, backend="hopper")


def fit_steps(tiles: ExpertTiles, group_width: int, *, across: bool) -> ExpertTiles:
    """Reduce block_k until a step lies within a group of scales, or if `across` has whole groups.

    Widths are multiples of 16.

    Example: a block_k of 128 stays with groups of 32 or 256, is 64 with groups of 192 and 16 with groups of 48.
    Local.
    """

    def fitted(gemm: GemmTiles) -> GemmTiles:
        if group_width == 0 or (across and gemm.block_k % group_width == 0):
            return gemm
        return dataclasses.replace(gemm, block_k=min(gemm.block_k, group_width & -group_width))

    return dataclasses.replace(tiles, first=fitted(tiles.first), second=fitted(tiles.second))


def stage_bytes(block_m: int, gemm: GemmTiles, row_bits: int, weight_bits: int, *, halves: int) -> int:
    """Shared memory of one stage of a GEMM's operands.

    Args:
        row_bits, weight_bits: of a stored element. halves: of the weights that a program holds, 2 for a gated w13.
    Local.
    """
    return (block_m * row_bits + halves * gemm.block_n * weight_bits) * gemm.block_k // 8


def fit_stages(
    tiles: ExpertTiles,
    shared_bytes: int,
    row_bits: int,
    weight_bits: int,
    *,
    gated: bool,
    rearranged: bool = False,
    paired: bool = False,
    warp_groups: bool = True,
) -> ExpertTiles:
    """Reduce num_stages until both GEMMs' buffers fit a block's shared memory. The default tables fit their GPUs.

    Without warp groups one stage of several is in registers, and the sums, and weights that were decoded two at once,
    pass through shared memory to other threads.

    Example: 128 rows and two halves of 128 columns with a bfloat16 block_k of 64 take 48 KiB a stage: four stages fit
    the 227 KiB of an H200, and four, of which one is in registers, the 163 KiB of an A100.

    Args:
        shared_bytes: available to a thread block. row_bits, weight_bits: of a stored element. gated: whether w13 has
            two halves. rearranged: whether packed weights pass through shared memory once more, a byte each, as those
            do that are decoded one by one. paired: whether they are decoded two at once.
        warp_groups: as `Device.warp_groups`.
    Errors: RuntimeError if one stage alone does not fit. Local.
    """

    def fitted(gemm: GemmTiles, halves: int) -> GemmTiles:
        rows, in_registers = halves * gemm.block_n, 0 if warp_groups else 1
        needed = stage_bytes(tiles.block_m, gemm, row_bits, weight_bits, halves=halves)
        at_once = rows if paired or rearranged else gemm.block_n  # columns of sums; decoded halves are one product
        sums = 0 if warp_groups else 4 * tiles.block_m * at_once
        other = _OTHER_SHARED_BYTES + rearranged * rows * gemm.block_k
        if paired and not warp_groups:
            other += rows * (_PAIRED_BITS // weight_bits) * row_bits // 8
        most = (shared_bytes - other) // needed
        if most < 1 or sums > shared_bytes:
            raise RuntimeError(
                f"a stage of {needed} bytes, beside {other}, and sums of {sums} do not fit the {shared_bytes} bytes of "
                "a block's shared memory"
            )
        return dataclasses.replace(gemm, num_stages=min(gemm.num_stages, most + in_registers))

    return dataclasses.replace(tiles, first=fitted(tiles.first, 2 if gated else 1), second=fitted(tiles.second, 1))
