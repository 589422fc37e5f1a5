"""What OpenAI's completion and chat endpoints take, with the additions of vLLM and SGLang that are served here.

A parameter that is not served may be null, or have a value that asks for nothing (`NEUTRAL`); any other value is
refused by name. Sources: OpenAI's API reference, the pages on vLLM's and SGLang's OpenAI-compatible servers.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from ep_moe.engines.transformers.decoding.adjust import MOST_LOGPROBS
from ep_moe.engines.transformers.decoding.passes import Sampling
from ep_moe.engines.transformers.decoding.sequences import MOST_END_IDS
from ep_moe.fields import shown
from ep_moe.serving.formats import ResponseFormat, Schema, StructuredOutputs
from ep_moe.serving.messages import Message, NamedTool, Strict, Tool
from ep_moe.serving.scheduler import BadRequestError

MOST_STOPS = 16
MOST_CHOICES = 128  # n
MOST_BIASES = 1024  # tokens of logit_bias
MOST_TOOLS = 128
MOST_FIELDS = 2048  # of an object in a request's body, more than any has: logit_bias has the most
# other names of parts of `structured_outputs`
ALIASES = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # only as an escape can half a pair be in UTF-8

_Stop = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]

# parameters that change nothing here
UNUSED = {
    *("cache_salt", "metadata", "prompt_cache_key", "prompt_cache_retention", "request_id"),
    *("rid", "safety_identifier", "user"),
}
# parameters that are not served, with the values besides null that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "allowed_token_ids", "chat_template", "custom_logit_processor", "custom_params"), ()),
    **dict.fromkeys(("data_parallel_rank", "extra_key", "guided_decoding_backend", "input_ids"), ()),
    **dict.fromkeys(("kv_transfer_params", "lora_path", "mm_processor_kwargs", "prediction"), ()),
    **dict.fromkeys(("prompt_embeds", "reasoning_effort", "session_params", "stop_regex"), ()),
    **dict.fromkeys(("thinking_token_budget", "truncate_prompt_tokens", "vllm_xargs"), ()),
    **dict.fromkeys(("web_search_options",), ()),
    **dict.fromkeys(("bad_words", "documents", "functions", "logits_processors", "tools"), ([],)),
    **dict.fromkeys(
        ("include_stop_str_in_output", "no_stop_trim", "return_hidden_states", "return_routed_experts"), (False,)
    ),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "store", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "include_reasoning": (True, False),  # of completions
    "separate_reasoning": (True, False),
    "service_tier": ("auto", "default"),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
}


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {kind}


def _check_prompt(prompt: Any) -> Any:
    """Raise ValueError for no prompt, or list of prompts; fast for very many elements, of which most may be wrong."""
    if isinstance(prompt, str) or _all(prompt, str):
        return prompt
    if all(_all(each, int) for each in (prompt if _all(prompt, list) else [prompt])):
        return prompt
    raise ValueError("must be a text, token ids, or a list of either")


class StreamOptions(Strict):
    """`stream_options`; `include_usage` adds a last chunk with the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False  # changes nothing: no chunk is padded
    continuous_usage_stats: Literal[False] = False


class _Body(Strict):
    """A body in which null is no value, and what is not served may ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, fields: dict[str, Any]) -> dict[str, Any]:
        left = {}
        for name, value in fields.items():
            if name in cls.model_fields:
                if value is not None:
                    left[name] = value
            elif name in NEUTRAL:
                neutral = NEUTRAL[name]
                if value is not None and value not in neutral:
                    known = " or ".join(json.dumps(each) for each in (*neutral, None))
                    raise BadRequestError(f"{name} ({shown(value)}) is not served, it may be {known}", name)
            elif name not in UNUSED:
                left[name] = value
        return left


class _Request(_Body):
    """Parameters of both endpoints; those of sampling as of `Sampling`, with OpenAI's and vLLM's limits."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_END_IDS, fail_fast=True)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[dict[int, _Bias], Field(max_length=MOST_BIASES)] = {}
    prompt_logprobs: _Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> "_Request":
        if self.best_of not in (None, self.n):
            raise BadRequestError(f"best_of ({self.best_of}) must be n ({self.n})", "best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequestError("prompt_logprobs are not served in a stream", "prompt_logprobs")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends in a chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each new token's log-probability; None without log-probabilities.
        Each endpoint has its own parameters for it."""
        return None

    def grammar(self) -> tuple[str, str]:
        """The parameter that asks for a grammar, and llguidance's text of it; ("", "") for none. Errors:
        BadRequestError."""
        found: list[tuple[str, str]] = []
        for name, value in (
            ("response_format", self.response_format),
            ("structured_outputs", self.structured_outputs),
            *((name, StructuredOutputs(**{kind: getattr(self, name)})) for name, kind in ALIASES.items()),
        ):
            try:
                if isinstance(value, ResponseFormat):
                    found += [(name, text) for text in [value.grammar()] if text]
                elif value is not None:
                    found += [(name, text) for text in value.grammars(self.guided_whitespace_pattern)]
            except BadRequestError as error:
                raise BadRequestError(f"{name}: {error}", name) from None
        if len(found) > 1:
            raise BadRequestError(f"{found[0][0]} and {found[1][0]} ask for two grammars", found[1][0])
        return found[0] if found else ("", "")

    def sampling(self, seed: int, grammar: str = "") -> Sampling:
        """How the tokens of a choice are chosen.

        Args:
            grammar: of its text.
        """
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            min_tokens=self.min_tokens,
            stop_ids=tuple(self.stop_token_ids),
            ignore_end=self.ignore_eos,
            grammar=grammar,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class CompletionRequest(_Request):
    """Body of /v1/completions; each prompt, a text or token ids, has n choices in the answer."""

    prompt: Annotated[Any, AfterValidator(_check_prompt)]
    echo: bool = False
    logprobs: _Count | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_length(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise BadRequestError("max_tokens (0) must be at least 1 without echo", "max_tokens")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """See `_Request`."""
        return self.logprobs

    def sampling(self, seed: int, grammar: str = "") -> Sampling:
        """See `_Request`; an echo has the log-probabilities of the prompt too."""
        found = super().sampling(seed, grammar)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            found = dataclasses.replace(found, prompt_logprobs=self.logprobs)
        return found


class _Templated(_Body):
    """Messages and how the chat template writes them."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] = []

    @model_validator(mode="after")
    def _check_template(self) -> "_Templated":
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequestError(
                "continue_final_message (True) needs add_generation_prompt (True) to be false", "continue_final_message"
            )
        taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        for name in self.chat_template_kwargs:
            if name in taken:
                raise BadRequestError(
                    f"chat_template_kwargs.{name} is none of the template's own", "chat_template_kwargs"
                )
        return self

    def text(self, tokenizer: Any) -> str:
        """The prompt. Errors: BadRequestError for a template without tools; those of the template."""
        text = self._text(tokenizer, [tool.for_template() for tool in self.tools] or None)
        if self.tools and text == self._text(tokenizer, None):
            raise BadRequestError("the model's chat template takes no tools", "tools")
        return text

    def _text(self, tokenizer: Any, tools: list[dict[str, Any]] | None) -> str:
        return str(
            tokenizer.apply_chat_template(
                [message.for_template() for message in self.messages],
                tokenize=False,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=tools,
                **self.chat_template_kwargs,
            )
        )


class ChatRequest(_Templated, _Request):
    """Body of /v1/chat/completions."""

    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: _Count = 0
    echo: Literal[False] = False
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadRequestError(f"tools has two functions {twice!r}", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise BadRequestError(f"tool_choice names {shown(name)}, which is no function of tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise BadRequestError("tool_choice ('required') needs tools", "tool_choice")
        return self

    @property
    def must_call(self) -> list[dict[str, Any]]:
        """The functions of which the model must call one; none if it need not."""
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            functions = [each for each in functions if each.name == self.tool_choice.function.name]
        elif self.tool_choice != "required":
            functions = []
        return [each.model_dump() for each in functions]

    @property
    def one_call(self) -> bool:
        """Whether at most one call is wanted."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError(f"top_logprobs ({self.top_logprobs}) needs logprobs to be true", "top_logprobs")
        if self.max_tokens == 0:
            raise BadRequestError("max_tokens (0) must be at least 1", "max_tokens")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The limit under its newer name, else under its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """See `_Request`."""
        return self.top_logprobs if self.logprobs else None


class TokenizeTextRequest(_Body):
    """Body of /tokenize with a text."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(_Templated):
    """Body of /tokenize with messages."""

    model: str = ""
    return_token_strs: bool = False


class NoSuchRankError(ValueError):
    """A rank that the launch has not."""

    param = "ranks"


class DetokenizeRequest(_Body):
    """Body of /detokenize."""

    model: str = ""
    tokens: Annotated[list[int], Field(fail_fast=True)]


class ScaleRequest(_Body):
    """Body of /admin/ranks: how many ranks are to serve, or which."""

    num_ranks: int | None = None
    ranks: Annotated[list[int], Field(fail_fast=True)] | None = None

    def chosen(self, states: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The ranks that are to serve; for a number those that do first, then those that load.

        Args: states: as of `Leader.ranks`.
        Errors: BadRequestError; NoSuchRankError.
        """
        most = len(states)
        if (self.num_ranks is None) == (self.ranks is None):
            raise BadRequestError("one of num_ranks and ranks is needed", "num_ranks")
        if self.ranks is not None:
            unknown = next((rank for rank in self.ranks if not 0 <= rank < most), None)
            if unknown is not None:
                raise NoSuchRankError(f"rank {shown(unknown)} is none of this launch, which has 0 to {most - 1}")
            if not self.ranks:
                raise BadRequestError("ranks ([]) must be one rank or more", "ranks")
            return tuple(sorted({*self.ranks}))
        assert self.num_ranks is not None
        if not 1 <= self.num_ranks <= most:
            raise BadRequestError(
                f"num_ranks ({shown(self.num_ranks)}) must be in [1, {most}], the ranks of the launch (--nproc)",
                "num_ranks",
            )
        order = ("serving", "loading", "leaving", "left", "lost")
        ranks = sorted(range(most), key=lambda rank: (order.index(states[rank][0]), rank))
        return tuple(sorted(ranks[: self.num_ranks]))


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(kind: type[Parsed], body: bytes | bytearray) -> Parsed:
    """A request of its body. Errors: BadRequestError names the parameter, its value and what it may be."""
    if not body:
        raise BadRequestError("the request's body is empty, a JSON object is needed")
    try:
        fields = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_object)  # of bytes it takes half a surrogate
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
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, BadRequestError):  # which names its parameter
            return cause
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


def usage(prompt_tokens: int, new_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
