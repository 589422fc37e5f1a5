"""Load of experts, the plans that spread it over ranks, and moves of experts while a model runs.

`plan` makes plans by the arithmetic of `packing`; `load` judges loads; `files` keeps loads and placements. `rebalancer`
carries plans out, in `pieces` that leave each layer valid, by a `carrier` of bytes; `votes` keep ranks in step.
"""

from ep_moe.balance.files import ModelSizes, RecordedLoad, read_placements, save_placements
from ep_moe.balance.load import balancedness, rank_loads
from ep_moe.balance.plan import Move, PlacementPlan, Step, plan_placement
from ep_moe.balance.rebalancer import Rebalancer, RebalanceState, RebalanceStatus

__all__ = [
    "ModelSizes",
    "Move",
    "PlacementPlan",
    "RebalanceState",
    "RebalanceStatus",
    "Rebalancer",
    "RecordedLoad",
    "Step",
    "balancedness",
    "plan_placement",
    "rank_loads",
    "read_placements",
    "save_placements",
]
