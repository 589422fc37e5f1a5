"""Decode graphs on GPUs: the bits of eager passes, the tokens of transformers' own loop, lost ranks, open slots."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoding import MODELS, TEXTS, by_transformers, prompts_of
from helpers.small_models import make_model
from test_gpu import on_gpus

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import GroupConfig
from ep_moe.engines.transformers import GenerationOptions, from_pretrained, generate, shard_experts
from ep_moe.engines.transformers.decoding import Decoder, decoder_of, why_no_graphs
from ep_moe.environment import shares_gpus
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch

CONFIG = GroupConfig(timeout_secs=60)
OVER_GLOO = shares_gpus()  # messages of ranks that share a GPU, which no graph captures
WIDE = {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 8}


def shipped_prompts(group: EPGroup, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Texts for this rank, padded on the left."""
    return prompts_of(*(TEXTS[(group.rank + row) % len(TEXTS)] for row in range(rows)), device=group.device)


def run(passes: Decoder, model: Any, ids: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
    """Tokens of a decoder's passes."""
    return passes.generate(model, ids, mask, GenerationOptions(**options), lambda count: None)


def kept(passes: Decoder, rows: int) -> list[torch.Tensor]:
    """The bits of all keys and values of the sequences, up to their last fed token, layer by layer, row by row."""
    found = []
    for layer in passes._cache.layers:
        for tensor in (layer.keys, layer.values):
            for row, position in enumerate(passes._sequences.positions[:rows].tolist()):
                found.append(tensor[row, :, : min(position, tensor.shape[2])].contiguous().view(torch.uint8).cpu())
    return found


def same_bits(model: Any, rows: int, ids: torch.Tensor, mask: Any, **options: Any) -> list[str]:
    """Differences between passes that are replayed and passes that run eagerly, with the same cache and buckets."""
    both = []
    for graphs in (True, False):
        passes = Decoder(model, graphs=graphs)
        first = run(passes, model, ids, mask, **options)
        tokens = run(passes, model, ids, mask, **options)  # in graphs already captured
        both.append((first, tokens, kept(passes, rows)))
        captured = len(passes.shapes)
        passes.destroy()
        if captured != graphs:
            return [f"{captured} passes are captured, graphs {graphs}"]
    (first, tokens, cached), (eager_first, eager_tokens, eager_cached) = both
    wrong = [] if torch.equal(tokens, eager_tokens) and torch.equal(first, tokens) else [f"tokens {tokens.tolist()}"]
    wrong += [] if torch.equal(eager_first, eager_tokens) else ["eager passes differ from themselves"]
    pairs = zip(cached, eager_cached, strict=True)
    wrong += [f"cache entry {index} differs" for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return wrong


def bits_on_rank(group: EPGroup, dtype: torch.dtype, scheme: str) -> list[str]:
    """The shipped model; ranks have different buckets, one has no rows at all."""
    model, wrong = from_pretrained(SHIPPED_MODEL, group, dtype=dtype, scheme=scheme, transport="nvlink"), []
    for rows in ((3, 1), (5, 0), (16, 33)):
        mine = rows[group.rank % 2]
        ids, mask = shipped_prompts(group, mine)
        options: dict[str, Any] = {"max_new_tokens": 40}
        wrong += same_bits(model, mine, ids, mask, **options)
        options |= {"temperature": 0.8, "top_p": 0.9}
        wrong += same_bits(model, mine, ids, mask, **options)
    model.ep_moe.destroy()
    return wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.bfloat16, "none"), (torch.float32, "none"), (torch.bfloat16, "fp8_block")]
)
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2, 4))
def test_graphs_give_the_bits_of_eager_passes(num_ranks: int, dtype: torch.dtype, scheme: str) -> None:
    wrong = launch(bits_on_rank, dtype, scheme, num_ranks=num_ranks, config=CONFIG, device="cuda")
    assert wrong == [[]] * num_ranks


def windows_on_rank(group: EPGroup, name: str) -> list[str]:
    """A model with sliding windows of 6 positions, which prompt and generation exceed."""
    model = make_model(**MODELS[name] | WIDE, dtype=torch.bfloat16).to(group.device)
    shard_experts(model, group, transport="nvlink")
    ids = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(group.rank)).to(group.device)
    wrong = same_bits(model, 3, ids, None, max_new_tokens=30)
    if why_no_graphs(model):
        wrong.append(why_no_graphs(model))
    model.ep_moe.destroy()
    return wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt_oss_windows", "mixtral_windows"])
@pytest.mark.parametrize("num_ranks", on_gpus(2))
def test_windows_in_graphs(num_ranks: int, name: str) -> None:
    wrong = launch(windows_on_rank, name, num_ranks=num_ranks, config=CONFIG, device="cuda")
    assert wrong == [[]] * num_ranks


def tokens_on_rank(group: EPGroup, transport: str) -> list[str]:
    """The shipped model in float32 by graphs, as `generate` chooses by itself, and by transformers' loop."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, wrong = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, transport=transport), []
    for rows, new_tokens, end_ids in ((4, 100, ()), (2, 60, (32,)), (1, 1, ()), (9, 17, (46,))):
        mine = max(rows - group.rank, 1)
        ids, mask = shipped_prompts(group, mine)
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "end_ids": end_ids}
        found = generate(model, ids, GenerationOptions(**options), attention_mask=mask)
        if not torch.equal(found, by_transformers(model, ids, mask, **options)):
            wrong.append(f"{rows} rows, {new_tokens} tokens: other tokens")
    if decoder_of(model, None) is None or not model.ep_moe.decoder.shapes:
        wrong.append("no graph was captured")
    memory, own = model.ep_moe.decoder.memory, getattr(model.ep_moe.transport, "peer_bytes", None)
    peer_bytes, cache_bytes = memory["peer_bytes"], memory["cache_bytes"]
    if (transport != "collective" and not peer_bytes > 0) or (own is not None and peer_bytes >= own) or not cache_bytes:
        wrong.append(f"{memory} beside {own} bytes of the model's transport")
    model.ep_moe.destroy()
    return wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2, 4))
def test_the_shipped_model_says_the_same_by_graphs(num_ranks: int) -> None:
    transports = ("nvlink", "local") if num_ranks == 1 else ("nvlink", "collective")
    for transport in transports[:1] if OVER_GLOO else transports:
        found = launch(tokens_on_rank, transport, num_ranks=num_ranks, config=CONFIG, device="cuda")
        assert found == [[]] * num_ranks


def fall_back(group: EPGroup) -> str:
    """The reason that `hierarchical` gives, and tokens without graphs."""
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, transport="hierarchical")
    ids, mask = shipped_prompts(group, 1)
    found = generate(model, ids, GenerationOptions(max_new_tokens=5), attention_mask=mask, decode_graphs=True)
    assert found.shape == (1, 5)
    return ", ".join(model.ep_moe.logged)


@pytest.mark.parametrize("num_ranks", on_gpus(2))
def test_a_transport_that_waits_on_the_host_decodes_without_graphs(num_ranks: int) -> None:
    reasons = launch(fall_back, num_ranks=num_ranks, config=CONFIG, device="cuda")
    assert reasons == ["decoding runs without CUDA graphs: HierarchicalTransport waits on the host"] * num_ranks


def lose_between_replays(group: EPGroup, victim: int, how: str, folder: Path, transport: str = "nvlink") -> None:
    """Generate; the victim is lost when it has read some tokens; survivors write down the error and the seconds."""
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.bfloat16, transport=transport)
    ids, mask = shipped_prompts(group, 2)
    generate(model, ids, GenerationOptions(max_new_tokens=600), attention_mask=mask)  # captures
    read, last = [], [time.monotonic()]

    def on_step(count: int) -> None:
        read.append(count)
        last[0] = time.monotonic()
        if group.rank == victim and len(read) == 10:
            os.kill(os.getpid(), signal.Signals[how])

    try:
        generate(model, ids, GenerationOptions(max_new_tokens=600), attention_mask=mask, on_step=on_step)
    except PeerLostError as error:
        in_time = time.monotonic() - last[0] < 8.0
        (folder / str(group.rank)).write_text(f"{error.ranks} in time: {in_time}, reads: {len(read)}")
        raise


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_ranks", on_gpus(2, 4))
def test_a_rank_lost_between_replays_is_named(num_ranks: int, victim: int, how: str, tmp_path: Path) -> None:
    _check_loss(num_ranks, victim, how, tmp_path, "nvlink")


@pytest.mark.timeout(300)
@pytest.mark.skipif(OVER_GLOO, reason="ranks that share a GPU gather over gloo, which no graph captures")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("num_ranks", on_gpus(2))
def test_a_rank_lost_between_replays_of_nccl_is_named(num_ranks: int, how: str, tmp_path: Path) -> None:
    _check_loss(num_ranks, 0, how, tmp_path, "collective")


def _check_loss(num_ranks: int, victim: int, how: str, tmp_path: Path, transport: str) -> None:
    config = GroupConfig(timeout_secs=5, heartbeat_secs=0.25)
    with pytest.raises(RankFailedError):
        launch(
            lose_between_replays,
            victim,
            how,
            tmp_path,
            transport,
            num_ranks=num_ranks,
            config=config,
            device="cuda",
            grace_secs=15,
        )
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    expected = f"({victim},) in time: True, reads: 10"
    assert written == {str(rank): expected for rank in range(num_ranks) if rank != victim}


def speed_on_rank(group: EPGroup) -> dict[str, float]:
    """Milliseconds of a step of the shipped model with 4 rows, by graphs and by eager passes."""
    model, found = from_pretrained(SHIPPED_MODEL, group, dtype=torch.bfloat16, transport="nvlink"), {}
    ids, mask = shipped_prompts(group, 4)
    for name, graphs in (("graph_ms", True), ("eager_ms", False)):
        for _ in range(2):
            start = time.perf_counter()
            generate(model, ids, GenerationOptions(max_new_tokens=200), attention_mask=mask, decode_graphs=graphs)
            found[name] = (time.perf_counter() - start) * 1e3 / 200
    model.ep_moe.destroy()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", on_gpus(2))
def test_graphs_are_faster(num_ranks: int) -> None:
    [found, *_] = launch(speed_on_rank, num_ranks=num_ranks, config=CONFIG, device="cuda")
    print(json.dumps(found), file=sys.stderr)
    assert found["graph_ms"] < found["eager_ms"] / 2
