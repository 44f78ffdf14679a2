"""Drafts elsewhere that cannot be had: one line and exit code 2 or, where they are optional or refuse the target, one
line and a target without one."""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from support import running, write_model
from workers import LOAD, endpoint_in

from pilotfish.cli import main
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Refuse
from pilotfish.engine.pools import remote_pools
from pilotfish.wire.channel import encode
from pilotfish.wire.curve_keys import KeyPair, load_key_pair

Refused = Callable[..., str]
Generate = Callable[..., tuple[int, str]]


@pytest.fixture
def generate(llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Exit code and stderr of `generate` on the tiny model."""
    monkeypatch.setattr(remote_pools, "ANSWER", 0.5)
    fixed = ["--target", str(llama), "--dtype", "float32", "--threads", "1", "--eager", "--max-tokens", "4"]

    def run(*options: object) -> tuple[int, str]:
        cores = os.sched_getaffinity(0)
        capfd.readouterr()
        code = main(["generate", *fixed, "--budget", "fixed", "--prompt", "a", "--json", *map(str, options)])
        out, err = capfd.readouterr()
        assert out.count("\n") == (code == 0) and os.sched_getaffinity(0) == cores
        return code, err

    return run


@pytest.fixture
def refused(generate: Generate) -> Refused:
    """The one line that is said of what cannot be used."""

    def line(*options: object) -> str:
        code, err = generate(*options)
        assert code == 2 and err.startswith("pilotfish: ") and err.count("\n") == 1
        return err.removeprefix("pilotfish: ").rstrip()

    return line


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


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], Path]:
    def new(name: str) -> Path:
        assert main(["keys", "new", str(tmp_path / name)]) == 0
        return tmp_path / f"{name}.key"

    return new


def test_an_unreachable_pool(refused: Refused, tmp_path: Path) -> None:
    where = endpoint_in(tmp_path)
    assert refused("--draft-pool", where) == f"draft_pool: nobody answers at {where}"


def test_a_pool_that_says_nothing(refused: Refused, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "pool"))
        silent.listen()
        assert refused("--draft-pool", endpoint_in(tmp_path)).startswith("draft_pool: ")


@pytest.mark.parametrize(
    "reason", [f"protocol version {PROTOCOL_VERSION}; this draft speaks 9", "its tokenizer is not"]
)
def test_a_pool_that_refuses(reason: str, generate: Generate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = endpoint_in(tmp_path)
    with answering(where, encode(Refuse(0, 0, reason))):
        assert generate("--draft-pool", where) == (0, "")
    assert caplog.messages == [f"draft_pool: {where} refused: {reason}; the target serves without it"]


def test_a_refusal_gives_no_commands_to_the_terminal(
    generate: Generate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = endpoint_in(tmp_path)
    reason = "no\x1b[2J\x1b]0;owned\x07\r\npilotfish: all is well\x9b\u202e"
    frame = msgspec.msgpack.encode({"type": "refuse", "session": 0, "generation": 0, "reason": reason})
    with answering(where, frame):
        assert generate("--draft-pool", where) == (0, "")
    (line,) = caplog.messages
    assert line.isprintable()
    assert r"refused: no\x1b[2J\x1b]0;owned\x07\r\npilotfish: all is well\x9b\u202e; the target serves" in line


def test_a_draft_with_another_tokenizer(refused: Refused, tmp_path: Path) -> None:
    foreign = write_model(tmp_path / "foreign", "llama", tokens=400)
    assert "have unequal tokenizers: token " in refused("--mode", "async", "--draft", foreign)


def test_keys_that_do_not_fit(refused: Refused, keys: Callable[[str], Path], tmp_path: Path) -> None:
    own, pool = keys("own"), load_key_pair("key", keys("pool"))
    other = load_key_pair("key", keys("other"))
    where = endpoint_in(tmp_path)
    with answering(where, LOAD, pool):
        assert refused("--draft-pool", where) == f"draft_pool: {where} broke off: it wants a key, or is no draft pool"
        wrong = refused("--draft-pool", where, "--draft-key", own, "--draft-pool-key", other.public)
        assert wrong.startswith(f"draft_pool: {where} broke off: its public key is not {other.public}")
        assert refused("--draft-pool", where, "--draft-key", own).startswith("draft_pool_key: ")
        assert refused("--draft-pool", where, "--draft-pool-key", pool.public).startswith("draft_key: ")
        assert refused("--draft-pool", where, "--draft-key", tmp_path / "no").startswith("draft_pool_key: ")


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
def test_options_that_make_no_sense(options: tuple[str, ...], begins: str, refused: Refused, draft: Path) -> None:
    drafts = () if "--draft" in options or "--draft-pool" in options else ("--draft", draft)
    mode = () if "--draft-pool" in options else ("--mode", "async")
    assert refused(*drafts, *mode, *options).startswith(begins)


def test_an_optional_draft(generate: Generate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warnings, which Python writes to stderr as they are where nobody has set up logging."""
    where = endpoint_in(tmp_path)
    assert generate("--draft-pool", where, "--draft-optional") == (0, "")
    assert caplog.messages == [f"draft_pool: nobody answers at {where}; the target serves without it"]


def test_nothing_is_left_behind_by_failures(
    refused: Refused, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused("--mode", "async", "--draft", draft, "--draft-key", "/no/such/key")
    assert not list(tmp_path.glob("pilotfish-*"))
