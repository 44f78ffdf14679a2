"""What a server keeps of requests: of whom, what, and that neither a full queue nor a bad disk costs a request."""

import asyncio
import logging
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_double import COMPLETIONS, IDENTITY, Engine, Health, Server, Submitted, Update, exchange, saying
from refusals import refused

from pilotfish.config.server import ServerConfig
from pilotfish.errors import EngineError, ParameterError
from pilotfish.operate.capture.folder import ClaimedFolder, found_rows
from pilotfish.operate.capture.rows import CapturedRow
from pilotfish.operate.capture.store import CaptureStore
from pilotfish.operate.capture.upkeep import read_rows_of
from pilotfish.server.auth import Caller, Keyring, load_file
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.traffic import capture as capture_module
from pilotfish.server.traffic.capture import RequestCapture, start_capture

KEYS = """
[[key]]
name = "open"
secret = "open-open-open-open"
capture = true
[[key]]
name = "closed"
secret = "closed-closed-closed"
"""
OPEN = {"authorization": "Bearer open-open-open-open"}
CLOSED = {"authorization": "Bearer closed-closed-closed"}
TEXT = "a = b + c"


class CapturingServer(Server):
    def __init__(self, engine: Engine, folder: Path) -> None:
        engine.says(TEXT)
        engine.health = Health(identity=msgspec.structs.replace(IDENTITY, fingerprint="f", tokenizer="t"))
        (folder / "keys.toml").write_text(KEYS)
        (folder / "keys.toml").chmod(0o600)
        self.path, metrics = folder / "captured", ServerMetrics("tiny")
        made = start_capture(ServerConfig(capture=self.path, capture_tags=("learn",)), metrics)
        assert made is not None
        self.capture: RequestCapture = made
        super().__init__(engine, Keyring(load_file(folder / "keys.toml")), metrics, OPEN, capture=made)

    def kept(self) -> list[CapturedRow]:
        """The rows, once the thread has ended."""
        self.capture.close()
        return [row for file in found_rows(self.path) for row in read_rows_of(file)]

    def results(self) -> dict[str, float]:
        captured = self.samples("pilotfish_captured_requests_total{")
        return {name.split('"')[1]: count for name, count in captured.items() if count}

    def tokens(self, text: str = TEXT) -> list[int]:
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def server(engine: Engine, tmp_path: Path) -> Iterator[CapturingServer]:
    made = CapturingServer(engine, tmp_path)
    yield made
    made.capture.close()


def test_tokens_of_a_key_that_allows_it_are_kept(server: CapturingServer) -> None:
    assert server.ask(temperature=0.5, metadata={"tag": "shop"}).status == 200
    (row,) = server.kept()
    assert row.prompt_tokens.tolist() == server.tokens("x") and row.output_tokens.tolist() == server.tokens()
    assert (row.temperature, row.tag, row.fingerprint, row.tokenizer) == (0.5, "shop", "f", "t")
    assert server.results() == {"kept": 1.0}
    assert not any(b"a = b" in file.path.read_bytes() for file in found_rows(server.path)), "no text"


@pytest.mark.parametrize(
    ("key", "fields", "kept"),
    [
        (CLOSED, {}, False),
        (CLOSED, {"metadata": {"tag": "other"}}, False),
        (CLOSED, {"metadata": {"tag": "learn"}}, True),
        (OPEN, {"stream": True}, True),
    ],
)
def test_of_others_nothing_is_kept(
    server: CapturingServer, key: dict[str, str], fields: dict[str, Any], kept: bool
) -> None:
    server.headers = key
    assert server.ask(**fields).status == 200
    assert len(server.kept()) == kept and server.results() == ({"kept": 1.0} if kept else {})


def test_a_request_may_refuse(server: CapturingServer) -> None:
    for key in (OPEN, CLOSED):
        server.headers = {**key, "x-no-capture": "1"}
        assert server.ask().status == 200
    assert server.kept() == [] and server.results() == {"refused": 1.0}


def test_all_outputs_of_all_prompts(server: CapturingServer) -> None:
    server.engine.says("a = b", "c = d + e")
    assert server.ask(prompt=["x", "y = 2"], n=2).status == 200
    pairs = [(row.prompt_tokens.tolist(), row.output_tokens.tolist()) for row in server.kept()]
    prompts, outputs = [[server.tokens(text) for text in texts] for texts in (("x", "y = 2"), ("a = b", "c = d + e"))]
    assert pairs == [(prompt, output) for prompt in prompts for output in outputs]
    assert server.results() == {"kept": 1.0}


def test_a_request_for_its_prompt_alone_is_not_kept(server: CapturingServer) -> None:
    assert server.ask(max_tokens=0, echo=True).status == 200
    assert server.kept() == []


def test_failed_and_aborted_requests_are_not_kept(server: CapturingServer) -> None:
    def failing(submitted: Submitted) -> Iterable[Any]:
        yield next(iter(saying(server.engine.tokenizer, TEXT)(submitted)))
        yield EngineError("step failed")

    server.engine.script = failing
    assert server.ask().status == 500
    server.ask(stream=True)
    gone = asyncio.Event()

    def leaving(submitted: Submitted) -> Iterable[Update | Exception | asyncio.Event]:
        yield next(iter(saying(server.engine.tokenizer, TEXT)(submitted)))  # type: ignore[misc]
        gone.set()
        yield asyncio.Event()  # which nobody sets

    server.engine.script = leaving
    asyncio.run(exchange(server.app, "POST", COMPLETIONS, b'{"prompt": "x"}', OPEN, gone))
    assert gone.is_set() and server.kept() == [] and server.results() == {}


# -- disks that fail, and that are slow


def test_a_lost_folder_costs_no_request(server: CapturingServer, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(server.path)
    with caplog.at_level(logging.WARNING, logger="pilotfish.server.traffic.capture"):
        assert [server.ask().status for _ in range(3)] == [200] * 3
        server.capture.close()
    assert server.results() == {"dropped": 3.0} and not server.path.exists()
    lines = [record.message for record in caplog.records if "not kept" in record.message]
    assert len(lines) == 1 and "No such file" in lines[0]


def test_a_full_disk_costs_rows_until_there_is_room(server: CapturingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    written, add = threading.Event(), CaptureStore.add

    def full(*_: Any) -> None:
        written.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CaptureStore, "add", full)
    assert server.ask().status == 200 and written.wait(10)
    monkeypatch.setattr(CaptureStore, "add", add)
    assert server.ask().status == 200
    assert len(server.kept()) == 1 and server.results() == {"kept": 1.0, "dropped": 1.0}


@pytest.mark.parametrize(("name", "most"), [("WAITING_REQUESTS", 2), ("WAITING_TOKENS", 20)])
def test_a_disk_that_hangs_is_waited_for_by_nobody(
    server: CapturingServer, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    begun, released, add = threading.Event(), threading.Event(), CaptureStore.add

    def hanging(self: CaptureStore, client: str, rows: list[CapturedRow]) -> None:
        begun.set()
        released.wait(10)
        add(self, client, rows)

    monkeypatch.setattr(CaptureStore, "add", hanging)
    monkeypatch.setattr(capture_module, name, most)
    assert server.ask().status == 200 and begun.wait(10)
    assert [server.ask().status for _ in range(6)] == [200] * 6
    waits = 2 if name == "WAITING_REQUESTS" else 20 // len(server.tokens("x") + server.tokens())
    assert 0 < waits < 6 and server.results() == {"dropped": 6.0 - waits}
    released.set()
    assert len(server.kept()) == 1 + waits


def test_the_end_waits_for_a_hung_disk_only_so_long(server: CapturingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(CaptureStore, "add", lambda *_: released.wait(10))
    monkeypatch.setattr(capture_module, "CLOSING", 0.01)
    server.ask()
    server.capture.close()
    assert server.capture._thread.is_alive()
    released.set()


# -- what is refused at the start


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    assert start_capture(ServerConfig(), ServerMetrics("tiny")) is None
    assert Caller("x").capture is False


def test_tags_without_a_folder_are_refused() -> None:
    assert "capture_tags" in refused(ParameterError, ServerConfig, capture_tags=("learn",))


def test_the_folder_is_given_back(server: CapturingServer) -> None:
    assert "no other server" in refused(ParameterError, ClaimedFolder, server.path)
    server.capture.close()
    ClaimedFolder(server.path).release()
