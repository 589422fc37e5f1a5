"""Makes a process ready to run the exchange in the interpreter: imported by the server that forks ranks, once for all.

Without it each rank takes half a second to import what its first launch needs and to rewrite the kernels.
"""

import time

import triton.experimental.gluon.nvidia.hopper  # noqa: F401 - Triton imports it in a first launch
from quick_interpreter import hurry, rewrite

from ep_moe.kernels.exchange import combine_receive, dispatch_receive, waits
from ep_moe.transport.one_sided import transport  # noqa: F401 - and the kernels that it launches

FIRST_PAUSE_SECS, MOST_PAUSE_SECS = 0.004, 0.06  # a waiting rank leaves the cores to the others

_polls = {"last": 0.0, "pause": FIRST_PAUSE_SECS}


def pause() -> None:
    """Between two polls; of a longer wait, longer ones."""
    now = time.monotonic()
    same_wait = now - _polls["last"] < MOST_PAUSE_SECS
    _polls["pause"] = min(2 * _polls["pause"], MOST_PAUSE_SECS) if same_wait else FIRST_PAUSE_SECS
    time.sleep(_polls["pause"])
    _polls["last"] = time.monotonic()


hurry()
for module in (waits, dispatch_receive, combine_receive):
    module.pause = pause
rewrite("ep_moe.kernels.exchange")
