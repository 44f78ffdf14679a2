"""How the API process ends without losing a request:

    SIGTERM, SIGINT ─► refuse new requests ─► wait for the admitted ones, up to `drain_timeout`
                    ─► end the target, and with an error the requests that are left ─► close

A second signal does not wait. SIGINT stays ignored where the process was started so."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
import uvloop

from pilotfish.config.server import ServerConfig
from pilotfish.engine.processes.process import die_with_parent, heeded, name_process
from pilotfish.errors import EngineError, ModelError, ParameterError
from pilotfish.server.application import PERIOD, Application, ServerSetup
from pilotfish.server.connections import ConnectionProtocol

logger = logging.getLogger(__name__)

#: Errors of bind(2) for which the port is to blame, not the host.
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
CLOSING = 5  # seconds that connections have to close once nothing is served any more


def run_server(setup: ServerSetup, ready: Callable[[str], None]) -> None:
    """`ready` gets the URL. ParameterError for an address that cannot be bound, ModelError for a model."""
    name_process("api")
    die_with_parent(signal.SIGTERM)
    with (
        contextlib.closing(listening_socket(setup.server)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_ApiProcess(setup, listener, ready).run())


def listening_socket(config: ServerConfig) -> socket.socket:
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


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _ApiProcess:
    def __init__(self, setup: ServerSetup, listener: socket.socket, ready: Callable[[str], None]) -> None:
        self._setup, self._listener, self._ready = setup, listener, ready
        self._application = Application(setup)
        config = uvicorn.Config(
            self._application.asgi,
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
        reload = None if setup.server.rollout is None else self._application.reload
        self._server = _Server(config, self._on_signal, reload)
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._application.start()
            logger.info("listening at %s", url_of(self._listener))
            watching = asyncio.create_task(self._watch())
            await self._server.serve([self._listener])
            await watching
        finally:
            await self._application.close()
        health = self._application.engine.health
        if health.failed:  # the target cannot be started again
            raise EngineError(health.reason) if self._application.was_ready else ModelError(health.reason)

    async def _watch(self) -> None:
        announced = False
        try:
            while not self._server.should_exit:
                health = self._application.look()
                if health.ready and not announced:
                    announced = True
                    self._ready(url_of(self._listener))
                self._server.should_exit |= health.failed
                await asyncio.sleep(PERIOD)
        finally:  # an error here ends the server
            self._server.should_exit = True

    def _on_signal(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        admission = self._application.admission
        admission.closed = True
        requests, seconds = admission.requests, self._setup.server.drain_timeout
        logger.info("draining: %d requests have up to %g s to end", requests, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await admission.idle.wait()
        await self._application.end_targets()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, on_signal: Callable[[], None], reload: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._handlers = dict.fromkeys(heeded((signal.SIGTERM, signal.SIGINT)), on_signal)
        if reload is not None:
            self._handlers[signal.SIGHUP] = reload

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in self._handlers:
                loop.remove_signal_handler(number)
