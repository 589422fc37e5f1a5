"""Tool calls and reasoning, with OpenAI's client; the ranks say what a test wants."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from helpers.fake_rows import ONE, FakeRows
from transformers import AutoTokenizer
from transformers.cli.serving.utils import get_response_template

from ep_moe.app.serve import bind
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.grammar import Compiler, Vocabulary
from ep_moe.serving.answers import AnswerParser, calls_grammar, response_template
from ep_moe.serving.core import Leader
from ep_moe.serving.http import run_beside
from ep_moe.serving.job import Service
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.ranks import OneRank
from ep_moe.serving.scheduler import BadRequestError, Limits

# as Qwen's, shortened
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASK: Any = [{"role": "user", "content": "Rain in Rome?"}]


def call(name: str, arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TWO = call("weather", '{"city": "R\N{LATIN SMALL LETTER O WITH GRAVE}ma", "days": 2}') + "\n" + call("clock", "{}")


class SayingRows(FakeRows):
    """Rows that say `text`, then the end token, whatever their prompts."""

    text = ""

    def __init__(self, limits: Limits, rank: int) -> None:
        super().__init__(limits, rank)
        self._said: dict[int, int] = {}  # tokens by row

    def run(self, plan: RowsPlan) -> RowsMade:
        """See `FakeRows`."""
        self._said |= {start.row: 0 for start in plan.starts[0]}
        return super().run(plan)

    def _next(self, row: int) -> int:
        token = [*self.text.encode(), 0][self._said[row]]
        self._said[row] += 1
        self._live[row][2] -= 1  # tokens left
        self._positions[row] += 1
        if token == 0 or self._live[row][2] == 0:
            del self._live[row]
        return token


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the shipped model, with a chat template that takes tools."""
    found = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def template(tokenizer: Any) -> dict[str, Any]:
    """The response template that transformers has for Qwen's models."""
    found = known_template(tokenizer, "qwen3_moe")
    assert found is not None
    assert response_template(tokenizer, SimpleNamespace(model_type="qwen3_moe")) is None  # without Qwen's tokens
    other = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    other.add_tokens(["<|im_start|>"])
    assert response_template(other, SimpleNamespace(model_type="qwen3_moe")) == found
    assert response_template(other, SimpleNamespace(model_type="mixtral")) is None
    other.response_template = {"fields": {}}
    assert response_template(other, SimpleNamespace(model_type="mixtral")) == {"fields": {}}
    return found


def known_template(tokenizer: Any, model_type: str) -> Any:
    """That of transformers for a family of models."""
    return get_response_template(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type)))


@contextlib.contextmanager
def serving(tokenizer: Any, template: Any) -> Iterator[openai.OpenAI]:
    """A server at a port with `SayingRows`; yields a client of it."""
    few = dataclasses.replace(ONE, num_positions=4096, max_prefill_tokens=2000)
    leader = Leader(OneRank(SayingRows(few, 0)), few)
    service = Service(
        leader=leader, tokenizer=tokenizer, name="fake", metrics=Metrics(leader), response_template=template
    )
    listener = bind("127.0.0.1", 0)
    address = "http://{}:{}/v1".format(*listener.getsockname())
    thread = threading.Thread(target=leader.run)
    with run_beside(service, listener, leader.close):
        thread.start()
        try:
            with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=20) as client:
                yield client
        finally:
            leader.close()
            thread.join()


@pytest.fixture(scope="module")
def client(tokenizer: Any, template: Any) -> Iterator[openai.OpenAI]:
    """A client of a server of which both templates are known."""
    with serving(tokenizer, template) as found:
        yield found


def test_answers_are_parsed_whole_and_in_streams(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning, content and calls, in the order of the text; what is no call is content."""
    rome = {"city": "R\N{LATIN SMALL LETTER O WITH GRAVE}ma", "days": 2}
    both = [("weather", rome), ("clock", {})]
    broken = "<tool_call>\n{'name'\n</tool_call>"
    for text, more, content, reasoning, calls, finish in (
        (f"<think>\nso\n</think>\n\nYes. {TWO}", {}, "Yes.", "\nso\n", both, "tool_calls"),
        (
            f"so</think>{TWO}",
            {"extra_body": {"chat_template_kwargs": {"thinking": True}}},
            None,
            "so",
            both,
            "tool_calls",
        ),
        (TWO, {"parallel_tool_calls": False}, None, None, both[:1], "tool_calls"),
        (TWO[:40], {}, TWO[:40], None, [], "stop"),
        (broken, {}, broken, None, [], "stop"),
        (TWO, {"max_tokens": 30}, TWO[:30], None, [], "length"),
        ("<think>so</think>no", {"tool_choice": "none"}, "no", "so", [], "stop"),
        ("<think>so</think>no", {"extra_body": {"include_reasoning": False}}, "no", None, [], "stop"),
        (
            "<think>so</think>no",
            {"tools": openai.omit, "extra_body": {"separate_reasoning": False}},
            "<think>so</think>no",
            None,
            [],
            "stop",
        ),
        ("no", {"tools": openai.omit, "logprobs": True}, "no", None, [], "stop"),
    ):
        monkeypatch.setattr(SayingRows, "text", text)
        asked: Any = {"model": "fake", "messages": ASK, "tools": [WEATHER, CLOCK], "temperature": 0} | more
        choice = client.chat.completions.create(**asked).choices[0]
        message = choice.message
        found = [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or ()]
        assert (found, choice.finish_reason) == (calls, finish), text
        assert (message.content or "").strip("\0\n ") == (content or "").strip(), text
        assert message.content is not None or calls
        assert getattr(message, "reasoning_content", None) == reasoning, text
        assert len({each.id for each in message.tool_calls or ()}) == len(calls)
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        deltas = [part.delta for part in parts]
        assert "".join(each.content or "" for each in deltas).strip("\0\n ") == (content or "").strip(), text
        assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == (reasoning or "")
        streamed = [each for delta in deltas for each in delta.tool_calls or ()]
        assert [each.index for each in streamed] == list(range(len(calls)))
        assert [(each.function.name, json.loads(each.function.arguments)) for each in streamed] == calls
        assert [part.finish_reason for part in parts if part.finish_reason] == [finish]


def test_calls_and_their_results_are_part_of_the_prompt(client: openai.OpenAI, tokenizer: Any) -> None:
    asked = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"at": [1]}'}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [asked]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    tokens = client.post("/../tokenize", body={"messages": turns, "tools": [WEATHER]}, cast_to=dict[str, Any])["tokens"]
    text = bytes(tokens).decode()
    assert text.startswith('{"type": "function", "function": {"name": "weather", "description": "The')
    assert '<tool_call>\n{"name": "clock", "arguments": {"at": [1]}}\n</tool_call>' in text
    assert "<|im_start|>tool\nnoon<|im_end|>" in text


def test_what_cannot_be_called_is_named(client: openai.OpenAI, tokenizer: Any, template: Any) -> None:
    body: Any = {"model": "fake", "messages": ASK}
    named = {"type": "function", "function": {"name": "none"}}
    broken = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "[1]"}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [broken]}]
    for more, message in (
        ({"tool_choice": "required"}, r"tool_choice \('required'\) needs tools"),
        ({"tools": [CLOCK], "tool_choice": named}, "tool_choice names 'none', which is no function of tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools has two functions 'clock'"),
        ({"tools": [{"type": "web_search"}]}, r"tools.0.type \('web_search'\): Input should be 'function'"),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "tools .* and response_format exclude each"),
        ({"messages": turns}, "arguments .*must be the text of a JSON object"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**body | more)
    with serving(tokenizer, None) as other, pytest.raises(openai.BadRequestError, match="has no response template"):
        other.chat.completions.create(**body, tools=[CLOCK])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", "{{ messages }}")
        with pytest.raises(openai.BadRequestError, match="the model's chat template takes no tools"):
            client.chat.completions.create(**body, tools=[CLOCK])


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_required_calls_have_a_grammar(tokenizer: Any, template: dict[str, Any], in_reasoning: bool) -> None:
    """It takes calls of the functions with arguments of their schemas, after reasoning, and nothing else."""
    pytest.importorskip("llguidance")
    vocabulary = Vocabulary(tokenizer)
    compiler = Compiler(vocabulary.text, vocabulary.end)
    functions = [each["function"] for each in (WEATHER, CLOCK)]

    def takes(text: str, functions: list[dict[str, Any]], *, one_call: bool) -> bool:
        grammar = calls_grammar(template, functions, tokenizer, in_reasoning=in_reasoning, one_call=one_call)
        matcher = compiler.matcher(grammar)
        assert not matcher.is_error(), matcher.get_error()
        data = list((f"so</think>\n{text}" if in_reasoning else text).encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    assert takes(TWO, functions, one_call=False)
    assert not takes(TWO, functions, one_call=True)
    assert takes(call("clock", "{}"), functions, one_call=True)
    assert not takes(call("clock", "{}"), functions[:1], one_call=True)
    assert not takes(call("weather", '{"days": 2}'), functions, one_call=True)
    assert not takes(call("weather", '{"city": "a", "days": 12}'), functions, one_call=True)
    assert not takes("Yes.", functions, one_call=True)
    if not in_reasoning:
        assert takes("<think>no</think>\n\n" + call("clock", "{}"), functions, one_call=True)
    prompt = "<|im_start|>assistant\n" + ("<think>\n" if in_reasoning else "")
    parser = AnswerParser(tokenizer, template, prompt, [], most_calls=None)
    assert parser.in_reasoning == in_reasoning
    other = known_template(tokenizer, "gemma4")
    with pytest.raises(BadRequestError, match="only if the model writes calls as JSON between marks"):
        calls_grammar(other, functions, tokenizer, in_reasoning=False, one_call=True)
