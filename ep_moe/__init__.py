"""ep_moe: a distributed expert-parallel Mixture-of-Experts runtime.

Each name is imported at its first use, since torch takes seconds to import and the command line often needs none.
"""

import importlib
import sys
import types

TYPE_CHECKING = False  # as type checkers know it; `typing` is left out, so that Ctrl-C is handled sooner
if TYPE_CHECKING:
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

_MODULES = {
    "EPGroup": "group",
    "PeerLostError": "group",
    "RankFailedError": "launch",
    "launch": "launch",
    "ExpertParallelMoE": "layer",
    "Placement": "placement",
    "StoredMatrix": "quant",
    "Routing": "routing",
    "route": "routing",
    "create_transport": "transport",
    "ExpertWeights": "weights",
}  # of the names of __all__ that are not of `config`


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'config')}"), name)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        if name != "launch" or not isinstance(value, types.ModuleType):  # `launch` is the function, not its package
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
