"""Which GPU a rank takes, and over which backend, where ranks may share one; their rounds are in `test_gpu.py`."""

import pytest
import torch

from ep_moe.environment import shares_gpus
from ep_moe.group.joining import MAX_SHARED_RANKS, backend_of, num_gpu_ranks, pick_device


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


def test_a_switch_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"EP_MOE_SHARED_GPU \('yes'\) is not 0 or 1"):
        shares_gpus({"EP_MOE_SHARED_GPU": "yes"})
