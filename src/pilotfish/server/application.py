import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.engine.processes.process import LOG_FORMAT
from pilotfish.engine.targets.async_engine import AsyncEngine, Health
from pilotfish.errors import ParameterError
from pilotfish.server.auth import Keyring
from pilotfish.server.bodies.client_texts import plain_texts
from pilotfish.server.bodies.reading import UNTOLD, tells_of_tools
from pilotfish.server.limits import Admission, RequestGuard
from pilotfish.server.middleware import RequestMiddleware, on_routing_error
from pilotfish.server.observe.fleet_metrics import FleetMetrics, draft_revisions
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.routes import VERSION, Api
from pilotfish.server.traffic.canary import Canary
from pilotfish.server.traffic.capture import start_capture
from pilotfish.server.traffic.cascade import Cascade, cascade_setup
from pilotfish.server.traffic.rollout import Rollout

if TYPE_CHECKING:
    from pilotfish.server.observe.tracing import Tracer

logger = logging.getLogger(__name__)

#: Seconds between two looks at the engine.
PERIOD = 0.1
FOLDER = Path(__file__).parent / "playground"
#: Same origin, no inline script, nothing from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time; the tag makes that cheap
}


@dataclass(frozen=True)
class ServerSetup:
    engine: EngineConfig
    server: ServerConfig
    keys: Keyring
    log_format: str  # json or text
    otlp_traces_endpoint: str | None = None


class Application:
    def __init__(self, setup: ServerSetup) -> None:
        self._setup = setup
        cascade, environment = cascade_setup(setup.engine, setup.server), {LOG_FORMAT: setup.log_format}
        self.engine = AsyncEngine(setup.engine if cascade is None else cascade.large, setup.server, environment)
        self.cascade = None if cascade is None else Cascade(cascade, self.engine, environment)
        self.admission = Admission(setup.server)
        name = (setup.server.served_model_name or (self.engine.name,))[0]
        self._metrics = ServerMetrics(name)
        self._fleet = FleetMetrics(self._metrics)
        self.engine.observe = self._metrics.progress
        self._tracer = start_tracing(setup.otlp_traces_endpoint, name)
        self.rollout = Rollout(setup.server.rollout, self._metrics)
        self._capture = start_capture(setup.server, self._metrics)
        guard = RequestGuard(setup.keys, self.admission, self._metrics, self._tracer, self.rollout, self._capture)
        self.asgi = make_app(self.engine, setup.server, guard, self.cascade)
        self._canary = Canary(self.engine, self._metrics, self._is_idle)
        self.rollout.offer = self._canary.offer
        self._tasks = set[asyncio.Task[None]]()
        self.was_ready = False  # once
        self._is_ready = False

    async def start(self) -> None:
        """ModelError for a model that cannot be served."""
        await self.engine.start()
        if self.cascade is not None:
            await self.cascade.start()
        apply_overrides(self.engine, self._setup.server)
        self._tasks.add(asyncio.create_task(self._canary.run()))

    def _is_idle(self) -> bool:
        statuses = [replica.status for replica in self.engine.health.replicas if replica.status is not None]
        busy = sum(status.running + status.waiting for status in statuses)
        return self.admission.requests == 0 and not self.admission.closed and busy <= self._canary.replaying

    def look(self) -> Health:
        health = self.engine.health
        self._fleet.tell(health.replicas, self.engine.resumes, self.engine.routed)
        self.rollout.look(draft_revisions(health.replicas), time.monotonic())
        if self.cascade is not None:
            small = self.cascade.small
            self._metrics["pilotfish_cascade_ready", small.name].set(small.health.ready)
        if health.ready != self._is_ready:
            self._is_ready = health.ready
            self._log_change(health)
        self.was_ready = self.was_ready or health.ready
        return health

    def _log_change(self, health: Health) -> None:
        if self.admission.closed:  # which is logged where it is closed
            return
        if not health.ready:
            logger.warning("not ready: %s", health.reason)
        elif self.was_ready or health.identity is None:
            logger.info("ready again")
        else:
            fields = {"version": VERSION, **msgspec.to_builtins(health.identity)}
            logger.info("ready", extra={"fields": fields})
            template = self.engine.tokenizer.chat_template
            if template and not tells_of_tools(template) and self._setup.server.tool_template == "model":
                logger.warning("tools are left out of prompts: %s", UNTOLD)

    def reload(self) -> None:
        """A file of variants that cannot be used is logged, and changes nothing."""
        try:
            self.rollout.reload(draft_revisions(self.engine.health.replicas).values())
        except ParameterError as error:
            logger.error("rollout: %s; the last file stays", error)

    async def end_targets(self) -> None:
        cascade = [] if self.cascade is None else [self.cascade.small.close()]
        await asyncio.gather(self.engine.close(), *cascade)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.end_targets()
        if self._capture is not None:
            await asyncio.to_thread(self._capture.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def apply_overrides(engine: AsyncEngine, config: ServerConfig) -> None:
    """ModelError for a tokenizer that cannot keep its special tokens out of texts."""
    if config.chat_template is not None:
        engine.tokenizer.chat_template = config.chat_template
    if config.generation_config == "vllm":
        engine.defaults = {}
    if not config.special_in_user_text:
        plain_texts(engine.tokenizer)


def start_tracing(endpoint: str | None, model_name: str) -> "Tracer | None":
    """None without an endpoint: then OpenTelemetry is not imported."""
    if endpoint is None:
        return None
    url = traces_url(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from pilotfish.server.observe.tracing import EXPORT_TIMEOUT, Tracer

    return Tracer(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT), model_name)


def traces_url(endpoint: str) -> str:
    allowed = "an http:// or https:// URL of an OTLP/HTTP collector, as http://localhost:4318"
    try:
        parts = urlsplit(endpoint)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ParameterError("otlp_traces_endpoint", endpoint, allowed)
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def make_app(engine: AsyncEngine, config: ServerConfig, guard: RequestGuard, cascade: Cascade | None) -> Starlette:
    api = Api(engine, config, guard, cascade)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.response_tokens, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/feedback", api.feedback, methods=["GET", "POST"]),
        Route("/v1/drafts", api.drafts),
        Route("/v1/rollout", api.rollout),
        Route("/v1/rollout/reload", api.rollout_reload, methods=["POST"]),
        Route("/v1/rollout/statistics", api.rollout_statistics),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/version", api.version),
    ]
    paths = {route.endpoint: route.path for route in routes}
    for route in routes:
        route.methods = route.methods and route.methods - {"HEAD"}
    app = Starlette(
        routes=[*routes, Route("/openapi.json", api.openapi), Route("/metrics", api.metrics), *page_routes()],
        middleware=[Middleware(RequestMiddleware, metrics=guard.metrics, paths=paths, strict=config.strict)],
        exception_handlers={HTTPException: on_routing_error},
    )
    app.router.redirect_slashes = False  # to where, the client would say
    return app


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(PAGE_HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    files = _PageFiles(directory=FOLDER)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", page), Mount("/playground", files)]
