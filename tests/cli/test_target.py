"""`pilotfish target`, by hand and as a server starts it; a target's process and two servers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
from attending import LIMIT, TARGET, AttendingServer
from conftest import Run
from support import make_engine, run

from pilotfish.cli import workers
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.config.workers import TargetConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.wire.curve_keys import TargetKeys, new_key_pair, write_key_pair
from pilotfish.wire.serving import Declined
from pilotfish.wire.sockets import DialingChannel

LISTEN = "ipc:///tmp/target-3"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TargetConfig]]:
    """Those that were to be run."""
    root, seen = logging.getLogger(), list[TargetConfig]()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(workers, "run_worker", lambda _, work: work(None))
    monkeypatch.setattr(workers, "_run_target", lambda config, *_: seen.append(config))
    yield seen
    root.handlers[:], root.level = handlers, level


def test_options_of_the_command_are_those_of_the_target(
    pilotfish: Run, llama: Path, draft: Path, targets: list[TargetConfig], tmp_path: Path
) -> None:
    options = ("--draft", draft, "--mode", "async", "--max-requests", 5, "--max-rows", 64, "--kv-slots", 512)
    own = ("--listen", LISTEN, "--name", "a", "--key", tmp_path, "--allow", tmp_path, "--insecure")
    assert pilotfish("target", "--model", llama, *options, *own).code == 0
    engine = EngineConfig(
        target=llama, draft=draft, mode="async", max_requests=5, max_rows=64, kv_slots=512, insecure=True
    )
    assert targets == [TargetConfig(engine=engine, listen=LISTEN, name="a", key=tmp_path, allow=tmp_path)]


def test_a_server_starts_one_from_its_own_configuration(
    pilotfish: Run, llama: Path, targets: list[TargetConfig]
) -> None:
    engine = EngineConfig(target=llama, kv_slots=512, threads=3, kv_host_memory=1.0, max_rows=99, eager=True)
    assert pilotfish("target", f"--listen={LISTEN}", f"--config={config_text(engine)}").code == 0
    assert targets == [TargetConfig(engine=engine, listen=LISTEN)]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--listen", "tcp://0.0.0.0:0"), "listen: 'tcp://0.0.0.0:0' is not allowed; expected "),
        (("--listen", "nowhere"), "listen: 'nowhere' is not allowed; expected "),
        (("--key", "{key}"), "allow: None is not allowed; expected an allowlist, with --key"),
        (("--allow", "{key}"), "key: None is not allowed; expected a key file, with --allow"),
        (("--key", "{key}", "--allow", "{key}"), "allow: "),
        (("--config", "{{}}"), "config: '{}' is not allowed; expected an engine's configuration"),
        (("--max-requests", 0), "max_requests: 0 is not allowed; expected an integer 1 to "),
        (("--log-format", "xml"), "log_format: 'xml' is not allowed; expected json or text"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    pilotfish: Run, llama: Path, tmp_path: Path, options: tuple[object, ...], line: str
) -> None:
    write_key_pair(new_key_pair(), tmp_path / "own.key")
    given = [option.format(key=tmp_path / "own.key") if isinstance(option, str) else option for option in options]
    result = pilotfish("target", "--model", llama, "--listen", f"ipc://{tmp_path}/target", "--kv-slots", 64, *given)
    assert result.code == 2 and result.stderr.startswith(f"pilotfish: {line}") and result.stderr.count("\n") == 1


def test_a_process_serves_two_servers_that_hold_its_keys_and_ends_in_order(llama: Path, tmp_path: Path) -> None:
    pairs = {name: new_key_pair() for name in ("target", "a", "b", "stranger")}
    write_key_pair(pairs["target"], tmp_path / "target.key")
    (tmp_path / "servers").write_text(f"{pairs['a'].public} one\n{pairs['b'].public} two\n")
    fixed = ("--dtype", "float32", "--threads", "1", "--kv-slots", "1024", "--json", "--name", "target 7")
    own_keys = ("--key", str(tmp_path / "target.key"), "--allow", str(tmp_path / "servers"))
    listen = ("--model", str(llama), "--listen", "tcp://127.0.0.1:0", *own_keys)
    command = [sys.executable, "-m", "pilotfish", "target", *listen, *fixed]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ExitStack() as s,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            endpoint = msgspec.json.decode(process.stdout.readline())["endpoint"]
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
            assert endpoint.startswith("tcp://127.0.0.1:") and title == "pilotfish: target 7"
            keys = [TargetKeys(pairs[name], pairs["target"].public) for name in ("a", "b", "stranger")]
            channels = [DialingChannel([endpoint], own.own.public[:8].encode(), [own]) for own in keys]
            a, b, stranger = (AttendingServer(s.enter_context(closing(channel))) for channel in channels)
            params = [SamplingParams(max_tokens=9, seed=seed, temperature=0.8) for seed in (1, 2)]
            for server, own in zip((a, b), params, strict=True):
                identity = server.join().identity
                assert identity.kv_slots == 1024 and identity.version and identity.tokenizer
                server.submit(1, [5, 6, 7], own)  # the same number
            outputs = [server.output(1) for server in (a, b)]
            assert a.whole and b.whole
            os.kill(process.pid, signal.SIGTERM)
            for server in (a, b):
                assert server.until(Declined).reason == "it shuts down"
            assert process.wait(LIMIT) == 0
            assert not stranger.channel.receive(0.5) and stranger.channel.refused(TARGET)
            lines = process.stderr.read()
        finally:
            process.kill()
    assert outputs == run(make_engine(llama), [[5, 6, 7]] * 2, params)
    assert f"target 7 listens at {endpoint}" in lines and "Traceback" not in lines and "leak" not in lines
