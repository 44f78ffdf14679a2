"""The API process: a listening socket, the engine, the application, and an end that loses nothing.

SIGTERM, SIGINT  ─►  let nobody in any more  ─►  wait for those inside, up to `drain_timeout`
                 ─►  end the target, and with it what is left, by an error  ─►  close

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
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import uvicorn
import uvloop

from pilotfish.config import EngineConfig, ServerConfig
from pilotfish.engine.async_engine import AsyncEngine, Health
from pilotfish.engine.process import LOG_FORMAT, die_with_parent, heeded, name_process
from pilotfish.errors import EngineError, ModelError, ParameterError
from pilotfish.observe.metrics import ServerMetrics
from pilotfish.server.admission import Admission, Limits
from pilotfish.server.app import make_app
from pilotfish.server.door import Door
from pilotfish.server.keys import Keyring
from pilotfish.server.logs import LogFormat
from pilotfish.server.page import page_routes
from pilotfish.server.protocol import Patience, protocol
from pilotfish.server.tracing import start_tracing
from pilotfish.server.watch import Watch, metrics_route

logger = logging.getLogger(__name__)

#: Seconds between two looks at the engine.
PERIOD = 0.1
#: Errors of bind(2) for which the port is to blame, not the host.
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
#: Seconds that connections have to close once nothing is served any more.
CLOSING = 5


@dataclass(frozen=True)
class Setup:
    """All that a server is made of."""

    engine: EngineConfig
    server: ServerConfig
    keys: Keyring
    limits: Limits
    log_format: LogFormat
    otlp_traces_endpoint: str | None = None


def run_server(setup: Setup, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called with the URL once requests can be served. ParameterError for an
    address that cannot be had, ModelError for models that cannot be served."""
    name_process("api")
    die_with_parent(signal.SIGTERM)
    with (
        contextlib.closing(listening_socket(setup.server)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_Process(setup, listener, ready).run())


def listening_socket(config: ServerConfig) -> socket.socket:
    """Bound; port 0 takes any that is free."""
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
    """In place of what a model's directory says of chats and of sampling."""
    if config.chat_template is not None:
        engine.tokenizer.chat_template = config.chat_template
    if config.generation_config == "vllm":
        engine.defaults = {}


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Process:
    def __init__(self, setup: Setup, listener: socket.socket, ready: Callable[[str], None]) -> None:
        self._setup = setup
        self._listener = listener
        self._ready = ready
        self._engine = AsyncEngine(setup.engine, setup.server.target_timeout, {LOG_FORMAT: setup.log_format})
        self._admission = Admission(setup.limits)
        name = (setup.server.served_model_name or (self._engine.name,))[0]
        self._metrics = ServerMetrics(name)
        self._engine.observe = lambda progress: self._metrics.progress(progress.step, progress.deltas)
        self._tracer = start_tracing(setup.otlp_traces_endpoint, name)
        door = Door(setup.keys, self._admission, self._engine, self._metrics, self._tracer)
        app = make_app(self._engine, setup.server, door)
        app.router.routes.extend([*page_routes(), metrics_route(self._metrics)])
        app.add_middleware(Watch, metrics=self._metrics)
        config = uvicorn.Config(
            app,
            http=protocol(Patience.of(setup.server)),  # type: ignore[arg-type]  # makes one, as a class does
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSING,
        )
        self._server = _Server(config, self._end)
        self._announced = self._was_ready = False
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch())
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
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Where the server ended because its target cannot be started again."""
        if not self._engine.health.failed:
            return
        reason = self._engine.health.reason
        raise EngineError(reason) if self._announced else ModelError(reason)

    async def _watch(self) -> None:
        while True:
            health = self._engine.health
            self._metrics.target(health.ready, health.restarts)
            if health.status is not None:
                self._metrics.status(health.status)
            self._log_change(health)
            if health.ready and not self._announced:
                self._announced = True
                self._ready(url_of(self._listener))
            if health.failed:
                self._server.should_exit = True
            await asyncio.sleep(PERIOD)

    def _log_change(self, health: Health) -> None:
        """One line when requests can be served, again or for the first time, and one when they cannot any more."""
        if health.ready == self._was_ready:
            return
        self._was_ready = health.ready
        if self._admission.closed:  # which has been told
            return
        if not health.ready:
            logger.warning("not ready: %s", health.reason)
        elif self._announced or health.status is None:
            logger.info("ready again")
        else:
            fields = {"version": version("pilotfish"), **msgspec.to_builtins(health.status.identity)}
            logger.info("ready", extra={"fields": fields})

    def _end(self) -> None:
        """A signal came."""
        if self._ending is None:
            self._ending = self._loop.create_task(self._drain())
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self._admission.close()
        requests, seconds = self._admission.requests, self._setup.server.drain_timeout
        logger.info("draining: %d requests have up to %g s to end", requests, seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._admission.idle.wait()
        await self._engine.close()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Tells of signals instead of ending by them."""

    def __init__(self, config: uvicorn.Config, signalled: Callable[[], None]) -> None:
        super().__init__(config)
        self._signalled = signalled

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), heeded((signal.SIGTERM, signal.SIGINT))
        for number in numbers:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
