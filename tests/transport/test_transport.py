"""Every transport carries every case of `ep_moe.testing`, bit for bit, on 1 to 3 ranks; on 4 as `matrix`."""

import functools
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from no_memory import abandoning_without_memory

from ep_moe import transport as room
from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.symmetric import why_unreachable
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.testing import check_transport, transport_cases
from ep_moe.testing.transports import CHECKS
from ep_moe.transport import TRANSPORTS, create_transport

# the checks of each number of ranks, (i, n) for every n-th from the i-th on; all of 2 and 4 ranks are `matrix`
SHARES = {("local", 1): (0, 1), ("collective", 1): (0, 4), ("collective", 2): (0, 3), ("collective", 3): (0, 1)}
SHARES |= {("gathered", 1): (0, 4), ("gathered", 2): (1, 4), ("gathered", 3): (0, 4)}


def checks_of(num_ranks: int) -> list[str]:
    """The names of all checks, in order."""
    return [*(case.name for case in transport_cases(num_ranks)), *CHECKS]


def check_on_rank(group: EPGroup, name: str, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """A share of the checks on this rank."""
    return check_transport(abandoning_without_memory(TRANSPORTS[name]), group, share=share)


@functools.cache
def outcomes(name: str, num_ranks: int) -> list[dict[str, str]]:
    """Each rank's outcome of each check; ranks are started once for all checks, and none for one rank."""
    if num_ranks == 1:
        return [check_on_rank(EPGroup.single("cpu"), name)]
    config, share = GroupConfig(timeout_secs=60), SHARES[name, num_ranks]
    return launch(check_on_rank, name, share, num_ranks=num_ranks, config=config, device="cpu")


@pytest.mark.parametrize(
    ("name", "num_ranks", "check"),
    [
        pytest.param(name, num_ranks, check, id=f"{name}-{num_ranks}-{check}")
        for (name, num_ranks), (first, step) in SHARES.items()
        for check in checks_of(num_ranks)[first::step]
    ],
)
def test_carries(name: str, num_ranks: int, check: str) -> None:
    assert [rank[check] for rank in outcomes(name, num_ranks)] == [""] * num_ranks


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_carries_all(num_ranks: int) -> None:
    config, expected = GroupConfig(timeout_secs=60), dict.fromkeys(checks_of(num_ranks), "")
    assert (
        launch(check_on_rank, "collective", num_ranks=num_ranks, config=config, device="cpu") == [expected] * num_ranks
    )


@pytest.mark.parametrize(
    ("num_ranks", "device", "reason", "chosen"),
    [
        pytest.param(1, "cpu", "", "'local': there is one rank", id="one-rank"),
        pytest.param(1, "cuda", "", "'peer'", id="one-gpu"),
        pytest.param(4, "cpu", "", "'collective': ranks are on cpu", id="cpu"),
        pytest.param(4, "cuda", "", "'peer'", id="gpus"),
        pytest.param(
            4, "cuda", "rank 0 and rank 2 share a GPU", "'gathered': rank 0 and rank 2 share a GPU", id="apart"
        ),
        pytest.param(5, "cuda", "no peer access", "'collective': no peer access", id="apart-many-tokens"),
    ],
)
def test_auto_says_what_it_is_and_why(
    num_ranks: int,
    device: str,
    reason: str,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(room, "TRANSPORTS", {name: lambda *_, name=name: name for name in TRANSPORTS})
    monkeypatch.setattr(room, "why_unreachable", lambda group: reason)
    config = TransportConfig(hidden=16, max_tokens_per_rank=256 if num_ranks > 1 else 2048)
    for rank in range(num_ranks):
        group = mock.Mock(spec=EPGroup, rank=rank, num_ranks=num_ranks, device=torch.device(device), backend="nccl")
        with caplog.at_level(logging.INFO, logger="ep_moe.transport"):
            made: Any = create_transport("auto", group, Placement.linear(8, num_ranks), config)
        assert made == chosen.split("'")[1]
    assert caplog.messages == [f"transport 'auto' is {chosen}"]  # of rank 0 alone


@pytest.mark.parametrize("name", ["peer", "nvlink"])
def test_peer_on_a_cpu_says_what_it_needs(name: str) -> None:
    pytest.importorskip("triton")
    config = TransportConfig(hidden=16, max_tokens_per_rank=1)
    with pytest.raises(RuntimeError, match="'peer' on a CPU needs TRITON_INTERPRET=1"):
        create_transport(name, EPGroup.single("cpu"), Placement.linear(8, 1), config)


def test_peer_is_refused_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    group = mock.Mock(spec=EPGroup, rank=0, num_ranks=2, device=torch.device("cuda"))
    assert why_unreachable(group) == "the kernels that store into it have never run on AMD GPUs"
