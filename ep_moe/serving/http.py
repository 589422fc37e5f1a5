"""An ASGI application that speaks OpenAI's protocol for a `Leader`.

Any ASGI server may run it, in any thread of rank 0's process. A client that goes away frees the rows of its sequences.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ep_moe.fields import shown
from ep_moe.serving.core import Leader, ServerEndedError
from ep_moe.serving.metrics import Metrics
from ep_moe.serving.protocol import ChatRequest, CompletionRequest, error_body, usage
from ep_moe.serving.scheduler import BadRequestError, Generation, QueueFullError
from ep_moe.serving.text import Piece, Tokenizer, stream_texts

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; a chat goes on for as long as there is room
SHUTDOWN_SECS = 1  # that open answers have to end; with LINGER_SECS less than the launcher's grace for a failed rank
LINGER_SECS = 1.0  # in which new requests read why the server has ended
_CLIENT_LEFT = 499  # as nginx logs it; nobody reads this answer
_DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class _ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The names that differ between the two endpoints."""

    endpoint: str
    prefix: str
    whole: str
    chunk: str
    chat: bool

    def choice(self, index: int, text: str, finish: str | None, *, part: bool) -> dict[str, Any]:
        """A choice of an answer, or the part of it in a chunk of a stream."""
        common = {"index": index, "logprobs": None, "finish_reason": finish or None}
        if not self.chat:
            return common | {"text": text}
        if part:
            return common | {"delta": {"content": text}}
        return common | {"message": {"role": "assistant", "content": text}}


_COMPLETION = _Kind(endpoint="completions", prefix="cmpl", whole="text_completion", chunk="text_completion", chat=False)
_CHAT = _Kind(endpoint="chat", prefix="chatcmpl", whole="chat.completion", chunk="chat.completion.chunk", chat=True)


class _Job:
    """One request: its sequences, one for each choice, and its answer."""

    def __init__(self, service: Service, kind: _Kind, request: CompletionRequest | ChatRequest) -> None:
        self._service, self._kind, self._request = service, kind, request
        self._start = time.perf_counter()
        self._counts: dict[int, int] = {}
        self._head = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }
        self._generations = [self._generation(prompt) for prompt in self._prompts()]

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
            except TemplateError as error:
                raise BadRequestError(
                    f"the model's chat template refuses these messages: {error}", "messages"
                ) from None
            return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"])]
        prompts = request.prompts
        if not prompts:
            raise BadRequestError("prompt ([]) must be one or more texts or lists of token ids", "prompt")
        return [
            tuple(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts
        ]

    def _generation(self, prompt: tuple[int, ...]) -> Generation:
        request, room = self._request, self._service.leader.room(prompt)
        if isinstance(request, ChatRequest):
            wanted = request.most_tokens
        else:
            wanted = min(COMPLETION_TOKENS, room) if request.max_tokens is None else request.max_tokens
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
            stream_texts(service.leader, service.tokenizer, self._generations, self._request.stops),
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
        outcome = "left"
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
            outcome = "ok"
        except ServerEndedError as error:
            outcome = "failed"
            yield _event(error_body(str(error), "server_error", code="server_ended"))
        finally:
            await pieces.aclose()
            self._service.metrics.requests.labels(self._kind.endpoint, outcome).inc()

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


def create_app(service: Service) -> FastAPI:
    """The application: /v1/models, /v1/completions, /v1/chat/completions, /health and /metrics."""
    app = FastAPI(title="ep-moe", docs_url=None, redoc_url=None)
    _answer_errors(app)

    async def answer(request: Request, kind: _Kind, body: CompletionRequest | ChatRequest) -> Response:
        count = service.metrics.requests.labels
        try:
            if body.model not in ("", service.name):
                message = f"model ({shown(body.model)}) is not served here, {service.name!r} is"
                content = error_body(message, "invalid_request_error", "model", "model_not_found")
                count(kind.endpoint, "refused").inc()
                return JSONResponse(content, 404)
            job = _Job(service, kind, body)
            if not body.stream:
                content = await _unless_left(request, job.whole())
                count(kind.endpoint, "ok").inc()
                return JSONResponse(content)
            pieces = job.pieces()
            first = await _unless_left(
                request, anext(pieces)
            )  # errors before the first text have a status of their own
            return StreamingResponse(job.events(first, pieces), media_type="text/event-stream")
        except (BadRequestError, QueueFullError):
            count(kind.endpoint, "refused").inc()
            raise
        except ServerEndedError:
            count(kind.endpoint, "failed").inc()
            raise
        except _ClientLeftError:
            count(kind.endpoint, "left").inc()
            return Response(status_code=_CLIENT_LEFT)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, _COMPLETION, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await answer(request, _CHAT, body)

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
        message = f"model ({shown(name)}) is not served here, {service.name!r} is"
        return JSONResponse(error_body(message, "invalid_request_error", "model", "model_not_found"), 404)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if service.leader.failure is not None:
            raise ServerEndedError(str(service.leader.failure))
        return {"status": "ok", "running": service.leader.num_running, "waiting": service.leader.num_waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _answer_errors(app: FastAPI) -> None:
    """Answer errors in OpenAI's shape."""

    def handler(
        status: int, kind: str, code: str | None = None
    ) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            del request
            param = getattr(error, "param", None)
            return JSONResponse(error_body(str(error) or type(error).__name__, kind, param, code), status)

        return handle

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        del request
        assert isinstance(error, RequestValidationError)
        # of the errors of several types, that of the type which fits best; their names, in brackets, say nothing
        found = max(error.errors(), key=lambda each: len(each["loc"]))
        place = [str(part) for part in found["loc"][1:] if "[" not in str(part)]
        if found["type"] == "json_invalid":
            place, message = [], f"the request's body is not valid JSON: {found['ctx']['error']}"
        elif not place:
            message = f"the request's body: {found['msg']}"
        elif found["type"] == "missing":
            message = f"{'.'.join(place)} is missing"
        else:
            message = f"{'.'.join(place)} ({shown(found['input'])}): {found['msg']}"
        return JSONResponse(error_body(message, "invalid_request_error", place[0] if place else None), 400)

    async def plain(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code)

    app.add_exception_handler(BadRequestError, handler(400, "invalid_request_error"))
    app.add_exception_handler(QueueFullError, handler(429, "rate_limit_error", "queue_full"))
    app.add_exception_handler(ServerEndedError, handler(503, "server_error", "server_ended"))
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, handler(500, "server_error"))


@contextlib.contextmanager
def run_beside(app: FastAPI, listener: socket.socket, on_end: Callable[[], None]) -> Iterator[None]:
    """Run the application in a thread, by uvicorn, while the block runs, `Leader.run` in it.

    If the block raises, requests are answered for a moment longer, with the error; then the thread ends.

    Args:
        listener: bound, not listening. on_end: called if the server ends by itself; it has to end the block.
    Errors: RuntimeError if the server does not start or ends by itself, and those of the block. Local.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_SECS
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
