"""Launcher of the kernel that prepares rows for the first GEMM, if its weights are decoded in registers.

Letters: Q row tiles of all experts.
"""

import math

import torch

from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.launching import num_programs
from ep_moe.experts.tuning import ExpertTiles, GemmTiles
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.gemm.arguments import RowGroups
from ep_moe.kernels.gemm.tokens import _prepare_rows_kernel

MOST_SCALED_ROWS = 32  # in a tile whose sums are scaled in each step; of more rows, the decoded weights are
_ROWS = 16  # of a program at a time
_COLUMNS = 128  # the same
_PROGRAMS_PER_SM = 8


def shuffles(shape: CallShape, gemm: GemmTiles) -> bool:
    """True if a GEMM with these tiles sums its columns in the order in which threads decode weights. Local."""
    return shape.decodes and gemm.swap and gemm.block_k % (64 * shape.scheme.weight.packed) == 0


def parts(shape: CallShape, gemm: GemmTiles) -> int:
    """Products in a step over K: of 128 columns each, if rows of weights are short in memory. Local."""
    width = 64 * shape.scheme.weight.packed
    return gemm.block_k // width if shuffles(shape, gemm) else 1


def group_loads(shape: CallShape, gemm: GemmTiles, columns: int, dtype: torch.dtype | None) -> str:
    """`Codes.SCALES` for numbers of groups, stored in `dtype`, in rows of weights of so many columns. Local."""
    group, products = shape.scheme.weight.group_width, parts(shape, gemm)
    product = gemm.block_k // products
    if dtype is None or dtype.itemsize > 2 or not shuffles(shape, gemm) or not group or product % group:
        return "single"
    in_product, in_row = (math.ceil(width / group) * dtype.itemsize for width in (product, columns))
    if in_product * products % 4:
        return "single"
    aligned = in_row % 4 == 0 and (in_product % 4 == 0 or in_product * products == 4)
    return "words" if aligned else "shifted"


def inner_order(shape: CallShape, tiles: ExpertTiles) -> int:
    """`Epilogue.ORDER` of the intermediate, as the second GEMM sums it; 0: as its columns are. Local."""
    return shape.scheme.weight.packed if shuffles(shape, tiles.second) else 0


def inner_width(shape: CallShape, tiles: ExpertTiles) -> int:
    """Columns of the stored intermediate: whole steps of the second GEMM if they are ordered. Local."""
    if not inner_order(shape, tiles):
        return shape.intermediate
    return math.ceil(shape.intermediate / tiles.second.block_k) * tiles.second.block_k


def ready_width(shape: CallShape, tiles: ExpertTiles) -> int:
    """Columns of the rows that are prepared for the first GEMM; 0 if it reads those of the batch.

    They are prepared if they are decoded to bfloat16, or if their columns are summed in another order. Local.
    """
    if shape.format.rows is None and not shuffles(shape, tiles.first):
        return 0
    step = max(tiles.first.block_k, _COLUMNS)
    return math.ceil(shape.hidden / step) * step


def prepare_rows(shape: CallShape, tiles: ExpertTiles, width: int) -> RepeatedLaunch | None:
    """Prepare the kernel for rows of `width` columns, None if that is 0.

    The rows are [Q * block_m, width], and have a scale each if tokens have; arguments as of `Backend.gather`. Local.
    """
    if not width:
        return None
    stored, columns = shape.scheme.payload, max(tiles.first.block_k, _COLUMNS)
    pieces = shape.max_tiles(tiles.block_m) * (tiles.block_m // _ROWS) * (width // columns)
    return RepeatedLaunch(
        _prepare_rows_kernel,
        num_programs(shape.device, _PROGRAMS_PER_SM, pieces),
        settings=(shape.hidden, shape.x_stride, shape.scale_height, *shape.scale_strides),
        constants={
            "PIECES": RowGroups(BLOCK_M=tiles.block_m, ROWS=_ROWS, BLOCK=columns),
            "GROUP": stored.block[1] if stored.family == "micro" else 0,
            "ORDER": shape.scheme.weight.packed if shuffles(shape, tiles.first) else 0,
        },
        options={"num_warps": 4},
        device=shape.device,
    )
