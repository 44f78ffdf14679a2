"""A lean HTTP client for load: it shares its cores with the server that it measures, so while an answer comes in it
only notes what came when, and reads that once the answer is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

EVENT_STREAM = b"text/event-stream"
DONE = b"[DONE]"


@dataclass(frozen=True)
class Part:
    """Bytes that the socket gave at a time."""

    at: float  # seconds of the host's monotonic clock
    data: bytes


@dataclass(frozen=True)
class Event:
    """A JSON object of an answer: of a stream, or the whole body."""

    at: float  # when its last byte had come
    data: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer to a request; status 0 where it ended before one came."""

    status: int
    events: list[Event]
    ended: bool  # as it should: a stream by its last event, a body by its length
    sent: float
    closed: float
    size: int  # bytes, headers included

    @property
    def tokens(self) -> int:
        """Generated, as the answer's usage has it; 0 where it has none."""
        usages = [event.data["usage"] for event in self.events if event.data.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else 0


class _Exchange(asyncio.Protocol):
    """A request on a connection of its own, until the server closes it or so many bytes have come."""

    def __init__(self, request: bytes, cut: int | None) -> None:
        self.parts: list[Part] = []
        self.sent = self.closed = 0.0
        self.over = asyncio.get_running_loop().create_future()
        self._request = request
        self._left = cut
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of uvloop's own class
        self.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append(Part(time.perf_counter(), data))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0 and self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  # what came tells
        self.closed = time.perf_counter()
        if not self.over.done():
            self.over.set_result(None)


@dataclass(frozen=True)
class Unread:
    """An answer as it came."""

    parts: Sequence[Part]
    sent: float
    closed: float


async def exchange(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> Unread:
    """The answer to a JSON body; where `cut` is given the connection is broken off once so many bytes have come.
    OSError where nobody listens."""
    address = urlsplit(url)
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    transport, spoken = await loop.create_connection(
        lambda: _Exchange(request, cut), address.hostname or "", address.port or 80
    )
    try:
        await spoken.over
    finally:
        transport.abort()
    return Unread(spoken.parts, spoken.sent, spoken.closed)


async def post(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> Answer:
    """As `exchange`, read."""
    return read(await exchange(url, path, body, cut))


def read(unread: Unread) -> Answer:
    reader = _Reader()
    parser = httptools.HttpResponseParser(reader)
    for part in unread.parts:
        reader.at = part.at
        parser.feed_data(part.data)
    status = parser.get_status_code() if reader.headed else 0
    size = sum(len(part.data) for part in unread.parts)
    return Answer(status, reader.events, reader.complete, unread.sent, unread.closed, size)


class _Reader:
    """Callbacks of httptools' parser."""

    def __init__(self) -> None:
        self.at = 0.0
        self.events: list[Event] = []
        self.headed = self.complete = False
        self._stream = self._done = False
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._stream |= name.lower() == b"content-type" and value.startswith(EVENT_STREAM)

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._stream:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if not self._stream:
            self._take(self._body)
        self.complete = self._done or not self._stream

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self._done = True
        else:
            self.events.append(Event(self.at, msgspec.json.decode(data)))
