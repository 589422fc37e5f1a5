"""An ASGI application that speaks OpenAI's protocol for a `Leader`.

Any ASGI server may run it, in any thread of the leader's process. A client that goes away frees the rows of its
sequences. Bodies are bounded before they are read, and parsed and tokenized by a thread of their own.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import re
import resource
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ep_moe.fields import shown
from ep_moe.serving.access import AccessLog
from ep_moe.serving.connections import LimitedConnection
from ep_moe.serving.core import DrainingError, ServerEndedError
from ep_moe.serving.job import (
    KINDS,
    ForbiddenError,
    Job,
    Kind,
    NotServedError,
    Service,
    UnauthorizedError,
    UnknownModelError,
    event,
)
from ep_moe.serving.metrics import CLIENT_LEFT, Metrics
from ep_moe.serving.protocol import (
    DetokenizeRequest,
    NoSuchRankError,
    ScaleRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    error_body,
    parse,
)
from ep_moe.serving.ranks import CannotScaleError
from ep_moe.serving.scheduler import BadRequestError, GrammarError, NotFiniteError, PrefillError, QueueFullError
from ep_moe.serving.text import Piece

SHUTDOWN_SECS = 1  # that open answers have to end; with LINGER_SECS less than the launcher's grace for a failed rank
LINGER_SECS = 1.0  # in which new requests read why the server has ended
BODY_BYTES, TOKEN_BYTES = 2**20, 32  # a body may have so many, and so many more for each token of the longest prompt
SMALL_BODY = 2**16  # bytes; of larger ones a few are read at a time
MOST_LARGE_BODIES = 16
SPARE_CONNECTIONS = 256  # besides one for each sequence that runs or waits
_PAGE = Path(__file__).with_name("page.html")
ID = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class _BodyTooLargeError(ValueError):
    """A request's body has more bytes than a prompt that is served."""


# errors of a request: status, OpenAI's type and code
_ERRORS: dict[type[Exception], tuple[int, str, str | None]] = {
    BadRequestError: (400, "invalid_request_error", None),
    UnauthorizedError: (401, "invalid_request_error", "invalid_api_key"),
    ForbiddenError: (403, "permission_error", None),
    NotServedError: (404, "invalid_request_error", None),
    NoSuchRankError: (404, "invalid_request_error", "rank_not_found"),
    CannotScaleError: (409, "invalid_request_error", "cannot_scale"),
    UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    _BodyTooLargeError: (413, "invalid_request_error", None),
    QueueFullError: (429, "rate_limit_error", "queue_full"),
    NotFiniteError: (500, "server_error", "not_finite"),
    GrammarError: (500, "server_error", "grammar"),
    PrefillError: (500, "server_error", "rank_failed"),
    DrainingError: (503, "server_error", "draining"),
    ServerEndedError: (503, "server_error", "server_ended"),
    Exception: (500, "server_error", None),
}


class _ClientLeftError(Exception):
    """The client has closed its connection."""


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
    """Reads requests' bodies, within limits, and works on them in a thread of its own."""

    def __init__(self, service: Service) -> None:
        self._most = BODY_BYTES + TOKEN_BYTES * service.leader.limits.longest_prompt
        self._large = asyncio.Semaphore(MOST_LARGE_BODIES)
        self._worker = ThreadPoolExecutor(1, "ep_moe-requests")  # one after another: each may take much memory

    async def work(
        self, request: Request, work: Callable[[bytearray, float], Result], on_body: Callable[[], object] = lambda: None
    ) -> Result:
        """What `work` makes of the body of a request and the time of its arrival; `on_body` is called when the body is
        there. Errors: those of `work`; BadRequestError; _BodyTooLargeError; ClientDisconnect."""
        start = time.perf_counter()
        async with contextlib.AsyncExitStack() as permits:
            body = await self._read(request, permits)
            on_body()
            return await asyncio.get_running_loop().run_in_executor(self._worker, work, body, start)

    async def _read(self, request: Request, permits: contextlib.AsyncExitStack) -> bytearray:
        kind = request.headers.get("content-type")
        if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
            found = "is missing" if kind is None else f"({shown(kind)}) is not served"
            raise BadRequestError(f"the header content-type {found}, application/json is needed")
        most, body = self._most, bytearray()
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
    """The application, with the endpoints that docs/serving.md lists."""
    app = FastAPI(title="ep-moe", docs_url=None, redoc_url=None, openapi_url=None)
    _answer_errors(app, service.metrics)
    if service.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[ID]
        )
    app.add_middleware(_Identified)

    def check_key(request: Request) -> None:
        service.check_key(request.headers.get("authorization"))

    keyed, bodies = APIRouter(dependencies=[Depends(check_key)]), _Bodies(service)
    _add_generation(keyed, service, bodies)
    _add_tokens(keyed, service, bodies)
    _add_models(keyed, service)
    _add_state(app, keyed, service)
    app.include_router(keyed)
    _add_admin(app, service, bodies)
    return app


class _Identified:
    """Gives each request an id, which its client may choose, and its answer a header with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        wanted = Headers(scope=scope).get(ID, "")
        name = wanted if _ID.fullmatch(wanted) else uuid.uuid4().hex
        scope.setdefault("state", {})["id"] = name

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (ID.encode(), name.encode())]
            await send(message)

        return await self._app(scope, receive, send_with_id)


def _add_models(app: APIRouter, service: Service) -> None:
    """The endpoints that name the model."""

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
        service.check_model(name)
        return model()


def _add_state(app: FastAPI, keyed: APIRouter, service: Service) -> None:
    """The endpoints about the server itself."""

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, Any]:
        if service.leader.failure is not None:
            raise ServerEndedError(str(service.leader.failure))
        if service.leader.draining:
            raise DrainingError(f"the server is about to end, {service.leader.num_running} sequences still run")
        lost = list(service.leader.lost.values())  # the server answers, with fewer ranks
        status = {"status": "degraded", "lost": lost} if lost else {"status": "ok"}
        return status | {"running": service.leader.num_running, "waiting": service.leader.num_waiting}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE.read_bytes(), media_type="text/html; charset=utf-8")

    @keyed.get("/load")
    async def load() -> dict[str, Any]:
        leader, limits = service.leader, service.leader.limits
        return {
            "model": service.name,
            "version": importlib.metadata.version("ep-moe"),
            "sizes": None if limits.sizes is None else dataclasses.asdict(limits.sizes),
            "load": leader.load,
            "owners": leader.owners,
            "rebalancing": leader.rebalancing or None,
        }

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("ep-moe")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_admin(app: FastAPI, service: Service, bodies: _Bodies) -> None:
    """The endpoints of administrators."""

    def check_admin(request: Request) -> None:
        service.check_admin(request.headers.get("authorization"))

    admin, leader = APIRouter(prefix="/admin", dependencies=[Depends(check_admin)]), service.leader

    def shown_ranks() -> dict[str, Any]:
        ranks = [
            {"rank": rank, "state": state, "sequences": leader.usage(rank)[0]} | ({"error": why} if why else {})
            for rank, (state, why) in enumerate(leader.ranks)
        ]
        states = [rank["state"] for rank in ranks]
        done = {*states} <= {"serving", "left"}
        return {"num_ranks": states.count("serving"), "most_ranks": len(ranks), "done": done, "ranks": ranks}

    def scale(body: bytearray, start: float) -> dict[str, Any]:
        del start
        leader.scale(parse(ScaleRequest, body).chosen(leader.ranks))
        return shown_ranks()

    @admin.get("/ranks")
    async def ranks() -> dict[str, Any]:
        return shown_ranks()

    @admin.post("/ranks", status_code=202)
    async def scale_ranks(request: Request) -> dict[str, Any]:
        return await bodies.work(request, scale)

    app.include_router(admin)


def _add_generation(app: APIRouter, service: Service, bodies: _Bodies) -> None:
    """The endpoints that generate."""
    grammars = ThreadPoolExecutor(1, "ep_moe-grammars")  # a compilation takes up to seconds: others need not wait

    async def stream(
        job: Job, kind: Kind, first: tuple[int, Piece], pieces: AsyncGenerator[tuple[int, Piece], None]
    ) -> AsyncIterator[bytes]:
        status = CLIENT_LEFT
        try:
            async for chunk in job.events(first, pieces):
                yield event(chunk)
            yield _DONE
            status = 200
        except (ServerEndedError, NotFiniteError, GrammarError, PrefillError) as error:
            status, name, code = _ERRORS[type(error)]
            yield event(error_body(str(error), name, code=code))
        finally:
            await pieces.aclose()
            service.metrics.count(kind.endpoint, status)

    async def answer(request: Request) -> Response:
        kind = KINDS[request.url.path]
        try:
            with contextlib.ExitStack() as coming:  # until its sequences are in the queue
                job = await bodies.work(
                    request,
                    functools.partial(Job, service, kind, request.state.id),
                    lambda: coming.callback(service.leader.expect()),
                )
                if job.has_grammar:
                    coming.close()
                    loop = asyncio.get_running_loop()
                    await _unless_left(request, loop.run_in_executor(grammars, job.check_grammar))
                if not job.stream:
                    content = await _unless_left(request, job.whole(coming.close))
                    service.metrics.count(kind.endpoint, 200)
                    return JSONResponse(content)
                pieces = job.pieces(coming.close)
                # errors before the first text have a status of their own
                first = await _unless_left(request, anext(pieces))
                return StreamingResponse(stream(job, kind, first, pieces), media_type="text/event-stream")
        except (_ClientLeftError, ClientDisconnect):
            service.metrics.count(kind.endpoint, CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)

    for path in KINDS:
        app.add_api_route(path, answer, methods=["POST"])


def _add_tokens(app: APIRouter, service: Service, bodies: _Bodies) -> None:
    """vLLM's endpoints of tokens without a generation."""

    def tokenize(body: bytearray, start: float) -> dict[str, Any]:
        del start
        asked: TokenizeTextRequest | TokenizeChatRequest
        if b'"messages"' in body:
            asked = parse(TokenizeChatRequest, body)
            tokens = service.chat_tokens(asked)
        else:
            asked = parse(TokenizeTextRequest, body)
            tokens = service.tokens(asked.prompt, special=asked.add_special_tokens)
        service.check_model(asked.model)
        texts = service.tokenizer.convert_ids_to_tokens(list(tokens)) if asked.return_token_strs else None
        most = service.leader.limits.num_positions
        return {"count": len(tokens), "max_model_len": most, "tokens": list(tokens), "token_strs": texts}

    def detokenize(body: bytearray, start: float) -> dict[str, Any]:
        del start
        asked = parse(DetokenizeRequest, body)
        service.check_model(asked.model)
        size = service.leader.limits.vocab_size
        unknown = next((token for token in asked.tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise BadRequestError(f"tokens has token {shown(unknown)}, tokens are in [0, {size})", "tokens")
        return {"prompt": service.text_of(asked.tokens)}

    @app.post("/tokenize")
    async def tokens(request: Request) -> dict[str, Any]:
        return await bodies.work(request, tokenize)

    @app.post("/detokenize")
    async def text(request: Request) -> dict[str, Any]:
        return await bodies.work(request, detokenize)


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer errors in OpenAI's shape, and count them."""

    def answer(request: Request, message: str, status: int, kind: str, *more: str | None) -> JSONResponse:
        served = KINDS.get(request.url.path)
        metrics.count(served.endpoint if served else "other", status)
        headers = {"www-authenticate": "Bearer"} if status == 401 else None
        return JSONResponse(error_body(message, kind, *more), status, headers)

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
        AccessLog(create_app(service)),
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
