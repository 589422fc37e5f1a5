"""Load of experts, and the plans that spread it over ranks.

`plan` makes plans by the arithmetic of `packing`; `load` judges loads; `files` keeps loads and placements.
"""

from ep_moe.balance.files import ModelSizes, RecordedLoad, read_placements, save_placements
from ep_moe.balance.load import balancedness, rank_loads
from ep_moe.balance.plan import Move, PlacementPlan, Step, plan_placement

__all__ = [
    "ModelSizes",
    "Move",
    "PlacementPlan",
    "RecordedLoad",
    "Step",
    "balancedness",
    "plan_placement",
    "rank_loads",
    "read_placements",
    "save_placements",
]
