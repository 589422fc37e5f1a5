"""A log line for each request, once its answer is sent: method, path, status, seconds, client and id."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

POLLED = ("/health", "/metrics", "/load")  # logged at level DEBUG
_log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


class AccessLog:
    """An ASGI application that logs the requests of another; a status of 0 is an answer that was not begun."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Handle a request."""
        level = logging.DEBUG if scope.get("path") in POLLED else logging.INFO
        if scope["type"] != "http" or not _log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            client = ":".join(map(str, scope.get("client") or ("?",)))
            secs = time.perf_counter() - start
            name = scope.get("state", {}).get("id", "-")
            _log.log(level, "%s %r %d in %.3f s, %s, %s", scope["method"], scope["path"], status, secs, client, name)
