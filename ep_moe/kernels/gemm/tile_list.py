"""The list of row tiles that the expert kernels process.

Letters: L local experts, Q row tiles of all experts.

Tokens of an expert are split into row tiles of BLOCK_M. Tiles are numbered expert by expert, and each owns BLOCK_M rows
of the intermediate, so that the intermediate is dense in any layout of the batch.
Example: counts [3, 0, 40] with BLOCK_M = 16 are 4 row tiles, experts [0, 2, 2, 2], first tiles [0, 1, 1].
"""

import triton
import triton.language as tl

from ep_moe.kernels.device import let_dependents_start


@triton.jit(do_not_specialize=["num_experts", "max_tiles"])
def _tile_list_kernel(
    rows,  # Rows, of which only num_tokens is read
    tiles,  # TileList, out
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,  # L rounded up to a power of two
    TILES: tl.constexpr,  # list entries per program
):
    """List the row tiles of all experts. Programs are independent: each finds the experts of its own entries."""
    if tiles.stored is not None:  # the next kernel may start, and waits for this one where it needs the list
        let_dependents_start()
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(rows.num_tokens + expert, mask=expert < num_experts, other=0)
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(num_tiles, 0)
    if tl.program_id(0) == 0:
        put_totals(num_tiles, end, tiles, num_experts, EXPERTS)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    if tiles.stored is not None:
        tl.store(tiles.stored + tile, tl.zeros([TILES], tl.int32), mask=tile < max_tiles)
    tl.store(tiles.tile_expert + tile, tl.minimum(owner, num_experts - 1), mask=tile < max_tiles)


@triton.jit
def put_totals(num_tiles, end, tiles, num_experts, EXPERTS: tl.constexpr):
    """Store what the list has beside its entries, from each expert's tiles and the sums of these, [EXPERTS]."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    tl.store(tiles.first_tile + expert, end - num_tiles, mask=is_expert)
    tl.store(tiles.num_tiles, tl.sum(num_tiles, 0))
    if tiles.amax is not None:
        tl.store(tiles.amax + expert, tl.zeros([EXPERTS], tl.int32), mask=is_expert)
    if tiles.next_tile is not None:
        tl.store(tiles.next_tile + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def list_tiles(counts, tiles, max_tiles, L: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """As `_tile_list_kernel`, by one program that has the experts' tokens [EXPERTS]; entries behind the last tile are
    left as they are: nothing reads them."""
    expert = tl.arange(0, EXPERTS)
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(num_tiles, 0)
    put_totals(num_tiles, end, tiles, L, EXPERTS)
    entries = tiles.tile_expert + (end - num_tiles)
    for i in range(tl.max(num_tiles, 0)):
        tl.store(entries + i, expert, mask=num_tiles > i)
    if tiles.stored is not None:
        for start in range(0, max_tiles, EXPERTS):
            tl.store(tiles.stored + start + expert, tl.zeros([EXPERTS], tl.int32), mask=start + expert < max_tiles)


@triton.jit
def find_tile(t, num_columns, rows, tiles, TILE):
    """Return (expert, its tokens, row tile within the expert, first row tile of the expert, column tile) of tile t.

    Tiles of an expert are ordered in groups of GROUP_M row tiles, each of which covers all columns before the next
    group, so that concurrent tiles share weights and tokens in the cache.
    """
    expert = tl.load(tiles.tile_expert + t // num_columns)
    num_tokens = tl.load(rows.num_tokens + expert)
    first_tile = tl.load(tiles.first_tile + expert)
    row_tiles = (num_tokens + TILE.BLOCK_M - 1) // TILE.BLOCK_M
    within = t - first_tile * num_columns
    group = within // (TILE.GROUP_M * num_columns)
    rows_of_group = tl.minimum(row_tiles - group * TILE.GROUP_M, TILE.GROUP_M)
    within -= group * TILE.GROUP_M * num_columns
    return expert, num_tokens, group * TILE.GROUP_M + within % rows_of_group, first_tile, within // rows_of_group


@triton.jit
def num_pieces(tiles, PIECES):
    """Pieces of ROWS rows of the intermediate, of all experts."""
    return tl.load(tiles.num_tiles) * (PIECES.BLOCK_M // PIECES.ROWS)


@triton.jit
def find_rows(piece, rows, tiles, PIECES):
    """Return (expert, rows of the intermediate [ROWS], which of them hold a token) of the piece-th ROWS rows."""
    row = piece * PIECES.ROWS + tl.arange(0, PIECES.ROWS)
    expert = tl.load(tiles.tile_expert + piece * PIECES.ROWS // PIECES.BLOCK_M)
    num_tokens = tl.load(rows.num_tokens + expert)
    return expert, row, row - tl.load(tiles.first_tile + expert) * PIECES.BLOCK_M < num_tokens
