"""What a connection may take of the server before a request of it is one: bytes and time.

uvicorn bounds neither the head of a request nor the time that it takes, ends a reader that takes nothing only with the
server, and tells of a lost connection only the last one of requests that were sent without waiting for answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pilotfish.config import ServerConfig
from pilotfish.server.answers import encode
from pilotfish.server.failures import HttpError

#: Bytes of a request that are no body: its line, headers and trailers.
MAX_HEAD = 64 << 10
#: Bytes around each byte of a body: in the worst case it is a chunk of its own.
FRAMING = 8


@dataclass(frozen=True)
class Patience:
    """Seconds that a connection may take."""

    read: float  # until the head of a request is there
    write: float  # without taking anything

    @classmethod
    def of(cls, config: ServerConfig) -> Patience:
        return cls(config.read_timeout, config.write_timeout)


class _TooLarge(Exception):  # noqa: N818  # becomes an answer
    pass


class Protocol(HttpToolsProtocol):
    """A connection; make it with `protocol(patience)`."""

    def __init__(self, *args: Any, patience: Patience, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._reading: asyncio.TimerHandle | None = None  # while a head is not complete
        self._writing: asyncio.TimerHandle | None = None  # while the reader is behind
        self._head = 0  # bytes of the message under way, without its body's
        self._body = 0
        self._too_large = False
        self._running: RequestResponseCycle | None = None  # whose answer is the next to end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._reading, self._writing)
        super().connection_lost(exc)
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # -- a request

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head > MAX_HEAD + FRAMING * self._body:
            self._too_large = True
            self.send_400_response("")
        elif self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop(self._reading)
        self._reading = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._too_large = True
            raise _TooLarge
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = self._body = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # -- what is no request

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what cannot be read, and close; within another answer there is only the end."""
        if self._too_large:
            self._refuse(HttpError(431, f"headers: they are too large; expected at most {MAX_HEAD} bytes"))
        else:
            self._refuse(HttpError(400, "request: it is not HTTP/1.1"))

    def _expect_head(self) -> None:
        self._reading = self.loop.call_later(self._patience.read, self._late)

    def _late(self) -> None:
        seconds = self._patience.read
        self._refuse(HttpError(408, f"headers: they were not complete after {seconds:g} s", "timeout", code="timeout"))

    def _refuse(self, error: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self._running is None or self._running.response_complete:
            self.transport.write(_response(error))
        self.transport.close()

    # -- a reader that is behind

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop(self._writing)
        super().resume_writing()

    def _look_again(self, left: int) -> None:
        self._writing = self.loop.call_later(self._patience.write, self._stalled, left)

    def _stalled(self, before: int) -> None:
        """Nothing of what waits was taken: what it holds is freed now, not once it is taken."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        else:
            self._look_again(left)

    @staticmethod
    def _stop(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def protocol(patience: Patience) -> partial[Protocol]:
    """What makes a connection's protocol, for uvicorn's `http`."""
    return partial(Protocol, patience=patience)


def _response(error: HttpError) -> bytes:
    body = encode(error.body)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
