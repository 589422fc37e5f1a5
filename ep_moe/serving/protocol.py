"""What OpenAI's completion and chat endpoints take, as far as it is served here, and what they answer.

A parameter that is not served may have the value that asks for nothing; any other value is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_STOPS = 16

_Zero = Annotated[float, Field(ge=0, le=0)]
_Stop = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[int, Field(ge=1)]


class StreamOptions(BaseModel):
    """`stream_options`; `include_usage` adds a last chunk with the usage."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class _Request(BaseModel):
    """Parameters of both endpoints."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # says who asks, which changes nothing here
    n: Literal[1] | None = None
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends in a chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """Body of /v1/completions; each prompt, a text or token ids, has one choice in the answer."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def most_tokens(self) -> int | None:
        """The limit under its newer name, else under its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
