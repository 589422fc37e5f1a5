"""The tiles of a program, drawn from a counter: programs that get short tiles draw more of them.

The loading warp draws; the warp groups read what it has drawn from shared memory, a few tiles behind. Who computes a
tile has no influence on its bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ep_moe.kernels.gemm.tile_list import find_tile
from ep_moe.kernels.hopper.arguments import Tiles

DRAWN = gl.constexpr(2)  # tiles ahead
FIELDS = gl.constexpr(8)


@gluon.jit
def allocate_tiles():
    """Shared memory and barriers for drawn tiles; two warp groups read each."""
    tile = gl.allocate_shared_memory(gl.int32, [DRAWN, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [DRAWN, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DRAWN, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DRAWN):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return Tiles(tile, full, empty)


@gluon.jit
def draw_tile(t, rows, tiles, PIPE):
    """Draw the tile after tile t, and find t. Returns (the drawn one, t's expert, how many of its rows are left from
    the tile's first on, the row tile in the list, the first row in the batch, the column tile)."""
    following = gl.atomic_add(tiles.next_tile + (0 if PIPE.FIRST else 1), 1) + gl.num_programs(0)
    expert, num_tokens, row_tile, first_tile, column_tile = find_tile(t, PIPE.COLUMN_TILES, rows, tiles, PIPE)
    left = num_tokens - row_tile * PIPE.BLOCK_M
    batch_row = gl.load(rows.row_start + expert) + row_tile * PIPE.BLOCK_M
    return following, expert, left, first_tile + row_tile, batch_row, column_tile


@gluon.jit
def put_tile(drawn, number, expert, left, in_row, out_row, column_tile):
    """Pass the number-th tile to the warp groups: its expert, that expert's rows from the tile's first on, the first
    row of the scales of x and of the result, and the column tile."""
    slot = number % DRAWN
    mbarrier.wait(drawn.empty.index(slot), ((number // DRAWN) & 1) ^ 1)  # a new barrier passes phase 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, FIELDS, layout)
    rows = gl.where(field == 2, in_row, gl.where(field == 3, out_row, column_tile))
    drawn.tile.index(slot).store(gl.where(field == 0, expert, gl.where(field == 1, left, rows)))
    mbarrier.arrive(drawn.full.index(slot), count=1)


@gluon.jit
def next_tile(drawn, number):
    """The number-th tile, as `put_tile` got it; no rows are left after the last tile."""
    slot = number % DRAWN
    mbarrier.wait(drawn.full.index(slot), (number // DRAWN) & 1)
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])  # all threads have all fields
    values = drawn.tile.index(slot).load(layout)
    mbarrier.arrive(drawn.empty.index(slot), count=1)
    return _field(values, 0), _field(values, 1), _field(values, 2), _field(values, 3), _field(values, 4)


@gluon.jit
def _field(values, number: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, FIELDS, values.type.layout) == number, values, 0), 0)
