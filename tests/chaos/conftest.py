"""Servers, targets and drafts that are made to suffer. Workers are processes or threads of their own, real sockets lie
between; outputs are compared with those of mode off."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedWorker
from handovers import PARAMS as HANDED
from handovers import prompts
from inline_server import inline_server
from live import HttpServer
from support import make_engine, run
from workers import PARAMS, PROMPTS, forked_pool, make_quick

from pilotfish.config.server import ServerConfig
from pilotfish.server.main import listening_socket


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Its name is short: sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def expected(llama: Path) -> list[list[int]]:
    """What the streams are without a draft."""
    with make_engine(llama) as engine:
        return run(engine, PROMPTS, PARAMS)


@pytest.fixture(scope="session")
def expected_outputs(llama: Path) -> list[list[int]]:
    """Of `handovers.prompts()`, where everything is computed."""
    with make_engine(llama) as engine:
        return run(engine, prompts(), HANDED)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


@pytest.fixture
def pool(quick: None, tmp_path: Path) -> Iterator[Any]:  # noqa: ARG001
    """`pool(draft, name="draft 0")` starts `pilotfish draft`, which listens at `endpoint_in(tmp_path)`."""
    started: list[ForkedWorker] = []

    def start(draft: Path, *options: str) -> ForkedWorker:
        started.append(forked_pool(draft, tmp_path, *options))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[HttpServer]:
    """A server whose target takes a while for each step, and runs four sequences at a time. What it sends waits with
    it, not in the system, where a client does not take it."""
    options = {"max_requests": 4, "pace": "target=4ms", "read_timeout": 2, "write_timeout": 1}

    def narrow(config: ServerConfig) -> socket.socket:
        listener = listening_socket(config)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # also of the connections that it accepts
        return listener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inline_server.listening_socket", narrow)
        with inline_server(llama, **options) as server:
            yield server
