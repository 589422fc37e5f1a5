"""Small models that decode by passes of fixed shapes, and their tokens."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from ep_moe.app.generate_rank import _padded
from ep_moe.engines.transformers import GenerationOptions, shard_experts
from ep_moe.engines.transformers.decoding import Decoder, decoder, loop
from ep_moe.group import EPGroup
from ep_moe.transport import GatheredTransport
from helpers.small_models import LATENT, make_model

TEXTS = ("In the beginning God ", "And he said unto ", "Blessed are the poor in spirit: for ", "The")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 5, "norm_topk_prob": True},
    "mixtral_windows": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 6},
    "gpt_oss_windows": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": LATENT
    | {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


def sharded_model(name: str, **sizes: Any) -> PreTrainedModel:
    """One of `MODELS` on one rank."""
    return shard_experts(make_model(**MODELS[name] | sizes), EPGroup.single("cpu"))


def prompts_of(*texts: str, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Texts as bytes, which the shipped model reads, padded on the left, and the mask of their tokens."""
    return _padded([list(text.encode()) for text in texts], torch.device(device))


def by_passes(
    model: PreTrainedModel, ids: torch.Tensor, mask: Any = None, *, graphs: bool = False, **options: Any
) -> torch.Tensor:
    """Tokens of the fixed-shape passes."""
    if model.ep_moe.decoder is None:
        model.ep_moe.decoder = Decoder(model, graphs=graphs)
    return model.ep_moe.decoder.generate(model, ids, mask, GenerationOptions(**options), lambda count: None)


def by_transformers(model: PreTrainedModel, ids: torch.Tensor, mask: Any = None, **options: Any) -> torch.Tensor:
    """Tokens of transformers' loop with its dynamic cache."""
    return loop.by_transformers(model, ids, mask, GenerationOptions(**options), lambda count: None)


@contextlib.contextmanager
def captured_on_a_cpu() -> Iterator[list[int]]:
    """A stand-in for CUDA graphs: a replay runs the captured call. Yields the numbers of replays of each capture."""
    counts, replaying = list[int](), list[int]()

    def capture(call: Callable[[], None], pool: object) -> Callable[[], None]:
        index = len(counts)
        counts.append(0)

        def replay() -> None:
            counts[index] += 1
            replaying.append(index)
            call()
            replaying.pop()

        return replay

    def in_graph(transport: GatheredTransport) -> bool:
        return bool(replaying)

    with (
        mock.patch.object(decoder, "capture", capture),
        mock.patch.object(decoder, "new_pool", object),
        mock.patch.object(GatheredTransport, "_in_graph", in_graph),
    ):
        yield counts
