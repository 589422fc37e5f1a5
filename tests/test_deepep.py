"""The transport over DeepEP, in all modes, on the stand-in `fake_deepep`, which checks what the library would."""

import functools
import sys
import types
from typing import Any

import fake_deepep
import pytest

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.testing import check_transport
from ep_moe.transport import TRANSPORTS

MODES = ("low_latency", "normal", "v2")


def make_on_fake(mode: str) -> Any:
    """The transport's factory, with the stand-in as `deep_ep`."""
    sys.modules["deep_ep"] = fake_deepep
    return TRANSPORTS[f"deepep_{mode}"]


def check_on_rank(group: EPGroup, mode: str) -> dict[str, str]:
    """All checks on this rank."""
    return check_transport(make_on_fake(mode), group)


@functools.cache
def outcomes(mode: str, num_ranks: int) -> list[dict[str, str]]:
    """Each rank's outcome of each check; ranks are started once for all checks."""
    return launch(check_on_rank, mode, num_ranks=num_ranks, config=GroupConfig(timeout_secs=60), device="cpu")
