"""A group of ranks: their ids and devices, and which of them is to blame when a wait times out.

A thread of each rank writes heartbeats to a store and reads those of the others. They show which rank died, hangs or
never arrived, while a backend reports at best a broken connection. The first rank that finds a failure writes it to the
store and all others adopt it, so that surviving ranks never blame each other.
"""

from ep_moe.group.base import DEFAULT_CONFIG, EPGroup
from ep_moe.group.errors import STILL_THERE, PeerLostError
from ep_moe.group.store import StorePlace, secret_key, serve_store
from ep_moe.group.watch import DEATHS_KEY

__all__ = [
    "DEATHS_KEY",
    "DEFAULT_CONFIG",
    "STILL_THERE",
    "EPGroup",
    "PeerLostError",
    "StorePlace",
    "secret_key",
    "serve_store",
]
