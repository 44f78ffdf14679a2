"""Targets and drafts that are made to suffer. Every draft worker is a process or a thread of its own, real sockets lie
between; outputs are compared with those of mode off."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedWorker
from handovers import PARAMS as HANDED
from handovers import prompts
from live import LiveServer
from support import make_engine, run
from workers import PARAMS, PROMPTS, forked_pool, make_quick


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


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Where `server` makes its own."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def server(llama: Path, draft: Path, server_directory: Path) -> Iterator[LiveServer]:
    """A server whose target takes a while for each step, and runs four sequences at a time."""
    options = {"max_requests": 4, "pace": "target=4ms", "read_timeout": 2, "write_timeout": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(server_directory))
        server = LiveServer(llama, draft=draft, mode="async", **options)
    with server:
        yield server
