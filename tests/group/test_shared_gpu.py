"""Which GPU a rank takes, over which backend, and which of the others' it reaches; rounds are in `test_gpu.py`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_moe.environment import shares_gpus
from ep_moe.group import symmetric
from ep_moe.group.joining import MAX_SHARED_RANKS, backend_of, num_gpu_ranks, pick_device
from ep_moe.group.symmetric import why_unreachable
from ep_moe.report.records import device_name

UUIDS = ("a", "b", "c")  # of GPUs 0, 1, 2
REACHED = {(0, 1), (1, 0)}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_ranks_take_turns_among_the_gpus(device: str | None, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_MOE_SHARED_GPU", "1")
    assert num_gpu_ranks() == MAX_SHARED_RANKS
    picked = [pick_device(device, rank, 3) for rank in range(3)]
    assert [(one.type, one.index) for one in picked] == [("cuda", 0), ("cuda", 1), ("cuda", 0)]
    assert {backend_of(one) for one in picked} == {"gloo"}


def test_without_the_switch_each_has_its_own(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_MOE_SHARED_GPU", raising=False)
    assert num_gpu_ranks() == 2
    assert pick_device(None, 1, 3).type == "cpu"
    assert backend_of(pick_device("cuda", 1, 2)) == "nccl"
    with pytest.raises(RuntimeError, match="device cuda:2 was requested, this machine has 2 GPUs"):
        pick_device("cuda", 2, 3)


def test_a_machine_without_gpus_has_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("EP_MOE_SHARED_GPU", "1")
    assert num_gpu_ranks() == 0
    with pytest.raises(RuntimeError, match="this machine has 0 GPUs"):
        pick_device("cuda", 1, 2)


def test_rows_say_that_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    names = []
    for switch in "01":
        monkeypatch.setenv("EP_MOE_SHARED_GPU", switch)
        names.append(device_name(torch.device("cuda", 0)))
    assert names == ["NVIDIA H200", "NVIDIA H200, shared"]


def test_a_switch_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"EP_MOE_SHARED_GPU \('yes'\) is not 0 or 1"):
        shares_gpus({"EP_MOE_SHARED_GPU": "yes"})


def group_of(rank: int, gpus: list[int]) -> Any:
    """A stand-in for a group whose ranks have these GPUs."""

    def gather(said: Any) -> list[Any]:
        if isinstance(said, tuple):
            return [(0, UUIDS[gpu]) for gpu in gpus]
        return [said]

    device = torch.device("cuda", gpus[rank])
    return SimpleNamespace(rank=rank, node=0, device=device, alone=False, all_gather_object=gather)


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of three GPUs, two of which have peer access."""
    fake = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=UUIDS[getattr(device, "index", device)]),
        device_count=lambda: len(UUIDS),
        can_device_access_peer=lambda device, peer: (device.index, peer) in REACHED,
    )
    monkeypatch.setattr(symmetric, "torch", SimpleNamespace(cuda=fake, version=torch.version))


@pytest.mark.usefixtures("three_gpus")
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


@pytest.mark.usefixtures("three_gpus")
def test_a_gpu_that_is_hidden_from_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has GPU 0 and sees no other; rank 1 has GPU 1 and sees both."""
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 1)
    assert why_unreachable(group_of(0, [0, 1])) == "rank 0 does not see the GPU of rank 1 (CUDA_VISIBLE_DEVICES)"
    monkeypatch.setattr(symmetric.torch.cuda, "device_count", lambda: 2)
    assert why_unreachable(group_of(1, [0, 1])) == ""
