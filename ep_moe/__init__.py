"""ep_moe: a distributed expert-parallel Mixture-of-Experts runtime."""

from ep_moe.config import (
    ActivationConfig,
    GroupConfig,
    Layout,
    MoEConfig,
    RoutingConfig,
    RoutingMethod,
    TransportConfig,
)
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix
from ep_moe.routing import Routing, route
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

__version__ = "0.1.0"

__all__ = [
    "ActivationConfig",
    "EPGroup",
    "ExpertParallelMoE",
    "ExpertWeights",
    "GroupConfig",
    "Layout",
    "MoEConfig",
    "PeerLostError",
    "Placement",
    "RankFailedError",
    "Routing",
    "RoutingConfig",
    "RoutingMethod",
    "StoredMatrix",
    "TransportConfig",
    "create_transport",
    "launch",
    "route",
]
