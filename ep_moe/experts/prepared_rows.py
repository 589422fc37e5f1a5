"""The order and the widths of rows that are multiplied by weights that are decoded in registers."""

import math

import torch

from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.tuning import ExpertTiles, GemmTiles

MOST_SCALED_ROWS = 32  # in a tile whose sums are scaled in each step; of more rows, the decoded weights are
PREPARED_COLUMNS = 128  # at least, that a program prepares at a time


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


def prepared_width(shape: CallShape, tiles: ExpertTiles) -> int:
    """Columns of the rows that are prepared for the first GEMM; 0 if it reads those of the batch.

    They are prepared if they are decoded to bfloat16, or if their columns are summed in another order. Local.
    """
    if shape.format.rows is None and not shuffles(shape, tiles.first):
        return 0
    step = max(tiles.first.block_k, PREPARED_COLUMNS)
    return math.ceil(shape.hidden / step) * step
