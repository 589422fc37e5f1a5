"""Survivors of a group go on over nvlink in another one, and nothing of the lost rank's memory stays."""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.decoding import MODELS
from helpers.lost import record, recorded
from helpers.small_models import make_model

from ep_moe.config import GroupConfig
from ep_moe.engines.transformers import GenerationOptions, generate, shard_experts
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.symmetric import SHARED_FOLDER
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from nvlink.common import hurried
from nvlink.test_decode import WITH_MODELS

OPTIONS = GenerationOptions(max_new_tokens=2)


def survive(group: EPGroup, folder: Path) -> None:
    """Each of three ranks has all experts; rank 1 dies."""
    torch.set_num_threads(1)
    model = make_model(**MODELS["qwen3_moe"] | {"num_hidden_layers": 1, "num_experts": 4})
    copies = Placement((0, 1, 2, 3) * 3, (0, 4, 8, 12))
    shard_experts(model, group, transport="nvlink", max_tokens_per_rank=8, placement=copies)
    ids = torch.randint(3, 60, (1, 4), generator=torch.Generator().manual_seed(group.rank))
    before = generate(model, ids, OPTIONS).tolist()
    group.barrier()  # a slower rank would see the loss in this generation
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        generate(model, ids, OPTIONS)
    model.ep_moe.leave()
    group = group.regroup(1, (0, 2))
    done = model.ep_moe.regroup(group)
    after = generate(model, ids, OPTIONS).tolist()
    record(folder, group.seat, (before, after, type(model.ep_moe.transport).__name__, done.placements[0].num_physical))
    model.ep_moe.destroy()


def test_survivors_go_on(tmp_path: Path) -> None:
    files = set(os.listdir(SHARED_FOLDER))
    options = {"config": GroupConfig(timeout_secs=60), "preload": WITH_MODELS, "grace_secs": 120.0}
    with pytest.raises(RankFailedError):
        launch(hurried, survive, tmp_path, num_ranks=3, device="cpu", **options)  # type: ignore[arg-type]
    found = recorded(tmp_path)
    assert set(found) == {0, 2}
    for before, after, transport, num_physical in found.values():
        assert (after, transport, num_physical) == (before, "NvlinkTransport", 8)
    assert not {name for name in set(os.listdir(SHARED_FOLDER)) - files if name.startswith("ep_moe_")}
