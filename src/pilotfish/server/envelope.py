"""Around every request: its id, and an answer whatever happens."""

from __future__ import annotations

import secrets
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.server.answers import encode
from pilotfish.server.failures import ClientGone, HttpError, http_error, no_route

MAX_ID = 128
_ERROR = "pilotfish.error"
CLIENT_GONE = 499  # nginx's; nobody reads it, but logs do


class Envelope:
    """ASGI middleware. X-Request-Id is the client's where that is up to 128 printable ASCII characters."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["pilotfish.request_id"] = own = _id(Headers(scope=scope).get("x-request-id", ""))
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = own
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            answer = failure(error, scope)
            if not started:
                await answer(scope, receive, tagged)


def _id(given: str) -> str:
    return given if is_request_id(given) else secrets.token_hex(16)


def is_request_id(given: str) -> bool:
    return 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable()


def request_id(scope: Scope) -> str:
    return cast(str, scope["pilotfish.request_id"])


def failed_with(scope: Scope) -> HttpError | None:
    """The error that a request was answered, or that its stream ended with."""
    return cast("HttpError | None", scope.get(_ERROR))


def failed(error: Exception, scope: Scope) -> HttpError:
    """What to answer to a request that ended with `error`; kept for `failed_with`."""
    known = scope[_ERROR] = http_error(error)
    return known


def failure(error: Exception, scope: Scope) -> Response:
    """The response to a request that ended with `error`."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    known = failed(error, scope)
    return Response(encode(known.body), known.status, known.headers, media_type="application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of exceptions."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = no_route(request.method, request.url.path, error)
    return failure(error, request.scope)
