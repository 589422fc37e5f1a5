"""An ASGI application that speaks OpenAI's protocol for a `Leader`.

Any ASGI server may run it, in any thread of the leader's process. A client that goes away frees the rows of its
sequences. Bodies are bounded before they are read, and parsed and tokenized by a thread of their own.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import resource
import secrets
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ep_moe.fields import shown
from ep_moe.serving.connections import LimitedConnection
from ep_moe.serving.core import Leader, ServerEndedError
from ep_moe.serving.metrics import CLIENT_LEFT, Metrics
from ep_moe.serving.protocol import ChatRequest, CompletionRequest, error_body, parse, usage
from ep_moe.serving.scheduler import BadRequestError, Generation, NotFiniteError, QueueFullError
from ep_moe.serving.text import Piece, TextStream, Tokenizer, stream_texts

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; a chat goes on up to the last position
SHUTDOWN_SECS = 1  # that open answers have to end; with LINGER_SECS less than the launcher's grace for a failed rank
LINGER_SECS = 1.0  # in which new requests read why the server has ended
BODY_BYTES, TOKEN_BYTES = 2**20, 32  # a body may have so many, and so many more for each token of the longest prompt
SMALL_BODY = 2**16  # bytes; of larger ones a few are read at a time
MOST_LARGE_BODIES = 16
SPARE_CONNECTIONS = 256  # besides one for each sequence that runs or waits
_DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class _BodyTooLargeError(ValueError):
    """A request's body has more bytes than a prompt that is served."""


class _UnknownModelError(ValueError):
    """A request for a model that is not served here."""

    param = "model"


# errors of a request: status, OpenAI's type and code
_ERRORS: dict[type[Exception], tuple[int, str, str | None]] = {
    BadRequestError: (400, "invalid_request_error", None),
    _UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    _BodyTooLargeError: (413, "invalid_request_error", None),
    QueueFullError: (429, "rate_limit_error", "queue_full"),
    NotFiniteError: (500, "server_error", "not_finite"),
    ServerEndedError: (503, "server_error", "server_ended"),
    Exception: (500, "server_error", None),
}


class _ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """What the application serves.

    Args:
        name: of the model, which requests may give. tokenizer: of transformers.
    """

    leader: Leader
    tokenizer: Tokenizer
    name: str
    metrics: Metrics
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def most_body_bytes(self) -> int:
        """The most bytes of a request's body."""
        return BODY_BYTES + TOKEN_BYTES * self.leader.limits.longest_prompt

    @functools.cached_property
    def token_chars(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The names that differ between the two endpoints."""

    endpoint: str
    prefix: str
    whole: str
    chunk: str
    chat: bool
    parsed: type[CompletionRequest] | type[ChatRequest]

    def choice(self, index: int, text: str, finish: str | None, *, part: bool) -> dict[str, Any]:
        """A choice of an answer, or the part of it in a chunk of a stream."""
        common = {"index": index, "logprobs": None, "finish_reason": finish or None}
        if not self.chat:
            return common | {"text": text}
        if part:
            return common | {"delta": {"content": text}}
        return common | {"message": {"role": "assistant", "content": text}}


_COMPLETION = _Kind(
    endpoint="completions",
    prefix="cmpl",
    whole="text_completion",
    chunk="text_completion",
    chat=False,
    parsed=CompletionRequest,
)
_CHAT = _Kind(
    endpoint="chat",
    prefix="chatcmpl",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    chat=True,
    parsed=ChatRequest,
)
_KINDS = {"/v1/completions": _COMPLETION, "/v1/chat/completions": _CHAT}


class _Job:
    """One request: its sequences, one for each choice, and its answer. Errors: BadRequestError, _UnknownModelError."""

    def __init__(self, service: Service, kind: _Kind, body: bytearray, start: float) -> None:
        self._service, self._kind = service, kind
        self._request: CompletionRequest | ChatRequest = parse(kind.parsed, body)
        if self._request.model not in ("", service.name):
            raise _UnknownModelError(f"model ({shown(self._request.model)}) is not served here, {service.name!r} is")
        self._start = start
        self._counts: dict[int, int] = {}
        self._head = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }
        self._generations = [self._generation(prompt) for prompt in self._prompts()]
        stops, tokenizer = self._request.stops, service.tokenizer
        self._texts = [
            TextStream(tokenizer, stops, () if kind.chat else generation.prompt) for generation in self._generations
        ]

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self._request.stream)

    def _prompts(self) -> list[tuple[int, ...]]:
        request, tokenizer = self._request, self._service.tokenizer
        if isinstance(request, ChatRequest):
            if not getattr(tokenizer, "chat_template", None):
                raise BadRequestError(
                    f"model {self._service.name!r} has no chat template; use /v1/completions", "messages"
                )
            messages = [message.for_template() for message in request.messages]
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # noqa: BLE001 - a template may do anything with what a client sends
                what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
                raise BadRequestError(f"the model's chat template refuses these messages: {what}", "messages") from None
            return [self._tokens(text, add_special_tokens=False)]
        prompts, most = request.prompts, self._service.leader.limits.max_waiting
        if not prompts:
            raise BadRequestError("prompt ([]) must be one or more texts or lists of token ids", "prompt")
        if len(prompts) > most:
            raise BadRequestError(f"prompt has {len(prompts)} prompts, the limit is {most} (max_waiting)", "prompt")
        return [self._tokens(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]

    def _tokens(self, text: str, **options: bool) -> tuple[int, ...]:
        tokens = self._service.leader.limits.longest_prompt
        most = tokens * self._service.token_chars
        if len(text) > most:
            raise BadRequestError(
                f"the prompt has {len(text)} characters, {tokens} tokens have {most} at most", "prompt"
            )
        return tuple(self._service.tokenizer(text, **options)["input_ids"])

    def _generation(self, prompt: tuple[int, ...]) -> Generation:
        request, most = self._request, self._service.leader.most_new_tokens(prompt)
        if isinstance(request, ChatRequest):
            wanted = request.most_tokens
        else:
            wanted = min(COMPLETION_TOKENS, most) if request.max_tokens is None else request.max_tokens
        return Generation(
            prompt=prompt,
            max_new_tokens=wanted,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
        )

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) pairs of all sequences, as they come."""
        service = self._service
        metrics, found = (
            service.metrics,
            stream_texts(service.leader, self._generations, self._texts),
        )
        async with contextlib.aclosing(found):
            async for index, piece in found:
                if not self._counts:
                    metrics.first_token.observe(time.perf_counter() - self._start)
                    metrics.prompt_tokens.inc(self._prompt_tokens)
                metrics.generated_tokens.inc(piece.num_tokens - self._counts.get(index, 0))
                self._counts[index] = piece.num_tokens
                yield index, piece
        metrics.request_secs.observe(time.perf_counter() - self._start)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(generation.prompt) for generation in self._generations)

    def _usage(self) -> dict[str, int]:
        return usage(self._prompt_tokens, sum(self._counts.values()))

    async def whole(self) -> dict[str, Any]:
        """The answer of a request without a stream."""
        texts, finish = [""] * len(self._generations), [""] * len(self._generations)
        async for index, piece in self.pieces():
            texts[index] += piece.text
            finish[index] = piece.finish
        choices = [self._kind.choice(index, text, finish[index], part=False) for index, text in enumerate(texts)]
        return self._head | {"object": self._kind.whole, "choices": choices, "usage": self._usage()}

    async def events(
        self, first: tuple[int, Piece], pieces: AsyncGenerator[tuple[int, Piece], None]
    ) -> AsyncIterator[bytes]:
        """The chunks of a stream, as server-sent events, from its first piece on."""
        status = CLIENT_LEFT
        try:
            if self._kind.chat:
                start = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._chunk([start])
            yield self._part(*first)
            async for index, piece in pieces:
                yield self._part(index, piece)
            if self._request.includes_usage:
                yield self._chunk([], self._usage())
            yield _DONE
            status = 200
        except (ServerEndedError, NotFiniteError) as error:
            status, kind, code = _ERRORS[type(error)]
            yield _event(error_body(str(error), kind, code=code))
        finally:
            await pieces.aclose()
            self._service.metrics.count(self._kind.endpoint, status)

    def _part(self, index: int, piece: Piece) -> bytes:
        return self._chunk([self._kind.choice(index, piece.text, piece.finish, part=True)])

    def _chunk(self, choices: list[dict[str, Any]], total: dict[str, int] | None = None) -> bytes:
        more: dict[str, Any] = {"usage": total} if self._request.includes_usage else {}
        return _event(self._head | {"object": self._kind.chunk, "choices": choices} | more)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`, and cancel it if the client goes away. Errors: _ClientLeftError, and those of `work`."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientLeftError
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Bodies:
    """Reads requests' bodies, within limits, and makes jobs of them in a thread of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._large = asyncio.Semaphore(MOST_LARGE_BODIES)
        self._worker = ThreadPoolExecutor(1, "ep_moe-requests")  # one after another: each may take much memory

    async def job(self, request: Request, kind: _Kind) -> _Job:
        """The job of a request. Errors: those of `_Job`; _BodyTooLargeError; ClientDisconnect."""
        start = time.perf_counter()
        async with contextlib.AsyncExitStack() as permits:
            body = await self._read(request, permits)
            make = functools.partial(_Job, self._service, kind, body, start)
            return await asyncio.get_running_loop().run_in_executor(self._worker, make)

    async def _read(self, request: Request, permits: contextlib.AsyncExitStack) -> bytearray:
        kind = request.headers.get("content-type")
        if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
            found = "is missing" if kind is None else f"({shown(kind)}) is not served"
            raise BadRequestError(f"the header content-type {found}, application/json is needed")
        most, body = self._service.most_body_bytes, bytearray()
        announced = int(request.headers.get("content-length", 0))
        if announced > most:
            raise _BodyTooLargeError(f"the request's body has {announced} bytes, the limit is {most}")
        async for part in request.stream():
            if len(body) <= SMALL_BODY < len(body) + len(part):
                await permits.enter_async_context(self._large)
            body += part
            if len(body) > most:
                raise _BodyTooLargeError(f"the request's body has more than {most} bytes, the limit")
        return body


def create_app(service: Service) -> FastAPI:
    """The application: /v1/models, /v1/completions, /v1/chat/completions, /health and /metrics."""
    app = FastAPI(title="ep-moe", docs_url=None, redoc_url=None, openapi_url=None)
    bodies = _Bodies(service)
    _answer_errors(app, service.metrics)

    async def answer(request: Request) -> Response:
        kind = _KINDS[request.url.path]
        try:
            job = await bodies.job(request, kind)
            if not job.stream:
                content = await _unless_left(request, job.whole())
                service.metrics.count(kind.endpoint, 200)
                return JSONResponse(content)
            pieces = job.pieces()
            # errors before the first text have a status of their own
            first = await _unless_left(request, anext(pieces))
            return StreamingResponse(job.events(first, pieces), media_type="text/event-stream")
        except (_ClientLeftError, ClientDisconnect):
            service.metrics.count(kind.endpoint, CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)

    for path in _KINDS:
        app.add_api_route(path, answer, methods=["POST"])

    def model() -> dict[str, Any]:
        limits = service.leader.limits
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "ep-moe",
            "max_model_len": limits.num_positions,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        if name == service.name:
            return model()
        raise _UnknownModelError(f"model ({shown(name)}) is not served here, {service.name!r} is")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if service.leader.failure is not None:
            raise ServerEndedError(str(service.leader.failure))
        return {"status": "ok", "running": service.leader.num_running, "waiting": service.leader.num_waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer errors in OpenAI's shape, and count them."""

    def answer(request: Request, message: str, status: int, kind: str, *more: str | None) -> JSONResponse:
        served = _KINDS.get(request.url.path)
        metrics.count(served.endpoint if served else "other", status)
        return JSONResponse(error_body(message, kind, *more), status)

    async def handle(request: Request, error: Exception) -> JSONResponse:
        status, kind, code = next(found for known, found in _ERRORS.items() if isinstance(error, known))
        param = getattr(error, "param", None)
        return answer(request, str(error) or type(error).__name__, status, kind, param, code)

    async def plain(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(request, message, error.status_code, "invalid_request_error")

    for known in _ERRORS:
        app.add_exception_handler(known, handle)
    app.add_exception_handler(HTTPException, plain)


@contextlib.contextmanager
def run_beside(service: Service, listener: socket.socket, on_end: Callable[[], None]) -> Iterator[None]:
    """Run the application in a thread, by uvicorn, while the block runs, `Leader.run` in it.

    If the block raises, requests are answered for a moment longer, with the error; then the thread ends.

    Args:
        listener: bound. on_end: called if the server ends by itself; it has to end the block.
    Errors: RuntimeError if the server does not start or ends by itself, and those of the block. Local.
    """
    connection: Any = functools.partial(
        LimitedConnection,
        count=functools.partial(service.metrics.count, "connection"),
        most=_most_connections(service),
    )
    config = uvicorn.Config(
        create_app(service),
        http=connection,
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECS,
    )
    server = uvicorn.Server(config)

    def run() -> None:
        try:
            server.run([listener])
        finally:
            on_end()

    thread = threading.Thread(target=run, name="ep_moe-http", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the HTTP server has not started, its error is on stderr")
        time.sleep(0.01)
    try:
        yield
        if not thread.is_alive():
            raise RuntimeError("the HTTP server has ended, its error is on stderr")
    except Exception:
        time.sleep(LINGER_SECS)
        raise
    finally:
        server.should_exit = True
        thread.join(SHUTDOWN_SECS + 1)


def _most_connections(service: Service) -> int:
    """One for every sequence that the server takes and some more, as far as half of this process's files allow."""
    limits = service.leader.limits
    most = limits.max_waiting + limits.num_ranks * limits.num_rows + SPARE_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)
