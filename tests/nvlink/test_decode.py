"""Decode passes over nvlink, whose rounds take their number of tokens from the device, say what `collective` says."""

import torch
from helpers.decoding import MODELS
from helpers.small_models import make_model

from ep_moe.engines.transformers import GenerationOptions, shard_experts
from ep_moe.engines.transformers.decoding import Decoder
from ep_moe.group import EPGroup
from nvlink.common import PRELOADED, on_ranks

WITH_MODELS = (*PRELOADED, "helpers.decoding", "helpers.small_models")  # transformers too


def tokens_by(name: str, group: EPGroup) -> torch.Tensor:
    """New tokens of this rank by a transport; ranks differ in rows and lengths, and rank 1 ends early."""
    model = make_model(**MODELS["qwen3_moe"] | {"num_hidden_layers": 1, "num_experts": 4})
    shard_experts(model, group, transport=name, max_tokens_per_rank=16)
    ids = torch.randint(3, 60, ((3, 1)[group.rank], 4), generator=torch.Generator().manual_seed(group.rank))
    model.ep_moe.decoder = Decoder(model, graphs=False)
    options = GenerationOptions(max_new_tokens=(4, 2)[group.rank])
    found: torch.Tensor = model.ep_moe.decoder.generate(model, ids, None, options, lambda count: None)
    model.ep_moe.destroy()
    return found


def compare_on_rank(group: EPGroup) -> list[list[list[int]]]:
    torch.set_num_threads(1)
    return [tokens_by(name, group).tolist() for name in ("nvlink", "collective")]


def test_decode_passes_take_their_count_from_the_device() -> None:
    found = on_ranks(compare_on_rank, timeout_secs=120, preload=WITH_MODELS)
    for (by_nvlink, by_collective), rows, new_tokens in zip(found, (3, 1), (4, 2), strict=True):
        assert by_nvlink == by_collective
        assert [len(row) for row in by_nvlink] == [new_tokens] * rows
