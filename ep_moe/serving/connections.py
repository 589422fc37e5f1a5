"""HTTP connections with limits: how long a request may take to arrive, and how many connections there are.

uvicorn has a time limit for idle connections alone: one whose client sends a request slowly, or none, would stay.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ep_moe.serving.protocol import error_body

REQUEST_SECS = 10.0  # in which a request, its body included, has to arrive
STALL_SECS = 30.0  # in which a client has to take something of its answer
READ_BYTES = 65536  # at once; they are in memory until the application asks for them


class LimitedConnection(H11Protocol):
    """uvicorn's connection, closed if its client is too slow.

    At the limit of connections a new one takes the place of the one that has waited longest for a whole request of its
    client, preferably of one that has not had an answer; if all have requests in progress, it is refused. Parts of a
    request make a connection no younger: its client would outlast those whose requests are about to arrive.

    Args:
        count: called with the status of each refusal. most: connections.
    """

    def __init__(self, *args: Any, count: Callable[[int], None], most: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._count, self._most = count, most
        self._waits_since = 0.0
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def _arriving(self) -> bool:
        """Whether the next request has not arrived whole."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        """Whether the server waits for the client, to send a request or to take the end of an answer."""
        return self._arriving or self._answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        others: set[Any] = self.connections
        full = len(others) >= self._most
        waiting: list[LimitedConnection] = [each for each in others if each._waits] if full else []
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._start_clock()
        if waiting:
            oldest = min(waiting, key=lambda each: (each._answered, each._waits_since))
            others.discard(oldest)  # which it does itself only later
            oldest.transport.abort()
            self._count(503)
        elif full:
            self._refuse(503, f"{self._most} connections have requests in progress, which is the limit")

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._start_clock()
        super().data_received(data)
        if not self._arriving:
            self._stop_clock()

    def on_response_complete(self) -> None:
        """Called once an answer is sent; the next request may have arrived already."""
        super().on_response_complete()
        self._waits_since = self.loop.time()
        if self._arriving:
            self._start_clock()

    def send_400_response(self, msg: str) -> None:
        """Called for what is not HTTP."""
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        """Called by the event loop when the client takes an answer too slowly."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECS, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by the event loop when the client has taken most of it."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._stop_clock()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self._stop_clock()
        self._late = self.loop.call_later(REQUEST_SECS, self._end_late)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _end_late(self) -> None:
        self._refuse(408, f"the request did not arrive within {REQUEST_SECS:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer an error, unless there is an answer already, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._count(status)
            body = json.dumps(error_body(message, "invalid_request_error" if status < 500 else "server_error")).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
