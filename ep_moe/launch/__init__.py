"""Starts ranks, on this machine or on the nodes of a Ray cluster, reports the first failure and ends the other ranks.

A launcher serves the store through which the ranks join in a process that outlives any rank, and writes deaths to it
for the surviving ranks.
"""

from ep_moe.launch.local import KEEP, Ended, Front, FrontFailedError, launch, start_server
from ep_moe.launch.outcomes import RankFailedError, RankTraceback
from ep_moe.launch.rank import Target, run_rank

__all__ = [
    "KEEP",
    "Ended",
    "Front",
    "FrontFailedError",
    "RankFailedError",
    "RankTraceback",
    "Target",
    "launch",
    "run_rank",
    "start_server",
]
