"""What OpenAI's completion and chat endpoints take, as far as it is served here, and what they answer.

A parameter that is not served may have the value that asks for nothing; any other value is refused by name.
"""

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ep_moe.fields import shown
from ep_moe.serving.scheduler import BadRequestError

MOST_STOPS = 16
MOST_FIELDS = 64  # of an object in a request's body, far more than any has
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # only as an escape can half a pair be in UTF-8

_Zero = Annotated[float, Field(ge=0, le=0)]
_Stop = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[int, Field(ge=1)]


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {kind}


def _check_prompt(prompt: Any) -> Any:
    """Raise ValueError for no prompt, or list of prompts; fast for very many elements, of which most may be wrong."""
    if isinstance(prompt, str) or _all(prompt, str):
        return prompt
    if all(_all(each, int) for each in (prompt if _all(prompt, list) else [prompt])):
        return prompt
    raise ValueError("must be a text, token ids, or a list of either")


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
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # changes nothing here
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

    prompt: Annotated[Any, AfterValidator(_check_prompt)]
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
        return list(self.prompt)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(BaseModel):
    """`response_format`; fields of other types are not read."""

    type: Literal["text"]


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: _Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        """The limit under its newer name, else under its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Parsed = TypeVar("Parsed", bound=_Request)


def parse(kind: type[Parsed], body: bytes | bytearray) -> Parsed:
    """A request of its body. Errors: BadRequestError names the parameter, its value and what it may be."""
    if not body:
        raise BadRequestError("the request's body is empty, a JSON object is needed")
    try:
        fields = json.loads(body, object_pairs_hook=_object)
    except BadRequestError:
        raise
    except (ValueError, RecursionError) as error:  # also of its bytes, and of a number of very many digits
        raise BadRequestError(f"the request's body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"the request's body ({shown(fields)}) is no JSON object")
    if _SURROGATE.search(body):
        for name, value in fields.items():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                param = name if name in kind.model_fields else None
                raise BadRequestError(f"{shown(name)} holds {half!r}, half of a character", param) from None
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _named(fields, error) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_FIELDS:
        raise BadRequestError(f"an object in the request's body has {len(pairs)} fields, the limit is {MOST_FIELDS}")
    return dict(pairs)


def _named(fields: dict[str, Any], error: ValidationError) -> BadRequestError:
    """The error of the deepest place; of a field of several types, what is wrong with the type that its value has."""
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for each in error.errors(include_url=False):
        place: list[str | int] = []
        value: Any = fields
        for part in each["loc"]:  # names of types are among them
            if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
                place.append(part)
                value = value[part]  # type: ignore[index]
        if each["type"] == "missing":
            place.append(each["loc"][-1])
        found.setdefault(tuple(place), []).append(each)
    deepest = max(found, key=len)
    best = [each for each in found[deepest] if not each["type"].endswith("_type")] or found[deepest]
    name, param = ".".join(map(str, deepest)), str(deepest[0])
    if best[0]["type"] == "missing":
        return BadRequestError(f"{name} is missing", param)
    reason = " or ".join(each["msg"].removeprefix("Value error, ") for each in best)
    return BadRequestError(f"{name} ({shown(best[0]['input'])}): {reason}", param)


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
