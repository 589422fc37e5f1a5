"""GPUs that reach each other's memory: with peer access and with atomics. On a fake driver."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_moe.group import peer_atomics, symmetric
from ep_moe.group.symmetric import why_unreachable

UUIDS = ("a", "b", "c")  # of GPUs 0, 1, 2
HANDLES = (7, 5, 9)  # that the driver gives them
NVLINK = {(7, 5), (5, 7)}
INVALID_DEVICE = 101


class Driver:
    """Answers as libcuda does, for machines on which some pairs of GPUs have NVLink."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:  # noqa: N802
        handle._obj.value = HANDLES[ordinal]
        return 0

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, source: Any, target: Any) -> int:  # noqa: N802
        assert attribute == 3
        value._obj.value = int((source.value, target.value) in NVLINK)
        return self.status


def group_of(rank: int, gpus: list[int]) -> Any:
    """A stand-in for a group whose ranks have these GPUs."""

    def gather(said: Any) -> list[Any]:
        if isinstance(said, tuple):
            return [(0, UUIDS[gpu]) for gpu in gpus]
        return [said]

    device = torch.device("cuda", gpus[rank])
    return SimpleNamespace(rank=rank, node=0, device=device, all_gather_object=gather)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine of three GPUs, all with peer access."""
    made = Driver()
    monkeypatch.setattr(peer_atomics, "cuda_driver", lambda: made)
    fake = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=UUIDS[getattr(device, "index", device)]),
        device_count=lambda: len(UUIDS),
        can_device_access_peer=lambda device, peer: True,
    )
    monkeypatch.setattr(symmetric, "torch", SimpleNamespace(cuda=fake))
    return made


@pytest.mark.parametrize(
    ("rank", "gpus", "reason"),
    [
        pytest.param(0, [0, 1], "", id="nvlink"),
        pytest.param(1, [0, 1], "", id="nvlink-of-the-other"),
        pytest.param(0, [0, 2], "rank 0 and rank 1", id="pcie"),
        pytest.param(2, [1, 0, 2], "rank 2 and rank 0", id="one-behind-pcie"),
    ],
)
def test_peers_without_atomics_are_not_reached(rank: int, gpus: list[int], reason: str, driver: Driver) -> None:
    words = f"the GPUs of {reason} have no native atomics between them (as over PCIe)"
    assert why_unreachable(group_of(rank, gpus)) == (words if reason else "")


def test_a_gpu_that_is_hidden_from_another_rank(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has GPU 0 and sees no other; rank 1 has GPU 1 and sees both."""
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 1)
    assert why_unreachable(group_of(0, [0, 1])) == "rank 0 does not see the GPU of rank 1 (CUDA_VISIBLE_DEVICES)"
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 2)
    assert why_unreachable(group_of(1, [0, 1])) == ""


def test_a_driver_that_does_not_say(driver: Driver) -> None:
    driver.status = INVALID_DEVICE
    said = why_unreachable(group_of(0, [0, 1]))
    assert said.startswith("whether the GPUs of rank 0 and rank 1 have atomics between them is not known: ")
    assert said.endswith("cuDeviceGetP2PAttribute of GPUs 0 and 1 (CUresult 101)")
