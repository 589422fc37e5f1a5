"""A group of ranks: who they are, on which device, and which of them is to blame when a wait does not end.

R ranks. A thread of each rank beats into a store and reads the beats of the others. A backend that loses a peer says at
best that a connection broke, and at worst nothing; the beats say who is gone, who stands still and who never arrived.
The first rank that knows writes it into the store and all others take it over: survivors never blame each other.
"""

from ep_moe.group.base import DEFAULT_CONFIG, EPGroup
from ep_moe.group.errors import STILL_THERE, PeerLostError
from ep_moe.group.store import serve_store
from ep_moe.group.watch import DEATHS_KEY

__all__ = ["DEATHS_KEY", "DEFAULT_CONFIG", "STILL_THERE", "EPGroup", "PeerLostError", "serve_store"]
