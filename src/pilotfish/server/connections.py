import asyncio
import math
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pilotfish.server.http_errors import HttpError, encode

MAX_HEAD = 64 << 10  # bytes of a request that are no body: its line, headers and trailers
FRAMING = 8  # bytes around each byte of a body: in the worst case it is a chunk of its own


class ConnectionProtocol(HttpToolsProtocol):
    """Closes a connection whose request head is not complete after `read_timeout` seconds, or whose client takes
    nothing for `write_timeout` seconds. uvicorn bounds neither a head nor its time, ends a stalled client only with the
    server, and of pipelined requests tells only the last one of a lost connection."""

    def __init__(self, *args: Any, read_timeout: float, write_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout, self._write_timeout = read_timeout, write_timeout
        self._reading: asyncio.TimerHandle | None = None  # while a head is not complete
        self._writing: asyncio.TimerHandle | None = None  # while the reader is behind
        self._head = 0  # bytes of the message under way, without its body's
        self._body = 0
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

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head > MAX_HEAD + FRAMING * self._body:
            self._refuse_large_head()
        elif self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop(self._reading)
        self._reading = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._refuse_large_head()
            raise ValueError  # ends the parser, which calls `send_400_response`: in vain, as the connection closes
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

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(HttpError(400, "request: it is not HTTP/1.1"))

    def _refuse_large_head(self) -> None:
        self._refuse(HttpError(431, f"headers: they are too large; expected at most {MAX_HEAD} bytes"))

    def _expect_head(self) -> None:
        self._reading = self.loop.call_later(self._read_timeout, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        message = f"headers: they were not complete after {self._read_timeout:g} s"
        self._refuse(HttpError(408, message, "timeout", code="timeout"))

    def _refuse(self, error: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self._running is None or self._running.response_complete:
            self.transport.write(_response(error))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(math.inf)

    def resume_writing(self) -> None:
        self._stop(self._writing)
        super().resume_writing()

    def _check_reader(self, before: float) -> None:
        """`before`: bytes that waited at the last check."""
        waiting = self.transport.get_write_buffer_size()
        if waiting >= before:
            self.transport.abort()
        else:
            self._writing = self.loop.call_later(self._write_timeout, self._check_reader, waiting)

    @staticmethod
    def _stop(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def _response(error: HttpError) -> bytes:
    body = encode(error.body)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
