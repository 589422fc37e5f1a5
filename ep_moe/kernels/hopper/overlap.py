"""The second GEMM begins while the first one ends: its programs take the SMs of those of the first that draw no tile.

The driver launches both kernels early (programmatic dependent launch), the second once all programs of the first run.
Each row tile of the intermediate has a counter of the threads that have stored their part of it, and the second kernel
reads a row tile once all have arrived. Pattern: release by each thread that stores, acquire by the warp that loads.
Programs of both never share an SM, whose shared memory one fills: a program that waits takes no SM from those that it
waits for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LOAD = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
_REST = gl.constexpr("nanosleep.u32 200; ")  # the counters are in the cache that GEMMs load from
THREADS = gl.constexpr(128)  # of a warp group


@gluon.jit
def let_dependents_start():
    """Allow the launch of the next kernel, once all programs have called this."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1
    )


@gluon.jit
def wait_for_kernel_before():
    """Wait until the kernel before has ended and all that it stored can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)


@gluon.jit
def arrive_stored(stored, row_tile):
    """Each thread of a warp group: its copies from shared memory have arrived, count it for this row tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, THREADS, layout)
    zero = gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [thread], gl.int32, False, 1)
    if row_tile >= 0:
        gl.atomic_add(stored + row_tile + zero, zero + 1, sem="release", scope="gpu")


@gluon.jit
def wait_until_stored(stored, row_tile, arrivals):
    """The loading warp waits until all of a row tile is stored, for its copies into shared memory."""
    seen = gl.inline_asm_elementwise(_LOAD, "=r,l", [stored + row_tile], gl.int32, False, 1)
    while seen < arrivals:
        seen = gl.inline_asm_elementwise(_REST + _LOAD, "=r,l", [stored + row_tile], gl.int32, False, 1)
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [seen], gl.int32, False, 1)
