"""A server as threads of the test's process: its API, loops, sockets and models are real, no interpreter starts."""

import asyncio
import io
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvloop
from inline_drafts import draft_worker
from inline_targets import InlineTarget
from live import START, HttpServer

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.server.application import ServerSetup
from pilotfish.server.auth import load_keyring
from pilotfish.server.main import _ApiProcess, listening_socket

SERVER_OPTIONS = {field.name for field in fields(ServerConfig)}


@contextmanager
def inline_server(model: Path, *, mode: str = "off", **options: Any) -> Iterator[HttpServer]:
    """Over a target, and beside it a draft where `mode` is async. `options` are fields of `ServerConfig` and
    `EngineConfig`."""
    of_server = {name: options.pop(name) for name in SERVER_OPTIONS & options.keys()}
    engine: dict[str, Any] = {"mode": mode, "dtype": "float32", "threads": 1, "kv_slots": 4096, **options}
    with tempfile.TemporaryDirectory(prefix="inline-") as directory, ExitStack() as stack:
        stream = io.StringIO()
        handler, logger = logging.StreamHandler(stream), logging.getLogger("pilotfish")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        if mode == "async":
            endpoint = f"ipc://{directory}/draft"
            stack.enter_context(draft_worker(EngineConfig(target=model, **engine), endpoint))
            engine["draft_pool"] = (endpoint,)
        target = stack.enter_context(closing(InlineTarget(Path(directory), model, **engine)))
        config = ServerConfig(port=0, target_pool=(target.member.endpoint,), **of_server)
        setup = ServerSetup(EngineConfig(target=model, **engine), config, load_keyring(), "text")
        yield HttpServer(stack.enter_context(_api(setup)), stream.getvalue)


@contextmanager
def _api(setup: ServerSetup) -> Iterator[str]:
    """Its URL, until it ends as SIGTERM ends it."""
    url, listener = Future[str](), listening_socket(setup.server)
    api = _ApiProcess(setup, listener, url.set_result)
    api._server.capture_signals = nullcontext  # type: ignore[method-assign]  # a thread gets none

    def serve() -> None:
        with closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(api.run())

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        wait([url, serving], START, FIRST_COMPLETED)
        if serving.done():
            serving.result()
        try:
            yield url.result(0)
        finally:
            api._loop.call_soon_threadsafe(api._on_signal)
            serving.result()
