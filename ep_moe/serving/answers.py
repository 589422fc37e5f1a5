"""The parts of a chat's answer: reasoning, content and tool calls, as transformers parses them by a response template.

A response template describes how a model writes these parts; a tokenizer brings one, and transformers has those of some
families (https://huggingface.co/docs/transformers, "Response parsing").
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ep_moe.serving.formats import guided, text_of
from ep_moe.serving.scheduler import BadRequestError
from ep_moe.serving.text import Tokenizer

REASONING = "reasoning_content"
_REASONING_FIELDS = {"reasoning_content", "reasoning", "thinking"}  # their names in response templates
_CALL = {"type": "function", "function": "{content}"}  # of a template whose calls are JSON with name and arguments


def response_template(tokenizer: Tokenizer, config: Any) -> dict[str, Any] | None:
    """How a model writes the parts of an answer; None if it is not known.

    Args:
        config: the model's. Its family's template is taken if the tokenizer has the token that begins a message in it.
    """
    found: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if found is not None:
        return found
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return None
    model: Any = SimpleNamespace(config=config)  # all that is read of one
    found = get_response_template(tokenizer, model)
    anchors = (found or {}).get("start_anchor", ())
    begins = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    known = any(anchor.startswith(begins) for anchor in ([anchors] if isinstance(anchors, str) else anchors))
    return found if known else None


class AnswerParser:
    """Splits the text of one answer into parts as it comes.

    Args:
        template: of `response_template`. prompt: the text before the answer, which may begin a part of it.
        tools: as the chat template takes them. most_calls: so many are kept, None for all; 0: they are content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: dict[str, Any],
        prompt: str,
        tools: Sequence[Any],
        *,
        most_calls: int | None,
    ) -> None:
        try:
            self._parser = tokenizer.get_response_parser(template, prefix=prompt, tools=list(tools))
        except Exception:  # noqa: BLE001 - a prompt that begins the answer with what cannot be parsed
            self._parser = tokenizer.get_response_parser(template, prefix="", tools=list(tools))
        self._most_calls, self._num_calls = most_calls, 0
        self._pending = ""  # text that no part has been made of yet
        self._raw = ""  # of a part that is parsed as a whole
        self._failed = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the prompt has begun the model's reasoning, before any text of the answer."""
        opened = [event for event in self._parser.initial_events if event["type"] != "region_chunk"]
        return bool(opened) and opened[-1]["type"] == "region_open" and opened[-1]["field"] in _REASONING_FIELDS

    @property
    def has_calls(self) -> bool:
        """Whether there was a tool call."""
        return self._num_calls > 0

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """New parts as OpenAI's delta of a message: `content`, `reasoning_content`, `tool_calls`; {} for none.

        A tool call comes whole. One that cannot be parsed is content, and so is all that follows.
        """
        delta: dict[str, Any] = {}
        if not self._failed:
            self._pending += text
            try:
                self._add(delta, self._parser.feed(text))
                if last:
                    self._add(delta, self._parser.finalize()[1])
                return delta
            except Exception:  # noqa: BLE001 - whatever the parsers of a template raise for what a model writes
                self._failed = True
                text = self._pending or self._raw
        if text:
            delta["content"] = delta.get("content", "") + text
        return delta

    def _add(self, delta: dict[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and event["dirty"] and self._most_calls != 0:
                self._raw += event["text"]
                continue
            if kind == "region_chunk":
                name = REASONING if field in _REASONING_FIELDS else "content"
                delta[name] = delta.get(name, "") + event["text"]
            elif kind == "region_close" and field == "tool_calls" and self._most_calls != 0:
                found = event["value"] if isinstance(event["value"], list) else [event["value"]]
                for call in map(self._call, found):
                    if self._most_calls is None or self._num_calls < self._most_calls:
                        delta.setdefault("tool_calls", []).append(call | {"index": self._num_calls})
                        self._num_calls += 1
            else:
                continue
            self._pending = self._raw = ""

    @staticmethod
    def _call(value: Any) -> dict[str, Any]:
        """OpenAI's tool call. Errors: KeyError, TypeError for a value without a name."""
        function = value["function"]
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        made = {"name": str(function["name"]), "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": made}


def message_of(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a whole answer from its deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(each.get("content", "") for each in deltas)}
    reasoning = "".join(each.get(REASONING, "") for each in deltas)
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    if reasoning:
        message[REASONING] = reasoning
    if calls:
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        message["content"] = message["content"].strip() or None
    return message


def calls_grammar(
    template: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    in_reasoning: bool,
    one_call: bool,
) -> str:
    """llguidance's grammar of an answer that calls one of some functions, or several.

    Args:
        tools: functions that may be called. in_reasoning: the prompt has begun the model's reasoning.
    Errors: BadRequestError if the model writes calls in another form than JSON between marks.
    """
    field, marks = template["fields"].get("tool_calls", {}), []
    if field.get("content") == "json" and field.get("transform") == _CALL and not field.get("content_args"):
        marks = [mark for mark in (_literal(field, "open"), _literal(field, "close")) if mark]
    if len(marks) != 2:
        raise BadRequestError(
            "tool_choice can be 'required' or name a function only if the model writes calls as JSON between marks; "
            "this one's response template has another form",
            "tool_choice",
        )
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def quoted(mark: str) -> str:
        return f"<[{tokenizer.convert_tokens_to_ids(mark)}]>" if mark in special else json.dumps(mark)

    rules = []
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
        schema = guided(tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False})
        rules.append(f'call{index}: {quoted(marks[0])} "\\n" {json.dumps(head)} args{index} "}}\\n" {quoted(marks[1])}')
        rules.append(f"args{index}: %json {text_of(schema)}")
    choice = " | ".join(f"call{index}" for index in range(len(tools)))
    calls = "call" if one_call else 'call ("\\n" call)*'
    thinks: Mapping[str, Any] = next(
        (each for name, each in template["fields"].items() if name in _REASONING_FIELDS), {}
    )
    opened, closed = thinks.get("open"), thinks.get("close")
    before = ""
    if isinstance(opened, str) and isinstance(closed, str) and not {opened, closed} & special:
        rules += [f"thought[suffix={json.dumps(closed)}]: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/"]
        before = "thought SPACE " if in_reasoning else f"({json.dumps(opened)} thought SPACE)? "
    elif in_reasoning:
        raise BadRequestError(
            "tool_choice can be 'required' or name a function only if the model does not reason first", "tool_choice"
        )
    return "\n".join([f"start: {before}{calls}", f"call: {choice}", *rules])


def _literal(field: Mapping[str, Any], name: str) -> str:
    """The text that opens or closes a field, "" if it is not known."""
    found = field.get(name) or str(field.get(f"{name}_pattern", "")).removeprefix(r"\s*")
    plain = isinstance(found, str) and not set(found) & set("\\^$.|?*+()[]{}\n\r")
    return found if plain else ""
