"""One request of OpenAI's two endpoints: its sequences, and its answer, whole or as a stream of chunks."""

import contextlib
import dataclasses
import functools
import hmac
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from ep_moe.engines.transformers.decoding.passes import Logprob, Sampling
from ep_moe.fields import shown
from ep_moe.grammar import Checker, Vocabulary
from ep_moe.serving.answers import REASONING, AnswerParser, calls_grammar, message_of
from ep_moe.serving.core import Leader
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.protocol import ChatRequest, CompletionRequest, TokenizeChatRequest, parse, usage
from ep_moe.serving.scheduler import LENGTH, MOST_SEED, STOP, BadRequestError, Generation
from ep_moe.serving.text import Piece, TextStream, Tokenizer, stream_texts

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; a chat goes on up to the last position
TOOL_CALLS = "tool_calls"  # why an answer has ended: it calls functions
MOST_ENTRIES = 2**18  # log-probabilities in an answer: all of them are made text at once
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not; vLLM's number
_PART = "\ufffd"  # what tokenizers make of a part of a character


class UnknownModelError(ValueError):
    """A request for a model that is not served here."""

    param = "model"


class UnauthorizedError(PermissionError):
    """A request without a key of this server."""


class ForbiddenError(PermissionError):
    """A request with the key of a client that needs an administrator's."""


class NotServedError(LookupError):
    """A request for what this server was not started for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """What the application serves.

    Args:
        name: of the model, which requests may give. tokenizer: of transformers.
        keys: one of which a request must bring, unless there are none. admin_keys: the same for /admin, which is off
            without any.
        origins: whose pages may ask from a browser; ("*",) for all.
        response_template: how the model writes the parts of an answer, None if it is not known.
    """

    leader: Leader
    tokenizer: Tokenizer
    name: str
    metrics: Metrics
    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    response_template: dict[str, Any] | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def checker(self) -> Checker:
        """Compiles grammars before ranks do."""
        return Checker(Vocabulary(self.tokenizer))

    @functools.cached_property
    def token_chars(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_model(self, name: str) -> None:
        """Raise UnknownModelError for the name of another model; "" is any."""
        if name not in ("", self.name):
            raise UnknownModelError(f"model ({shown(name)}) is not served here, {self.name!r} is")

    def check_key(self, header: str | None) -> None:
        """Raise UnauthorizedError unless the header `authorization` brings a key. The time that it takes depends on no
        key's content."""
        if self.keys and not _brings(header, self.keys):
            raise UnauthorizedError("the header authorization brings no key of this server: 'Bearer KEY' is needed")

    def check_admin(self, header: str | None) -> None:
        """Raise NotServedError if /admin is off, ForbiddenError or UnauthorizedError unless the header `authorization`
        brings an administrator's key; as `check_key`."""
        if not self.admin_keys:
            raise NotServedError("/admin is off: start the server with --admin-keys FILE or EP_MOE_ADMIN_KEY")
        if _brings(header, self.admin_keys):
            return
        if _brings(header, self.keys):
            raise ForbiddenError("the header authorization brings a client's key, /admin needs an administrator's")
        raise UnauthorizedError(
            "the header authorization brings no administrator's key of this server: 'Bearer KEY' is needed"
        )

    def tokens(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The tokens of a prompt. Errors: BadRequestError for a text that is too long for any.

        Args:
            special: with the tokens that the tokenizer puts around a text.
        """
        tokens = self.leader.limits.longest_prompt
        most = tokens * self.token_chars
        if len(text) > most:
            raise BadRequestError(
                f"the prompt has {len(text)} characters, {tokens} tokens have {most} at most", "prompt"
            )
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def chat_tokens(self, request: ChatRequest | TokenizeChatRequest) -> tuple[int, ...]:
        """The tokens of messages by the model's chat template. Errors: BadRequestError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadRequestError(f"model {self.name!r} has no chat template; use /v1/completions", "messages")
        try:
            text = request.text(self.tokenizer)
        except BadRequestError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may do anything with what a client sends
            what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise BadRequestError(f"the model's chat template refuses these messages: {what}", "messages") from None
        return self.tokens(text, special=request.add_special_tokens)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included, as it is."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _brings(header: str | None, keys: Sequence[str]) -> bool:
    """Whether a header `authorization` brings one of these keys, in a time that depends on no key's content."""
    kind, _, brought = (header or "").partition(" ")
    # as ASGI decodes headers
    found = [hmac.compare_digest(brought.strip().encode("latin-1"), key.encode()) for key in keys]
    return kind.lower() == "bearer" and any(found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The names that differ between the two endpoints."""

    endpoint: str
    prefix: str
    whole: str
    chunk: str
    chat: bool
    parsed: type[CompletionRequest] | type[ChatRequest]


_COMPLETION = Kind(
    endpoint="completions",
    prefix="cmpl",
    whole="text_completion",
    chunk="text_completion",
    chat=False,
    parsed=CompletionRequest,
)
_CHAT = Kind(
    endpoint="chat",
    prefix="chatcmpl",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    chat=True,
    parsed=ChatRequest,
)
KINDS = {"/v1/completions": _COMPLETION, "/v1/chat/completions": _CHAT}


class Job:
    """One request: its sequences, one for each choice, and its answer. Errors: BadRequestError, UnknownModelError."""

    def __init__(self, service: Service, kind: Kind, request_id: str, body: bytearray, start: float) -> None:
        self._service, self._kind = service, kind
        self._request: CompletionRequest | ChatRequest = parse(kind.parsed, body)
        service.check_model(self._request.model)
        self._start = start
        self._head = {
            "id": f"{kind.prefix}-{request_id}",
            "created": int(time.time()),
            "model": service.name,
        }
        prompts = self._prompts()
        self._prompt_tokens = sum(map(len, prompts))
        self._cached_tokens = 0  # of each prompt's first choice
        seed = secrets.randbits(63) if self._request.seed is None else self._request.seed
        self._grammar_param, self._grammar = self._request.grammar()
        parsers: list[AnswerParser | None] = [None] * (len(prompts) * self._request.n)
        if isinstance(self._request, ChatRequest):
            parsers = self._parsers(self._request, prompts[0])
            self._require_calls(self._request, parsers[0])
        if self._grammar and service.leader.limits.no_grammars:
            reason = service.leader.limits.no_grammars
            raise BadRequestError(f"{self._grammar_param} cannot be served: {reason}", self._grammar_param)

        def sampling(index: int) -> Sampling:
            found = self._request.sampling(_next_seed(seed, index), self._grammar)
            # a chat's answer has the prompt's log-probabilities once
            return dataclasses.replace(found, prompt_logprobs=None) if kind.chat and index else found

        self._choices = [
            _Choice(service, self._request, prompt, sampling(index), parsers[index])
            for prompt in prompts
            for index in range(self._request.n)
        ]
        entries = sum(choice.num_entries for choice in self._choices)
        if entries > MOST_ENTRIES:
            raise BadRequestError(
                f"the answer may have {entries} log-probabilities, the limit is {MOST_ENTRIES}: ask for fewer of them, "
                f"for fewer tokens, prompts or choices, or, of new tokens, for a stream",
                "logprobs" if self._request.prompt_logprobs is None else "prompt_logprobs",
            )

    @property
    def has_grammar(self) -> bool:
        """Whether its texts must follow a grammar."""
        return bool(self._grammar)

    def check_grammar(self) -> None:
        """Raise BadRequestError for a grammar that cannot be compiled. May take seconds."""
        error = self._service.checker.error_of(self._grammar)
        if error:
            raise BadRequestError(f"{self._grammar_param} cannot be served: {error}", self._grammar_param)

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""
        return self._request.stream

    def _prompts(self) -> list[tuple[int, ...]]:
        request, service = self._request, self._service
        if isinstance(request, ChatRequest):
            return [service.chat_tokens(request)]
        prompts, most = request.prompts, service.leader.limits.max_waiting
        if not prompts:
            raise BadRequestError("prompt ([]) must be one or more texts or lists of token ids", "prompt")
        if len(prompts) * request.n > most:
            what = f"{len(prompts)} prompts" + (f" with n ({request.n}) choices each" if request.n > 1 else "")
            raise BadRequestError(f"prompt has {what}, the limit is {most} (max_waiting)", "prompt")
        return [
            service.tokens(prompt, special=request.add_special_tokens) if isinstance(prompt, str) else tuple(prompt)
            for prompt in prompts
        ]

    def _parsers(self, request: ChatRequest, prompt: tuple[int, ...]) -> list[AnswerParser | None]:
        """Of each answer's parts; None if it is content as it is."""
        service, calls = self._service, bool(request.tools) and request.tool_choice != "none"
        if calls and self._grammar:
            raise BadRequestError(
                f"tools (with tool_choice {shown(request.tool_choice)}) and {self._grammar_param} exclude each other",
                "tools",
            )
        none: list[AnswerParser | None] = [None] * request.n
        if self._grammar or not (calls or request.separate_reasoning):
            return none
        if service.response_template is None:
            if calls:
                raise BadRequestError(
                    f"tools cannot be served, unless tool_choice is 'none': how model {service.name!r} writes calls is "
                    f"not known, its tokenizer has no response template",
                    "tools",
                )
            return none
        begun, tools = service.text_of(prompt), [tool.for_template() for tool in request.tools]
        most = 0 if not calls else 1 if request.one_call else None
        return [AnswerParser(service.tokenizer, service.response_template, begun, tools, most_calls=most) for _ in none]

    def _require_calls(self, request: ChatRequest, parser: AnswerParser | None) -> None:
        """Set the grammar of an answer that must call a function."""
        if request.must_call:
            assert parser is not None
            assert self._service.response_template is not None
            self._grammar_param = "tool_choice"
            self._grammar = calls_grammar(
                self._service.response_template,
                request.must_call,
                self._service.tokenizer,
                in_reasoning=parser.in_reasoning,
                one_call=request.one_call,
            )

    async def pieces(self, submitted: Callable[[], None]) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) pairs of all sequences, as they come; `submitted` is called when all are in the queue."""
        service, counts = self._service, [0] * len(self._choices)
        begun: dict[int, tuple[float, int]] = {}  # when a choice had its first text, and its tokens by then
        found = stream_texts(
            service.leader,
            [choice.generation for choice in self._choices],
            [choice.text for choice in self._choices],
            submitted,
        )
        async with contextlib.aclosing(found):
            async for index, piece in found:
                now = time.perf_counter()
                if not begun:
                    service.metrics.first_token.observe(now - self._start)
                    service.metrics.prompt_tokens.inc(self._prompt_tokens)
                service.metrics.generated_tokens.inc(piece.num_tokens - counts[index])
                counts[index] = piece.num_tokens
                if index not in begun and index % self._request.n == 0:
                    self._cached_tokens += piece.cached
                    service.metrics.cached_tokens.inc(piece.cached)
                first, tokens = begun.setdefault(index, (now, piece.num_tokens))
                if piece.finish and piece.num_tokens > tokens:
                    service.metrics.token_secs.observe((now - first) / (piece.num_tokens - tokens))
                yield index, piece
        service.metrics.request_secs.observe(time.perf_counter() - self._start)

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, sum(choice.num_tokens for choice in self._choices), self._cached_tokens)

    async def whole(self, submitted: Callable[[], None]) -> dict[str, Any]:
        """The answer of a request without a stream, as of `pieces`."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for index, piece in self.pieces(submitted):
            parts[index].append(self._choices[index].part(piece))
        choices = []
        for index, found in enumerate(parts):
            content: dict[str, Any] = {}
            if self._kind.chat:
                content["message"] = message_of([part["delta"] for part in found])
            else:
                content["text"] = "".join(part["text"] for part in found)
            more = {key: part[key] for part in found for key in ("prompt_logprobs",) if key in part}
            last = found[-1]["finish_reason"]
            joined = _joined([part["logprobs"] for part in found])
            choices.append({"index": index, "logprobs": joined, "finish_reason": last} | content | more)
        answer = self._head | {"object": self._kind.whole, "choices": choices, "usage": self._usage()}
        if self._kind.chat and "prompt_logprobs" in choices[0]:
            answer["prompt_logprobs"] = choices[0].pop("prompt_logprobs")
        return answer

    async def events(
        self, first: tuple[int, Piece], pieces: AsyncGenerator[tuple[int, Piece], None]
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream from its first piece on. Errors: those of the sequences."""
        if self._kind.chat:
            for index in range(len(self._choices)):
                delta = {"role": "assistant", "content": ""}
                yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])
        for chunk in self._part(*first):
            yield chunk
        async for index, piece in pieces:
            for chunk in self._part(index, piece):
                yield chunk
        if self._request.includes_usage:
            yield self._chunk([], self._usage())

    def _part(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunk of a piece; none if it says nothing, as within a tool call."""
        part = self._choices[index].part(piece)
        silent = part.get("delta") == {} and part["logprobs"] is None and part["finish_reason"] is None
        return [] if silent else [self._chunk([{"index": index} | part])]

    def _chunk(self, choices: list[dict[str, Any]], total: dict[str, Any] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"usage": total} if self._request.includes_usage else {}
        return self._head | {"object": self._kind.chunk, "choices": choices} | more


class _Choice:
    """One sequence of a request, and how its pieces are answered."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest | ChatRequest,
        prompt: tuple[int, ...],
        sampling: Sampling,
        parser: AnswerParser | None,
    ) -> None:
        self._service, self._request, self._parser = service, request, parser
        self._chat = isinstance(request, ChatRequest)
        self._silent = False  # no new token is wanted: one is made, and not shown
        most = service.leader.most_new_tokens(prompt)
        if isinstance(request, ChatRequest):
            wanted = request.most_tokens
        else:
            wanted = min(COMPLETION_TOKENS, most) if request.max_tokens is None else request.max_tokens
            self._silent = wanted == 0
            wanted = max(wanted, 1)
        self.generation = Generation(prompt=prompt, max_new_tokens=wanted, sampling=sampling)
        # log-probabilities that come at once; a limit that is too large is refused later
        new = 0 if request.stream else most if wanted is None else min(wanted, most)
        asked = (len(prompt), sampling.prompt_logprobs), (new, sampling.logprobs)
        self.num_entries = sum(tokens * (count + 1) for tokens, count in asked if count is not None)
        self.text = TextStream(
            service.tokenizer,
            request.stops,
            () if self._chat else prompt,
            hidden=service.leader.limits.end_ids if parser else None,
        )
        self.num_tokens = 0
        self._first = True
        self._chars = 0  # of the tokens before, for text_offset

    def part(self, piece: Piece) -> dict[str, Any]:
        """`text` or a chat's `delta`, `logprobs` and `finish_reason` of a piece, and `prompt_logprobs` of the first."""
        text, logprobs = piece.text, list(piece.logprobs)
        if self._silent:
            piece = dataclasses.replace(piece, num_tokens=0, finish=LENGTH)
            text, logprobs = "", []
        self.num_tokens = piece.num_tokens
        first, self._first = self._first, False
        prompt = self.generation.prompt
        before: list[tuple[int, Logprob | None]] = []
        if first and not self._chat and self._request.echo:
            text = self._service.text_of(prompt).rstrip(_PART) + text
            before = list(zip(prompt, (None, *piece.prompt_logprobs), strict=False))
        content = self._delta(text, last=bool(piece.finish)) if self._chat else {"text": text}
        called = self._parser is not None and self._parser.has_calls and piece.finish == STOP
        found: dict[str, Any] = content | {
            "logprobs": None,
            "finish_reason": TOOL_CALLS if called else piece.finish or None,
        }
        if self._request.num_logprobs is not None:
            found["logprobs"] = self._chat_logprobs(logprobs) if self._chat else self._logprobs([*before, *logprobs])
        if first and None not in (self._request.prompt_logprobs, self.generation.sampling.prompt_logprobs):
            entries = zip(prompt[1:], piece.prompt_logprobs, strict=True)
            found["prompt_logprobs"] = [None, *(self._ranked(token, each) for token, each in entries)]
        return found

    def _delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """What a piece of a chat's text adds to the message."""
        if self._parser is None:
            return {"delta": {"content": text}}
        delta = self._parser.push(text, last=last)
        if isinstance(self._request, ChatRequest) and not self._request.include_reasoning:
            delta.pop(REASONING, None)
        return {"delta": delta}

    @functools.cached_property
    def _token_text(self) -> Any:
        return functools.cache(lambda token: self._service.text_of([token]))

    def _logprobs(self, found: list[tuple[int, Logprob | None]]) -> dict[str, Any]:
        """OpenAI's object for completions."""
        texts, offsets = [self._token_text(token) for token, _ in found], []
        for text in texts:
            offsets.append(self._chars)
            self._chars += len(text)
        top = [
            each and {self._token_text(other): _finite(value) for other, value in ((token, each.value), *each.top)}
            for token, each in found
        ]
        values = [each and _finite(each.value) for _, each in found]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _chat_logprobs(self, found: list[tuple[int, Logprob]]) -> dict[str, Any]:
        """OpenAI's object for chats."""

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._token_text(token)
            return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}

        content = [
            entry(token, each.value) | {"top_logprobs": [entry(*other) for other in each.top]} for token, each in found
        ]
        return {"content": content, "refusal": None}

    def _ranked(self, token: int, found: Logprob) -> dict[str, Any]:
        """vLLM's object for a token of the prompt."""
        ranks = {other: (value, rank) for rank, (other, value) in enumerate(found.top, 1)}
        ranks.setdefault(token, (found.value, found.rank))
        return {
            str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": self._token_text(other)}
            for other, (value, rank) in ranks.items()
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _next_seed(seed: int, index: int) -> int:
    """The seed of a prompt's choice; that of the first is the request's own."""
    return (seed + index + MOST_SEED) % (2 * MOST_SEED) - MOST_SEED if index else seed


def _joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The `logprobs` of a whole answer from those of its pieces."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return {
        key: [each for part in known for each in part[key]] if isinstance(known[0][key], list) else None
        for key in known[0]
    }


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
