"""A server whose workers are killed, and that ends itself: what its clients see."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_clients import LIMIT, Client, alive, completion, eventually, nothing_left, settle, texts
from live import LiveServer
from sizes import sized

SHORT = [completion(i) for i in range(4)]
LONG = [completion(i, max_tokens=sized(80, 300)) for i in range(8)]


@pytest.fixture(scope="module")
def server_directory() -> Iterator[Path]:
    """Where it makes its own."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def server(llama: Path, draft: Path, server_directory: Path) -> Iterator[LiveServer]:
    """A server whose target takes a while for each step, and runs four sequences at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(server_directory))
        server = LiveServer(llama, draft=draft, mode="async", max_requests=4, pace="target=8ms")
    with server:
        yield server


@pytest.fixture(scope="module")
def long_texts(server: LiveServer) -> list[str]:
    """One after the other, undisturbed."""
    return texts(server, LONG)


def test_a_killed_target_is_told_of_and_started_again(server: LiveServer) -> None:
    expected = texts(server, SHORT)
    restarts = server.metric("pilotfish_target_restarts_total")
    begun = [Client(server, {**body, "max_tokens": 1500, "stream": True}) for body in SHORT]
    assert all(client.begun.wait(LIMIT) for client in begun)
    waiting = [Client(server, {**body, "stream": i % 2 == 0}) for i, body in enumerate(SHORT)]
    eventually(lambda: server.metric("vllm:num_requests_waiting") == len(waiting))
    (target,), drafts = server.pids("target"), server.pids("draft 0")
    os.kill(target, signal.SIGKILL)
    eventually(lambda: server.get("/ready")[0] == 503)
    reason = server.get("/ready")[1]["reason"]
    assert reason == "target: was ended by signal 9 (Killed); it is started again"
    for client, text in zip(begun, expected, strict=True):
        answer = client.answer
        assert answer.status == 200 and answer.events[-1] == "[DONE]"
        assert (answer.error["type"], answer.error["message"]) == ("service_unavailable", reason)
        assert answer.text and (text.startswith(answer.text) or answer.text.startswith(text))
    for client in waiting:
        answer = client.answer
        assert (answer.status, answer.error["message"]) == (503, reason)
        assert int(answer.headers["retry-after"]) >= 1
    assert Client(server, SHORT[0]).answer.status == 503
    assert len(drafts) == 1
    eventually(lambda: not alive(drafts[0]))
    eventually(lambda: server.get("/ready")[0] == 200, LIMIT)
    assert texts(server, SHORT) == expected
    assert server.metric("pilotfish_target_restarts_total") == restarts + 1
    settle(server)


def test_streams_outlive_a_target_that_stands_still_for_a_while(server: LiveServer) -> None:
    """`make soak` stops one for longer than ZeroMQ's patience with a connection between hosts."""
    bodies = [completion(i, max_tokens=sized(60, 200)) for i in range(sized(8, 16))]
    expected = texts(server, bodies)
    clients = [Client(server, {**body, "stream": True}) for body in bodies]
    assert clients[0].begun.wait(LIMIT)
    (target,) = server.pids("target")
    restarts = server.metric("pilotfish_target_restarts_total")
    os.kill(target, signal.SIGSTOP)
    try:
        eventually(lambda: server.get("/ready")[0] == 503)
        assert server.get("/ready")[1]["reason"].startswith("target: silent for ")
        eventually(lambda: server.metric("pilotfish_target_ready") == 0)
        assert Client(server, SHORT[0]).answer.status == 503
    finally:
        os.kill(target, signal.SIGCONT)
    answers = [client.answer for client in clients]
    assert all(answer.whole for answer in answers) and [answer.text for answer in answers] == expected
    eventually(lambda: server.get("/ready")[0] == 200)
    assert server.metric("pilotfish_target_restarts_total") == restarts
    lines = [json.loads(line) for line in server.log.splitlines()]  # of all processes; each is JSON
    messages = [line["message"] for line in lines]
    assert "ready again" in messages and any(m.startswith("not ready: target: silent for ") for m in messages)
    first = lines[messages.index("ready")]
    assert (first["mode"], first["dtype"], first["kv_slots"], first["max_requests"]) == ("async", "float32", 4096, 4)
    assert first["model"] and first["version"]
    settle(server)


@pytest.mark.parametrize("harm", sized([signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]), ids=lambda harm: harm.name)
def test_no_client_notices_what_happens_to_a_draft(harm: int, server: LiveServer, long_texts: list[str]) -> None:
    eventually(lambda: len(server.pids("draft 0")) == 1, LIMIT)
    clients = [Client(server, {**body, "stream": i % 2 == 0}) for i, body in enumerate(LONG)]
    assert clients[0].begun.wait(LIMIT)
    (draft,) = server.pids("draft 0")
    os.kill(draft, harm)
    try:
        answers = [client.answer for client in clients]
    finally:
        if alive(draft):
            os.kill(draft, signal.SIGCONT)
    assert all(answer.whole for answer in answers)
    assert [answer.text for answer in answers] == long_texts
    settle(server)


def test_a_draining_server_finishes_requests(server: LiveServer, server_directory: Path, long_texts: list[str]) -> None:
    """The last one, as it ends the server."""
    eventually(lambda: len(server.pids("draft 0")) == 1, LIMIT)
    workers = server.pids("target") + server.pids("draft 0")
    assert len(workers) == 2 and list(server_directory.glob("pilotfish-*"))
    inside = [Client(server, {**body, "stream": True}) for body in LONG]
    eventually(lambda: server.metric("pilotfish_requests_in_flight") == len(LONG))
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.get("/ready")[0] == 503)
    assert "draining" in server.get("/ready")[1]["reason"]
    late = Client(server, completion(stream=True)).answer
    assert (late.status, late.error["code"], late.error["type"]) == (503, "draining", "service_unavailable")
    assert int(late.headers["retry-after"]) >= 1
    assert [client.answer.text for client in inside] == long_texts
    assert all(client.answer.whole for client in inside)
    assert server.process.wait(LIMIT) == 0
    assert nothing_left(server_directory, workers)
