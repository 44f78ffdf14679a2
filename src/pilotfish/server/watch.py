"""What is said of every HTTP request: a line in the log, a count in the metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.observe.metrics import ServerMetrics
from pilotfish.server.door import VISITOR, Visitor
from pilotfish.server.envelope import CLIENT_GONE, failed_with, request_id
from pilotfish.server.logs import Access, log_access, request_context

#: Asked every few seconds by machines: logged only where they fail.
PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Fields that hold parts of a prompt; a body that is no object may be one.
PROMPTS = frozenset({"prompt", "messages", "suffix", "prediction", "documents", "body"})
#: Routes whose requests are for a target.
GENERATION = frozenset({"/v1/completions", "/v1/chat/completions"})


class Watch:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._note(scope, status, 1000 * (time.monotonic() - began))

    def _note(self, scope: Scope, status: int, ms: float) -> None:
        visitor: Visitor | None = scope.get(VISITOR)
        visit = visitor and visitor.visit
        self._metrics.http(_handler(scope), scope["method"], status)
        if scope["path"] in GENERATION and visit is None and status >= 400:
            self._metrics.rejected(status)
        if scope["path"] in PROBES and status == 200:
            return
        record = visit and visit.record
        counts = _error_fields(scope)
        if record:
            counts |= {
                "prompt_tokens": record.facts.prompt_tokens,
                "generation_tokens": record.generation_tokens,
                "finish_reason": record.reason,
            }
        with request_context(request_id(scope), visitor.client.name if visitor else None):
            log_access(Access(scope["method"], scope["path"], status, ms, **counts))


def _error_fields(scope: Scope) -> dict[str, Any]:
    """The field to blame and the message of the error that was answered, also where a stream had begun. A prompt is
    named, never quoted."""
    error = failed_with(scope)
    if error is None:
        return {}
    quotes_prompt = (error.param or "").split(".")[0].split("[")[0] in PROMPTS
    return {"param": error.param, "code": error.code, "error": None if quotes_prompt else str(error)}


def _handler(scope: Scope) -> str:
    """The pattern of the route; what clients make up is no label."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"


def metrics_route(metrics: ServerMetrics) -> Route:
    """/metrics, for Prometheus."""

    async def render(request: Request) -> Response:
        rendered = await asyncio.to_thread(metrics.render, request.headers.get("accept", ""))
        return Response(rendered.body, media_type=rendered.content_type)

    return Route("/metrics", render)
