import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.logs import log_access, request_context
from pilotfish.printable import short
from pilotfish.server.auth import Caller
from pilotfish.server.bodies.ignored import HEADER as IGNORED
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.requests import WITHIN_PROMPTS
from pilotfish.server.http_errors import CLIENT_GONE, MESSAGES, ClientGone, FieldNames, HttpError, encode, http_error
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestRecord

REQUEST_ID = re.compile(r"[ -~]{1,128}")
#: Asked every few seconds by machines: logged only when they fail.
PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Routes whose requests go to the target.
GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_STATE = "pilotfish.request"


@dataclass
class RequestState:
    id: str  # X-Request-Id
    arrived: float  # monotonic seconds
    ignored: Ignored
    caller: Caller | None = None
    field_names: FieldNames = ()  # of the body, once it is a chat
    record: RequestRecord | None = None  # once it is admitted
    error: HttpError | None = None  # that was answered, or ended a stream


def state_of(scope: Scope) -> RequestState:
    return cast(RequestState, scope[_STATE])


def ignored_of(request: Request) -> Ignored:
    return state_of(request.scope).ignored


class RequestMiddleware:
    """X-Request-Id is the client's if that is up to 128 printable ASCII characters."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Mapping[Any, str], *, strict: bool) -> None:
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
                if scope["path"].startswith(MESSAGES):
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
        path = self._paths.get(scope.get("endpoint"), "other")  # clients must not make up labels
        self._metrics.http(path, scope["method"], status)
        if scope["path"] in GENERATION and state.record is None and status >= 400:
            self._metrics["pilotfish_requests_rejected", str(status)].inc()
        if scope["path"] in PROBES and status == 200:
            return
        fields: dict[str, Any] = {}
        if (error := state.error) is not None:  # also of a broken stream
            prompt_to_blame = (error.param or "").split(".")[0].split("[")[0] in WITHIN_PROMPTS  # named, never quoted
            fields = {"param": error.param, "code": error.code, "error": None if prompt_to_blame else str(error)}
        if (record := state.record) is not None and record.reason is not None:
            fields["prompt_tokens"] = record.facts.prompt_tokens
            fields["generation_tokens"] = record.generation_tokens
            fields["finish_reason"] = record.reason
            fields["variant"] = record.facts.variant
            fields["answered_by"], fields["escalated"] = record.cascade.answered_by, record.cascade.escalated
        ms = 1000 * (time.monotonic() - state.arrived)
        with request_context(state.id, state.caller.name if state.caller else None):
            log_access(scope["method"], scope["path"], status, ms, **fields)


def recorded_error(error: Exception, scope: Scope) -> HttpError:
    state = state_of(scope)
    state.error = http_error(error).renamed(state.field_names)
    return state.error


def error_response(error: Exception, scope: Scope) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    known = recorded_error(error, scope)
    body, status = known.body, known.status
    if scope["path"].startswith(MESSAGES):
        body, status = known.message_body(state_of(scope).id), known.message_status
    return Response(encode(body), status, known.headers, media_type="application/json")


async def on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"path: {request.method} {short(request.url.path)}"
    known = HttpError(404, f"{path} is not served", code="unknown_url")
    if error.status_code == 405:
        message = f"{path} is not allowed; expected {(error.headers or {}).get('Allow')}"
        known = HttpError(405, message, code="method_not_supported", headers=error.headers)
    return error_response(known, request.scope)
