"""`pilotfish serve`: what it refuses before anything is loaded, in one line."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Configured, Run


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """As they were: a server sends all lines of its process to one place."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "host: '0.0.0.0'"),
        (["--port", "70000"], "port: 70000"),
        (["--api-key", "short"], "api_key"),
        (["--api-keys", "/nowhere/keys.toml"], "api_keys"),
        (["--api-key", "a-secret-of-sixteen", "--allow-anonymous"], "allow_anonymous"),
        (["--log-format", "xml"], "log_format: 'xml'"),
        (["--otlp-traces-endpoint", "collector:4317"], "otlp_traces_endpoint: 'collector:4317'"),
        (["--max-queued-requests", "-1"], "max_queued_requests: -1"),
        (["--request-timeout", "nan"], "request_timeout: nan"),
        (["--drain-timeout", "-1"], "drain_timeout: -1"),
        (["--per-request-spec-decode-metrics", "all"], "metrics: 'all'"),
        (["--speculative-config", '{"method": "mlp_speculator"}'], "speculative_config.method: 'mlp_speculator'"),
        (["--served-model-name", ""], "served_model_name"),
        (["--replicas", "0"], "replicas: 0"),
        (["--port", "0", "--target-pool", "http://a"], "target_pool: 'http://a'"),
        (["--port", "0", "--target-pool", "tcp://192.0.2.1:7000"], "target_pool: 'tcp://192.0.2.1:7000'"),
        (["--port", "0", "--target-pool", "ipc:///a", "--target-key", "/nowhere/a.key"], "target_key"),
        (["--port", "0", "--target-pool", "ipc:///a", "--target-pool-key", "abc"], "target_key: None"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    pilotfish: Run, llama: Path, options: list[str], named: str
) -> None:
    result = pilotfish("serve", "--target", str(llama), *options)
    assert result.code == 2
    assert result.stderr.startswith("pilotfish: ") and named in result.stderr and result.stderr.count("\n") == 1


def test_an_address_that_is_taken(pilotfish: Run, llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = pilotfish("serve", "--target", str(llama), "--port", str(taken.getsockname()[1]))
        port = taken.getsockname()[1]
    assert result.code == 2 and result.stderr.startswith(f"pilotfish: port: {port} is in use at 127.0.0.1;")


def test_a_host_that_is_none_of_this_machine(pilotfish: Run, llama: Path) -> None:
    result = pilotfish("serve", "--target", str(llama), "--host", "192.0.2.1", "--allow-anonymous", "--port", "0")
    assert result.code == 2 and result.stderr.startswith("pilotfish: host: '192.0.2.1:0'")


def test_secrets_do_not_show(pilotfish: Run, llama: Path) -> None:
    result = pilotfish("serve", "--target", str(llama), "--api-key", "has a space in it, and is long")
    assert result.code == 2 and "has a space" not in result.stderr


@pytest.mark.parametrize(("terminal", "form"), [(True, "text"), (False, "json")])
def test_json_unless_a_terminal_reads(
    configured: Configured, llama: Path, terminal: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.cli.serve.sys.stderr.isatty", lambda: terminal)
    assert configured(llama).log_format == form


def test_a_file_has_options_and_the_command_line_goes_before_it(
    configured: Configured, llama: Path, draft: Path, tmp_path: Path
) -> None:
    """As bench tune writes it, numbers and switches among them."""
    file = tmp_path / "chosen.toml"
    told = {"target": llama, "draft": draft, "mode": "sync"}
    lines = [f"{name} = '{value}'" for name, value in told.items()]
    file.write_text("\n".join([*lines, "nodes = 5", "levels = 3", "prefix-cache = false", "max_rows = 64"]) + "\n")
    engine = configured("--config", str(file), "--levels", "2").engine
    assert (engine.target, engine.draft, engine.mode, engine.nodes, engine.levels) == (llama, draft, "sync", 5, 2)
    assert not engine.prefix_cache and engine.max_rows == 64


@pytest.mark.parametrize(
    ("text", "named"),
    [("nodez = 5", "nodez: there is no such option"), ("nodes = ", "is not TOML"), (None, "config: ")],
)
def test_a_file_that_is_none_is_refused(pilotfish: Run, tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / "chosen.toml"
    if text is not None:
        file.write_text(text)
    result = pilotfish("serve", "--config", str(file))
    assert result.code == 2 and named in result.stderr and result.stderr.count("\n") == 1
