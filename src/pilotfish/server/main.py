"""The API process: a listening socket, the engine, the application, and an end that loses nothing.

    SIGTERM, SIGINT ─► refuse new requests ─► wait for the admitted ones, up to `drain_timeout`
                    ─► end the target, and with an error the requests that are left ─► close

A second signal does not wait. SIGINT stays ignored where the process was started so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop

from pilotfish.config import EngineConfig, ServerConfig
from pilotfish.engine.async_engine import AsyncEngine, Health
from pilotfish.engine.process import LOG_FORMAT, die_with_parent, heeded, name_process
from pilotfish.errors import EngineError, ModelError, ParameterError
from pilotfish.observe.metrics import ServerMetrics
from pilotfish.server.auth import Keyring
from pilotfish.server.http import ConnectionProtocol
from pilotfish.server.limits import Admission, RequestGuard
from pilotfish.server.routes import VERSION, make_app

if TYPE_CHECKING:
    from pilotfish.observe.tracing import Tracer

logger = logging.getLogger(__name__)

#: Seconds between two looks at the engine.
PERIOD = 0.1
#: Errors of bind(2) for which the port is to blame, not the host.
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
#: Seconds that connections have to close once nothing is served any more.
CLOSING = 5


@dataclass(frozen=True)
class ServerSetup:
    engine: EngineConfig
    server: ServerConfig
    keys: Keyring
    log_format: str  # json or text
    otlp_traces_endpoint: str | None = None


def run_server(setup: ServerSetup, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called with the URL once requests can be served. ParameterError for an
    address that cannot be had, ModelError for models that cannot be served."""
    name_process("api")
    die_with_parent(signal.SIGTERM)
    with (
        contextlib.closing(listening_socket(setup.server)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_ApiProcess(setup, listener, ready).run())


def listening_socket(config: ServerConfig) -> socket.socket:
    """A bound socket; port 0 takes any free port."""
    try:
        address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[4][:2], family=address[0], backlog=2048)
    except OSError as error:
        if error.errno in PORT_ERRORS:
            why = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
            message = f"port: {config.port} {why} at {config.host}; another one is needed, or 0 for any that is free"
            raise ParameterError.described("port", message) from error
        allowed = f"an address that can be listened at ({error.strerror or error})"
        raise ParameterError("host", f"{config.host}:{config.port}", allowed) from error


def apply_overrides(engine: AsyncEngine, config: ServerConfig) -> None:
    """Replace the chat template and the sampling defaults of the model's directory."""
    if config.chat_template is not None:
        engine.tokenizer.chat_template = config.chat_template
    if config.generation_config == "vllm":
        engine.defaults = {}


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_tracing(endpoint: str | None, model_name: str) -> Tracer | None:
    """Sends to an OTLP/HTTP collector. None without an endpoint: then OpenTelemetry is not imported."""
    if endpoint is None:
        return None
    url = traces_url(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from pilotfish.observe.tracing import EXPORT_TIMEOUT, Tracer

    return Tracer(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT), model_name)


def traces_url(endpoint: str) -> str:
    """The collector's URL, with OTLP's path /v1/traces where it names none."""
    allowed = "an http:// or https:// URL of an OTLP/HTTP collector, as http://localhost:4318"
    try:
        parts = urlsplit(endpoint)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ParameterError("otlp_traces_endpoint", endpoint, allowed)
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class _ApiProcess:
    def __init__(self, setup: ServerSetup, listener: socket.socket, ready: Callable[[str], None]) -> None:
        self._setup, self._listener, self._ready = setup, listener, ready
        self._engine = AsyncEngine(setup.engine, setup.server, {LOG_FORMAT: setup.log_format})
        self._admission = Admission(setup.server)
        name = (setup.server.served_model_name or (self._engine.name,))[0]
        self._metrics = ServerMetrics(name)
        self._engine.observe = self._metrics.progress
        self._tracer = start_tracing(setup.otlp_traces_endpoint, name)
        guard = RequestGuard(setup.keys, self._admission, self._metrics, self._tracer)
        config = uvicorn.Config(
            make_app(self._engine, setup.server, guard),
            http=partial(  # type: ignore[arg-type]  # makes a protocol, as a class does
                ConnectionProtocol, read_timeout=setup.server.read_timeout, write_timeout=setup.server.write_timeout
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSING,
        )
        self._server = _Server(config, self._on_signal)
        self._announced = self._was_ready = False
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch_engine())
        try:
            await self._engine.start()
            apply_overrides(self._engine, self._setup.server)
            logger.info("listening at %s", url_of(self._listener))
            await self._server.serve([self._listener])
        finally:
            watching.cancel()
            await self._engine.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        health = self._engine.health
        if health.failed:  # the target cannot be started again
            raise EngineError(health.reason) if self._announced else ModelError(health.reason)

    async def _watch_engine(self) -> None:
        while True:
            health = self._engine.health
            self._metrics.fleet.tell(health.replicas, self._engine.resumes)
            self._log_change(health)
            if health.ready and not self._announced:
                self._announced = True
                self._ready(url_of(self._listener))
            if health.failed:
                self._server.should_exit = True
            await asyncio.sleep(PERIOD)

    def _log_change(self, health: Health) -> None:
        """Log when requests can be served, for the first time or again, and when they no longer can."""
        if health.ready == self._was_ready:
            return
        self._was_ready = health.ready
        if self._admission.closed:  # `_drain` has logged it
            return
        if not health.ready:
            logger.warning("not ready: %s", health.reason)
        elif self._announced or health.identity is None:
            logger.info("ready again")
        else:
            fields = {"version": VERSION, **msgspec.to_builtins(health.identity)}
            logger.info("ready", extra={"fields": fields})

    def _on_signal(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self._admission.close()
        requests, seconds = self._admission.requests, self._setup.server.drain_timeout
        logger.info("draining: %d requests have up to %g s to end", requests, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._admission.idle.wait()
        await self._engine.close()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Calls `on_signal` in place of ending."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), heeded((signal.SIGTERM, signal.SIGINT))
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
