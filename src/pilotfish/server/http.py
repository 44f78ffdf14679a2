"""HTTP around the routes: limits of connections, and each request's id, log line, count in the metrics and answer
whatever happens."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pilotfish.logs import log_access, request_context
from pilotfish.printable import short
from pilotfish.server.bodies.ignored import HEADER as IGNORED
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.http_errors import ClientGone, HttpError, encode, http_error
from pilotfish.server.messages import message_errors
from pilotfish.server.observe.metrics import ServerMetrics

if TYPE_CHECKING:
    from pilotfish.server.answers.stream import RequestHandle
    from pilotfish.server.auth import Caller

REQUEST_ID = re.compile(r"[ -~]{1,128}")
CLIENT_GONE = 499  # nginx's; nobody reads it, but logs do
#: Asked every few seconds by machines: logged only when they fail.
PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Fields that hold parts of a prompt, or say what its answer must be; a body that is no object may be one.
PROMPTS = frozenset(
    {"prompt", "messages", "system", "input", "instructions", "suffix", "prediction", "documents", "comment", "body"}
    | {"tools", "tool_choice", "functions", "response_format", "text", "output_config", "structured_outputs"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"}
    | {"grammar", "json_schema", "regex", "ebnf", "structural_tag", "chat_template", "bad_words", "stop", "images"}
    | {"web_search_options", "options", "extra_body", "format", "response_schema", "generation_config"}
)
#: Routes whose requests go to the target.
GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
#: Bytes of a request that are no body: its line, headers and trailers.
MAX_HEAD = 64 << 10
#: Bytes around each byte of a body: in the worst case it is a chunk of its own.
FRAMING = 8
_STATE = "pilotfish.request"


@dataclass
class RequestState:
    """A request's entry in its ASGI scope: the middleware makes it, routes fill it in, the access log reads it."""

    id: str  # X-Request-Id
    arrived: float  # monotonic seconds
    ignored: Ignored
    caller: Caller | None = None
    handle: RequestHandle | None = None
    error: HttpError | None = None  # that was answered, or ended a stream


def state_of(scope: Scope) -> RequestState:
    return cast(RequestState, scope[_STATE])


def ignored_of(request: Request) -> Ignored:
    return state_of(request.scope).ignored


class RequestMiddleware:
    """ASGI middleware around the whole application. X-Request-Id is the client's if that is up to 128 printable ASCII
    characters."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Mapping[Any, str], *, strict: bool) -> None:
        """`paths` are those of the routes' handlers, for the metrics."""
        self._app, self._metrics, self._paths, self._strict = app, metrics, paths, strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # "lifespan": Ray Serve announces itself, uvicorn is told not to
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        own_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope[_STATE] = RequestState(own_id, time.monotonic(), Ignored(strict=self._strict))
        status: int | None = None

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = own_id
                if state.ignored.header:
                    headers[IGNORED] = state.ignored.header
                if scope["path"].startswith(message_errors.PREFIX):
                    headers["request-id"] = own_id
            await send(message)

        try:
            with request_context(own_id):
                try:
                    await self._app(scope, receive, tagged)
                except Exception as error:
                    answer = error_response(error, scope)
                    if status is None:
                        await answer(scope, receive, tagged)
        finally:
            self._report(scope, state, CLIENT_GONE if status is None else status)

    def _report(self, scope: Scope, state: RequestState, status: int) -> None:
        path = self._paths.get(scope.get("endpoint"), "other")  # a label must not hold what clients make up
        self._metrics.http(path, scope["method"], status)
        if scope["path"] in GENERATION and state.handle is None and status >= 400:
            self._metrics.rejected(status)
        if scope["path"] in PROBES and status == 200:
            return
        fields = _error_fields(state.error)
        if state.handle is not None and (record := state.handle.record).reason is not None:
            fields["prompt_tokens"] = record.facts.prompt_tokens
            fields["generation_tokens"] = record.generation_tokens
            fields["finish_reason"] = record.reason
            fields["variant"] = record.facts.variant
            fields["answered_by"], fields["escalated"] = record.cascade.answered_by, record.cascade.escalated
        ms = 1000 * (time.monotonic() - state.arrived)
        with request_context(state.id, state.caller.name if state.caller else None):
            log_access(scope["method"], scope["path"], status, ms, **fields)


def recorded_error(error: Exception, scope: Scope) -> HttpError:
    """The answer to a request that ended with `error`, kept for the access log."""
    known = http_error(error)
    if scope["path"].startswith(message_errors.PREFIX):
        known = message_errors.as_asked(known)
    state_of(scope).error = known
    return known


def error_response(error: Exception, scope: Scope) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    known = recorded_error(error, scope)
    body, status = known.body, known.status
    if scope["path"].startswith(message_errors.PREFIX):
        body, status = message_errors.body_of(known, state_of(scope).id), message_errors.status_of(known)
    return Response(encode(body), status, known.headers, media_type="application/json")


async def on_routing_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of HTTPException: 404 for an unknown path, 405 for another method."""
    assert isinstance(error, HTTPException)
    path = f"path: {request.method} {short(request.url.path)}"
    known = HttpError(404, f"{path} is not served", code="unknown_url")
    if error.status_code == 405:
        message = f"{path} is not allowed; expected {(error.headers or {}).get('Allow')}"
        known = HttpError(405, message, code="method_not_supported", headers=error.headers)
    return error_response(known, request.scope)


def _error_fields(error: HttpError | None) -> dict[str, Any]:
    """The field to blame and the message, also where a stream had begun. A prompt is named, never quoted."""
    if error is None:
        return {}
    quotes_prompt = (error.param or "").split(".")[0].split("[")[0] in PROMPTS
    return {"param": error.param, "code": error.code, "error": None if quotes_prompt else str(error)}


# -- connections


class ConnectionProtocol(HttpToolsProtocol):
    """A connection that is closed when a request's head is not complete after `read_timeout` seconds, or its reader
    takes nothing for `write_timeout` seconds.

    uvicorn bounds neither a request's head nor the time that it takes. It ends a reader that takes nothing only with
    the server, and of requests that were sent without waiting for answers it tells only the last one of a lost
    connection.
    """

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

    # -- a request

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

    # -- what is no request

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer an unreadable request and close; if another answer is being sent, only close."""
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

    # -- a reader that is behind

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop(self._writing)
        super().resume_writing()

    def _expect_reader(self, waiting: int) -> None:
        self._writing = self.loop.call_later(self._write_timeout, self._check_reader, waiting)

    def _check_reader(self, before: int) -> None:
        """A reader that took nothing: abort, which frees the buffer at once."""
        waiting = self.transport.get_write_buffer_size()
        if waiting >= before:
            self.transport.abort()
        else:
            self._expect_reader(waiting)

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
