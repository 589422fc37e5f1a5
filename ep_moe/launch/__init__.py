"""Starts ranks, on this machine or on the nodes of a Ray cluster, reports the first failure and ends the other ranks.

A launcher serves the store through which the ranks join in a process that outlives any rank, and writes deaths to it
for the surviving ranks. Names are imported at their first use: the server that forks ranks starts before torch is here.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_moe.launch.local import launch
    from ep_moe.launch.outcomes import RankFailedError, RankTraceback
    from ep_moe.launch.rank import Target, run_rank
    from ep_moe.launch.server import start_server
    from ep_moe.launch.supervised import KEEP, LEFT, Ended, Front, FrontFailedError, Start, Stop

__all__ = [
    "KEEP",
    "LEFT",
    "Ended",
    "Front",
    "FrontFailedError",
    "RankFailedError",
    "RankTraceback",
    "Start",
    "Stop",
    "Target",
    "launch",
    "run_rank",
    "start_server",
]

_MODULES = {
    "RankFailedError": "outcomes",
    "RankTraceback": "outcomes",
    "Target": "rank",
    "launch": "local",
    "run_rank": "rank",
    "start_server": "server",
}  # of the names of __all__ that are not of `supervised`


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'supervised')}"), name)
