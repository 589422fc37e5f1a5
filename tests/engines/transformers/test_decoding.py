"""Generation by passes of fixed shapes gives the tokens of transformers' own loop; on a CPU the passes run eagerly."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.decoding import MODELS, TEXTS, by_passes, by_transformers, captured_on_a_cpu, prompts_of, sharded_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import GroupConfig, Layout
from ep_moe.engines.transformers import GenerationOptions, from_pretrained, generate
from ep_moe.engines.transformers.decoding import (
    Decoder,
    RowDecoder,
    decoder,
    decoder_of,
    end_ids_of,
    why_no_graphs,
    why_not_fixed,
)
from ep_moe.engines.transformers.decoding.attention import attend
from ep_moe.engines.transformers.decoding.fixed_cache import FixedCache, windows_of
from ep_moe.engines.transformers.decoding.passes import RowsPlan, RowStart, Sampling, pass_shape
from ep_moe.engines.transformers.decoding.sequences import BROKEN, NONE, Sequences, sample, uniform
from ep_moe.group import EPGroup
from ep_moe.launch import RankFailedError, launch
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.serving.core import waits_by_source
from ep_moe.transport import GatheredTransport


@pytest.fixture(scope="module")
def shipped() -> PreTrainedModel:
    """The shipped model in float32 on one rank."""
    return from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(shipped: PreTrainedModel) -> torch.Tensor:
    """32 tokens [4, 32] that transformers' loop generates after `TEXTS`, which fewer tokens and other batches share."""
    return by_transformers(shipped, *prompts_of(*TEXTS), max_new_tokens=32)


def cut(tokens: torch.Tensor, *end_ids: int) -> torch.Tensor:
    """The tokens of each row up to its first end token, then -1."""
    is_end = torch.isin(tokens, torch.tensor(end_ids))
    return tokens.masked_fill(is_end.long().cumsum(1) - is_end.long() > 0, -1)


def test_the_shipped_model_says_the_same(shipped: PreTrainedModel, reference: torch.Tensor) -> None:
    for new_tokens in (1, 2, 32):
        assert torch.equal(
            by_passes(shipped, *prompts_of(*TEXTS), max_new_tokens=new_tokens), reference[:, :new_tokens]
        )
    for row, text in enumerate(TEXTS):
        assert torch.equal(by_passes(shipped, *prompts_of(text), max_new_tokens=9)[0], reference[row, :9])


@pytest.mark.parametrize(
    ("name", "prompt_tokens"),
    [
        ("qwen3_moe", 6),
        ("deepseek_v3", 6),
        *((name, size) for name in MODELS if "windows" in name for size in (3, 6, 11)),
    ],
)
def test_models_say_the_same(name: str, prompt_tokens: int) -> None:
    """Windows of 6 positions: prompts that are shorter, as long, and longer; with and without padding."""
    model = sharded_model(name)
    ids = torch.randint(3, 60, (3, prompt_tokens), generator=torch.Generator().manual_seed(1))
    expected = by_transformers(model, ids, max_new_tokens=10)
    assert torch.equal(by_passes(model, ids, max_new_tokens=10), expected)
    mask = torch.ones_like(ids)
    mask[1, : prompt_tokens - 2] = 0
    expected[1] = by_transformers(model, ids[1:2, -2:], max_new_tokens=10)[0]
    assert torch.equal(by_passes(model, ids * mask, mask, max_new_tokens=10), expected)


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


def test_end_tokens_and_lengths(shipped: PreTrainedModel, reference: torch.Tensor) -> None:
    ids, mask = prompts_of(*TEXTS)
    ends = int(reference[1, 20]), 7
    for run in (by_passes, by_transformers):
        assert torch.equal(run(shipped, ids, mask, max_new_tokens=24, end_ids=ends), cut(reference[:, :24], *ends))
        assert run(shipped, ids[:0], None, max_new_tokens=5).shape == (0, 5)
        assert run(shipped, ids, mask, max_new_tokens=0).shape == (4, 0)


@pytest.mark.parametrize("most", [80, 16])
def test_prompts_in_several_prefills(most: int, reference: torch.Tensor) -> None:
    """36 columns: two rows in each prefill, or 16 tokens of a row; without cuDNN, which makes a plan for each shape."""
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32, max_tokens_per_rank=most)
    ids, mask = prompts_of(*TEXTS)
    cudnn: list[tuple[int, bool]] = []  # tokens of a row, and whether attention may take it

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        del module, args
        cudnn.append((kwargs["input_ids"].shape[1], torch.backends.cuda.cudnn_sdp_enabled()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    assert torch.equal(by_passes(model, ids, mask, max_new_tokens=12), reference[:, :12])
    assert {allowed for columns, allowed in cudnn if columns > 1} == {False}
    assert cudnn[-1] == (1, True)  # a decode pass


def test_more_rows_and_longer_prompts_than_before(shipped: PreTrainedModel, reference: torch.Tensor) -> None:
    texts = "And it came to pass " * 10, TEXTS[1]
    expected = by_transformers(shipped, *prompts_of(*texts), max_new_tokens=8)
    for rows in ([0], [0, 1, 2, 3], [], [2]):
        ids, mask = prompts_of(*([TEXTS[row] for row in rows] or texts))
        wanted = reference[rows, :8] if rows else expected
        assert torch.equal(by_passes(shipped, ids, mask, max_new_tokens=8), wanted)


def test_a_sample_depends_on_its_seed_alone(shipped: PreTrainedModel, reference: torch.Tensor) -> None:
    ids, mask = prompts_of(*TEXTS)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.8, "top_p": 0.9}
    found = by_passes(shipped, ids, mask, seeds=(4, 5, 6, 7), **options)
    alone = [
        by_passes(shipped, *prompts_of(text), seeds=(seed,), **options)[0] for seed, text in enumerate(TEXTS, start=4)
    ]
    assert torch.equal(found, torch.stack(alone))
    assert not torch.equal(found, by_passes(shipped, ids, mask, seeds=(5, 6, 7, 8), **options))
    for run in (by_passes, by_transformers):
        assert torch.equal(run(shipped, ids, mask, max_new_tokens=4, temperature=1e-40), reference[:, :4])


def test_expert_load_counts_live_rows_alone(shipped: PreTrainedModel) -> None:
    ids, mask = prompts_of(*TEXTS[:3])  # a bucket of 4
    by_passes(shipped, ids, mask, max_new_tokens=5)
    shipped.ep_moe.reset_expert_load()
    by_passes(shipped, ids, mask, max_new_tokens=5)
    tokens = int(mask.sum()) + 3 * 4
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
    every = torch.full((4000,), 4)

    def drawn(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        return sample(logits, temperature, top_p, every, ones * 0, numbers)

    shares = drawn(logits, ones, ones).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([0.5, 0.1, 0.3, 0.1])).abs().max() < 0.03
    shares = drawn(logits, ones, ones * 0.7).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([0.625, 0, 0.375, 0])).abs().max() < 0.03
    assert drawn(logits, ones, ones * 0.5).unique().tolist() == [0]
    shares = drawn(logits, ones / 2, ones).bincount(minlength=4) / 4000
    assert (shares - torch.tensor([25, 1, 9, 1]) / 36).abs().max() < 0.03
    assert drawn(logits * float("nan"), ones, ones).max() < 4
    for tiny in (1e-30, 1e-38, 1e-40, 1e-45):  # down to the least float32, where a quotient of logits overflows
        assert drawn(logits * 200 + 1000, ones * tiny, ones).unique().tolist() == [0]


def test_tokens_left_to_a_sample_are_those_of_transformers() -> None:
    """min_p, then top_k, then top_p, each on what the one before has left."""
    logits = torch.randn(1, 40) * 2
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.7, 1.5), (0.3, 0.9, 1.0), (1, 7, 40), (0.0, 0.05, 1.0)
    ):
        warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
        warpers += [MinPLogitsWarper(min_p)] if min_p else []
        warpers += [TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
        expected = LogitsProcessorList(warpers)(torch.zeros(1, 0), logits).softmax(-1)[0]
        count = 2000
        numbers = (torch.arange(count) + 0.5) / count
        every = [torch.full((count,), float(value)) for value in (temperature, top_p, min_p)]
        tokens = sample(logits.expand(count, -1), *every[:2], torch.full((count,), top_k), every[2], numbers)
        shares = tokens.bincount(minlength=40) / count
        assert (shares - expected).abs().max() < 2 / count, (temperature, top_p, top_k, min_p)


def test_logits_are_adjusted_as_transformers_and_openai_define_it() -> None:
    vocab, prompt, biased = 12, (3, 5, 3), Sampling(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 4.0), (8, -100.0)),
        min_tokens=3, stop_ids=(9,), logprobs=4,
    )  # fmt: skip
    plain = Sampling(seed=1)
    sequences, single = (Sequences(3, 4, torch.device("cpu")) for _ in range(2))
    starts = [
        RowStart(row=row, prompt=prompt, max_new_tokens=9, sampling=each) for row, each in enumerate((biased, plain))
    ]
    for each in (sequences, single):
        each.end_all((2,))
    sequences.begin(starts, vocab)
    single.begin([dataclasses.replace(starts[1], row=0)], vocab)
    new: list[int] = []
    for step in range(4):
        logits = torch.randn(2, vocab) * 3
        logits[0, (2, 9)[step % 2]] += 20  # an end token, banned for three steps
        sequences.advance(logits, sampled=True, adjusted=True)
        single.advance(logits[1:], sampled=True)
        wanted = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[*prompt, *new]]), logits[:1])[0]
        counts = torch.tensor([new.count(token) for token in range(vocab)])
        wanted = wanted - 0.25 * counts - 0.5 * (counts > 0)
        wanted[7], wanted[8] = wanted[7] + 4, wanted[8] - 100
        if step < 3:
            wanted[[2, 9]] = float("-inf")
        new.append(int(wanted.argmax()))
        assert sequences.made[step].tolist() == [new[-1], int(single.made[step, 0]), NONE]
        assert sequences.adjustments is not None
        found = sequences.adjustments.read(step + 1, {0: 4})[0][step]
        raw = logits[0].log_softmax(0)
        assert found.value == pytest.approx(float(raw[new[-1]]), abs=1e-6)
        assert found.rank == int((raw > raw[new[-1]]).sum()) + 1
        assert found.top == tuple((int(token), float(raw[token])) for token in raw.argsort(descending=True)[:4])
    assert new[-1] in (2, 9)
    assert sequences.live.tolist() == [False, True, False]
    assert single.adjustments is None
    again = dataclasses.replace(starts[0], sampling=Sampling(logprobs=0, ignore_end=True))
    sequences.begin([again], vocab)  # nothing of the sequence before is left
    sequences.step.zero_()
    logits = torch.randn(1, vocab)
    logits[0, 2] += 30
    sequences.advance(logits, sampled=False, adjusted=True)
    assert (int(sequences.made[0, 0]), bool(sequences.live[0])) == (2, True)
    sequences.begin(starts[:1], vocab)
    sequences.adjustments.allow({0: torch.tensor([1 << 9], dtype=torch.int32)})
    sequences.advance(torch.randn(1, vocab), sampled=False, adjusted=True)
    assert int(sequences.made[1, 0]) == 9  # a grammar's only token, banned or not


def test_rows_that_are_not_live_keep_still() -> None:
    sequences = Sequences(4, 3, torch.device("cpu"))
    sequences.live[:] = torch.tensor([True, False, True, False])
    sequences.greedy[0] = False
    sequences.left[:] = torch.tensor([2, 0, 5, 9])
    sequences.end_ids[:, 0] = 1
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
    sequences.begin([RowStart(row=row, prompt=(1,) * 5, max_new_tokens=2) for row in range(2)], 5)
    sequences.step.zero_()
    sequences.advance(torch.full((2, 5), float("nan")).index_fill_(0, torch.tensor([1]), 1.0), sampled=False)
    assert sequences.made[0, :2].tolist() == [BROKEN, 0]


def test_a_ring_holds_the_last_positions() -> None:
    cache = FixedCache([4, None])
    cache.reserve(2, 16)
    states = torch.arange(6.0)[None, None, :, None].expand(2, 1, 6, 1).clone()
    cpu = torch.device("cpu")
    cache.begin_prefill([0, 1], [0, 0], [6, 3], 16, cpu)  # the second row's positions 0 to 2 are columns 3 to 5
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
        "a prompt of 4097 tokens exceeds max_",  # position_embeddings, tokens_per_rank
    ),
    "right": (
        {"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.tensor([[1, 1, 0]])},
        "padding on the left alone",
    ),
    "holes": (
        {"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.tensor([[1, 0, 1]])},
        "padding on the left alone",
    ),
    "shape": ({"ids": torch.ones(1, 3, dtype=torch.int64), "mask": torch.ones(2, 3)}, "attention_mask is (2, 3)"),
    "positions": (
        {"ids": torch.ones(1, 1023, dtype=torch.int64)},
        "a prompt of 1023 tokens and max_new_tokens (2) exceed max_position_embeddings (1024) on rank 0",
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
        ("seeds", (0, 2**63), "seeds have 9223372036854775808, which is not a number of 64 bits"),
    ],
)
def test_bad_options_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        dataclasses.replace(GenerationOptions(max_new_tokens=1), **{field: value})
    assert str(error.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_computes_nan_is_named_with_its_layer(value: float) -> None:
    model, ids = sharded_model("qwen3_moe"), torch.ones(2, 3, dtype=torch.int64)
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
    model = sharded_model("qwen3_moe")
    for wanted in (False, True, None, True):
        passes = decoder_of(model, wanted)
        assert passes is not None
        assert not passes.graphs
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["decoding runs without CUDA graphs: ranks are on cpu"]
    model.ep_moe.decoder = None
    caplog.clear()
    with mock.patch.object(type(model), "_can_compile_fullgraph", False):
        assert decoder_of(model, True) is None
        ids = torch.ones(2, 3, dtype=torch.int64)
        assert generate(model, ids, GenerationOptions(max_new_tokens=2)).shape == (2, 2)
    logged = [record.getMessage() for record in caplog.records]
    reason = f"transformers does not declare that {type(model).__name__} runs without host decisions"
    assert logged == [f"decoding runs by transformers' own loop: {reason}"]
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
    assert windows_of(sharded_model("gpt_oss_windows").config) == [6, None, 6]


def test_a_pass_is_captured_once_for_its_shape(
    shipped: PreTrainedModel, reference: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    steps, (ids, mask) = [], prompts_of(*TEXTS)
    monkeypatch.setattr("ep_moe.engines.transformers.decoding.passes.LEAST_CAPACITY", 64)
    with captured_on_a_cpu() as counts:
        for rows, new_tokens in ((4, 4), (3, 4), (1, 4), (4, 30), (4, 4)):
            found = by_passes(model, *prompts_of(*TEXTS[:rows]), graphs=True, max_new_tokens=new_tokens)
            assert torch.equal(found, reference[:rows, :new_tokens])
            steps.append(list(counts))
    # 3 rows are padded to 4; another capacity takes larger memory, so that the first shapes are captured anew
    assert steps[1] == [6]
    assert [len(entry) for entry in steps] == [1, 1, 2, 3, 4]
    decoder = model.ep_moe.decoder
    assert {(shape.rows, shape.capacity) for shape in decoder.shapes} == {(4, 64), (4, 128)}
    decoder.drop_graphs()
    assert decoder.shapes == ()
    with captured_on_a_cpu() as counts:
        decoder.warmup(model, 3, ids.shape[1] + 4)
        assert counts == [0]
        assert torch.equal(by_passes(model, ids, mask, max_new_tokens=9), reference[:, :9])
        assert counts == [8]
    decoder.drop_graphs()
    sampled = {"max_new_tokens": 9, "temperature": 0.8}
    with captured_on_a_cpu() as counts:
        found = by_passes(model, ids, mask, **sampled)
    assert len(counts) == 1
    assert torch.equal(found, by_passes(shipped, ids, mask, **sampled))


def test_a_capture_with_an_open_slot_is_refused() -> None:
    model = sharded_model("qwen3_moe")
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
    model = sharded_model("qwen3_moe")
    ids = torch.ones(1, 3, dtype=torch.int64)
    by_passes(model, ids, max_new_tokens=2)
    assert model.ep_moe.decoder.memory["cache_bytes"] > 0
    model.ep_moe.destroy()
    assert model.ep_moe.decoder.memory["cache_bytes"] == 0
    with pytest.raises(RuntimeError, match="destroyed"):
        by_passes(model, ids, max_new_tokens=2)


# Two ranks.


def on_rank(group: EPGroup, reference: torch.Tensor) -> tuple[list[list[str]], list[list[float]]]:
    """A rank's passes, for prompts that differ between ranks in number, length and new tokens; returns its errors, and
    how long it has waited before and after a pass that rank 1 begins late."""
    torch.set_num_threads(1)
    rank = group.rank
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32, max_tokens_per_rank=24)  # chunks on rank 0
    whole, (ids, mask) = (reference, reference[:1])[rank], prompts_of(*(TEXTS, TEXTS[:1])[rank])

    def check(rows: int, new_tokens: int, run: Any = by_passes, *end_ids: int) -> None:
        given = (ids[:rows], None if mask is None else mask[:rows]) if rows else (ids[:0], None)
        found = run(model, *given, max_new_tokens=new_tokens, end_ids=end_ids)
        assert torch.equal(found, cut(whole[:rows], *end_ids)[:, :new_tokens]), (rows, new_tokens, end_ids)

    every = ids.shape[0]
    check(every, (9, 20)[rank])
    check(every, 32, by_passes, 32)
    check((every, 0)[rank], 5)
    check(every, (0, 5)[rank])
    check(every, 0)
    check((0, every)[rank], 5, by_transformers)
    errors: list[list[str]] = [[], []]
    for caught, run in zip(errors, (by_passes, by_transformers), strict=True):
        for culprit in range(2):
            try:
                bad = ids.float() if rank == culprit else ids
                run(model, bad[:, -20:], None if mask is None else mask[:, -20:], max_new_tokens=3)
            except ValueError as error:
                caught.append(str(error))
    model.ep_moe.decoder.leave()
    with captured_on_a_cpu(), mock.patch.object(decoder, "decode_transport", return_value=GatheredTransport):
        check(every, 3)
        model.ep_moe.decoder.graphs = True
        for turn in range(3):  # both ranks capture, then rank 0 alone, then none
            check(every if rank or turn else 1, 8)
    assert sorted(shape.rows for shape in model.ep_moe.decoder.shapes) == ([1, 4], [1])[rank]
    rows, everywhere = RowDecoder(model, num_rows=1, num_positions=8, end_ids=(), graphs=False), ((),) * 2
    plan = RowsPlan(ended=everywhere, starts=everywhere, passes=1, shapes=(pass_shape(1, 1, False),) * 2, load=True)
    waited = []
    for late in (0, rank):
        time.sleep(0.4 * late)
        waited.append(rows.run(plan).waited)
    model.ep_moe.destroy()
    return errors, waited


def test_ranks_of_different_buckets_stay_in_step_and_refuse_as_one(reference: torch.Tensor) -> None:
    ranks = launch(on_rank, reference, num_ranks=2, config=GroupConfig(timeout_secs=60), device="cpu")
    own, other = "expected [rows, tokens] int64 on cpu", "rank {} refused its prompts; its own error names the reason"
    (_, late), (early, _) = waits_by_source(*zip(*(waited for _, waited in ranks), strict=True))
    assert late > 0.3 > 0.1 > early
    for rank, ((by_pass, by_loop), _) in enumerate(ranks):
        for culprit in range(2):
            assert by_pass[culprit] == other.format(culprit) if culprit != rank else own in by_pass[culprit]
            assert own in by_loop[culprit]
            assert by_loop[culprit].startswith(f"rank {culprit} raised ValueError: ") == (culprit != rank)


def die_between_passes(group: EPGroup, folder: Path) -> None:
    """Generate; rank 1 kills itself when it has read its first tokens, rank 0 writes down what it is logged."""
    torch.set_num_threads(1)
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32)
    ids, _ = prompts_of(TEXTS[0])
    read: list[int] = []

    def on_step(count: int) -> None:
        read.append(count)
        if group.rank == 1 and len(read) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    decoder = Decoder(model, graphs=False)
    decoder.generate(model, ids, None, GenerationOptions(max_new_tokens=1000), on_step)
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
