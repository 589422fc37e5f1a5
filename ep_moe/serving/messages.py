"""Messages of a chat, the functions that a model may call, and its calls of them, as OpenAI's API has them."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(extra="forbid")


def _arguments(value: Any) -> dict[str, Any]:
    """The object of a call's arguments. Errors: ValueError."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
        json.dumps(found, ensure_ascii=False).encode()  # a UnicodeEncodeError, a ValueError, for half of a character
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("must be the text of a JSON object")
    return found


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """An element of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = self.function.model_dump(exclude={"strict"})
        return {"type": self.type, "function": {name: value for name, value in function.items() if value is not None}}


class _Named(Strict):
    name: str


class NamedTool(Strict):
    """A function that `tool_choice` wants to be called."""

    type: Literal["function"] = "function"
    function: _Named


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What a tool call of a message calls; `arguments` is the text of a JSON object."""

    name: str
    arguments: Annotated[Any, AfterValidator(_arguments)]


class ToolCall(BaseModel):
    """A tool call of an assistant's message."""

    model_config = ConfigDict(extra="ignore")  # the index of a stream's chunks

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: the arguments are an object."""
        return self.model_dump()


class Message(Strict):
    """A message of a chat."""

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Literal[""] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content (None) of role {self.role!r} must be a text or a list of parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        calls = [call.for_template() for call in self.tool_calls or ()] or None
        more = {
            "name": self.name,
            "reasoning_content": reasoning,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": text} | {key: value for key, value in more.items() if value is not None}
