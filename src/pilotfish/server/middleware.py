"""Around every request: its id, an answer whatever happens, a line in the log, and a count in the metrics."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.logs import log_access, request_context
from pilotfish.observe.metrics import ServerMetrics
from pilotfish.server.responses import ClientGone, HttpError, encode, http_error, short

if TYPE_CHECKING:
    from pilotfish.server.auth import Caller
    from pilotfish.server.stream import RequestHandle

REQUEST_ID = re.compile(r"[ -~]{1,128}")
CLIENT_GONE = 499  # nginx's; nobody reads it, but logs do
#: Asked every few seconds by machines: logged only when they fail.
PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Fields that hold parts of a prompt; a body that is no object may be one.
PROMPTS = frozenset({"prompt", "messages", "suffix", "prediction", "documents", "body"})
#: Routes whose requests go to the target.
GENERATION = frozenset({"/v1/completions", "/v1/chat/completions"})
#: Attribute of a route's handler.
ROUTE_PATH = "route_path"
_STATE = "pilotfish.request"


@dataclass
class RequestState:
    """A request's entry in its ASGI scope: the middleware makes it, routes fill it in, the access log reads it."""

    id: str  # X-Request-Id
    arrived: float  # monotonic seconds
    caller: Caller | None = None
    handle: RequestHandle | None = None
    error: HttpError | None = None  # that was answered, or ended a stream


def state_of(scope: Scope) -> RequestState:
    return cast(RequestState, scope[_STATE])


class RequestMiddleware:
    """ASGI middleware around the whole application. X-Request-Id is the client's if that is up to 128 printable ASCII
    characters."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        own_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope[_STATE] = RequestState(own_id, time.monotonic())
        status: int | None = None

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
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
        path = getattr(scope.get("endpoint"), ROUTE_PATH, "other")  # a label must not hold what clients make up
        self._metrics.http(path, scope["method"], status)
        if scope["path"] in GENERATION and state.handle is None and status >= 400:
            self._metrics.rejected(status)
        if scope["path"] in PROBES and status == 200:
            return
        fields = _error_fields(state.error)
        if state.handle is not None and (record := state.handle.record) is not None:
            fields["prompt_tokens"] = record.facts.prompt_tokens
            fields["generation_tokens"] = record.generation_tokens
            fields["finish_reason"] = record.reason
        ms = 1000 * (time.monotonic() - state.arrived)
        with request_context(state.id, state.caller.name if state.caller else None):
            log_access(scope["method"], scope["path"], status, ms, **fields)


def recorded_error(error: Exception, scope: Scope) -> HttpError:
    """The answer to a request that ended with `error`, kept for the access log."""
    known = state_of(scope).error = http_error(error)
    return known


def error_response(error: Exception, scope: Scope) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    known = recorded_error(error, scope)
    return Response(encode(known.body), known.status, known.headers, media_type="application/json")


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
