"""A server with two targets of its own, one of which is killed: its clients see a pause, and never another token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_clients import LIMIT, Client, alive, balanced, completion
from live import LiveServer
from sizes import in_soak
from workers import eventually

BODIES = [completion(i, max_tokens=160, stream=i % 3 != 0) for i in range(16)]


@pytest.fixture(scope="module")
def fleet(llama: Path, draft: Path) -> Iterator[LiveServer]:
    options = {"max_requests": 16, "pace": "target=5ms", "drafter": "lm+ngram", "resume_timeout": 60}
    with LiveServer(llama, draft=draft, mode="async", replicas=2, **options) as server:
        eventually(lambda: all(one["ready"] for one in server.get("/ready")[1]["replicas"]), LIMIT)
        yield server


def serving(server: LiveServer) -> dict[str, int]:
    """Requests of each target."""
    return {one["name"]: one["requests"] for one in server.get("/ready")[1]["replicas"]}


@in_soak
def test_no_client_notices_that_a_target_is_killed(fleet: LiveServer) -> None:
    expected = [client.answer.text for client in [Client(fleet, body) for body in BODIES]]
    clients = [Client(fleet, body) for body in BODIES]
    eventually(lambda: all(serving(fleet).values()))
    (killed,), drafts = fleet.pids("target 0"), fleet.pids("draft 0")
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: serving(fleet)["target 0"] == 0 and fleet.metric("pilotfish_resumed_requests_total") > 0)
    assert fleet.get("/ready")[0] == 200 and Client(fleet, BODIES[0]).answer.whole
    answers = [client.answer for client in clients]
    assert all(answer.whole for answer in answers)
    assert [answer.text for answer in answers] == expected
    eventually(lambda: sum(map(alive, drafts)) == 1)
    eventually(lambda: fleet.metric("pilotfish_replica_ready") == 2, LIMIT)
    assert fleet.metric("pilotfish_target_restarts_total") == 1
    eventually(lambda: balanced(fleet))
