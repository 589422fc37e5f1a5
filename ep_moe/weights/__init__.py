"""A layer's expert weights, and how a rank reads its own from a checkpoint."""

from ep_moe.weights.base import ExpertWeights, PerExpert
from ep_moe.weights.checkpoint import Checkpoint, DenseTensors
from ep_moe.weights.families import FAMILIES, ExpertTensor, Family, find_family, moe_config

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "DenseTensors",
    "ExpertTensor",
    "ExpertWeights",
    "Family",
    "PerExpert",
    "find_family",
    "moe_config",
]
