"""The load of ranks, from that of experts, and how balanced it is.

Letters: A MoE layers, E logical experts, R ranks.
"""

from collections.abc import Sequence

import numpy as np

from ep_moe.placement import Placement


def rank_loads(load: Sequence[Sequence[float]], placements: Sequence[Placement]) -> list[list[float]]:
    """The load of each rank's experts, [A][R], from that of all experts, [A][E]; copies in use share alike. Local."""
    found = []
    for counts, placement in zip(load, placements, strict=True):
        experts, active = np.array(placement.physical_to_logical), placement.active
        shares = np.zeros(len(experts))
        shares[active] = (np.asarray(counts, np.float64) / np.bincount(experts[active]))[experts[active]]
        ends = np.concatenate([[0.0], shares.cumsum()])[list(placement.starts)]
        found.append(np.diff(ends).tolist())
    return found


def balancedness(loads: Sequence[Sequence[float]]) -> float:
    """The mean rank's load over the fullest one's, [A][R], both summed over layers; 1 without any load. Local.

    A pass takes as long as its layers' fullest ranks together; balanced experts would take this part of that time.
    """
    fullest = sum(max(ranks) for ranks in loads)
    return sum(sum(ranks) / len(ranks) for ranks in loads) / fullest if fullest else 1.0
