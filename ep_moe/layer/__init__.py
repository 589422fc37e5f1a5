"""The layer: route, dispatch, experts, combine. `op` is how torch.compile sees it, `backward` refuses training."""

from ep_moe.layer.backward import refuse_backward
from ep_moe.layer.base import Phases
from ep_moe.layer.moe import ExpertParallelMoE

__all__ = ["ExpertParallelMoE", "Phases", "refuse_backward"]
