"""GPUs that reach each other's memory: visible to each other, and with peer access."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_moe.group import symmetric
from ep_moe.group.symmetric import why_unreachable

UUIDS = ("a", "b", "c")  # of GPUs 0, 1, 2
REACHED = {(0, 1), (1, 0)}


def group_of(rank: int, gpus: list[int]) -> Any:
    """A stand-in for a group whose ranks have these GPUs."""

    def gather(said: Any) -> list[Any]:
        if isinstance(said, tuple):
            return [(0, UUIDS[gpu]) for gpu in gpus]
        return [said]

    device = torch.device("cuda", gpus[rank])
    return SimpleNamespace(rank=rank, node=0, device=device, all_gather_object=gather)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of three GPUs, two of which have peer access."""
    fake = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=UUIDS[getattr(device, "index", device)]),
        device_count=lambda: len(UUIDS),
        can_device_access_peer=lambda device, peer: (device.index, peer) in REACHED,
    )
    monkeypatch.setattr(symmetric, "torch", SimpleNamespace(cuda=fake))


@pytest.mark.parametrize(
    ("rank", "gpus", "reason"),
    [
        pytest.param(0, [0, 1], "", id="reached"),
        pytest.param(1, [0, 1], "", id="reached-by-the-other"),
        pytest.param(2, [1, 0, 2], "rank 2 and rank 0", id="one-apart"),
    ],
)
def test_peers_without_access_are_not_reached(rank: int, gpus: list[int], reason: str) -> None:
    assert why_unreachable(group_of(rank, gpus)) == (f"the GPUs of {reason} have no peer access" if reason else "")


def test_a_gpu_that_is_hidden_from_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has GPU 0 and sees no other; rank 1 has GPU 1 and sees both."""
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 1)
    assert why_unreachable(group_of(0, [0, 1])) == "rank 0 does not see the GPU of rank 1 (CUDA_VISIBLE_DEVICES)"
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 2)
    assert why_unreachable(group_of(1, [0, 1])) == ""
