"""An HTTP client for benches, of any server that speaks OpenAI's API.

It is lean: it shares its cores with the server that it measures, so while an answer comes in it only notes what came
when, and whether that is all. What came is read once the answer is over."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
EVENT_STREAM = b"text/event-stream"
DONE = b"[DONE]"
#: Characters of a body that is no JSON, in messages.
SHOWN = 200


@dataclass(frozen=True)
class Event:
    """A JSON object of an answer: of a stream, or the whole body."""

    at: float  # when its last byte had come, in seconds of the host's monotonic clock
    data: dict[str, Any]


class Answer:
    """Answer to a request, made of the bytes that the socket gave at each time. Its public methods are called by
    httptools' parser. Events are read as the standard says: lines of `data:` with a space or without, lines that end
    with CR LF or LF, comments and other fields left out."""

    def __init__(self, parts: Iterable[tuple[float, bytes]], sent: float, closed: float) -> None:
        self.sent, self.closed = sent, closed
        self.events: list[Event] = []
        self.ended = False  # as it should: a stream by its last event, a body by its length
        self.status = 0  # where it ended before one came
        self.problem = ""  # what of it is no HTTP or no JSON, and was left out
        self._stream = self._done = False
        self._body = b""
        self._data: list[bytes] = []  # of an event whose end has not come
        self._parser = httptools.HttpResponseParser(self)
        try:
            for self._at, data in parts:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problem = f"it is no HTTP: {error}"

    def on_header(self, name: bytes, value: bytes) -> None:
        self._stream |= name.lower() == b"content-type" and value.startswith(EVENT_STREAM)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._stream:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._read_line(line.removesuffix(b"\r"))

    def on_message_complete(self) -> None:
        if not self._stream:
            self._take(self._body)
        self.ended = self._done or not self._stream

    def _read_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            self._take(b"\n".join(self._data))
            self._data = []

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self._done = self.ended = True
            return
        try:
            self.events.append(Event(self._at, msgspec.json.decode(data, type=dict[str, Any])))
        except msgspec.DecodeError:
            self.problem = f"it is no JSON object: {data[:SHOWN].decode(errors='replace')}"


class Exchange(asyncio.Protocol):
    """A request on a connection of its own, and its answer as it came, until it is complete or the server closes."""

    transport: asyncio.Transport

    def __init__(self, request: bytes) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.sent = self.closed = 0.0
        self.whole = False  # as far as HTTP says
        self.over = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # of uvloop's own class
        self.sent = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # the answer will say so
            self.transport.abort()

    def on_message_complete(self) -> None:
        """Of httptools' parser: a server may leave the connection open."""
        self.whole = True
        self._end()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  # what came tells
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.closed = time.perf_counter()
            self.over.set_result(None)


async def exchange(
    url: str,
    path: str,
    body: Mapping[str, Any] | None,
    protocol: Callable[[bytes], Exchange] = Exchange,
    headers: Mapping[str, str] | None = None,
) -> Exchange:
    """Posts a JSON body, or gets where there is none, and waits for the answer. OSError where nobody listens."""
    address = urlsplit(url)
    secure = address.scheme == "https"
    connecting = asyncio.get_running_loop().create_connection(
        lambda: protocol(_request(address.netloc, address.path.rstrip("/") + path, body, headers or {})),
        address.hostname or "",
        address.port or (443 if secure else 80),
        ssl=secure or None,
    )
    transport, spoken = await connecting
    try:
        await spoken.over
    finally:
        transport.abort()
    return spoken


def _request(host: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> bytes:
    data = b"" if body is None else msgspec.json.encode(body)
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"host: {host}",
        "connection: close",
        *([] if body is None else ["content-type: application/json", f"content-length: {len(data)}"]),
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode() + data
