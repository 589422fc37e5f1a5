"""Generation by passes of fixed shapes gives the tokens of transformers' own loop; on a CPU the passes run eagerly."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ep_moe.app.generate_rank import _padded
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import GroupConfig, Layout
from ep_moe.engines.transformers import GenerationOptions, from_pretrained, generate, shard_experts
from ep_moe.engines.transformers.decoding import (
    Decoder,
    RowDecoder,
    decoder,
    decoder_of,
    end_ids_of,
    loop,
    why_no_graphs,
    why_not_fixed,
)
from ep_moe.engines.transformers.decoding.attention import attend
from ep_moe.engines.transformers.decoding.fixed_cache import FixedCache, windows_of
from ep_moe.engines.transformers.decoding.sampling import sample, uniform
from ep_moe.engines.transformers.decoding.sequences import BROKEN, Sequences
from ep_moe.group import EPGroup
from ep_moe.launch import RankFailedError, launch
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing

TEXTS = ("In the beginning God ", "And he said unto ", "Blessed are the poor in spirit: for ", "The")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts": 5, "norm_topk_prob": True}),
    "mixtral_windows": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "gpt_oss_windows": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """For tiny operators a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(name: str, **more: Any) -> PreTrainedConfig:
    """The config of a small model, with other sizes in `more`."""
    model_type, sizes = MODELS[name]
    return AutoConfig.for_model(model_type, **SIZES | sizes | more)


def make_model(name: str) -> PreTrainedModel:
    """A small model with random weights, on one rank."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(make_config(name)).eval()
    return shard_experts(model, EPGroup.single("cpu"))


@pytest.fixture(scope="module")
def shipped() -> PreTrainedModel:
    """The shipped model in float32 on one rank."""
    return from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)


def prompts_of(*texts: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Texts as bytes, which the shipped model reads, padded on the left."""
    return _padded([list(text.encode()) for text in texts], torch.device("cpu"))


@contextlib.contextmanager
def captured_on_a_cpu() -> Iterator[list[int]]:
    """A stand-in for CUDA graphs: a replay runs the captured call. Yields the numbers of replays of each capture."""
    counts: list[int] = []

    def capture(call: Callable[[], None], pool: object) -> Callable[[], None]:
        index = len(counts)
        counts.append(0)

        def replay() -> None:
            counts[index] += 1
            call()

        return replay

    with mock.patch.object(decoder, "capture", capture), mock.patch.object(decoder, "new_pool", object):
        yield counts


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


@pytest.mark.parametrize("new_tokens", [1, 2, 17, 40])
def test_the_shipped_model_says_the_same(shipped: PreTrainedModel, new_tokens: int) -> None:
    ids, mask = prompts_of(*TEXTS)
    expected = by_transformers(shipped, ids, mask, max_new_tokens=new_tokens)
    found = by_passes(shipped, ids, mask, max_new_tokens=new_tokens)
    assert found.shape == (4, new_tokens)
    assert torch.equal(found, expected)
    alone = [by_passes(shipped, *prompts_of(text), max_new_tokens=new_tokens)[0] for text in TEXTS]
    assert torch.equal(found, torch.stack(alone))


@pytest.mark.parametrize("prompt_tokens", [3, 6, 11])
@pytest.mark.parametrize("name", MODELS)
def test_models_say_the_same(name: str, prompt_tokens: int) -> None:
    """Windows of 6 positions: prompts that are shorter, as long, and longer; with and without padding."""
    model = make_model(name)
    ids = torch.randint(3, 60, (3, prompt_tokens), generator=torch.Generator().manual_seed(1))
    expected = by_transformers(model, ids, max_new_tokens=20)
    assert torch.equal(by_passes(model, ids, max_new_tokens=20), expected)
    mask = torch.ones_like(ids)
    mask[1, : prompt_tokens - 2] = 0
    ids = ids * mask
    alone = by_transformers(model, ids[1:2, -2:], max_new_tokens=20)
    found = by_passes(model, ids, mask, max_new_tokens=20)
    assert torch.equal(found[::2], expected[::2])
    assert torch.equal(found[1:2], alone)


@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_grouped_attention(num_groups: int) -> None:
    """Against softmax in float64, each key head repeated for its query heads; values are narrower than keys."""
    generator = torch.Generator().manual_seed(num_groups)
    sizes = [(3, 6, 1, 16), (3, num_groups, 9, 16), (3, num_groups, 9, 8)]
    query, key, value = (torch.randn(size, generator=generator) for size in sizes)
    mask = torch.zeros(3, 1, 1, 9).masked_fill(
        torch.arange(9) >= torch.tensor([9, 4, 1])[:, None, None, None], -torch.inf
    )
    repeated_key, repeated_value = (part.double().repeat_interleave(6 // num_groups, 1) for part in (key, value))
    scores = query.double() @ repeated_key.transpose(2, 3) * 0.3 + mask
    expected = (scores.softmax(-1) @ repeated_value).transpose(1, 2)
    found, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3, softcap=None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_end_tokens_and_lengths(shipped: PreTrainedModel) -> None:
    ids, mask = prompts_of(*TEXTS)
    whole = by_transformers(shipped, ids, mask, max_new_tokens=40)
    end = int(whole[1, 20])
    ended = by_passes(shipped, ids, mask, max_new_tokens=40, end_ids=(end, 7))
    for row, expected in zip(ended, whole, strict=True):
        places = (expected == end).nonzero()
        count = int(places[0]) + 1 if len(places) else 40
        assert torch.equal(row[:count], expected[:count])
        assert bool((row[count:] == -1).all())
    assert torch.equal(ended, by_transformers(shipped, ids, mask, max_new_tokens=40, end_ids=(end, 7)))
    assert by_passes(shipped, ids, mask, max_new_tokens=0).shape == (4, 0)
    assert by_passes(shipped, ids[:0], None, max_new_tokens=5).shape == (0, 5)
    assert by_transformers(shipped, ids[:0], None, max_new_tokens=5).shape == (0, 5)
    assert by_transformers(shipped, ids, mask, max_new_tokens=0).shape == (4, 0)


def test_prompts_in_several_prefills() -> None:
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32, max_tokens_per_rank=80)
    ids, mask = prompts_of(*TEXTS)  # 36 columns: two rows in each prefill
    expected = torch.cat([by_transformers(model, *prompts_of(text), max_new_tokens=12) for text in TEXTS])
    assert torch.equal(by_passes(model, ids, mask, max_new_tokens=12), expected)


def test_more_rows_and_longer_prompts_than_before(shipped: PreTrainedModel) -> None:
    long = "And it came to pass " * 10
    for texts in ((TEXTS[0],), TEXTS, (long, TEXTS[1]), (TEXTS[2],)):
        ids, mask = prompts_of(*texts)
        expected = by_transformers(shipped, ids, mask, max_new_tokens=8)
        assert torch.equal(by_passes(shipped, ids, mask, max_new_tokens=8), expected)


def test_a_sample_depends_on_its_seed_alone(shipped: PreTrainedModel) -> None:
    ids, mask = prompts_of(*TEXTS)
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9}
    found = by_passes(shipped, ids, mask, seeds=(4, 5, 6, 7), **options)
    alone = [
        by_passes(shipped, *prompts_of(text), seeds=(seed,), **options)[0] for seed, text in enumerate(TEXTS, start=4)
    ]
    assert torch.equal(found, torch.stack(alone))
    assert not torch.equal(found, by_passes(shipped, ids, mask, seeds=(5, 6, 7, 8), **options))
    likeliest = by_transformers(shipped, ids, mask, max_new_tokens=4)
    for run in (by_passes, by_transformers):
        assert torch.equal(run(shipped, ids, mask, max_new_tokens=4, temperature=1e-40), likeliest)


def test_expert_load_counts_live_rows_alone(shipped: PreTrainedModel) -> None:
    ids, mask = prompts_of(*TEXTS[:3])  # a bucket of 4
    by_passes(shipped, ids, mask, max_new_tokens=5)
    shipped.ep_moe.reset_expert_load()
    by_passes(shipped, ids, mask, max_new_tokens=5)
    tokens = ids.numel() + 3 * 4
    assert shipped.ep_moe.expert_load.sum(1).tolist() == [4 * tokens] * 4


def test_uniform_numbers() -> None:
    seeds, counters = torch.arange(-50, 50).repeat_interleave(100), torch.arange(100).repeat(100)
    numbers = uniform(seeds, counters)
    assert numbers.dtype == torch.float32
    assert 0 <= float(numbers.min()) < 1e-3 < 0.999 < float(numbers.max()) < 1
    counts = numbers.mul(16).long().bincount(minlength=16)
    assert float(((counts - 625) ** 2 / 625).sum()) < 37.7  # chi squared with 15 degrees of freedom, p = 0.001
    assert numbers.unique().numel() > 9900


def test_samples_follow_their_probabilities() -> None:
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log().expand(4000, 4)
    ones, numbers = torch.ones(4000), uniform(torch.zeros(4000, dtype=torch.int64), torch.arange(4000))
    shares = sample(logits, ones, ones, numbers).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([0.5, 0.1, 0.3, 0.1])).abs().max() < 0.03
    shares = sample(logits, ones, ones * 0.7, numbers).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([0.625, 0, 0.375, 0])).abs().max() < 0.03
    assert sample(logits, ones, ones * 0.5, numbers).unique().tolist() == [0]
    shares = sample(logits, ones / 2, ones, numbers).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([25, 1, 9, 1]) / 36).abs().max() < 0.03
    assert sample(logits * float("nan"), ones, ones, numbers).max() < 4
    for tiny in (1e-30, 1e-38, 1e-40, 1e-45):  # down to the least float32, where a quotient of logits overflows
        assert sample(logits * 200 + 1000, ones * tiny, ones, numbers).unique().tolist() == [0]


def test_rows_that_are_not_live_keep_still() -> None:
    sequences = Sequences(4, 3, torch.device("cpu"))
    sequences.live[:] = torch.tensor([True, False, True, False])
    sequences.greedy[0] = False
    sequences.left[:] = torch.tensor([2, 0, 5, 9])
    sequences.end_ids[0] = 1
    assert sequences.num_tokens(4).tolist() == [3]
    logits = torch.nn.functional.one_hot(torch.tensor([3, 3, 1, 2]), 5).float()
    logits[1] = float("nan")
    sequences.advance(logits, sampled=False)
    assert sequences.tokens.tolist() == [3, 0, 1, 0]
    assert sequences.positions.tolist() == [1, 0, 1, 0]
    assert sequences.live.tolist() == [True, False, False, False]
    assert sequences.num_tokens(4).tolist() == [1]
    logits[0, 4] = float("inf")
    sequences.advance(logits, sampled=True)
    assert sequences.num_tokens(2).tolist() == [0]
    assert sequences.made.tolist() == [[3, -1, 1, -1], [BROKEN, -1, -1, -1], [-1] * 4]
    assert sequences.tokens.tolist() == [3, 0, 1, 0]  # still tokens of the embedding
    sequences.begin(0, torch.tensor([4, 4]), torch.tensor([2, 2]))
    sequences.step.zero_()
    sequences.advance(torch.full((2, 5), float("nan")).index_fill_(0, torch.tensor([1]), 1.0), sampled=False)
    assert sequences.made[0, :2].tolist() == [BROKEN, 0]


def test_a_ring_holds_the_last_positions() -> None:
    cache = FixedCache([4, None])
    cache.reserve(2, 16)
    states = torch.arange(6.0)[None, None, :, None].expand(2, 1, 6, 1).clone()
    cache.begin_prefill(0, 2, 16, torch.tensor([6, 3]))  # the second row's positions 0 to 2 are columns 3 to 5
    for layer in range(2):
        assert cache.update(states, states, layer)[0] is states
    assert cache.layers[0].keys[0].flatten().tolist() == [4, 5, 2, 3]
    assert cache.layers[0].keys[1].flatten()[:3].tolist() == [3, 4, 5]
    assert cache.layers[1].keys[0].flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    cache.begin_decode(2, 16, torch.tensor([6, 3]))
    keys, _ = cache.update(torch.full((2, 1, 1, 1), 9.0), torch.full((2, 1, 1, 1), 9.0), 0)
    assert keys[0].flatten().tolist() == [4, 5, 9, 3]
    assert keys[1].flatten().tolist() == [3, 4, 5, 9]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "float": ({"ids": torch.ones(1, 3)}, "expected [rows, tokens] int64 on cpu"),
    "flat": ({"ids": torch.ones(3, dtype=torch.int64)}, "prompts are (3,) torch.int64"),
    "empty": ({"ids": torch.ones(2, 0, dtype=torch.int64)}, "a prompt needs at least one token"),
    "long": (
        {"ids": torch.ones(1, 4097, dtype=torch.int64)},
        "a prompt of 4097 tokens exceeds max_tokens_per_rank (4096) on rank 0",
    ),
    "right": (
        {"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.tensor([[1, 1, 0]])},
        "padding on the left alone",
    ),
    "holes": (
        {"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.tensor([[1, 0, 1]])},
        "padding on the left alone",
    ),
    "shape": (
        {"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.ones(2, 3)},
        "attention_mask is (2, 3)",
    ),
    "unknown": ({"ids": torch.tensor([[5, 256]])}, "a prompt has token 256 on rank 0, tokens are in [0, 256)"),
    "seeds": ({"ids": torch.ones(1, 3, dtype=torch.int64), "seeds": (1, 2)}, "seeds are 2 on rank 0, prompts are 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_prompts_are_named(shipped: PreTrainedModel, name: str) -> None:
    given, message = BAD[name]
    options = {"max_new_tokens": 2} | {key: value for key, value in given.items() if key == "seeds"}
    for run in (by_passes, by_transformers):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            run(shipped, given["ids"], given.get("mask"), **options)
        assert message in str(error.value)
    ids, mask = prompts_of(*TEXTS)
    assert by_passes(shipped, ids, mask, max_new_tokens=2).shape == (4, 2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", -1, "max_new_tokens (-1) must not be negative"),
        ("temperature", -0.5, "temperature (-0.5) must not be negative"),
        ("top_p", 0.0, "top_p (0.0) is not in (0, 1]"),
        ("end_ids", tuple(range(17)), "end_ids are 17, the limit is 16"),
    ],
)
def test_bad_options_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        dataclasses.replace(GenerationOptions(max_new_tokens=1), **{field: value})
    assert str(error.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_computes_nan_is_named_with_its_layer(value: float) -> None:
    model, ids = make_model("qwen3_moe"), torch.ones(2, 3, dtype=torch.int64)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 5] = value
    wrong, layer = (
        "the model computes NaN or infinity: the logits",
        "first layer whose output is not finite is model.layers.1",
    )
    with pytest.raises(RuntimeError, match=f"{wrong} of row 0 are not finite; the {layer}$"):
        by_passes(model, ids, max_new_tokens=2)
    with pytest.raises(RuntimeError, match=f"{wrong} are not finite"):
        by_transformers(model, ids, max_new_tokens=2)
    with pytest.raises(RuntimeError, match=layer):
        RowDecoder(model, num_rows=1, num_positions=8, end_ids=(), graphs=False)


def test_end_tokens_are_those_of_the_model_and_of_its_tokenizer(shipped: PreTrainedModel, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "B"}))
    with mock.patch.multiple(shipped, name_or_path=str(tmp_path), generation_config=GenerationConfig(eos_token_id=67)):
        assert end_ids_of(shipped) == (67, 66)
        shipped.name_or_path = str(tmp_path / "nothing")
        assert end_ids_of(shipped) == (67,)


def test_why_there_are_no_graphs(shipped: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    assert why_not_fixed(shipped) == ""
    assert why_no_graphs(shipped) == "ranks are on cpu"
    model = make_model("qwen3_moe")
    for wanted in (False, True, None, True):
        passes = decoder_of(model, wanted)
        assert passes is not None
        assert not passes.graphs
    told = [record.getMessage() for record in caplog.records]
    assert told == ["decoding runs without CUDA graphs: ranks are on cpu"]
    model.ep_moe.decoder = None
    caplog.clear()
    with mock.patch.object(type(model), "_can_compile_fullgraph", False):
        assert decoder_of(model, True) is None
        ids = torch.ones(2, 3, dtype=torch.int64)
        assert generate(model, ids, GenerationOptions(max_new_tokens=2)).shape == (2, 2)
    told = [record.getMessage() for record in caplog.records]
    reason = f"transformers does not declare that {type(model).__name__} runs without host decisions"
    assert told == [f"decoding runs by transformers' own loop: {reason}"]
    reasons = {
        "sliding_window": ({"layer_types": ["linear_attention"] * 3}, "layers of type 'linear_attention'"),
        "attention": ({"_attn_implementation_internal": "flex"}, "attention 'flex' takes no mask"),
        "rope": ({"rope_parameters": {"rope_type": "dynamic"}}, "its rotary embedding 'dynamic' reads positions"),
        "chunks": ({"attention_chunk_size": 4}, "layers of chunked attention"),
    }
    for fields, reason in reasons.values():
        before = dict(vars(model.config))
        vars(model.config).update(fields)
        assert why_not_fixed(model).startswith(reason)
        vars(model.config).clear()
        vars(model.config).update(before)
    assert windows_of(make_model("gpt_oss_windows").config) == [6, None, 6]


def test_a_pass_is_captured_once_for_its_shape(shipped: PreTrainedModel) -> None:
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    steps = []
    with captured_on_a_cpu() as counts:
        for texts, new_tokens in ((TEXTS, 9), (TEXTS[:3], 9), (TEXTS[:1], 9), (TEXTS, 40), (TEXTS, 9)):
            ids, mask = prompts_of(*texts)
            expected = by_transformers(shipped, ids, mask, max_new_tokens=new_tokens)
            assert torch.equal(by_passes(model, ids, mask, graphs=True, max_new_tokens=new_tokens), expected)
            steps.append(list(counts))
    # 3 rows are padded to 4; another capacity takes larger memory, so that the first shapes are captured anew
    assert steps[1] == [16]
    assert [len(entry) for entry in steps] == [1, 1, 2, 3, 4]
    assert {(shape.rows, shape.capacity) for shape in model.ep_moe.decoder.shapes} == {(4, 64), (4, 128)}
    model.ep_moe.decoder.drop_graphs()
    assert model.ep_moe.decoder.shapes == ()
    with captured_on_a_cpu() as counts:
        ids, mask = prompts_of(*TEXTS)
        model.ep_moe.decoder.warmup(model, 3, ids.shape[1] + 9)
        assert counts == [0]
        found = by_passes(model, ids, mask, max_new_tokens=9)
        assert counts == [8]
    assert torch.equal(found, by_transformers(shipped, ids, mask, max_new_tokens=9))
    model.ep_moe.decoder.drop_graphs()
    sampled = {"max_new_tokens": 9, "temperature": 0.8}
    with captured_on_a_cpu() as counts:
        ids, mask = prompts_of(*TEXTS)
        found = by_passes(model, ids, mask, **sampled)
    assert len(counts) == 1
    assert torch.equal(found, by_passes(shipped, ids, mask, **sampled))


def test_a_capture_with_an_open_slot_is_refused() -> None:
    model = make_model("qwen3_moe")
    ids = torch.ones(1, 3, dtype=torch.int64)
    by_passes(model, ids, graphs=False, max_new_tokens=2)
    passes = model.ep_moe.decoder
    transport = passes._transport
    tokens = torch.zeros(1, 32)
    routing = Routing(topk_ids=torch.zeros(1, 2, dtype=torch.int64), topk_weights=torch.ones(1, 2))
    transport.dispatch_send(tokens, routing, layout=Layout.COMPACT, scheme=get_scheme("none"))
    assert transport.open_slots == (0,)
    passes.graphs = True
    with pytest.raises(RuntimeError, match="slot 0 has an open round: a decode pass is captured when all rounds"):
        by_passes(model, ids, max_new_tokens=2)
    transport.abandon()
    with captured_on_a_cpu() as counts:
        by_passes(model, ids, max_new_tokens=2)
    assert len(counts) == 1


def test_a_second_decoder_takes_the_place_of_the_first(shipped: PreTrainedModel) -> None:
    session, ids = shipped.ep_moe, torch.ones(1, 3, dtype=torch.int64)
    generate(shipped, ids, GenerationOptions(max_new_tokens=2))
    ended = [session.decoder._transport]
    for _ in range(2):
        RowDecoder(shipped, num_rows=1, num_positions=8, end_ids=(), graphs=False)
        for transport in ended:
            with pytest.raises(RuntimeError, match="the transport is destroyed"):
                transport.check()
        ended.append(session.decoder._transport)
    generate(shipped, ids, GenerationOptions(max_new_tokens=2))
    session.decoder.destroy()
    session.decoder = None


def test_nothing_runs_once_the_session_has_ended(shipped: PreTrainedModel) -> None:
    model = make_model("qwen3_moe")
    ids = torch.ones(1, 3, dtype=torch.int64)
    by_passes(model, ids, max_new_tokens=2)
    assert model.ep_moe.decoder.memory.cache_bytes > 0
    model.ep_moe.destroy()
    assert model.ep_moe.decoder.memory.cache_bytes == 0
    with pytest.raises(RuntimeError, match="destroyed"):
        by_passes(model, ids, max_new_tokens=2)


# Two ranks.


def on_rank(group: EPGroup) -> dict[str, Any]:
    """What a rank's passes say, for prompts that differ between ranks in number, length and new tokens."""
    torch.set_num_threads(1)
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, max_tokens_per_rank=80)
    texts = (TEXTS, TEXTS[:1])[group.rank]
    ids, mask = prompts_of(*texts)
    none = ids[:0]
    found: dict[str, Any] = {
        "uneven": by_passes(model, ids, mask, max_new_tokens=(9, 20)[group.rank]),
        "ends": by_passes(model, ids, mask, max_new_tokens=60, end_ids=(32,)),
        "one has none": by_passes(model, (ids, none)[group.rank], (mask, None)[group.rank], max_new_tokens=5),
        "one wants none": by_passes(model, ids, mask, max_new_tokens=(0, 5)[group.rank]),
        "none want any": by_passes(model, ids, mask, max_new_tokens=0),
        "transformers, one has none": by_transformers(
            model, (none, ids)[group.rank], (None, mask)[group.rank], max_new_tokens=5
        ),
    }
    for name, generate_by in (("errors", by_passes), ("errors of transformers' loop", by_transformers)):
        found[name] = errors = []
        for rank in range(2):
            bad = ids.float() if group.rank == rank else ids
            try:
                generate_by(model, bad, mask, max_new_tokens=3)
            except ValueError as error:
                errors.append(str(error))
    found["after errors"] = by_passes(model, ids, mask, max_new_tokens=3)
    model.ep_moe.decoder.graphs = True
    with captured_on_a_cpu():
        one = ids[:1], None if mask is None else mask[:1]
        for turn in range(3):  # both ranks capture, then rank 0 alone, then none
            rows = one if group.rank == 0 and turn == 0 else (ids, mask)
            found[f"captured {turn}"] = by_passes(model, *rows, max_new_tokens=20)
    found["shapes"] = sorted(shape.rows for shape in model.ep_moe.decoder.shapes)
    model.ep_moe.destroy()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """Both ranks' results of `on_rank`."""
    return launch(on_rank, num_ranks=2, config=GroupConfig(timeout_secs=60), device="cpu")


def test_ranks_of_different_buckets_stay_in_step(shipped: PreTrainedModel, two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two_ranks):
        texts = (TEXTS, TEXTS[:1])[rank]
        ids, mask = prompts_of(*texts)
        whole = by_transformers(shipped, ids, mask, max_new_tokens=60)
        ended = by_transformers(shipped, ids, mask, max_new_tokens=60, end_ids=(32,))
        assert torch.equal(found["uneven"], whole[:, : (9, 20)[rank]])
        assert torch.equal(found["ends"], ended)
        assert torch.equal(found["one has none"], (whole, whole[:0])[rank][:, :5])
        assert torch.equal(found["one wants none"], whole[:, : (0, 5)[rank]])
        assert found["none want any"].shape[1] == 0
        assert torch.equal(found["transformers, one has none"], (whole[:0], whole)[rank][:, :5])
        assert torch.equal(found["after errors"], whole[:, :3])
        assert torch.equal(found["captured 0"], whole[:1, :20])
        assert torch.equal(found["captured 1"], whole[:, :20])
        assert torch.equal(found["captured 2"], whole[:, :20])
        assert found["shapes"] == ([1, 4], [1])[rank]


def test_a_refusal_is_one_on_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    own, other = "expected [rows, tokens] int64 on cpu", "rank {} refused its prompts; its own error says why"
    assert own in two_ranks[0]["errors"][0]
    assert own in two_ranks[1]["errors"][1]
    assert two_ranks[0]["errors"][1] == other.format(1)
    assert two_ranks[1]["errors"][0] == other.format(0)
    for rank, found in enumerate(two_ranks):
        assert len(found["errors of transformers' loop"]) == 2
        for culprit, message in enumerate(found["errors of transformers' loop"]):
            assert own in message
            assert message.startswith(f"rank {culprit} raised ValueError: ") == (culprit != rank)


def die_between_passes(group: EPGroup, folder: Path) -> None:
    """Generate; rank 1 kills itself when it has read its first tokens, rank 0 writes down what it is told."""
    torch.set_num_threads(1)
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32)
    ids, _ = prompts_of(TEXTS[0])
    read: list[int] = []

    def on_step(count: int) -> None:
        read.append(count)
        if group.rank == 1 and len(read) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    decoder = Decoder(model, graphs=False)
    decoder.generate(model, ids, None, GenerationOptions(max_new_tokens=2000), on_step)
    (folder / "survived").touch()


def test_a_rank_that_dies_between_passes_is_named(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1"):
        launch(
            die_between_passes,
            tmp_path,
            num_ranks=2,
            config=GroupConfig(timeout_secs=5, heartbeat_secs=0.25),
            device="cpu",
        )
    assert not (tmp_path / "survived").exists()
    assert time.monotonic() - start < 90
