"""What `Rebalancer`s of all ranks have done, as plain data for reports, messages and metrics."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ep_moe.balance.rebalancer import RebalanceStatus


def status_entries(status: RebalanceStatus) -> dict[str, Any]:
    """The fields of a status, the state as its text. Local."""
    return dataclasses.asdict(status) | {"state": status.state.value}


def status_of_ranks(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries of all ranks as one: `moved_bytes` is their sum, `seconds` that of the slowest. Local."""
    return entries[0] | {
        "moved_bytes": sum(rank["moved_bytes"] for rank in entries),
        "seconds": max(rank["seconds"] for rank in entries),
    }
