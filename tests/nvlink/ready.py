"""Makes a process ready to run the exchange in the interpreter: imported by the server that forks ranks, once for all.

Without it each rank takes half a second to import what its first launch needs and to rewrite the kernels.
"""

import gc
import time

import triton.experimental.gluon.nvidia.hopper  # noqa: F401 - Triton imports it in a first launch
from quick_interpreter import hurry, rewrite

from ep_moe.kernels.exchange import combine_receive, dispatch_receive, waits
from ep_moe.transport.one_sided import transport  # noqa: F401 - and the kernels that it launches

PAUSE_SECS = 0.01  # a waiting rank leaves the cores to the others


def pause() -> None:
    """Between two polls."""
    time.sleep(PAUSE_SECS)


hurry()
for module in (waits, dispatch_receive, combine_receive):
    module.pause = pause
rewrite("ep_moe.kernels.exchange")
gc.freeze()  # ranks share this memory
