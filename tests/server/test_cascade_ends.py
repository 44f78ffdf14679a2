"""Requests for a cascade whose clients leave, or that take too long: nothing stays behind in either engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cascade_double import COMPLETIONS, Server, cascaded
from http_double import Answer, exchange, saying


@pytest.fixture
def server(tokenizer: Any, tmp_path: Path) -> Iterator[Server]:
    made = cascaded(tokenizer, tmp_path)
    yield made
    made.capture.close()
    assert made.admission.requests == 0


async def leave(server: Server, body: dict[str, Any]) -> Answer:
    gone = asyncio.Event()
    data = json.dumps({"model": "auto", "prompt": "x", **body}).encode()
    task = asyncio.create_task(exchange(server.app, "POST", COMPLETIONS, data, {}, gone))
    for _ in range(40):
        await asyncio.sleep(0)
    assert not task.done()
    gone.set()
    return await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("of_small", "sure", "large"), [(0, -0.5, 0), (1, -0.5, 0), (3, -0.5, 0), (9, -0.9, 1)])
def test_a_client_that_leaves_frees_both(server: Server, of_small: int, sure: float, large: int, stream: bool) -> None:
    """Before the small model says anything, before it is judged, after that, and while the large one answers."""
    server.sure = [sure]
    small, said = server.saying("small talk of it"), saying(server.large.tokenizer, "large talk")
    server.small.script = lambda submitted: [*list(small(submitted))[:of_small], asyncio.Event()]
    server.large.script = lambda submitted: [next(iter(said(submitted))), asyncio.Event()]
    asyncio.run(leave(server, {"stream": stream}))
    submitted = [*server.small.submitted, *server.large.submitted]
    assert len(server.large.submitted) == large and all(one.aborted for one in submitted)
    assert server.admission.requests == 0
    assert sum(server.samples("pilotfish_cascade_requests_total").values()) == (of_small >= 3)


@pytest.mark.parametrize(("of_small", "sure"), [(1, -0.5), (3, -0.5), (9, -0.9)])
def test_a_deadline_frees_both(server: Server, of_small: int, sure: float) -> None:
    server.sure = [sure]
    small = server.saying("small talk of it")
    server.small.script = lambda submitted: [*list(small(submitted))[:of_small], asyncio.Event()]
    server.large.script = lambda _: [asyncio.Event()]
    assert server.ask(timeout=0.05).status == 504
    assert all(one.aborted for one in (*server.small.submitted, *server.large.submitted))
