"""Texts that follow a grammar: masks, rows of a model beside others, what is refused. test_serve.py asks a server."""

import collections
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.decoding import captured_on_a_cpu
from transformers import AutoTokenizer

from ep_moe import grammar
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.engines.transformers import from_pretrained
from ep_moe.engines.transformers.decoding import RowDecoder
from ep_moe.engines.transformers.decoding.grammars import RowGrammars
from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan, RowStart, Sampling, pass_shape
from ep_moe.group import EPGroup
from ep_moe.serving.formats import StructuredOutputs, json_grammar
from ep_moe.serving.protocol import CompletionRequest, parse
from ep_moe.serving.scheduler import BadRequestError, Generation, GrammarError, Limits, Progress, Scheduler

pytest.importorskip("llguidance")
CHOICES = ["yes", "yes, \N{GREEK SMALL LETTER ALPHA}!", "no\n", 'a "b"/c']
NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1, "\N{GRINNING FACE}"]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {}]}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the shipped model: a token is a byte."""
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def checker(tokenizer: Any) -> Iterator[grammar.Checker]:
    """Compiles grammars for it."""
    found = grammar.Checker(grammar.Vocabulary(tokenizer))
    yield found
    found.close()


def allowed(mask: torch.Tensor) -> set[int]:
    """The tokens of a mask."""
    return {32 * place + bit for place, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1}


def limits_of(num_rows: int, num_positions: int, max_prefill_tokens: int) -> Limits:
    return Limits(
        num_ranks=1,
        num_rows=num_rows,
        num_positions=num_positions,
        max_prefill_tokens=max_prefill_tokens,
        max_waiting=9,
        passes_per_plan=4,
        vocab_size=256,
    )


@pytest.mark.parametrize("ends", [(), (0,), (7, 31)])
def test_masks_are_the_tokens_that_continue_a_choice(tokenizer: Any, ends: tuple[int, ...]) -> None:
    """Every prefix of every choice, byte by byte; vocabularies of more tokens than the tokenizer has."""
    grammars = RowGrammars(tokenizer, 300, ends)
    [text] = StructuredOutputs(choice=CHOICES).grammars()
    encoded = [choice.encode() for choice in CHOICES]
    for whole in encoded:
        start = RowStart(row=2, prompt=(1,), max_new_tokens=99, sampling=Sampling(grammar=text))
        mask, ended = grammars.begin(start), {}
        for place, token in enumerate(whole):
            before = whole[:place]
            wanted = {each[place] for each in encoded if each.startswith(before) and len(each) > place}
            assert mask is not None
            assert allowed(mask) == wanted | set(ends if before in encoded else ())
            masks, ended = grammars.follow({0: 5, 2: token})
            mask = masks.get(2)
        longer = any(each.startswith(whole) and each != whole for each in encoded)
        assert ended == ({} if longer else {2: ""})
        assert bool(grammars) == longer
    grammars.begin(start)
    assert grammars.follow({2: ord("z")})[1][2]  # a token that its grammar does not allow
    assert not grammars
    assert grammars.begin(dataclasses.replace(start, sampling=Sampling())) is None


def test_a_row_follows_its_grammar_and_the_others_keep_their_tokens() -> None:
    """Captured passes; the shipped model, greedy and sampled, with log-probabilities before the grammar."""
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    prompt, made = tuple(b"In the beginning God "), {}
    for text in ("", json_grammar(NODE)):
        each = [Sampling(logprobs=0), Sampling(temperature=1.0, seed=3, grammar=text, logprobs=1, min_tokens=2)]
        starts = tuple(
            RowStart(row=row, prompt=prompt, max_new_tokens=99, sampling=sampling) for row, sampling in enumerate(each)
        )
        with captured_on_a_cpu():
            rows = RowDecoder(
                model,
                num_rows=2,
                num_positions=128,
                end_ids=(),
                graphs=True,
                grammars=RowGrammars(tokenizer, model.config.vocab_size, ()),
            )
            chunks = ((0, len(prompt)), (1, len(prompt)))
            parts = [rows.run(RowsPlan(ended=((),), starts=(starts,), chunks=(chunks,)))]
            shape = pass_shape(2, 128, True, True)
            passes = RowsPlan(ended=((),), starts=((),), passes=4, shapes=(shape,))
            parts += [rows.run(passes) for _ in range(20)]
        made[text] = [[step[row] for part in parts for step in part.tokens] for row in range(2)]
        probabilities = [each.value for part in parts for each in part.logprobs[0]]
        made[text].append(probabilities)
        ended = [part.ended for part in parts if part.ended]
        if text:
            assert ended == [{1: ""}]
            tokens = [token for token in made[text][1] if token >= 0]
            node, depth = json.loads(bytes(tokens)), 0
            while isinstance(node, dict):
                assert node["v"] in (1, "\N{GRINNING FACE}")
                node, depth = node.get("next"), depth + 1
            assert depth > 0
            first = next(each for part in parts for each in part.logprobs.get(1, ()))
            assert (first.top[0][0] != tokens[0], first.rank > 1) == (True, True)  # before the grammar
    plain, beside = made.values()
    assert plain[0] == beside[0]
    assert plain[2] == pytest.approx(beside[2], abs=1e-5)  # experts sum rows of other batches in another order


def test_streams_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one and of several chunks; a sequence that is cancelled meanwhile; the tokens are those of a grammar
    that is compiled already."""
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32, max_tokens_per_rank=16)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    grammars = RowGrammars(tokenizer, model.config.vocab_size, ())
    rows = RowDecoder(model, num_rows=5, num_positions=256, end_ids=(), graphs=False, grammars=grammars)
    limits = limits_of(5, 256, 16)
    [text] = StructuredOutputs(choice=["Amen, and Amen.", "Selah; " * 9]).grammars()
    asked = [(b"In the ", 110, ""), (b"And God ", 1, text), (b"And he said unto them, ", 60, text), (b"Lo", 60, text)]
    gate, compiling, compile_ = threading.Event(), threading.Event(), grammar.Compiler.matcher

    def wait(compiler: grammar.Compiler, text: str) -> Any:
        compiling.set()
        assert gate.wait(60)
        return compile_(compiler, text)

    monkeypatch.setattr(grammar.Compiler, "matcher", wait)
    made: list[list[int]] = []
    for compiled in (False, True):
        scheduler, found = Scheduler(limits), collections.defaultdict[int, list[Progress]](list)
        for prompt, new, each in asked:
            sampling = Sampling(grammar=each, logprobs=0)
            scheduler.submit(Generation(prompt=tuple(prompt), max_new_tokens=new, sampling=sampling))
        plans: collections.deque[RowsPlan] = collections.deque()
        while (plan := scheduler.next_plan()) or plans:
            plans += [plan] if plan else []
            if plan and len(plans) < 2:  # one ahead, as a server does
                continue
            for ticket, progress in scheduler.take([rows.run(plans.popleft())]):
                found[ticket].append(progress)
            if not compiled and not gate.is_set() and sum(len(each.tokens) for each in found[0]) > 40:
                assert compiling.is_set()
                assert list(found) == [0]  # 40 tokens while nothing is compiled
                scheduler.cancel(3)
                gate.set()
        made += [[each for part in found[ticket] for each in part.tokens] for ticket in range(4)]
        assert all(len(each.logprobs) == len(each.tokens) for parts in found.values() for each in parts)
    assert made[:3] == made[4:7]
    assert [len(tokens) for tokens in made[:4]] == [110, 1, made[2].index(ord(".")) + 1 if 46 in made[2] else 60, 0]
    assert bytes(made[7]).decode() in ("Amen, and Amen.", "Selah; " * 9)


def test_a_grammars_end_and_its_error_end_a_sequence() -> None:
    limits = limits_of(3, 64, 32)
    scheduler = Scheduler(limits)
    for _ in range(3):
        scheduler.submit(Generation(prompt=(1,), max_new_tokens=9, sampling=Sampling(grammar="start: /a/")))
    plan = scheduler.next_plan()
    assert plan is not None
    assert plan.starts[0][0].sampling.adjusted
    found = dict(scheduler.take([RowsMade(tokens=[[5, 6, 7]], ended={0: "", 2: "no memory"})]))
    assert (found[0].finish, found[0].tokens, found[1].finish) == ("stop", (5,), "")
    assert isinstance(found[2].error, GrammarError)
    assert scheduler.num_running == 1
    scheduler.cancel(1)
    scheduler.submit(Generation(prompt=(1,), max_new_tokens=1, sampling=Sampling(grammar="start: /a/")))
    scheduler.next_plan()
    found = dict(scheduler.take([RowsMade(tokens=[[5]], ended={0: "no memory"})]))
    assert found[3].finish == "length"  # all that was wanted is there


def test_formats_are_one_of_all_that_clients_name() -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NODE, "strict": True}}},
        {"structured_outputs": {"json": NODE}},
        {"guided_json": NODE},
        {"json_schema": json.dumps(NODE)},
        {"regex": "a/b"},
        {"guided_regex": "a\\/b"},
        {"guided_choice": ["a", "b"]},
        {"ebnf": 'root ::= "a" | "b" root'},
        {"guided_grammar": 'start: "a"'},
    ]
    found = [parse(CompletionRequest, json.dumps({"prompt": "a"} | each).encode()).grammar() for each in asked]
    assert [name for name, _ in found] == [next(iter(each)) for each in asked]
    assert len({text for _, text in found[1:5]}) == 1
    assert found[5][1] == found[6][1]
    for nothing in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
        body = json.dumps({"prompt": "a", **nothing}).encode()
        assert parse(CompletionRequest, body).grammar() == ("", "")
    half = json.dumps({"prompt": "a", "json_schema": '{"const": "\\ud800"}'}).encode()
    with pytest.raises(BadRequestError, match="json_schema: the schema holds .*half of a character"):
        parse(CompletionRequest, half).grammar()
    long = json.dumps({"prompt": "a", "ebnf": "root ::= " + "a" * 2**16}).encode()
    with pytest.raises(BadRequestError, match="ebnf: the grammar has 65545 bytes, the limit is 65536"):
        parse(CompletionRequest, long).grammar()
    for two in ({"regex": "a", "ebnf": "b"}, {"structured_outputs": {"regex": "a", "choice": ["b"]}}):
        with pytest.raises(BadRequestError, match="ask for two grammars"):
            parse(CompletionRequest, json.dumps({"prompt": "a", **two}).encode()).grammar()


def test_a_verdict_of_a_busy_machine_is_not_kept(checker: grammar.Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the process that compiles: a second time it would take no time."""
    monkeypatch.setattr(grammar, "MOST_CPU_SECS", 0.0)
    text, wrong = StructuredOutputs(regex="busy").grammars()[0], StructuredOutputs(regex="(?=a)b").grammars()[0]
    compiler = grammar.Compiler(checker._vocabulary.text, checker._vocabulary.end)
    for _ in range(2):
        error, lasts = grammar._first_error(compiler, text)
        assert ("s of a processor, the limit is 0" in error, lasts) == (True, False)
    assert grammar._first_error(compiler, wrong)[1]
    monkeypatch.setattr(checker, "_ask", lambda each: ("busy", False) if each == text else ("wrong", True))
    assert [checker.error_of(each) for each in (text, wrong)] == ["busy", "wrong"]
    monkeypatch.setattr(checker, "_ask", lambda each: ("", True))
    assert [checker.error_of(each) for each in (text, wrong)] == ["", "wrong"]


def test_what_cannot_be_compiled_is_named(checker: grammar.Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keywords, patterns, sizes; a compilation without an end, and one that crashes; then others are compiled."""
    doubled: dict[str, Any] = {
        f"d{i}": {"properties": dict.fromkeys("ab", {"$ref": f"#/$defs/d{i + 1}"})} for i in range(40)
    }
    doubled["d40"] = {"type": "null"}
    endless = json_grammar(
        {"allOf": [{"pattern": f"{index}.*{index + 1}.*", "type": "string"} for index in range(200)]}
    )
    for text, error in (
        (json_grammar(NODE), ""),
        (json_grammar({"$defs": doubled, "$ref": "#/$defs/d0"}), ""),
        (json_grammar({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (json_grammar({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (json_grammar({"enum": ["x" * 70, "y"] * 900}), "bytes, the limit is 65536"),
        (json_grammar(False), "Unsatisfiable schema"),
        (StructuredOutputs(choice=[""]).grammars()[0], "it allows no text but the empty one"),
        (endless, "its compilation takes longer than 2 s"),
        (json_grammar({"type": "integer"}), "its compilation takes too much memory, or crashes"),
        (json_grammar({"type": "integer"}), ""),  # a crash says nothing of the next time
        (json_grammar(True), ""),
    ):
        with monkeypatch.context() as patch:
            if text == endless:
                patch.setattr(grammar, "MOST_SECS", 2.0)
            if "crashes" in error:
                assert not checker.error_of(json_grammar({"type": "string"}))
                checker._process.kill()  # type: ignore[union-attr]
            found = checker.error_of(text)
        assert error in found if error else not found, found
