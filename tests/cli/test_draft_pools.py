"""Drafts elsewhere that cannot be had: one line and exit code 2 or, where they are optional or refuse the target, one
line and a target without one."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from command_runs import Refused, Run
from support import running, write_model

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Load, Refuse
from pilotfish.engine.pools import remote_pools
from pilotfish.wire.channel import encode
from pilotfish.wire.curve_keys import KeyPair, new_key_pair, write_key_pair


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And this process has the cores in the end that it had before."""
    monkeypatch.setattr(remote_pools, "ANSWER", 0.5)
    cores = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == cores


def assert_served(generate: Run, *options: object) -> None:
    result = generate("--prompt", "a", *options)
    assert (result.code, result.stderr, len(result.rows)) == (0, "", 1)


@contextmanager
def answering(endpoint: str, answer: bytes, own: KeyPair | None = None) -> Iterator[None]:
    """A pool that says one thing only."""
    stopped = threading.Event()

    def serve() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            if own is not None:
                router.curve_server, router.curve_secretkey = True, own.secret.encode()
            router.bind(endpoint)
            while not stopped.is_set():
                if router.poll(20):
                    router.send_multipart([router.recv_multipart()[0], answer])

    with running(serve, stopped.set):
        yield


def test_an_unreachable_pool(line: Refused, where: str) -> None:
    assert line("--draft-pool", where) == f"draft_pool: nobody answers at {where}"


def test_a_pool_that_says_nothing(line: Refused, where: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(where.removeprefix("ipc://"))
        silent.listen()
        assert line("--draft-pool", where).startswith("draft_pool: ")


@pytest.mark.parametrize(
    "reason", [f"protocol version {PROTOCOL_VERSION}; this draft speaks 9", "its tokenizer is not"]
)
def test_a_pool_that_refuses(reason: str, generate: Run, where: str, caplog: pytest.LogCaptureFixture) -> None:
    with answering(where, encode(Refuse(0, 0, reason))):
        assert_served(generate, "--draft-pool", where)
    assert caplog.messages == [f"draft_pool: {where} refused: {reason}; the target serves without it"]


def test_a_refusal_gives_the_terminal_no_commands(generate: Run, where: str, caplog: pytest.LogCaptureFixture) -> None:
    reason = "no\x1b[2J\x1b]0;owned\x07\r\npilotfish: all is well\x9b\u202e"
    frame = msgspec.msgpack.encode({"type": "refuse", "session": 0, "generation": 0, "reason": reason})
    with answering(where, frame):
        assert_served(generate, "--draft-pool", where)
    (said,) = caplog.messages
    assert said.isprintable()
    assert r"refused: no\x1b[2J\x1b]0;owned\x07\r\npilotfish: all is well\x9b\u202e; the target serves" in said


def test_a_draft_with_another_tokenizer(line: Refused, tmp_path: Path) -> None:
    foreign = write_model(tmp_path / "foreign", "llama", tokens=400)
    assert "have unequal tokenizers: token " in line("--mode", "async", "--draft", foreign)


def test_keys_that_do_not_fit(line: Refused, where: str, tmp_path: Path) -> None:
    own, pool, other = tmp_path / "own.key", new_key_pair(), new_key_pair().public
    write_key_pair(new_key_pair(), own)
    with answering(where, encode(Load("a draft", 0, 0, 0, 1, 1.0, 0.0)), pool):
        assert line("--draft-pool", where) == f"draft_pool: {where} broke off: it wants a key, or is no draft pool"
        wrong = line("--draft-pool", where, "--draft-key", own, "--draft-pool-key", other)
        assert wrong.startswith(f"draft_pool: {where} broke off: its public key is not {other}")
        assert line("--draft-pool", where, "--draft-key", own).startswith("draft_pool_key: ")
        assert line("--draft-pool", where, "--draft-pool-key", pool.public).startswith("draft_key: ")
        assert line("--draft-pool", where, "--draft-key", tmp_path / "no").startswith("draft_pool_key: ")


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        (("--cores", "4000"), "cores: '4000'"),
        (("--draft-device", "x"), "draft_device: 'x'"),
        (("--cores", "0", "--draft-cores", "0"), "draft_cores: '0' is not allowed; expected other cores than"),
        (("--draft", "/no/such/draft"), "draft: '/no/such/draft'"),
        (("--draft-pool", "nonsense"), "draft_pool: 'nonsense'"),
        (("--draft-pool", "tcp://localhost:99999"), "draft_pool: 'tcp://localhost:99999'"),
        (("--draft-pool", "ipc:///x", "--mode", "sync"), "mode: 'sync' is not allowed; expected async with draft_pool"),
        (("--drafter", "ngram"), "drafter: 'ngram'"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], begins: str, line: Refused, draft: Path) -> None:
    drafts = () if "--draft" in options or "--draft-pool" in options else ("--draft", draft)
    mode = () if "--draft-pool" in options else ("--mode", "async")
    assert line(*drafts, *mode, *options).startswith(begins)


def test_an_optional_draft(generate: Run, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Warnings, which Python writes to stderr as they are where nobody has set up logging."""
    assert_served(generate, "--draft-pool", where, "--draft-optional")
    assert caplog.messages == [f"draft_pool: nobody answers at {where}; the target serves without it"]


def test_nothing_is_left_behind_by_failures(
    line: Refused, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    line("--mode", "async", "--draft", draft, "--draft-key", "/no/such/key")
    assert not list(tmp_path.glob("pilotfish-*"))
