"""Token exchange. `base` is the seam; `TRANSPORTS` holds the implementations by name."""

from collections.abc import Callable

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport.base import Dispatched, Handle, Transport
from ep_moe.transport.collective import CollectiveTransport
from ep_moe.transport.local import LocalTransport

TRANSPORTS: dict[str, Callable[[EPGroup, Placement, TransportConfig], Transport]] = {
    "local": LocalTransport,
    "collective": CollectiveTransport,
}


def create_transport(name: str, group: EPGroup, placement: Placement, config: TransportConfig) -> Transport:
    """Build a transport by name; "auto" is "local" for one rank and "collective" for more.

    Errors: ValueError lists the names. Collective.
    """
    if name == "auto":
        name = "local" if group.num_ranks == 1 else "collective"
    if name not in TRANSPORTS:
        raise ValueError(f"transport ({name!r}) is not one of auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](group, placement, config)


__all__ = [
    "TRANSPORTS",
    "CollectiveTransport",
    "Dispatched",
    "Handle",
    "LocalTransport",
    "Transport",
    "create_transport",
]
