"""Every transport carries every case of `ep_moe.testing`, bit for bit, on 1 to 4 ranks."""

import functools

import pytest

from ep_moe.config import GroupConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.testing import check_transport, transport_cases
from ep_moe.transport import TRANSPORTS

GROUPS = [("local", 1), ("collective", 1), ("collective", 2), ("collective", 3), ("collective", 4)]
CHECKS = [
    pytest.param(name, num_ranks, check, id=f"{name}-{num_ranks}-{check}")
    for name, num_ranks in GROUPS
    for check in [*(case.name for case in transport_cases(num_ranks)), "refusals", "slots", "abandon"]
]


def check_on_rank(group: EPGroup, name: str) -> dict[str, str]:
    """All checks on this rank."""
    return check_transport(TRANSPORTS[name], group)


@functools.cache
def outcomes(name: str, num_ranks: int) -> list[dict[str, str]]:
    """What each rank says of each check; ranks are started once for all checks."""
    config = GroupConfig(timeout_secs=60)
    return launch(check_on_rank, name, num_ranks=num_ranks, config=config, device="cpu")


@pytest.mark.parametrize(("name", "num_ranks", "check"), CHECKS)
def test_carries(name: str, num_ranks: int, check: str) -> None:
    assert [rank[check] for rank in outcomes(name, num_ranks)] == [""] * num_ranks
