"""The queue, the plans, the text and the HTTP of a server, without its command: test_serve.py has that."""

import asyncio
import collections
import contextlib
import dataclasses
import http.client
import importlib.metadata
import json
import multiprocessing
import random
import re
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import tokenizers
import torch
from helpers.decoding import TEXTS, by_transformers, captured_on_a_cpu, sharded_model
from helpers.fake_rows import LIMITS, ONE, FakeRows, continuation, lead, logprob
from starlette.testclient import TestClient
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from ep_moe.app.serve import bind
from ep_moe.app.serve_rank import _Member
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.balance.rebalancer import RebalanceState, RebalanceStatus
from ep_moe.balance.reports import status_entries
from ep_moe.bench.serve import Answer, _parts, summary
from ep_moe.cli import app
from ep_moe.config import GroupConfig
from ep_moe.engines.transformers import from_pretrained
from ep_moe.engines.transformers.decoding import RowDecoder
from ep_moe.engines.transformers.decoding.passes import Logprob, RowsMade, RowsPlan, RowStart, Sampling, pass_shape
from ep_moe.engines.transformers.decoding.sequences import BROKEN
from ep_moe.group import EPGroup
from ep_moe.launch import KEEP, LEFT, Ended, Start, Stop, launch
from ep_moe.placement import Placement
from ep_moe.serving import channel as wire
from ep_moe.serving.access import AccessLog
from ep_moe.serving.connections import LimitedConnection
from ep_moe.serving.core import Leader, waits_by_source
from ep_moe.serving.http import create_app, run_beside
from ep_moe.serving.job import Service
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.protocol import NEUTRAL, UNUSED, ChatRequest, CompletionRequest, ScaleRequest, usage
from ep_moe.serving.ranks import OneRank, RanksChangedError, Regrouped, ServerEndedError, StoreRanks
from ep_moe.serving.scheduler import BadRequestError, Generation, Progress, QueueFullError, Scheduler
from ep_moe.serving.text import TextStream


@pytest.mark.parametrize("prefix_blocks", [0, 7, 60])
def test_everyone_gets_all_tokens_whatever_comes_and_goes(prefix_blocks: int) -> None:
    """With a prefix cache that is smaller than what runs, and with a larger one: the rows check what they copy."""
    chance, limits = random.Random(5), dataclasses.replace(LIMITS, prefix_blocks=prefix_blocks)
    scheduler, ranks = Scheduler(limits), [FakeRows(limits, rank) for rank in range(limits.num_ranks)]
    cached = 0
    asked: dict[int, Generation] = {}
    made: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    cancelled: set[int] = set()
    plans: collections.deque[RowsPlan] = collections.deque()
    most_running = idle = 0
    while idle < 20:
        for _ in range(chance.choice((0, 0, 1, 6)) if len(asked) < 300 else 0):
            prompt = tuple(chance.randrange(1, 256) for _ in range(chance.choice((1, 3, 8, 23, 24, 25, 71, 95))))
            begun = [*made[before], 7][:95] if (before := chance.choice([*asked, None])) is not None else []
            prompt = chance.choice((prompt, (*asked[before].prompt, *begun, *prompt)[:95] if begun else prompt))
            generation = Generation(prompt=prompt, max_new_tokens=chance.randint(1, 96 - len(prompt)))
            ticket = scheduler.submit(generation)
            asked[ticket], made[ticket] = generation, []
        plan = scheduler.next_plan()
        if plan is not None:
            plans.append(plan)
        if asked and chance.random() < 0.3:  # while the ranks are at work
            ticket = chance.choice(list(asked))
            if scheduler.cancel(ticket):
                assert ticket not in finished
                cancelled.add(ticket)
        most_running = max(most_running, scheduler.num_running)
        idle += not plans
        if not plans or (plan is not None and len(plans) < chance.choice((1, 3))):  # plans ahead of their tokens
            continue
        plan = plans.popleft()
        for ticket, progress in scheduler.take([rank.run(plan) for rank in ranks]):
            assert ticket not in cancelled
            cached += progress.cached if not made[ticket] else 0
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
    assert (cached > 100) == (prefix_blocks > 0)
    assert all(scheduler.prefix_tokens(rank) == 16 * prefix_blocks for rank in range(limits.num_ranks))


@pytest.mark.parametrize("prefix_blocks", [0, 30])
def test_everyone_gets_all_tokens_whichever_ranks_die_and_come_back(prefix_blocks: int) -> None:
    """Plans are interrupted, on each rank somewhere else: no token and no log-probability is lost or told twice."""
    chance, limits = random.Random(7), dataclasses.replace(LIMITS, prefix_blocks=prefix_blocks)
    scheduler, ranks = Scheduler(limits), {rank: FakeRows(limits, rank) for rank in range(3)}
    asked: dict[int, Generation] = {}
    found: dict[int, list[Progress]] = collections.defaultdict(list)
    plans: collections.deque[RowsPlan] = collections.deque()
    cancelled, most_lost, changes = set[int](), 0, 0
    while len(asked) < 200 or scheduler.num_running or scheduler.num_waiting or plans:
        for _ in range(chance.choice((0, 1, 6)) if len(asked) < 200 else 0):
            prompt = tuple(chance.randrange(1, 256) for _ in range(chance.choice((1, 8, 24, 71))))
            prompt = chance.choice([*(each.prompt for each in asked.values()), ()])[:20] + prompt
            sampling = Sampling(logprobs=1, prompt_logprobs=chance.choice((None, 0)))
            most = chance.randint(1, 96 - len(prompt))
            generation = Generation(prompt=prompt, max_new_tokens=most, sampling=sampling)
            asked[scheduler.submit(generation)] = generation
        if (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        if asked and chance.random() < 0.05 and scheduler.cancel(ticket := chance.choice(list(asked))):
            cancelled.add(ticket)
        if chance.random() < 0.1:
            stay = {rank for rank in ranks if chance.random() < 0.7}
            answers = {
                rank: [ranks[rank].run(plans[index]) for index in range(chance.randint(0, len(plans)))] for rank in stay
            }
            for rank in stay:
                most = min(map(len, answers.values())) if len(stay) == len(ranks) else 0
                if len(answers[rank]) > most:  # another rank has failed in the last plan
                    answers[rank][-1] = ranks[rank].spoil(plans[len(answers[rank]) - 1], answers[rank][-1], chance)
                if len(answers[rank]) < len(plans) and chance.random() < 0.5:
                    ranks[rank].interrupt(plans[len(answers[rank])])
            come = {rank for rank in range(3) if rank not in stay and chance.random() < 0.5} or {0} - stay
            seats = sorted(stay | come)
            ranks = {rank: ranks[rank] if rank in stay else FakeRows(limits, 0) for rank in seats}
            for place, rank in enumerate(seats):
                ranks[rank].regroup(place)
            progress, lost = scheduler.regroup(seats, answers)
            plans.clear()
            most_lost, changes = max(most_lost, lost), changes + 1
        elif plans and (plan is None or len(plans) >= chance.choice((1, 3))):
            plan = plans.popleft()
            progress = scheduler.take([rank.run(plan) for rank in ranks.values()])
        else:
            continue
        for ticket, each in progress:
            found[ticket].append(each)
    assert changes > 20
    assert most_lost > 5
    assert 5 < len(cancelled) < 100
    for ticket, generation in asked.items():
        parts, prompt = found[ticket], generation.prompt
        tokens = [token for each in parts for token in each.tokens]
        expected = continuation(generation)[: len(tokens) if ticket in cancelled else None]
        assert tokens == expected
        assert [each for part in parts for each in part.logprobs] == [logprob(token, 1) for token in tokens]
        told = [each for part in parts for each in part.prompt_logprobs]
        wanted = prompt[1:] if generation.sampling.prompt_logprobs == 0 else ()
        assert told == [logprob(token, 0) for token in wanted[: len(told) if ticket in cancelled else None]]
        assert ticket in cancelled or [each.finish for each in parts if each.finish] == [parts[-1].finish]


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 64 positions, too."""
    monkeypatch.setattr("ep_moe.engines.transformers.decoding.passes.LEAST_CAPACITY", 64)


def test_rows_whose_tokens_are_all_planned_widen_no_shape(small_shapes: None) -> None:
    scheduler = Scheduler(dataclasses.replace(ONE, num_positions=256, passes_per_plan=4))
    for prompt, new in ((60, 4), (1, 9)):
        scheduler.submit(Generation(prompt=(1,) * min(prompt, 24), max_new_tokens=new + 60 - min(prompt, 60)))
    plans = [plan for _ in range(40) if (plan := scheduler.next_plan())]  # none of their tokens is there
    assert max(shape.capacity for plan in plans for shape in plan.shapes) == 128
    assert plans[-1].shapes[0].rows == 2


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
    found = {
        ticket: progress.tokens
        for ticket, progress in scheduler.take([RowsMade(tokens=[made]) for made in ([7], [1, 3], [2, 4])])
    }
    assert found == {0: (7,), 2: (2,), 3: (3,), 4: (4,)}
    others = scheduler.next_plan()  # prefills too: nothing ran before the first
    assert others is not None
    assert [[(start.row, len(start.prompt)) for start in starts] for starts in others.starts] == [
        [(1, 20)],
        [(0, 2)],
        [],
    ]
    scheduler.submit(Generation(prompt=(1, 2), max_new_tokens=9))
    passes = scheduler.next_plan()
    assert passes is not None
    assert (passes.passes, any(passes.starts)) == (4, False)  # those who run get tokens before others start
    assert passes.shapes == (pass_shape(2, 64, False),) * 3


def test_a_prompt_goes_to_the_rank_that_has_its_prefix_unless_that_is_fuller() -> None:
    limits = dataclasses.replace(LIMITS, num_ranks=2, prefix_blocks=9)
    scheduler, ranks = Scheduler(limits), [FakeRows(limits, rank) for rank in range(2)]

    def place(*tokens: int) -> list[list[tuple[int, int]]]:
        """Chunks of the next plan, after sequences of one new token."""
        for token in tokens:
            scheduler.submit(Generation(prompt=(token,) * 20, max_new_tokens=1))
        plan = scheduler.next_plan()
        assert plan is not None
        scheduler.take([rank.run(plan) for rank in ranks])
        return [list(chunks) for chunks in plan.chunks]

    assert place(5, 6) == [[(0, 20)], [(0, 20)]]
    assert place(6) == [[], [(0, 4)]]
    assert place(5) == [[(0, 4)], []]
    assert place(6, 6) == [[(0, 20)], [(0, 4)]]
    assert place(6, 6) == [[(0, 4)], [(0, 4)]]


def test_streams_wait_for_one_chunk_of_a_long_prompt_at_most() -> None:
    """And a short prompt that comes meanwhile for one more."""
    limits = dataclasses.replace(ONE, num_positions=1000)
    scheduler, rows = Scheduler(limits), FakeRows(limits, 0)
    stream = scheduler.submit(Generation(prompt=(1,), max_new_tokens=900, sampling=Sampling(ignore_end=True)))
    long, short = -1, -1
    made, since, got, waits = [0, 0], 0, [0], []  # tokens of long and short; plans since the stream's last
    while not made[0]:
        if len(got) == 4:
            long = scheduler.submit(Generation(prompt=(2,) * 20 * limits.max_prefill_tokens, max_new_tokens=1))
        if len(got) == 20:
            short = scheduler.submit(Generation(prompt=(3,), max_new_tokens=1))
        plan = scheduler.next_plan()
        assert plan is not None
        found = dict(scheduler.take([rows.run(plan)]))
        since = 0 if stream in found else since + 1
        waits += [since] if short >= 0 and not made[1] else []
        got.append(since)
        for place, ticket in enumerate((long, short)):
            made[place] += len(found[ticket].tokens) if ticket in found else 0
    assert max(got) == 1
    assert made == [1, 1]
    assert sum(got[4:]) == 20 + 1  # chunks of the long prompt, and the short one
    assert sum(waits) <= 2


def test_requests_that_come_together_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefill for those that have come before the first of them ends, within limits; streams wait for none."""
    monkeypatch.setattr("ep_moe.serving.core.MOST_HELD_SECS", 60.0)
    plans: list[RowsPlan] = []

    class Noted(FakeRows):
        def run(self, plan: RowsPlan) -> RowsMade:
            plans.append(plan)
            return super().run(plan)

    limits = ONE
    leader = Leader(OneRank(Noted(limits, 0)), limits)
    ended = threading.Semaphore(0)

    def submit(new: int) -> None:
        generation = Generation(prompt=(7,), max_new_tokens=new, sampling=Sampling(ignore_end=True))
        leader.submit(generation, lambda progress: ended.release() if progress.finish else None)

    thread = threading.Thread(target=leader.run)
    thread.start()
    done = [leader.expect() for _ in range(3)]
    for number, each in enumerate(done):
        assert not plans
        submit(90 if number == 0 else 1)
        each()
        each()
        time.sleep(0.05)
    while len(plans) < 3:
        time.sleep(0.001)
    slow = leader.expect()  # comes while a stream runs, and submits nothing
    assert all(ended.acquire(timeout=10) for _ in range(3))
    monkeypatch.setattr("ep_moe.serving.core.MOST_HELD_SECS", 0.01)
    submit(1)
    assert ended.acquire(timeout=10)
    slow()
    leader.close()
    thread.join()
    assert [len(plan.starts[0]) for plan in plans if any(plan.chunks)] == [3, 1]
    assert leader._coming == 0


@pytest.mark.parametrize(
    ("generation", "param", "message"),
    [
        ({"prompt": ()}, "prompt", "the prompt has no tokens"),
        ({"prompt": (1,) * 96}, "prompt", "the prompt has 96 tokens, the limit is 95"),
        ({"prompt": (1, 256)}, "prompt", "the prompt has token 256, tokens are in [0, 256)"),
        ({"prompt": (1,) * 6, "max_new_tokens": 91}, "max_tokens", "the most for this prompt is 90"),
        ({"prompt": (1,), "max_new_tokens": 0}, "max_tokens", "max_tokens (0) must be at least 1"),
        ({"prompt": (1,), "sampling": Sampling(seed=2**63)}, "seed", "is not a number of 64 bits"),
        (
            {"prompt": (1,), "max_new_tokens": 2, "sampling": Sampling(min_tokens=10**20)},
            "min_tokens",
            "min_tokens (100000000000000000000) must be in [0, 2], up to max_tokens",
        ),
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


def test_a_sequence_that_two_ranks_fail_with_ends() -> None:
    """By the same error, in its prefill."""
    scheduler, rows = Scheduler(ONE), FakeRows(ONE, 0)
    bad, good = (scheduler.submit(Generation(prompt=(1,) * 20, max_new_tokens=9)) for _ in range(2))
    for error in ("KeyError: 1", "", "KeyError: 1", "KeyError: 2", "KeyError: 2"):
        assert scheduler.num_waiting == 2
        scheduler.next_plan()
        found, lost = scheduler.regroup((0,), {}, errors={0: error})
    assert [(ticket, str(each.error)) for ticket, each in found] == [(bad, "two ranks failed with it: KeyError: 2")]
    assert lost == 0
    scheduler.next_plan()
    assert scheduler.regroup((0,), {}, errors={0: "KeyError: 2"}) == ([], 1)
    plan = scheduler.next_plan()
    assert plan is not None
    assert [ticket for ticket, _ in scheduler.take([rows.run(plan)])] == [good]
    scheduler.next_plan()  # decodes
    assert scheduler.regroup((0,), {}, errors={0: "KeyError: 2"}) == ([], 1)


def test_a_sequence_fills_all_positions_and_no_more() -> None:
    scheduler = Scheduler(LIMITS)
    assert [scheduler.most_new_tokens((1,) * size) for size in (1, 95)] == [95, 1]
    with pytest.raises(BadRequestError, match="the prompt has 96 tokens, the limit is 95"):
        scheduler.most_new_tokens((1,) * 96)
    scheduler.submit(Generation(prompt=(1,) * 95, max_new_tokens=1))


# Text.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the shipped model, a token is a byte, without its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.chat_template = None
    return tokenizer


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


@pytest.mark.parametrize("name", ["shipped", "gpt_oss_windows"])
def test_rows_say_the_same_as_sequences_alone(name: str, small_shapes: None) -> None:
    """Sequences that start and end at different times, greedy beside sampled, in passes of all, captured as graphs."""
    if name == "shipped":
        model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    else:
        model = sharded_model(name)
    prompts = [tuple(byte % model.config.vocab_size for byte in text.encode()) for text in TEXTS]
    starts = [
        RowStart(
            row=row,
            prompt=prompts[index],
            max_new_tokens=40,
            sampling=Sampling(temperature=temperature, seed=index, logprobs=2 * index or None, prompt_logprobs=asked),
        )
        for index, (row, temperature) in enumerate([(0, 0.0), (1, 0.7), (2, 0.0), (0, 0.0)])
        for asked in [2 if index in (1, 3) else None]
    ]
    made: list[list[int]] = [[] for _ in starts]
    logprobs: list[list[Logprob]] = [[] for _ in starts]
    of_prompts: dict[int, list[Logprob]] = {}

    def start(rows: RowDecoder, *indices: int, ended: tuple[int, ...] = ()) -> None:
        new = tuple(starts[index] for index in indices)
        plan = RowsPlan(ended=(ended,), starts=(new,), chunks=(tuple((each.row, len(each.prompt)) for each in new),))
        found = rows.run(plan)
        for place, index in enumerate(indices):
            made[index].append(found.tokens[0][place])
            logprobs[index] += found.logprobs.get(place, [])
            of_prompts.update({index: found.prompts[place]} if place in found.prompts else {})

    def decode(rows: RowDecoder, passes: int, positions: int, owners: dict[int, int]) -> None:
        shape = pass_shape(1 + max(owners), positions, True, any(map(owners.__contains__, (1, 2))))
        found = rows.run(RowsPlan(ended=((),), starts=((),), passes=passes, shapes=(shape,)))
        for step in found.tokens:
            assert [row for row, token in enumerate(step) if token >= 0] == sorted(owners)
            for row, index in owners.items():
                made[index].append(step[row])
        for row, index in owners.items():
            logprobs[index] += found.logprobs.get(row, [])

    with captured_on_a_cpu() as counts:
        together = RowDecoder(model, num_rows=4, num_positions=128, end_ids=(), graphs=True)
        if name != "shipped":
            together.warmup()
        start(together, 0)
        decode(together, 3, 25, {0: 0})
        start(together, 1, 2)  # padded to the longer of the two
        decode(together, 8, 46, {0: 0, 1: 1, 2: 2})
        start(together, 3, ended=(0,))
        decode(together, 16, 62, {0: 3, 1: 1, 2: 2})
        decode(together, 4, 66, {0: 3, 1: 1, 2: 2})  # more positions than a bucket of 64
    # of each shape that is used; by a warm-up, of 1, 2 and 4 rows and 64 and 128 positions, greedy, sampled, adjusted
    assert len(counts) == {"shipped": 4}.get(name, 3 * 2 * 3)
    assert sum(map(bool, counts)) == 4
    for index, each in enumerate(starts):
        sequence = (*each.prompt, *made[index])
        with torch.inference_mode():
            whole = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0].log_softmax(-1)
        expected = list(zip(sequence[1:], whole, strict=False))
        num_prompt = len(each.prompt) - 1
        assert len(logprobs[index]) == (len(made[index]) if index else 0)
        assert len(of_prompts.get(index, ())) == (num_prompt if index in (1, 3) else 0)
        for found, (token, row) in [
            *zip(of_prompts.get(index, ()), expected[:num_prompt], strict=False),
            *zip(logprobs[index], expected[num_prompt:], strict=False),
        ]:
            assert found.value == pytest.approx(float(row[token]), abs=1e-4)
            assert found.value <= found.top[0][1]
            for other, value in found.top:
                assert value == pytest.approx(float(row[other]), abs=1e-4)
        if each.sampling.temperature:  # transformers' own loop samples other tokens
            alone, mixed = RowDecoder(model, num_rows=1, num_positions=128, end_ids=(), graphs=False), made[index]
            starts[index], made[index] = dataclasses.replace(each, row=0), []
            start(alone, index)
            decode(alone, 15, 64, {0: index})
            tokens, made[index] = made[index], mixed
        else:
            tokens = by_transformers(model, torch.tensor([each.prompt]), max_new_tokens=len(made[index]))[0].tolist()
        assert made[index][: len(tokens)] == tokens, index


@pytest.mark.parametrize("name", ["gpt_oss_windows", "qwen3_moe"])
def test_prompts_of_all_lengths_that_come_and_go_are_those_of_transformers(name: str, small_shapes: None) -> None:
    """64 prompts in chunks of up to 40 tokens, most of which continue others, cancelled at random, with a prefix cache
    of fewer blocks unless windows forget them; log-probabilities are those of the whole model."""
    chance, model = random.Random(3), sharded_model(name)
    limits = dataclasses.replace(ONE, num_rows=8, max_prefill_tokens=40, passes_per_plan=2, vocab_size=60, end_ids=())
    rows = RowDecoder(model, num_rows=limits.num_rows, num_positions=96, end_ids=(), graphs=False, prefix_rows=3)
    assert rows.prefix_blocks == (0 if "windows" in name else 24)
    scheduler = Scheduler(dataclasses.replace(limits, prefix_blocks=rows.prefix_blocks))
    asked: dict[int, Generation] = {}
    found: dict[int, list[Progress]] = {}
    cancelled = set()
    while len(asked) < 64 or scheduler.num_running or scheduler.num_waiting:
        for _ in range(chance.choice((0, 1, 3)) if len(asked) < 64 else 0):
            prompt = tuple(chance.randrange(60) for _ in range(chance.randint(1, 95)))
            if asked and chance.random() < 0.7:
                prompt = (*chance.choice(list(asked.values())[:2]).prompt, *prompt)[: chance.randint(1, 95)]
            sampling = Sampling(logprobs=0, prompt_logprobs=chance.choice((None, 0)))
            generation = Generation(prompt=prompt, max_new_tokens=min(4, 96 - len(prompt)), sampling=sampling)
            ticket = scheduler.submit(generation)
            asked[ticket], found[ticket] = generation, []
        plan = scheduler.next_plan()
        if asked and chance.random() < 0.1:
            ticket = chance.choice(list(asked))
            if scheduler.cancel(ticket):
                cancelled.add(ticket)
        for ticket, progress in scheduler.take([rows.run(plan)]) if plan else ():
            found[ticket].append(progress)
    assert 5 < len(cancelled) < 40
    cached = sum(each.cached for progress in found.values() for each in progress[:1])
    assert (cached > 200) == ("windows" not in name)
    for half in (range(32), range(32, 64)):
        longest, prompts = 96, [asked[ticket].prompt for ticket in half]
        padded = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.arange(longest) >= longest - torch.tensor(list(map(len, prompts)))[:, None]
        tokens = by_transformers(model, padded, mask.long(), max_new_tokens=4).tolist()
        sequences = [(*prompt, *new, *(0,) * longest)[:longest] for prompt, new in zip(prompts, tokens, strict=True)]
        with torch.inference_mode():  # what comes behind a token changes nothing
            whole = model(input_ids=torch.tensor(sequences), use_cache=False).logits.log_softmax(-1)
        for ticket, new, sequence, logprobs in zip(half, tokens, sequences, whole, strict=True):
            generation, progress = asked[ticket], found[ticket]
            made = [token for each in progress for token in each.tokens]
            assert ticket in cancelled or progress[-1].finish == "length"
            assert made == new[: generation.max_new_tokens if ticket not in cancelled else len(made)], generation
            values = [each.value for part in progress for each in (*part.prompt_logprobs, *part.logprobs)]
            first = 0 if generation.sampling.prompt_logprobs == 0 else len(generation.prompt) - 1
            expected = logprobs[:-1].gather(1, torch.tensor(sequence)[1:, None])[first:].flatten().tolist()
            assert values == pytest.approx(expected[: len(values)], abs=1e-4)
            assert len(values) == len(generation.prompt) - 1 - first + len(made) or not made


# Ranks.


def test_ranks_follow_until_the_leader_closes() -> None:
    found = launch(lead, "close", num_ranks=3, config=GroupConfig(timeout_secs=20), device="cpu")[0]
    assert found == [continuation(Generation(prompt=(size,) * size, max_new_tokens=size)) for size in range(1, 21)]


def test_a_rank_that_dies_while_nobody_asks_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        launch(lead, "die", num_ranks=2, config=GroupConfig(timeout_secs=20), device="cpu")
    assert time.monotonic() - start < 15


def test_an_error_of_the_model_reaches_everyone() -> None:
    class BrokenRows(FakeRows):
        def run(self, plan: RowsPlan) -> RowsMade:
            raise MemoryError("no room for 3 GB")

    limits = ONE
    leader = Leader(OneRank(BrokenRows(limits, 0)), limits)
    found: list[Progress] = []
    leader.submit(Generation(prompt=(1,)), found.append)
    with pytest.raises(MemoryError):
        leader.run()
    assert [str(progress.error) for progress in found] == ["rank 0: MemoryError: no room for 3 GB"]
    with pytest.raises(ServerEndedError, match="rank 0: MemoryError: no room for 3 GB"):
        leader.submit(Generation(prompt=(1,)), found.append)


def test_a_front_end_that_has_ended_does_not_end_the_ranks() -> None:
    limits = ONE
    leader = Leader(OneRank(FakeRows(limits, 0)), limits)
    found: list[Progress] = []

    def close_at_the_end(progress: Progress) -> None:
        found.append(progress)
        if progress.finish:
            leader.close()

    def ended(progress: Progress) -> None:
        raise RuntimeError("Event loop is closed")

    leader.submit(Generation(prompt=(1,), max_new_tokens=2), ended)
    leader.submit(Generation(prompt=(1,), max_new_tokens=4), close_at_the_end)
    with mock.patch.object(leader._ranks, "close") as told:
        leader.run()
    assert told.called  # which ends `follow` on the others
    assert sum(len(progress.tokens) for progress in found) == 4


# HTTP.


@contextlib.contextmanager
def served(
    tokenizer: Any,
    rows: type[FakeRows] = FakeRows,
    more: Mapping[str, Any] = {},
    wrap: Callable[[Any], Any] = lambda app: app,
    **limits: Any,
) -> Iterator[tuple[TestClient, Leader]]:
    """A client of the application, with fake rows of one rank behind it."""
    few = dataclasses.replace(ONE, **limits)
    leader = Leader(OneRank(rows(few, 0)), few)
    metrics = Metrics(leader)
    application = create_app(Service(leader=leader, tokenizer=tokenizer, name="fake", metrics=metrics, **more))
    thread = threading.Thread(target=leader.run)
    thread.start()
    try:
        with TestClient(wrap(application), raise_server_exceptions=False) as client:
            yield client, leader
    finally:
        leader.close()
        thread.join()


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "n": ("completions", {"prompt": "a", "n": 129}, 400, "n (129): Input should be less than or equal to 128"),
    "temperature": ("completions", {"prompt": "a", "temperature": 2.5}, 400, "temperature (2.5): Input should be less"),
    "top_p": ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p (0): Input should be greater than 0"),
    "messages": ("chat/completions", {"messages": []}, 400, "messages ([]): List should have at least 1"),
    "max_tokens": (
        "completions",
        {"prompt": "a", "max_tokens": 0},
        400,
        "max_tokens (0) must be at least 1 without echo",
    ),
    "positions": ("completions", {"prompt": "a", "max_tokens": 96}, 400, "the most for this prompt is 95"),
    "long": ("completions", {"prompt": [1] * 96}, 400, "the prompt has 96 tokens, the limit is 95"),
    "characters": ("completions", {"prompt": "a" * 10**5}, 400, "the prompt has 100000 characters, 95 tokens have"),
    "prompts": ("completions", {"prompt": ["a"] * 1001}, 400, "prompt has 1001 prompts, the limit is 1000"),
    "empty": ("completions", {"prompt": ""}, 400, "the prompt has no tokens"),
    "none": ("completions", {"prompt": []}, 400, "prompt ([]) must be one or more texts"),
    "mixed": ("completions", {"prompt": ["a", 1]}, 400, "prompt (['a', 1]): must be a text, token ids, or a list of"),
    "flags": ("completions", {"prompt": [True]}, 400, "prompt ([True]): must be a text, token ids, or a list of"),
    "missing": ("completions", {}, 400, "prompt is missing"),
    "ids": ("completions", {"prompt": [300]}, 400, "the prompt has token 300, tokens are in [0, 256)"),
    "choices": (
        "completions",
        {"prompt": ["a"] * 10, "n": 101},
        400,
        "10 prompts with n (101) choices each, the limit",
    ),
    "best_of": ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of (3) must be n (1)"),
    "unknown": ("completions", {"prompt": "a", "top_kk": 3}, 400, "top_kk (3): Extra inputs are not permitted"),
    "unserved": (
        "completions",
        {"prompt": "a", "suffix": "x"},
        400,
        "suffix ('x') is not served, it may be \"\" or null",
    ),
    "bias": (
        "completions",
        {"prompt": "a", "logit_bias": {"256": 1}},
        400,
        "logit_bias has token 256, tokens are in [0",
    ),
    "biases": ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias.x"),
    "stop ids": (
        "completions",
        {"prompt": "a", "stop_token_ids": [-1]},
        400,
        "stop_token_ids has token -1, tokens are",
    ),
    "top_logprobs": ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs (2) needs logprobs to be true"),
    "stream": (
        "completions",
        {"prompt": "a", "prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs are not served in a stream",
    ),
    "template": (
        "chat/completions",
        CHAT | {"chat_template_kwargs": {"tokenize": 1}},
        400,
        "chat_template_kwargs.tokenize is none of the template's own",
    ),
    "penalty": (
        "completions",
        {"prompt": "a", "presence_penalty": 2.5},
        400,
        "presence_penalty (2.5): Input should be",
    ),
    "logprobs": ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs (21): Input should be less than"),
    "stops": ("completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "]): List should have at most 16 items"),
    "prompt entries": (
        "completions",
        {"prompt": [[1] * 90] * 5, "n": 128, "prompt_logprobs": 20},
        400,
        "the answer may have 1209600 log-probabilities, the limit is 262144",
    ),
    "entries": (
        "completions",
        {"prompt": ["a"] * 5, "n": 128, "logprobs": 20, "max_tokens": 10**20},
        400,
        "the answer may have 1276800 log-probabilities, the limit is 262144",
    ),
    "model": ("completions", {"prompt": "a", "model": "gpt"}, 404, "model ('gpt') is not served here, 'fake' is"),
    "surrogate": ("completions", {"prompt": "a\ud800"}, 400, r"'prompt' holds '\ud800', half of a character"),
    "surrogate name": ("completions", {"prompt": "a", "\udc00": 1}, 400, r"'\udc00' holds '\udc00', half of a"),
    "fields": ("completions", {str(index): 0 for index in range(2049)}, 400, "has 2049 fields, the limit is 2048"),
    "chat template": ("chat/completions", CHAT, 400, "model 'fake' has no chat template; use /v1/completions"),
    "content": (
        "chat/completions",
        {"messages": [{"role": "user", "content": None}]},
        400,
        "messages.0 ({'role': 'user', 'content': None}): content (None) of role 'user' must be a text or a list",
    ),
    "schema": (
        "chat/completions",
        CHAT | {"response_format": {"type": "xml"}},
        400,
        "response_format.type ('xml'): Input should be 'text', 'json_object' or 'json_schema'",
    ),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content.0.type ('image_url'): Input should be 'text'",
    ),
    "path": ("nothing", {}, 404, "POST /v1/nothing: Not Found"),
    "no JSON": ("completions", b"{", 400, "the request's body is not valid JSON"),
    "no UTF-8": ("completions", b"\xff", 400, "the request's body is not valid JSON"),
    "raw surrogate": ("completions", b'{"prompt": "a\xed\xa0\x80"}', 400, "is not valid JSON: 'utf-8' codec can't"),
    "deep": ("completions", b"[" * 10**5, 400, "the request's body is not valid JSON"),
    "no body": ("completions", b"", 400, "the request's body is empty"),
    "no object": ("completions", b"[5]", 400, "the request's body ([5]) is no JSON object"),
    "large": ("completions", b" " * (2**20 + 32 * 95 + 1), 413, "has 1051617 bytes, the limit is 1051616"),
}


def test_errors_have_openais_shape_name_value_and_limit_and_are_counted(tokenizer: Any) -> None:
    with served(tokenizer) as (client, _):
        json_type, counts = {"content-type": "application/json"}, collections.Counter[tuple[str, int]]()

        def refused(path: str, body: bytes | Iterator[bytes], headers: Any, status: int, message: str) -> None:
            answer = client.post(f"/v1/{path}", content=body, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, message in error["message"]) == (status, True), answer.text
            assert (error.keys(), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
            counts[{"completions": path, "chat/completions": "chat"}.get(path, "other"), status] += 1

        for path, body, status, message in REFUSED.values():
            refused(path, body if isinstance(body, bytes) else json.dumps(body).encode(), json_type, status, message)
        parts = iter([b" " * 10**6] * 2)  # without a content-length
        refused("completions", parts, json_type, 413, "has more than 1051616 bytes, the limit")
        missing, other = "the header content-type is missing", "the header content-type ('text/plain') is not served"
        refused("completions", b"{}", None, 400, missing)
        refused("chat/completions", b"{}", {"content-type": "text/plain"}, 400, other)
        broken = {"{{ messages[0].no.name }}": "has no attribute 'no'", "{{ 1 // 0 }}": "ZeroDivisionError: integer"}
        for template, what in broken.items():
            tokenizer.chat_template = template
            refused("chat/completions", json.dumps(CHAT).encode(), json_type, 400, what)
        tokenizer.chat_template = None
        assert client.get("/v1/models/fake").json()["id"] == "fake"
        found = client.get("/metrics").text
        for (endpoint, status), count in counts.items():
            labels = f'endpoint="{endpoint}",outcome="refused",status="{status}"'
            assert f"ep_moe_requests_total{{{labels}}} {count}.0" in found


TEMPLATE = "{% for message in messages %}{{ message.content }}{{ message.reasoning_content }}{% endfor %}{{ mark }}"


def test_what_asks_for_nothing_changes_nothing(tokenizer: Any) -> None:
    """Null and neutral values of all that OpenAI, vLLM and SGLang document."""
    neutral = {
        "completions": {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "top_k": -1, "repetition_penalty": 1.0},
        "chat/completions": {"n": 1, "logprobs": False, "top_logprobs": 0, "chat_template_kwargs": {}, "top_k": 0},
    }
    with served(tokenizer) as (client, _), mock.patch.object(tokenizer, "chat_template", TEMPLATE):
        for path, more in neutral.items():
            asked = CHAT | {"max_tokens": 9} if "chat" in path else {"prompt": "ab", "max_tokens": 9}
            plain = client.post(f"/v1/{path}", json=asked).json()["choices"]
            kind = ChatRequest if "chat" in path else CompletionRequest
            nulls = dict.fromkeys({*kind.model_fields, *NEUTRAL, *UNUSED} - asked.keys())
            bodies = [asked | nulls, asked | more, asked | dict.fromkeys(UNUSED, "x") | {"metadata": {"a": "b"}}]
            bodies += [asked | {name: value} for name, values in NEUTRAL.items() for value in values]
            for body in bodies:
                answer = client.post(f"/v1/{path}", json=body)
                assert answer.status_code == 200, (body, answer.text)
                assert answer.json()["choices"] == plain
        before = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "reasoning_content": "so "}
        turns = {"messages": [before, *CHAT["messages"]], "max_tokens": 9, "chat_template_kwargs": {"mark": "!"}}
        said = client.post("/v1/chat/completions", json=turns).json()
        assert said["usage"]["prompt_tokens"] == len("so hi!")
        tokens = client.post("/tokenize", json={"messages": turns["messages"]}).json()
        assert (tokens["count"], bytes(tokens["tokens"])) == (5, b"so hi")


def test_formats_without_their_library_are_refused(tokenizer: Any) -> None:
    with served(tokenizer, no_grammars="install: pip install 'ep-moe[json]'") as (client, _):
        for asked in ({"response_format": {"type": "json_object"}}, {"ebnf": 'root ::= "a"'}, {"regex": "a"}):
            error = client.post("/v1/completions", json={"prompt": "a", **asked}).json()["error"]
            [name] = asked
            wanted = f"{name} cannot be served: install: pip install 'ep-moe[json]'"
            assert (error["type"], error["param"], error["message"]) == ("invalid_request_error", name, wanted)


def test_logprobs_echo_and_several_choices(tokenizer: Any) -> None:
    """OpenAI's objects, whole and in streams, with what the fake ranks' model says."""
    made = continuation(Generation(prompt=tuple(b"ab"), max_new_tokens=5))
    body = {"prompt": "ab", "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True, "n": 2, "ignore_eos": True}

    def text(token: int) -> str:
        return str(tokenizer.decode([token]))

    with served(tokenizer) as (client, leader):
        answer = client.post("/v1/completions", json=body | {"prompt_logprobs": 1}).json()
        assert answer["usage"] == usage(2, 10, 0)
        for index, choice in enumerate(answer["choices"]):
            assert (choice["index"], choice["text"][:2]) == (index, "ab")
            found, texts = choice["logprobs"], [text(token) for token in [*b"ab", *made]]
            assert found["tokens"] == texts
            assert found["text_offset"] == [sum(map(len, texts[:place])) for place in range(7)]
            assert found["token_logprobs"] == [None, *(-token / 8 for token in [98, *made])]
            assert found["top_logprobs"][0] is None
            assert found["top_logprobs"][1] == {"b": -98 / 8, "c": -1 / 8}  # one, as of prompt_logprobs
            likely = {text(made[0]): -made[0] / 8, text(made[0] + 1): -1 / 8, text(made[0] + 2): -2 / 8}
            assert found["top_logprobs"][2] == likely
            ranked = {"99": {"logprob": -1 / 8, "rank": 1, "decoded_token": "c"}}
            ranked["98"] = {"logprob": -98 / 8, "rank": 5, "decoded_token": "b"}
            assert choice["prompt_logprobs"] == [None, ranked]
        streamed = client.post("/v1/completions", json=body | {"stream": True, "prompt_logprobs": None}).text
        parts = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n\n")[:-2]]
        for index in range(2):
            mine = [part for part in parts if part["index"] == index]
            whole = answer["choices"][index]
            assert "".join(part["text"] for part in mine) == whole["text"]
            for key in ("tokens", "token_logprobs", "text_offset"):
                assert [each for part in mine for each in part["logprobs"][key]] == whole["logprobs"][key]
        scored = client.post("/v1/completions", json=body | {"max_tokens": 0, "prompt": list(b"ab"), "n": 1}).json()
        assert scored["choices"][0]["text"] == "ab"
        assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -98 / 8]
        assert scored["usage"]["completion_tokens"] == 0
        with mock.patch.object(tokenizer, "chat_template", TEMPLATE):
            asked = CHAT | {"max_tokens": 3, "logprobs": True, "top_logprobs": 1, "n": 2, "stop_token_ids": [5]}
            with mock.patch.object(leader, "submit", wraps=leader.submit) as submit:
                chat = client.post("/v1/chat/completions", json=asked | {"prompt_logprobs": 0}).json()
            assert [call.args[0].sampling.prompt_logprobs for call in submit.call_args_list] == [0, None]
            assert len(chat["prompt_logprobs"]) == 2
            for choice in chat["choices"]:
                first = choice["logprobs"]["content"][0]
                token = continuation(Generation(prompt=tuple(b"hi"), max_new_tokens=1))[0]
                assert (first["token"], first["logprob"], first["bytes"]) == (
                    text(token),
                    -token / 8,
                    [*text(token).encode()],
                )
                assert [each["logprob"] for each in first["top_logprobs"]] == [-1 / 8]


def test_tokens_version_and_health(tokenizer: Any) -> None:
    with served(tokenizer) as (client, _):
        found = client.post("/tokenize", json={"prompt": "ab\u20ac", "return_token_strs": True}).json()
        assert (found["count"], found["tokens"], len(found["token_strs"])) == (5, [*"ab\u20ac".encode()], 5)
        assert found["max_model_len"] == 96
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "ab\u20ac"}
        template = "{% for each in messages %}{{ each.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        with mock.patch.object(tokenizer, "chat_template", template):
            more: dict[str, str] = {"{}": "hi;>", '{"add_generation_prompt": false}': "hi;"}
            more |= {'{"add_generation_prompt": false, "continue_final_message": true}': "hi"}
            for asked, text in more.items():
                tokens = client.post("/tokenize", json={"messages": CHAT["messages"]} | json.loads(asked)).json()
                assert bytes(tokens["tokens"]).decode() == text
        refused = client.post("/detokenize", json={"tokens": [256]}).json()["error"]
        assert (refused["param"], refused["message"]) == ("tokens", "tokens has token 256, tokens are in [0, 256)")
        assert client.get("/version").json() == {"version": importlib.metadata.version("ep-moe")}
        head = client.head("/health")
        assert (head.status_code, head.content) == (200, b"")


def test_keys_origins_and_ids(tokenizer: Any) -> None:
    ask = {"prompt": "a", "max_tokens": 1}
    with served(tokenizer, more={"keys": ("one", "tw\u00f6"), "origins": ("http://page",)}) as (client, _):
        for key in ("", "Bearer on", "Bearer onee", "Basic one", "one", "Bearer"):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/load")):
                answer = client.request(method, path, headers={"authorization": key}, json=ask)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics", "/version", "/"):
            assert client.get(path).status_code == 200
        headers = {"authorization": "bearer tw\u00f6".encode(), "x-request-id": "mine-1", "origin": "http://page"}
        answer = client.post("/v1/completions", json=ask, headers=headers)
        assert (answer.status_code, answer.json()["id"]) == (200, "cmpl-mine-1")
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["access-control-allow-origin"] == "http://page"
        asked = {"origin": "http://page", "access-control-request-method": "POST"}
        for origin, status in (("http://page", 200), ("http://other", 400)):
            flight = client.options("/v1/completions", headers=asked | {"origin": origin})
            assert flight.status_code == status
            assert ("access-control-allow-origin" in flight.headers) == (status == 200)
    with served(tokenizer) as (client, _):
        ids = [
            client.get("/health", headers={"x-request-id": sent}).headers["x-request-id"] for sent in ("a b", "x" * 129)
        ]
        assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
        assert "access-control-allow-origin" not in client.get("/health", headers={"origin": "http://page"}).headers


def test_ranks_are_scaled_by_administrators_alone(tokenizer: Any) -> None:
    admin = {"authorization": "Bearer b\u00f6ss".encode()}
    with served(tokenizer) as (client, _):
        for method in ("GET", "POST"):
            off = client.request(method, "/admin/ranks", headers=admin, json={"num_ranks": 1})
            assert off.status_code == 404
            assert "/admin is off: start the server with --admin-keys" in off.json()["error"]["message"]
    with served(tokenizer, more={"keys": ("one",), "admin_keys": ("b\u00f6ss",)}) as (client, leader):
        for key, status in (("", 401), ("Bearer other", 401), ("Basic b\u00f6ss", 401), ("Bearer one", 403)):
            for method in ("GET", "POST"):
                refused = client.request(
                    method, "/admin/ranks", headers={"authorization": key.encode()}, json={"num_ranks": 1}
                )
                assert (refused.status_code, "error" in refused.json()) == (status, True)
        shown = {"rank": 0, "state": "serving", "sequences": 0}
        assert client.get("/admin/ranks", headers=admin).json() == {
            "num_ranks": 1,
            "most_ranks": 1,
            "done": True,
            "ranks": [shown],
        }
        for body, status, text in (
            ({"num_ranks": 0}, 400, "num_ranks (0) must be in [1, 1], the ranks of the launch"),
            ({"num_ranks": 2}, 400, "num_ranks (2) must be in [1, 1]"),
            ({"ranks": [0, 3]}, 404, "rank 3 is none of this launch, which has 0 to 0"),
            ({"ranks": []}, 400, "ranks ([]) must be one rank or more"),
            ({"ranks": [0], "num_ranks": 1}, 400, "one of num_ranks and ranks"),
            ({}, 400, "one of num_ranks and ranks"),
            ({"num_ranks": 1, "secs": 3}, 400, "secs (3)"),
            ({"num_ranks": 1}, 409, "there is one rank"),
        ):
            refused = client.post("/admin/ranks", headers=admin, json=body)
            assert refused.status_code == status, refused.json()
            assert text in refused.json()["error"]["message"]
        leader._regroups = True
        refused = client.post("/admin/ranks", headers=admin, json={"num_ranks": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cannot_scale")
        assert "regroup just now" in refused.json()["error"]["message"]


def test_ranks_that_serve_stay_first() -> None:
    states = [(state, "") for state in ("lost", "serving", "left", "loading", "serving")]
    chosen = [ScaleRequest(num_ranks=number).chosen(states) for number in (1, 2, 3, 4, 5)]
    assert chosen == [(1,), (1, 4), (1, 3, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("secs", [20.0, 0.2])
def test_a_server_that_drains_finishes_what_it_has(tokenizer: Any, secs: float) -> None:
    gate, found = threading.Event(), []

    class SlowRows(FakeRows):
        def run(self, plan: RowsPlan) -> RowsMade:
            gate.wait(60)
            return super().run(plan)

    with served(tokenizer, SlowRows) as (client, leader):
        ask = {"prompt": "ab", "max_tokens": 9, "stream": True}
        thread = threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=ask).text))
        thread.start()
        while not leader.num_running:
            time.sleep(0.01)
        leader.drain(secs)
        for answer in (client.post("/v1/completions", json=ask), client.get("/health")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        time.sleep(0.3 if secs < 1 else 0)
        gate.set()
        thread.join(30)
        assert ("[DONE]" in found[0], "was not done in time" in found[0]) == (secs > 1, secs < 1)
        while leader.failure is None:
            time.sleep(0.01)


class OneBroken(FakeRows):
    """Logits that are not finite for the sequences that begin with token 66."""

    def run(self, plan: RowsPlan) -> RowsMade:
        """See `RowDecoder.run`."""
        made = super().run(plan)
        for place, start in enumerate(plan.starts[0]):
            if start.prompt[0] == 66:
                made.tokens[0][place] = BROKEN
                self._live.pop(start.row, None)
        return made


def test_a_sequence_that_is_not_finite_fails_alone(tokenizer: Any) -> None:
    with served(tokenizer, OneBroken) as (client, _):
        for stream in (False, True):
            answers = [
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9, "stream": stream})
                for prompt in ("A", "B", "A")
            ]
            assert [answer.status_code for answer in answers] == [200, 500, 200]
            error = answers[1].json()["error"]
            assert (error["code"], "the model computes NaN or infinity" in error["message"]) == ("not_finite", True)
        found = client.get("/metrics").text
        assert 'ep_moe_requests_total{endpoint="completions",outcome="failed",status="500"} 2.0' in found


def test_answers_usage_streams_and_metrics(tokenizer: Any) -> None:
    prompts = ["ab", "xyz"]
    made = [continuation(Generation(prompt=tuple(prompt.encode()), max_new_tokens=12)) for prompt in prompts]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0}
    with served(tokenizer) as (client, leader):
        whole = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in whole["choices"]] == texts
        new = sum(map(len, made))
        counts = {"prompt_tokens": 5, "completion_tokens": new, "total_tokens": 5 + new}
        assert whole["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
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
        assert 'ep_moe_requests_total{endpoint="completions",outcome="ok",status="200"} 2.0' in text
        assert "ep_moe_running_sequences 0.0" in text
        leader.close()
        while leader.failure is None:
            time.sleep(0.01)
        for answer in (client.get("/health"), client.post("/v1/completions", json=body)):
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is closed")


def test_usage_and_metrics_count_what_came_from_the_prefix_cache(tokenizer: Any) -> None:
    prompt, ask = "ab" * 20, {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with served(tokenizer, prefix_blocks=6) as (client, _):
        first, again = (client.post("/v1/completions", json={"prompt": prompt} | ask).json() for _ in range(2))
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        twice = client.post("/v1/completions", json={"prompt": [prompt + "x", "y"], "n": 2} | ask).json()
        whole = client.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 0} | ask).json()
        found = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again, twice, whole)]
        assert found == [0, 32, 32, 0]
        text = client.get("/metrics").text
    assert "ep_moe_cached_prompt_tokens_total 64.0" in text
    assert 'ep_moe_rank_prefix_tokens{rank="0"} 32.0' in text


@contextlib.contextmanager
def listening(tokenizer: Any, rows: type[FakeRows] = FakeRows, **limits: int) -> Iterator[Callable[[], socket.socket]]:
    """A server at a port, with fake rows of one rank behind it; yields a call that connects to it."""
    few = dataclasses.replace(ONE, **limits)
    leader = Leader(OneRank(rows(few, 0)), few)
    service = Service(leader=leader, tokenizer=tokenizer, name="fake", metrics=Metrics(leader))
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    thread = threading.Thread(target=leader.run)
    with contextlib.ExitStack() as opened, run_beside(service, listener, leader.close):
        thread.start()
        try:
            yield lambda: opened.enter_context(socket.create_connection(address, timeout=10))
        finally:
            leader.close()
            thread.join()


def test_bench_serve_measures_any_server(tokenizer: Any, tmp_path: Path) -> None:
    """Levels of clients and of Poisson arrivals; failed requests are counted and named; percentiles are numpy's."""
    report, plot, command = tmp_path / "report.json", tmp_path / "plot.png", ["bench", "serve", "--requests", "6"]
    sizes = ["--prompt-chars", "20", "--new-tokens", "5", "--concurrency", "1", "--concurrency", "3"]
    with listening(tokenizer) as connect:
        host, port = connect().getpeername()
        url = ["--url", f"http://{host}:{port}/v1"]
        done = CliRunner().invoke(
            app, [*command, *sizes, *url, "--rate", "0", "--rate", "50", "--plot", str(plot), "--json"]
        )
        assert done.exit_code == 0, done.stderr
        report = json.loads(done.stdout)
        assert [(row["concurrency"], row["rate"]) for row in report["rows"]] == [(1, 0), (1, 50), (3, 0), (3, 50)]
        for row in report["rows"]:
            assert (row["requests"], row["failed"], row["prompt_tokens"], row["new_tokens"]) == (6, 0, 120, 30)
            assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"] < 1e3 * row["secs"]
            assert row["tokens_per_sec"] == pytest.approx(30 / row["secs"])
        assert report["rows"][1]["secs"] > 0.03  # six arrivals at 50 per second
        assert plot.read_bytes()[:4] == b"\x89PNG"
        refused = CliRunner().invoke(app, [*command, *url, "--prompt-chars", "24", "--new-tokens", "99"])
        assert (refused.exit_code, "the most for this prompt is 72" in refused.stderr) == (1, True), refused.stderr
        short = CliRunner().invoke(app, [*command, *url, "--prompt-chars", "100000"])
        assert (short.exit_code, "text has 65" in short.stderr) == (2, True), short.stderr
    found = summary([Answer(chunks=[0.1, 0.2, 0.5], end=0.5, prompt_tokens=4, new_tokens=5), Answer(error="no")], 2.0)
    assert (found["failed"], found["errors"], found["requests_per_sec"], found["tokens_per_sec"]) == (
        1,
        ["no"],
        0.5,
        2.5,
    )
    assert found["tpot_ms"]["p50"] == pytest.approx(100)
    assert found["itl_ms"] == pytest.approx({"p50": 200, "p90": 280, "p99": 298, "mean": 200})


def test_bench_serve_reads_events_in_any_pieces() -> None:
    text, usage = "a\u2028\x85\u20ac", {"prompt_tokens": 1}
    events = [{"choices": [{"text": text}]}, {"choices": [], "usage": usage}, {"error": {"message": "lost"}}]
    body = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\r\n\r\n" for each in events)

    async def read(size: int) -> list[Any]:
        async def pieces() -> AsyncIterator[bytes]:
            for first in range(0, len(body), size):
                yield body[first : first + size]

        found = _parts(pieces())
        first = [await anext(found), await anext(found)]
        with pytest.raises(openai.OpenAIError, match="lost"):
            await anext(found)
        return first

    for size in (1, 7, len(body)):
        assert asyncio.run(read(size)) == [(text, None), ("", usage)]


def test_waits_are_counted_by_source() -> None:
    by_rank = waits_by_source([[1.0], [0.5], [0.0]], [[4.0], [1.0], [2.5]])
    assert by_rank == [[0.0, 2.5, 0.5], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    assert waits_by_source([[0.0]] * 2, [[0.0, 0.5], [0.25, 0.0]]) == [[0.0, 0.5], [0.25, 0.0]]
    assert waits_by_source([[0.0, 0.5], [0.25, 0.0]], [[0.0, 2.0], [0.25, 0.0]]) == [[0.0, 1.5], [0.0, 0.0]]


GRAFANA = Path(__file__).parents[2] / "docker" / "grafana.json"


def test_the_dashboard_asks_for_metrics_that_there_are(tokenizer: Any) -> None:
    with served(tokenizer) as (client, leader):
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 200
        found = set(re.findall(r"^(ep_moe_\w+?)(?:\{.*\})? ", client.get("/metrics").text, re.MULTILINE))
        assert leader.load == [[1, 2, 3], [4, 5, 6]]
        shown, metrics = client.get("/load").json(), client.get("/metrics").text
        assert (shown["load"], shown["owners"]) == (leader.load, [[[0], [0], [0]]] * 2)
        assert 'ep_moe_rank_expert_tokens{rank="0"} 21.0' in metrics
        assert 'ep_moe_rank_wait_seconds{rank="0",source="0"} 0.0' in metrics
        assert float(re.findall(r"^ep_moe_balancedness (.*)", metrics, re.MULTILINE)[0]) == 1.0
    panels = json.loads(GRAFANA.read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"ep_moe_\w+", target["expr"])
    }
    assert asked <= found
    shown = {name for name in found if not name.endswith(("_created", "_sum", "_count"))}
    assert shown - asked == set()


def test_experts_that_move_take_their_tokens_along(tokenizer: Any) -> None:
    """Tokens count for the ranks that had the experts when they came, and the metrics have what ranks report."""
    limits = dataclasses.replace(LIMITS, num_ranks=2, placements=(Placement((0, 1, 2, 3), (0, 2, 4)),))
    leader = Leader(mock.Mock(seats=(0, 1), lost={1: "rank 1 was killed"}), limits)
    metrics, status = Metrics(leader), RebalanceStatus(rebalances=2, declined=1, moved_experts=3, moved_bytes=500)
    leader.num_heals, leader.heal_secs, leader.num_moved = 2, 1.5, 7
    text = metrics.text().decode()
    assert 'ep_moe_rebalance_state{state="off"} 1.0' in text
    for line in ("lost_ranks 1.0", "heals_total 2.0", "heal_seconds_total 1.5", "moved_sequences_total 7.0"):
        assert f"\nep_moe_{line}\n" in text
    moved = (Placement((0, 3, 2, 1), (0, 2, 4)),)
    for load, placements in (([6, 1, 1, 2], limits.placements), ([16, 3, 2, 5], moved), ([20, 6, 4, 6], moved)):
        entries = status_entries(dataclasses.replace(status, state=RebalanceState.MOVING, seconds=len(str(load))))
        parts = {"load": [load], "waited": [0.0], "rebalancing": entries, "placements": placements}
        made = [RowsMade(tokens=[], **parts) for _ in range(2)]
        leader._report_load([made[0], dataclasses.replace(made[1], placements=())], 0.0)
    assert leader.load == [[40, 12, 8, 12]]
    assert leader.owners == [[[0], [1], [1], [0]]]
    # before the move 38 and 14; behind it experts 0 and 3 are on rank 0
    first, behind = (32 + 6, 4 + 10), (8 + 2, 6 + 4)
    assert leader.rank_load == [[first[0] + behind[0], first[1] + behind[1]]]
    assert leader.recent_rank_load == [[first[0] + behind[0] - 14, first[1] + behind[1] - 6]]
    found = metrics.text().decode()
    for line in (
        'rebalances_total{outcome="complete"} 2.0',
        'rebalances_total{outcome="declined"} 1.0',
        'rebalances_total{outcome="failed"} 0.0',
        "rebalance_experts_total 3.0",
        "rebalance_bytes_total 1000.0",
        'rebalance_state{state="moving"} 1.0',
        'rebalance_state{state="off"} 0.0',
        'rank_expert_tokens{rank="1"} 24.0',
    ):
        assert f"ep_moe_{line}\n" in found


class Talk:
    """The front end's view of the ranks of a launch, which the test speaks for; seat n has process n + 10 at first."""

    def __init__(self, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channel = mock.Mock()
        monkeypatch.setattr("ep_moe.serving.ranks.FrontChannel", lambda *args: self.channel)
        monkeypatch.setattr("ep_moe.serving.ranks.SETTLE_SECS", 0.0)  # answers are here before they are asked for
        self.launcher, connection = multiprocessing.Pipe()
        self.ranks = StoreRanks(mock.Mock(), num_ranks, True, starter=connection, timeout_secs=5)
        for seat in range(num_ranks):
            self.answer(seat, wire.Ready(limits=LIMITS))
        assert self.ranks.wait_until_ready() == LIMITS
        assert self.told() == [KEEP]

    def answer(self, seat: int, content: Any, epoch: int = 0, process: int = 0) -> None:
        self.ranks._found.put(wire.Answer(seat=seat, process=process or seat + 10, epoch=epoch, content=content))

    def join(self, epoch: int, *seats: int, process: int = 0) -> None:
        for seat in seats:
            self.answer(seat, wire.Joined(forgotten=(), placements=()), epoch, process)

    def told(self) -> list[Any]:
        return [self.launcher.recv() for _ in iter(self.launcher.poll, False)]

    def memberships(self) -> list[wire.Membership]:
        found = [call.args[2] for call in self.channel.send.call_args_list]
        self.channel.send.reset_mock()
        return found

    def ended(self, seat: int, how: str, process: int = 0) -> None:
        self.ranks._found.put(Ended(seat=seat, process=process or seat + 10, how=how, again=None))


@pytest.mark.parametrize("says", ["", "rank 1 was killed by SIGKILL (noticed in connect)"])
def test_all_are_started_again_if_no_rank_goes_on(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within some time, or because the last one reports the loss of one that it was to go on without."""
    limit = 20.0 if says else 0.3
    monkeypatch.setattr("ep_moe.serving.ranks.REGROUP_SECS", limit)
    talk = Talk(2, monkeypatch)
    talk.ended(1, "failed: KeyError: 1")
    with pytest.raises(RanksChangedError):
        talk.ranks.check()
    if says:
        talk.answer(0, wire.Lost(seats=(1,), text=says, still_there=False), epoch=1)

    def start_again() -> None:
        secs = 5.0 if says else 0.0
        assert [talk.launcher.recv(), talk.launcher.recv()] == [(1, 11, 5.0), (0, 10, secs)]  # are to be killed
        talk.ended(0, "was killed by SIGKILL")
        talk.answer(0, wire.Ready(), process=20)
        while talk.channel.send.call_count < 2:
            time.sleep(0.01)
        talk.join(2, 0, process=20)

    launcher = threading.Thread(target=start_again)
    launcher.start()
    begin = time.monotonic()
    done = talk.ranks.regroup()
    launcher.join()
    assert (0.0 if says else limit) < time.monotonic() - begin < 5.0
    assert done.errors == {0: "", 1: "KeyError: 1"}
    assert (done.seats, done.answers) == ((0,), {})  # nothing of the ranks before is left
    assert talk.memberships() == [wire.Membership(seats=(0,), deaths=(0,)), wire.Membership(seats=(0,), deaths=(1,))]


def test_graphs_are_freed_before_a_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends no communicator whose operations a graph holds."""
    monkeypatch.setattr("ep_moe.app.serve_rank.start_rebalancing", mock.Mock())
    calls, member = mock.Mock(), object.__new__(_Member)
    member.session, member.group, member._rows, member._rebalance = calls.session, calls.group, calls.rows, mock.Mock()
    calls.rows.regroup.return_value, calls.session.placements = (), ()
    member.regroup(1, (0,), (0,))
    order = ["session.leave", "group.latest.regroup", "session.regroup"]
    assert [name for name, *_ in calls.mock_calls if name in order] == order


def test_ranks_are_started_and_stopped_as_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves and comes back before it has ended; one dies while it hands over; one that is lost is taken out."""
    talk = Talk(3, monkeypatch)
    ranks, answer, join, told, memberships, ended = (
        talk.ranks,
        talk.answer,
        talk.join,
        talk.told,
        talk.memberships,
        talk.ended,
    )
    ranks.scale(frozenset((0, 1)))
    ranks.check()
    assert ranks.changes
    join(1, 0, 1)
    assert (ranks.regroup().left, ranks.seats, ranks.lost) == ((2,), (0, 1), {})
    assert memberships() == [wire.Membership(seats=(0, 1), deaths=(0, 0), leaving=(2,))]
    assert (told(), ranks.ending) == ([Stop(seat=2, secs=5.0)], [2])
    ranks.scale(frozenset((0, 1, 2)))
    ranks.check()
    assert told() == []
    ended(2, LEFT)
    ranks.check()
    assert (told(), ranks.changes, ranks.ending) == ([Start(seat=2)], False, [])
    answer(2, wire.Ready(), process=22)
    ranks.check()
    join(2, 0, 1)
    join(2, 2, process=22)
    assert (ranks.regroup().left, ranks.seats) == ((), (0, 1, 2))
    memberships()
    ranks.scale(frozenset((0, 2)))
    ranks.check()
    ended(1, "was killed by SIGKILL")
    join(4, 0)
    join(4, 2, process=22)
    done = ranks.regroup()
    assert (done.left, done.seats, sorted(done.answers)) == ((), (0, 2), [0, 2])
    assert memberships() == [
        wire.Membership(seats=(0, 2), deaths=(0, 0), leaving=(1,)),
        wire.Membership(seats=(0, 2), deaths=(0, 0)),
    ]
    assert (told()[-1], ranks.lost) == (Stop(seat=1, secs=5.0), {})
    ended(0, "was killed by SIGKILL")
    with pytest.raises(RanksChangedError):
        ranks.check()
    join(5, 2, process=22)
    ranks.regroup()
    assert ranks.lost == {0: "rank 0 was killed by SIGKILL"}
    told()
    ranks.scale(frozenset((0, 2)))  # again: its restarts are used up
    ranks.check()
    assert told() == [Start(seat=0)]
    ranks.scale(frozenset((2,)))
    ranks.check()
    assert (told(), ranks.lost, ranks.changes) == ([Stop(seat=0, secs=5.0)], {}, False)
    ended(0, LEFT)
    ranks.scale(frozenset((0, 2)))
    answer(0, wire.Ready(), process=30)
    ranks.check()
    memberships()
    join(6, 2, process=22)
    join(6, 0, process=30)
    ranks.regroup()
    assert memberships() == [wire.Membership(seats=(0, 2), deaths=(1, 0))]


def test_owners_of_experts_are_ranks_of_the_launch() -> None:
    """Also when the ranks that are left number themselves anew, which alone are balanced then."""
    ranks = mock.Mock(seats=(0, 1, 2), lost={})
    leader = Leader(ranks, LIMITS)
    assert leader.owners == [[[0], [0], [0]]] * 2
    left = (Placement((2, 0, 1, 2), (0, 2, 4)),)
    ranks.regroup.return_value = Regrouped(
        seats=(0, 2), answers={0: [], 2: []}, forgotten={0: frozenset(), 2: frozenset()}, placements=left
    )
    ranks.seats = (0, 2)
    leader._regroup()
    assert leader.owners == [[[0], [2], [0, 2]]]
    leader.rank_load = [[4.0, 9.0, 4.0]]
    assert leader.recent_rank_load == [[4.0, 4.0]]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_live_page_shows_the_metrics(tokenizer: Any, tmp_path: Path) -> None:
    """16 streams that stand still while headless Chromium runs the page."""
    gate = threading.Event()

    class HeldRows(FakeRows):
        started = 0

        def run(self, plan: RowsPlan) -> RowsMade:
            self.started += len(plan.starts[0])
            if plan.passes:
                gate.wait(60 if self.started == 16 else 0.1)
            return super().run(plan)

    ask = json.dumps({"prompt": "ab", "max_tokens": 90, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    body = POST + f"content-length: {len(ask)}\r\n\r\n".encode() + ask
    with listening(tokenizer, HeldRows, num_rows=16, max_prefill_tokens=64) as connect:
        streams = [connect() for _ in range(16)]
        for stream in streams:
            stream.sendall(body)
        assert {stream.recv(16) for stream in streams} == {b"HTTP/1.1 200 OK\r"}
        address = "http://{}:{}/".format(*streams[0].getpeername())
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        page = subprocess.run(
            [*command, "--virtual-time-budget=3000", "--dump-dom", address], capture_output=True, text=True, timeout=120
        ).stdout
        cards = dict(re.findall(r'data-name="([^"]+)">([^<]*)<', page))
        metrics = http.client.HTTPConnection(*streams[0].getpeername())
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read().decode()
        gate.set()
    assert ">healthy<" in page
    for name, metric in (
        ("running", "running_sequences"),
        ("waiting", "waiting_sequences"),
        ("new tokens", "generated_tokens_total"),
        ("balancedness", "balancedness"),
    ):
        value = re.search(rf"^ep_moe_{metric} (\S+)$", text, re.MULTILINE)
        assert value is not None
        assert float(cards[name]) == pytest.approx(float(value[1]), rel=0.01), name
    assert cards["running"] == "16"
    assert "<td>16 of 16</td>" in page
    assert 'width="24" height="16"' in page  # two layers of three experts


def status_of(connection: socket.socket, data: bytes = b"") -> bytes:
    """The status of the answer to what is sent; of an end without an answer b""."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)
        return connection.recv(4096).partition(b" ")[2][:3]
    return b""


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def count_of(connect: Callable[[], socket.socket], status: str) -> int:
    """How many connections the server has ended with a status, by its metrics."""
    metrics = connect()
    metrics.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = b"".join(iter(lambda: metrics.recv(65536), b"")).decode()
    found = re.search(rf'requests_total\{{endpoint="connection",outcome="\w+",status="{status}"\}} (\d+)', text)
    return int(found[1]) if found else 0


def test_slow_clients_are_told(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"nothing": b"", "headers": POST, "body": POST + b'content-length: 99\r\n\r\n{"prompt"'}
    with listening(tokenizer) as connect:
        monkeypatch.setattr("ep_moe.serving.connections.REQUEST_SECS", 0.3)
        late, endless = {name: connect() for name in slow}, connect()
        endless.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        for name, connection in late.items():
            connection.sendall(slow[name])
        with contextlib.suppress(ConnectionError):  # what is sent to a closed connection resets it, unread answer too
            while not select.select([endless], [], [], 0.05)[0]:
                endless.sendall(b"1\r\na\r\n")
        assert {name: status_of(connection) for name, connection in late.items()} == dict.fromkeys(slow, b"408")
        monkeypatch.setattr("ep_moe.serving.connections.REQUEST_SECS", 60.0)
        assert count_of(connect, "408") == len(slow) + 1
        assert status_of(connect(), b"\x00\r\n\r\n") == b"400"
        assert count_of(connect, "400") == 1


def test_a_connections_next_request_has_its_own_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    def start_clock(connection: Any) -> None:
        started.append(time.monotonic())
        start(connection)

    start = LimitedConnection._start_clock
    monkeypatch.setattr(LimitedConnection, "_start_clock", start_clock)
    with listening(tokenizer) as connect:
        kept = http.client.HTTPConnection("")
        kept.sock = connect()
        for _ in range(3):
            begun = time.monotonic()
            kept.request("GET", "/health")
            answer = kept.getresponse()
            assert (answer.status, answer.read()[:14]) == (200, b'{"status":"ok"')
            assert max(started) > begun


@pytest.mark.parametrize("oldest", ["idle", "half a request"])
def test_many_connections_lock_nobody_out(oldest: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections take the places of older ones that wait, whatever these send meanwhile."""
    monkeypatch.setattr("ep_moe.serving.connections.REQUEST_SECS", 60.0)
    monkeypatch.setattr("ep_moe.serving.http._most_connections", lambda service: 20)
    with listening(tokenizer) as connect:
        kept = http.client.HTTPConnection("")
        kept.sock = connect()

        def settle() -> None:
            """Return once the server has read all that was sent before: an answer takes several turns of its loop."""
            for _ in range(3):
                kept.request("GET", "/health")
                assert kept.getresponse().read()

        settle()
        old = [connect() for _ in range(19)]
        settle()
        new = [connect()]  # in place of the first
        settle()
        if oldest == "half a request":
            for connection in old[1:]:
                connection.sendall(POST)
            settle()
        new += [connect() for _ in range(18)]
        settle()
        assert [status_of(connection) for connection in old] == [b""] * 19
        assert [status_of(connection, HEALTH) for connection in reversed(new)] == [b"200"] * 19
        assert count_of(connect, "503") == 20  # with that of the metrics


def test_each_request_is_a_log_line(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with served(tokenizer, wrap=AccessLog) as (client, _), caplog.at_level("INFO", "ep_moe.serving.access"):
        client.headers["x-request-id"] = "mine"
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
        client.get("/health")
        client.get("/no%0Asuch")
    lines = [re.sub(r"[\d.]+ s", "0 s", record.getMessage()) for record in caplog.records]
    posted = "POST '/v1/completions' 200 in 0 s, testclient:50000, mine"
    assert lines == [posted, posted, r"GET '/no\nsuch' 404 in 0 s, testclient:50000, mine"]


def test_a_full_queue_is_told(tokenizer: Any) -> None:
    gate = threading.Event()

    class SlowRows(FakeRows):
        def run(self, plan: RowsPlan) -> RowsMade:
            gate.wait(20)
            return super().run(plan)

    with served(tokenizer, SlowRows, max_waiting=2) as (client, leader):
        leader.submit(Generation(prompt=(1,), max_new_tokens=1), lambda progress: None)
        while leader.num_waiting:  # until the plan of the first one runs
            time.sleep(0.01)
        for _ in range(2):
            leader.submit(Generation(prompt=(1,), max_new_tokens=1), lambda progress: None)
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
        gate.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert "wait already, the limit is 2" in answer.json()["error"]["message"]
        while leader.num_waiting:
            time.sleep(0.01)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 200
