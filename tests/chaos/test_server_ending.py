"""Servers that are told to end, or are killed, while they serve; and those that cannot begin."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from http_clients import LIMIT, Client, completion, eventually, nothing_left
from live import LiveServer
from sizes import in_soak, sized
from support import make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams

ENDLESS = completion(max_tokens=1900, n=2, stream=True)


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where servers make their own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def begin(server: LiveServer) -> Client:
    client = Client(server, ENDLESS)
    assert client.begun.wait(LIMIT)
    return client


@in_soak
def test_what_takes_longer_than_the_drain_ends_with_an_error(llama: Path, tmp_path: Path) -> None:
    with LiveServer(llama, mode="off", drain_timeout=1, pace="target=20ms") as server:
        client, workers = begin(server), server.pids("target")
        server.process.send_signal(signal.SIGTERM)
        answer = client.answer
        assert answer.status == 200 and answer.events[-1] == "[DONE]"
        assert answer.error["type"] == "service_unavailable" and "shutting down" in answer.error["message"]
        assert server.process.wait(LIMIT) == 0
    assert nothing_left(tmp_path, workers)


@in_soak
def test_a_second_signal_does_not_wait(llama: Path, tmp_path: Path) -> None:
    with LiveServer(llama, mode="off", drain_timeout=600, pace="target=1s") as server:
        begin(server)
        workers = server.pids("target")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
    assert nothing_left(tmp_path, workers)


def test_a_server_that_is_killed_leaves_nothing(llama: Path, draft: Path, tmp_path: Path) -> None:
    mode = sized("off", "async")
    with LiveServer(llama, draft=draft, mode=mode, pace="target=4ms") as server:
        begin(server)
        workers = server.pids("target") + server.pids("draft 0")
        assert len(workers) == (2 if mode == "async" else 1)
        server.kill()
        eventually(lambda: nothing_left(tmp_path, workers))


@in_soak
def test_a_server_ended_while_its_target_starts_leaves_nothing(llama: Path, draft: Path, tmp_path: Path) -> None:
    """The target has begun draft workers, and still imports what it needs itself."""
    server = LiveServer(llama, draft=draft, mode="async")
    try:
        eventually(lambda: "listening at" in server.log and len(list(tmp_path.glob("pilotfish-*"))) == 2, 60.0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        assert nothing_left(tmp_path, [])
    finally:
        server.kill()


def refused(target: Path, *options: str) -> str:
    """What a server that cannot begin says."""
    command = [sys.executable, "-m", "pilotfish", "serve", f"--target={target}", "--dtype=float32", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@in_soak
def test_a_model_without_weights(llama: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    lines = refused(bare, "--port=0", "--log-format=text").splitlines()
    assert lines[-1].startswith("pilotfish: target: exited with code 2: ") and lines[-1].endswith("; it stays down")
    assert f"{bare} has no safetensors weights" in lines[-1] and not any(map(server_error, lines))
    assert not list(tmp_path.glob("pilotfish-*"))


def server_error(line: str) -> bool:
    return "Traceback" in line or " ERROR " in line


@in_soak
def test_a_directory_of_kv_that_another_process_has(llama: Path, tmp_path: Path) -> None:
    with make_engine(llama, kv_disk=tmp_path / "kv") as engine:
        lines = refused(llama, "--port=0", "--log-format=text", f"--kv-disk={tmp_path / 'kv'}").splitlines()
        assert lines[-1].endswith(f"that no other process uses; process {os.getpid()} has this one; it stays down")
        assert lines[-1].startswith("pilotfish: target: exited with code 2: pilotfish: kv_disk: ")
        assert not any(map(server_error, lines))
        assert run(engine, ["a"], [SamplingParams(max_tokens=4)])
