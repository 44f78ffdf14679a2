"""`pilotfish prefill`, by hand and as an engine starts its workers; a worker's process from its start to its end."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from conftest import Run
from support import write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig
from pilotfish.core.prefilling.prefill_messages import (
    PREFILL_VERSION,
    OrderFailed,
    PrefillHello,
    PrefillOrder,
    PrefillRefuse,
)
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.prefills import prefill_pool
from pilotfish.wire.channel import decode_from_prefill, encode
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair
from pilotfish.wire.sockets import DialingChannel

LISTEN = "ipc:///tmp/prefill-3"
LIMIT = 60.0


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PrefillConfig]]:
    """The pools that were to be run."""
    root, seen = logging.getLogger(), list[PrefillConfig]()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(prefill_pool, "run_prefill_pool", lambda config, _: seen.append(config))
    yield seen
    root.handlers[:], root.level = handlers, level


def test_a_worker_has_every_field_of_its_engine_that_is_not_of_the_target_alone(
    pilotfish: Run, llama: Path, draft: Path, pools: list[PrefillConfig], tmp_path: Path
) -> None:
    config = EngineConfig(
        target=llama,
        draft=draft,
        mode="async",
        dtype="float32",
        prefill_workers=2,
        memory=3.5,
        kv_slots=512,
        kv_dtype="int8",
        max_requests=5,
        max_rows=99,
        max_model_len=100,
        threads=3,
        cores="0",
        kv_host_memory=1.0,
        pace="prefill=2ms",
        trace=tmp_path / "trace.json",
        eager=True,
    )
    assert pilotfish(*worker_command("prefill", config, LISTEN, "prefill 1")[3:]).code == 0
    assert pools == [PrefillConfig(model=config.of_prefill, listen=LISTEN, name="prefill 1")]
    own = {item.name for item in fields(config) if getattr(pools[0].model, item.name) != getattr(config, item.name)}
    assert own == {"draft", "mode", "cores", "threads", "max_rows", "kv_host_memory", "prefill_workers"}


def test_options_of_the_command_are_those_of_the_pool(
    pilotfish: Run, llama: Path, pools: list[PrefillConfig], tmp_path: Path
) -> None:
    options = ("--kv-slots", 512, "--max-queued-tokens", "8K", "--segment-bytes", "64K", "--segment-memory", 0.5)
    options += ("--lease", 3, "--name", "a", "--insecure", "--key", tmp_path, "--max-model-len", "1k")
    assert pilotfish("prefill", "--model", llama, "--listen", LISTEN, *options).code == 0
    own = {"segment_bytes": 1 << 16, "segment_memory": 0.5, "max_queued_tokens": 8192, "lease": 3.0}
    model = EngineConfig(target=llama, kv_slots=512, max_model_len=1000, max_rows=2048)
    assert pools == [PrefillConfig(model=model, listen=LISTEN, name="a", insecure=True, key=tmp_path, **own)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windowed"), "mistral")


SOCKET = "ipc://{}/pool"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--listen", "tcp://0.0.0.0:0"), "listen: 'tcp://0.0.0.0:0' is not allowed; expected "),
        (("--listen", "nowhere"), "listen: 'nowhere' is not allowed; expected "),
        (("--key", "{key}"), "allow: None is not allowed; expected an allowlist, with --key"),
        (("--key", "{key}", "--allow", "{key}"), "allow: "),
        (("--lease", 0), "lease: 0.0 is not allowed; expected a number of seconds, 1 to 3600"),
        (("--max-queued-tokens", "many"), "max_queued_tokens: 'many' is not allowed; expected a whole number"),
        (("--max-queued-tokens", 0), "max_queued_tokens: 0 is not allowed; expected an integer 1 to "),
        (("--segment-bytes", 100), "segment_bytes: 100 is not allowed; expected an integer 4096 to "),
        (("--segment-memory", 0.001), "segment_memory: 0.001 is not allowed; expected room for two of 1048576 bytes"),
        (("--model", "{windowed}"), "target: every layer of "),
        (("--model", "{tmp}/none"), "target: "),
        (("--config", "{{}}"), "config: '{}' is not allowed; expected an engine's configuration"),
        (("--pair", "pycode"), "pair: it cannot be combined with --target"),
        (("--pace", "prefill=soon"), "pace: 'soon' is not allowed; expected "),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    pilotfish: Run, llama: Path, windowed: Path, tmp_path: Path, options: tuple[object, ...], line: str
) -> None:
    write_key_pair(new_key_pair(), tmp_path / "own.key")
    names = {"key": tmp_path / "own.key", "windowed": windowed, "tmp": tmp_path}
    given = [option.format(**names) if isinstance(option, str) else option for option in options]
    fixed = ("--model", llama, "--listen", SOCKET.format(tmp_path), "--dtype", "float32", "--kv-slots", 64)
    result = pilotfish("prefill", *fixed, *given)
    errors = [text for text in result.stderr.splitlines() if not text.startswith("pilotfish prefill: ")]
    assert result.code == 2 and len(errors) == 1 and errors[0].startswith(f"pilotfish: {line}"), result.stderr


@pytest.fixture
def directory() -> Iterator[Path]:
    """Its name is short: a socket is in it."""
    with tempfile.TemporaryDirectory(prefix="prefill-") as made:
        yield Path(made)


def test_a_process_says_where_it_listens_refuses_other_models_and_ends_in_order(llama: Path, directory: Path) -> None:
    fixed = ("--dtype", "float32", "--threads", "1", "--kv-slots", "256", "--eager", "--json", "--name", "prefill 7")
    listen = ("--model", str(llama), "--listen", SOCKET.format(directory), "--trace", str(directory / "trace.json"))
    command = [sys.executable, "-m", "pilotfish", "prefill", *listen, *fixed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            endpoint = msgspec.json.decode(process.stdout.readline())["endpoint"]
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
            assert endpoint == SOCKET.format(directory) and title == "pilotfish: prefill 7"
            identity = KVIdentity({"model": "another"}, KVLayout(2, 0, 2, [128, 128]))
            with closing(DialingChannel([endpoint], secrets.token_bytes(8))) as channel:
                away = ask(channel, PrefillHello(PREFILL_VERSION, identity, "m"))
                assert isinstance(away, PrefillRefuse) and away.reason.startswith("model: llama of 2 layers, ")
                assert away.reason.endswith(", not another")
                assert isinstance(ask(channel, PrefillOrder(1, [1], 0)), OrderFailed)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(LIMIT) == 0
            lines = process.stderr.read()
        finally:
            process.kill()
    assert "turned a target away: model: " in lines and "Traceback" not in lines
    assert [path.name for path in directory.iterdir()] == ["trace.json.prefill-7.part"]


def ask(channel: DialingChannel, message: msgspec.Struct) -> object:
    """The answer."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        channel.send(b"0", encode(message))
        for received in channel.receive(0.2):
            return decode_from_prefill(received.frame)
    raise AssertionError("no answer")
