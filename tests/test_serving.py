"""The queue, the plans, the text and the HTTP of a server, without its command: tests/test_serve.py has that."""

import contextlib
import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from fake_rows import LIMITS, FakeRows, continuation, lead
from starlette.testclient import TestClient
from test_decoding import TEXTS, captured_on_a_cpu, make_model
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import GroupConfig
from ep_moe.engines.transformers import GenerationOptions, from_pretrained
from ep_moe.engines.transformers.decoding import RowDecoder, by_transformers
from ep_moe.engines.transformers.decoding.passes import pass_shape
from ep_moe.engines.transformers.decoding.rows import RowsPlan, RowStart
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.serving.core import Leader, LeadRank, RemoteRanks, ServerEndedError, relay
from ep_moe.serving.http import Service, create_app
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.scheduler import BadRequestError, Generation, Progress, QueueFullError, Scheduler
from ep_moe.serving.text import TextStream


def test_everyone_gets_all_tokens_whatever_comes_and_goes() -> None:
    chance = random.Random(5)
    scheduler, ranks = Scheduler(LIMITS), [FakeRows(LIMITS, rank) for rank in range(LIMITS.num_ranks)]
    asked: dict[int, Generation] = {}
    made: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    cancelled: set[int] = set()
    most_running = idle = 0
    while idle < 20:
        for _ in range(chance.choice((0, 0, 1, 6)) if len(asked) < 300 else 0):
            prompt = tuple(chance.randrange(1, 256) for _ in range(chance.choice((1, 3, 8, 23, 24))))
            generation = Generation(prompt=prompt, max_new_tokens=chance.randint(1, 72))
            ticket = scheduler.submit(generation)
            asked[ticket], made[ticket] = generation, []
        plan = scheduler.next_plan()
        if asked and chance.random() < 0.3:  # while the ranks are at work
            ticket = chance.choice(list(asked))
            if scheduler.cancel(ticket):
                assert ticket not in finished
                cancelled.add(ticket)
        if plan is None:
            idle += 1
            continue
        most_running = max(most_running, scheduler.num_running)
        for ticket, progress in scheduler.take([rank.run(plan) for rank in ranks]):
            assert ticket not in cancelled
            made[ticket] += progress.tokens
            if progress.finish:
                finished[ticket] = progress.finish
    assert len(asked) >= 300
    assert most_running == LIMITS.num_ranks * LIMITS.num_rows
    assert 20 < len(cancelled) < 200
    assert finished.keys() == asked.keys() - cancelled
    for ticket, finish in finished.items():
        assert made[ticket] == continuation(asked[ticket])
        assert finish == ("stop" if made[ticket][-1] == 0 else "length")
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_generations_start_in_order_on_the_rank_with_the_fewest() -> None:
    scheduler = Scheduler(LIMITS)
    for size in (20, 2, 2, 2, 2, 20, 2):
        scheduler.submit(Generation(prompt=(1,) * size, max_new_tokens=9))
    plan = scheduler.next_plan()
    assert plan is not None
    # the sixth fits into no prefill of this plan, and the seventh does not overtake it
    assert [[(start.row, len(start.prompt)) for start in starts] for starts in plan.starts] == [
        [(0, 20)],
        [(0, 2), (1, 2)],
        [(0, 2), (1, 2)],
    ]
    assert scheduler.cancel(1)  # its token is not that of the next one of its rank
    found = {ticket: progress.tokens for ticket, progress in scheduler.take([[[7]], [[1, 3]], [[2, 4]]])}
    assert found == {0: (7,), 2: (2,), 3: (3,), 4: (4,)}
    passes = scheduler.next_plan()
    assert passes is not None
    assert (passes.passes, any(passes.starts)) == (4, False)  # those who run get tokens before others start
    assert passes.shapes == (pass_shape(1, 64, False), pass_shape(2, 64, False), pass_shape(2, 64, False))


@pytest.mark.parametrize(
    ("generation", "param", "message"),
    [
        ({"prompt": ()}, "prompt", "the prompt has no tokens"),
        ({"prompt": (1,) * 25}, "prompt", "the prompt has 25 tokens, the limit is 24"),
        ({"prompt": (1, 256)}, "prompt", "the prompt has token 256, tokens are in [0, 256)"),
        ({"prompt": (1,) * 6, "max_new_tokens": 91}, "max_tokens", "the most for this prompt is 90"),
        ({"prompt": (1,), "max_new_tokens": 0}, "max_tokens", "max_tokens (0) must be at least 1"),
        ({"prompt": (1,), "seed": 2**63}, "seed", "is not a number of 64 bits"),
    ],
)
def test_what_cannot_be_served_is_named(generation: dict[str, Any], param: str, message: str) -> None:
    scheduler = Scheduler(dataclasses.replace(LIMITS, max_waiting=1))
    with pytest.raises(BadRequestError) as error:
        scheduler.submit(Generation(**generation))
    assert message in str(error.value)
    assert error.value.param == param
    scheduler.submit(Generation(prompt=(1,)))
    with pytest.raises(QueueFullError, match="1 generations wait already, the limit is 1"):
        scheduler.submit(Generation(prompt=(1,)))


def test_a_sequence_fills_all_positions_and_no_more() -> None:
    scheduler = Scheduler(dataclasses.replace(LIMITS, max_prompt_tokens=200))
    assert [scheduler.room((1,) * size) for size in (1, 95)] == [95, 1]
    with pytest.raises(BadRequestError, match="the prompt has 96 tokens, the limit is 95"):
        scheduler.room((1,) * 96)
    scheduler.submit(Generation(prompt=(1,) * 95, max_new_tokens=1))


# Text.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the shipped model: a token is a byte."""
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_text_comes_whole_in_any_pieces(tokenizer: Any, size: int) -> None:
    text = "In the beginning \N{GREEK SMALL LETTER ALPHA}\N{GRINNING FACE}, e\N{COMBINING ACUTE ACCENT} end"
    tokens = list(text.encode()) + [0xF0, 0x9F]  # ends within a character
    stream, pieces = TextStream(tokenizer), []
    for first in range(0, len(tokens), size):
        piece = stream.push(tokens[first : first + size], "length" if first + size >= len(tokens) else "")
        pieces.append(piece.text)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert (piece.num_tokens, piece.finish) == (len(tokens), "length")


def sentencepiece() -> Any:
    """A tokenizer as Mixtral's: words, bytes, and a decoder that strips a first space."""
    words = ["<unk>", "<s>", "</s>", "\u2581hello", "\u2581world", "."]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_text_continues_that_of_its_prompt(tokenizer: Any, name: str) -> None:
    """Whatever the prompt's last token, its text and the new one are that of all tokens; a split character is shown."""
    text = "\N{THUMBS UP SIGN}" * 5 + " a"
    tokens = list(text.encode())
    if name == "sentencepiece":
        tokenizer, tokens = sentencepiece(), [1, 3, 4, 4, *(6 + byte for byte in tokens), 4, 2, 3]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    for size in range(1, len(tokens)):
        before = next(
            found
            for end in range(size, -1, -1)
            if not (found := tokenizer.decode(tokens[:end], skip_special_tokens=True)).endswith("\ufffd")
        )
        stream, shown = TextStream(tokenizer, prompt=tokens[:size]), before
        for index, token in enumerate(tokens[size:], start=1):
            piece = stream.push([token], "length" if size + index == len(tokens) else "")
            shown += piece.text
            assert piece.num_tokens == index
        assert shown == whole


@pytest.mark.parametrize(
    ("stops", "shown", "num_tokens", "finish"),
    [
        (["gin"], "In the be", 12, "stop"),
        (["zz", "nn", "inn"], "In the beg", 13, "stop"),  # "nn" and "inn" are complete with the same token
        (["ing!", "in the"], "In the beginning", 16, "length"),
        (["g"], "In the be", 10, "stop"),
    ],
)
def test_text_ends_before_a_stop_string(
    tokenizer: Any, stops: list[str], shown: str, num_tokens: int, finish: str
) -> None:
    tokens, stream, text = list(b"In the beginning"), TextStream(tokenizer, stops), ""
    for index, token in enumerate(tokens):
        piece = stream.push([token], "length" if index == len(tokens) - 1 else "")
        text += piece.text
        assert shown.startswith(text)  # nothing was shown that belongs to a stop string
        if piece.finish:
            break
    assert (text, piece.num_tokens, piece.finish) == (shown, num_tokens, finish)


# Rows of a real model.


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small operators a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["shipped", "gpt_oss_windows"])
def test_rows_say_the_same_as_sequences_alone(name: str, one_thread: None) -> None:
    """Sequences that start and end at different times, greedy beside sampled, in passes of all, captured as graphs."""
    if name == "shipped":
        model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    else:
        model = make_model(name)
    prompts = [tuple(byte % model.config.vocab_size for byte in text.encode()) for text in TEXTS]
    starts = [
        RowStart(row=row, prompt=prompts[index], max_new_tokens=40, temperature=temperature, seed=index)
        for index, (row, temperature) in enumerate([(0, 0.0), (1, 0.7), (2, 0.0), (0, 0.0)])
    ]
    made: list[list[int]] = [[] for _ in starts]

    def start(rows: RowDecoder, *indices: int, ended: tuple[int, ...] = ()) -> None:
        plan = RowsPlan(ended=(ended,), starts=(tuple(starts[index] for index in indices),))
        for index, token in zip(indices, rows.run(plan)[0], strict=True):
            made[index].append(token)

    def decode(rows: RowDecoder, passes: int, positions: int, owners: dict[int, int]) -> None:
        shape = pass_shape(1 + max(owners), positions, True)
        for step in rows.run(RowsPlan(ended=((),), starts=((),), passes=passes, shapes=(shape,))):
            assert [row for row, token in enumerate(step) if token >= 0] == sorted(owners)
            for row, index in owners.items():
                made[index].append(step[row])

    with captured_on_a_cpu() as counts:
        together = RowDecoder(model, num_rows=4, num_positions=128, end_ids=(), graphs=True)
        start(together, 0)
        decode(together, 3, 25, {0: 0})
        start(together, 1, 2)  # padded to the longer of the two
        decode(together, 8, 46, {0: 0, 1: 1, 2: 2})
        start(together, 3, ended=(0,))
        decode(together, 16, 62, {0: 3, 1: 1, 2: 2})
        decode(together, 4, 66, {0: 3, 1: 1, 2: 2})  # more positions than a bucket of 64
    assert len(counts) == 4  # one for each shape
    for index, each in enumerate(starts):
        if each.temperature:  # transformers' own loop samples other tokens
            alone, mixed = RowDecoder(model, num_rows=1, num_positions=128, end_ids=(), graphs=False), made[index]
            starts[index], made[index] = dataclasses.replace(each, row=0), []
            start(alone, index)
            decode(alone, 15, 64, {0: index})
            tokens, made[index] = made[index], mixed
        else:
            options = GenerationOptions(max_new_tokens=len(made[index]))
            tokens = by_transformers(model, torch.tensor([each.prompt]), None, options, lambda count: None)[0].tolist()
        assert made[index][: len(tokens)] == tokens, index


# Ranks.


def test_ranks_follow_until_the_leader_closes() -> None:
    found = launch(lead, "close", num_ranks=3, config=GroupConfig(timeout_secs=20), device="cpu")[0]
    assert found == [continuation(Generation(prompt=(size,) * size, max_new_tokens=size)) for size in range(1, 21)]


def test_a_rank_that_dies_while_nobody_asks_is_named(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        launch(lead, "die", tmp_path, num_ranks=2, config=GroupConfig(timeout_secs=20), device="cpu")
    assert time.monotonic() - start < 15
    assert (tmp_path / "named").exists()


def test_an_error_of_the_model_reaches_everyone() -> None:
    class BrokenRows(FakeRows):
        def run(self, plan: RowsPlan) -> list[list[int]]:
            raise MemoryError("no room for 3 GB")

    limits = dataclasses.replace(LIMITS, num_ranks=1)
    leader = Leader(LeadRank(EPGroup.single("cpu"), BrokenRows(limits, 0)), limits)
    found: list[Progress] = []
    leader.submit(Generation(prompt=(1,)), found.append)
    with pytest.raises(MemoryError):
        leader.run()
    assert [str(progress.error) for progress in found] == ["rank 0: MemoryError: no room for 3 GB"]
    with pytest.raises(ServerEndedError, match="rank 0: MemoryError: no room for 3 GB"):
        leader.submit(Generation(prompt=(1,)), found.append)


# HTTP.


@contextlib.contextmanager
def served(tokenizer: Any, rows: type[FakeRows] = FakeRows, **limits: int) -> Iterator[tuple[TestClient, Leader]]:
    """A client of the application, with fake rows of one rank behind it."""
    few = dataclasses.replace(LIMITS, num_ranks=1, **limits)
    leader = Leader(LeadRank(EPGroup.single("cpu"), rows(few, 0)), few)
    metrics = Metrics(leader)
    app = create_app(Service(leader=leader, tokenizer=tokenizer, name="fake", metrics=metrics))
    thread = threading.Thread(target=leader.run)
    thread.start()
    try:
        with TestClient(app, raise_server_exceptions=False) as client:
            yield client, leader
    finally:
        leader.close()
        thread.join()


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "n": ("completions", {"prompt": "a", "n": 2}, 400, "n (2): Input should be 1"),
    "temperature": ("completions", {"prompt": "a", "temperature": 2.5}, 400, "temperature (2.5): Input should be less"),
    "top_p": ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p (0): Input should be greater than 0"),
    "messages": ("chat/completions", {"messages": []}, 400, "messages ([]): List should have at least 1"),
    "max_tokens": (
        "completions",
        {"prompt": "a", "max_tokens": 0},
        400,
        "max_tokens (0): Input should be greater than",
    ),
    "positions": ("completions", {"prompt": "a", "max_tokens": 96}, 400, "the most for this prompt is 95"),
    "long": ("completions", {"prompt": "a" * 25}, 400, "the prompt has 25 tokens, the limit is 24"),
    "empty": ("completions", {"prompt": ""}, 400, "the prompt has no tokens"),
    "none": ("completions", {"prompt": []}, 400, "prompt ([]) must be one or more texts"),
    "missing": ("completions", {}, 400, "prompt is missing"),
    "ids": ("completions", {"prompt": [300]}, 400, "the prompt has token 300, tokens are in [0, 256)"),
    "unknown": ("completions", {"prompt": "a", "top_k": 3}, 400, "top_k (3): Extra inputs are not permitted"),
    "penalty": (
        "completions",
        {"prompt": "a", "presence_penalty": 0.5},
        400,
        "presence_penalty (0.5): Input should be",
    ),
    "logprobs": ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs (5): Input should be None"),
    "model": ("completions", {"prompt": "a", "model": "gpt"}, 404, "model ('gpt') is not served here, 'fake' is"),
    "template": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "hi"}]},
        400,
        "model 'fake' has no chat template; use /v1/completions",
    ),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content.0.type ('image_url'): Input should be 'text'",
    ),
    "path": ("nothing", {}, 404, "POST /v1/nothing: Not Found"),
}


def test_errors_have_openais_shape_and_name_value_and_limit(tokenizer: Any) -> None:
    with served(tokenizer) as (client, _):
        for name, (path, body, status, message) in REFUSED.items():
            answer = client.post(f"/v1/{path}", json=body)
            assert answer.status_code == status, (name, answer.text)
            error = answer.json()["error"]
            assert message in error["message"], name
            assert (error.keys(), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
        answer = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert (answer.status_code, "not valid JSON" in answer.json()["error"]["message"]) == (400, True)
        assert client.get("/v1/models/fake").json()["id"] == "fake"


def test_answers_usage_streams_and_metrics(tokenizer: Any) -> None:
    prompts = ["ab", "xyz"]
    made = [continuation(Generation(prompt=tuple(prompt.encode()), max_new_tokens=12)) for prompt in prompts]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0}
    with served(tokenizer) as (client, leader):
        whole = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in whole["choices"]] == texts
        new = sum(map(len, made))
        assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": new, "total_tokens": 5 + new}
        streamed = client.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        found = ["", ""]
        for chunk in chunks[:-1]:
            found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert found == texts
        text = client.get("/metrics").text
        assert f"ep_moe_generated_tokens_total {2 * new:.1f}" in text
        assert 'ep_moe_requests_total{endpoint="completions",outcome="ok"} 2.0' in text
        assert "ep_moe_running_sequences 0.0" in text
        leader.close()
        while leader.failure is None:
            time.sleep(0.01)
        for answer in (client.get("/health"), client.post("/v1/completions", json=body)):
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is closed")


def test_a_full_queue_is_told(tokenizer: Any) -> None:
    with served(tokenizer, max_waiting=2) as (client, _):
        answer = client.post("/v1/completions", json={"prompt": ["a"] * 40, "max_tokens": 9})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert "wait already, the limit is 2" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 200
