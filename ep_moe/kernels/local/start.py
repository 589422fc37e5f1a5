"""The first kernel of a call without transport: one program finds the rows and row tiles of experts, others quantize,
and copy few tokens to their rows.

Letters: N token rows, K top-k, H hidden, L local experts, B blocks of tokens, Q row tiles of all experts.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import let_dependents_start, start_early
from ep_moe.kernels.gemm.tile_list import list_tiles
from ep_moe.kernels.rows.permute import copy_few, merge_and_place
from ep_moe.kernels.rows.quantize import quantize_rows


class Lists(NamedTuple):
    """How the lists of rows and tiles are made."""

    EXPERTS: tl.constexpr  # L + 1 rounded up to a power of two
    BLOCKS: tl.constexpr  # B
    BATCHED: tl.constexpr
    BLOCK_M: tl.constexpr  # of a row tile


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "first",
        "last",
        "ids_stride",
        "weights_stride",
        "capacity",
        "alignment",
        "max_tiles",
    ]
)
def _start_call_kernel(
    placed,  # Placed
    tiles,  # TileList, out
    tokens,  # Quantizing; words of x and data alone if few are copied as they are; all None if no token is stored
    num_tokens,
    first,
    last,
    ids_stride,
    weights_stride,
    capacity,
    alignment,
    max_tiles,
    x_stride,
    IDS,  # Ids
    LISTS,  # Lists
    GROUPS,  # Groups or MicroTile; Words if few tokens are copied as they are
    SCALING,  # Scaling of what is quantized
):
    """What `_merge_and_place_kernel`, `_tile_list_kernel` and a quantizing kernel store, in one launch; and what
    `_pack_rows_kernel` stores, if `placed` has a token_to_row.

    Example: with 9 programs, program 0 makes the lists and program i + 1 is the quantizing kernel's program i of 8.
    """
    start_early()
    if placed.token_to_row is not None:  # of few tokens all programs run at once
        let_dependents_start()
    program = tl.program_id(0) - 1
    sizes = num_tokens, first, last, ids_stride, weights_stride
    if tokens.x is not None and program >= 0:
        if tokens.scale is None:
            copy_few(program, tokens.x, tokens.data, x_stride, placed, sizes, IDS, GROUPS)
        elif placed.token_to_row is not None:
            quantize_rows(program, tokens, num_tokens, x_stride, GROUPS, SCALING, capacity, placed, sizes, IDS, True)
        else:
            quantize_rows(program, tokens, num_tokens, x_stride, GROUPS, SCALING, num_tokens, None, None, None, False)
    if program < 0:
        counts = merge_and_place(placed, sizes, capacity, alignment, IDS, LISTS.EXPERTS, LISTS.BLOCKS, LISTS.BATCHED)
        list_tiles(counts, tiles, max_tiles, IDS.L, LISTS.EXPERTS, LISTS.BLOCK_M)
