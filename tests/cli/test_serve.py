"""`pilotfish serve`: what it refuses before anything is loaded; commands of deploy/ and docs/cluster.md."""

import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_runs import Configured, Refused, Run
from manifests import KEYS, ROOT, WITH_COMMANDS
from pages import codes, table

from pilotfish.server.auth import file_entry, new_secret
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "host: '0.0.0.0'"),
        (["--host", "192.0.2.1", "--allow-anonymous", "--port", "0"], "host: '192.0.2.1:0'"),
        (["--api-key", "short"], "api_key"),
        (["--api-keys", "/nowhere/keys.toml"], "api_keys"),
        (["--api-key", "a-secret-of-sixteen", "--allow-anonymous"], "allow_anonymous"),
        (["--log-format", "xml"], "log_format: 'xml'"),
        (["--otlp-traces-endpoint", "collector:4317"], "otlp_traces_endpoint: 'collector:4317'"),
        (["--speculative-config", '{"method": "mlp_speculator"}'], "speculative_config.method: 'mlp_speculator'"),
        (["--served-model-name", ""], "served_model_name"),
        (["--replicas", "0"], "replicas: 0"),
        (["--cascade", "/nowhere.toml"], "cascade: '/nowhere.toml'"),
        (["--port", "0", "--target-pool", "http://a"], "target_pool: 'http://a'"),
        (["--port", "0", "--target-pool", "tcp://192.0.2.1:7000"], "target_pool: 'tcp://192.0.2.1:7000'"),
        (["--port", "0", "--target-pool", "ipc:///a", "--target-key", "/nowhere/a.key"], "target_key"),
        (["--port", "0", "--target-pool", "ipc:///a", "--target-pool-key", "abc"], "target_key: None"),
    ],
)
def test_what_cannot_be(refused: Refused, llama: Path, options: list[str], named: str) -> None:
    assert named in refused("serve", "--target", llama, *options)


def test_an_address_that_is_taken(refused: Refused, llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", "--target", llama, "--port", port)
    assert line.startswith(f"port: {port} is in use at 127.0.0.1;")


def test_secrets_do_not_show(refused: Refused, llama: Path) -> None:
    assert "has a space" not in refused("serve", "--target", llama, "--api-key", "has a space in it, and is long")


@pytest.mark.parametrize(("terminal", "form"), [(True, "text"), (False, "json")])
def test_json_unless_a_terminal_reads(
    configured: Configured, llama: Path, terminal: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.cli.serve.sys.stderr.isatty", lambda: terminal)
    assert configured(llama).log_format == form


def test_options_go_before_those_of_a_file(configured: Configured, llama: Path, draft: Path, tmp_path: Path) -> None:
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
def test_a_file_that_is_none_is_refused(refused: Refused, tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "chosen.toml").write_text(text)
    assert named in refused("serve", "--config", tmp_path / "chosen.toml")


# -- commands of deploy/ and docs/cluster.md


@pytest.fixture
def mounted(llama: Path, draft: Path, tmp_path: Path) -> dict[str, str]:
    """What stands for paths and variables of a pod."""
    for role in ("api", "target", "draft", "prefill"):
        write_key_pair(new_key_pair(), tmp_path / f"{role}.key")
    subprocess.run([ROOT / "deploy" / "keys.sh", tmp_path, "2", "1", "1"], check=True)
    clients = tmp_path / "clients.toml"
    clients.write_text(file_entry("me", new_secret()))
    clients.chmod(0o600)
    return {
        "/models/target": str(llama),
        "/models/draft": str(draft),
        str(KEYS): str(tmp_path),
        "=keys/": f"={tmp_path}/",
        "/etc/pilotfish/members": str(tmp_path),
        "$(CORES)": "1",
        "$(TARGET_CORES)": "1",
        "0.0.0.0:7": "127.0.0.1:7",
    }


CELLS = [row[-1] for row in table("cluster.md", "Several hosts")]
ON_HOSTS = [line for cell in CELLS for line in codes(cell) if line.startswith("pilotfish ")]
COMMANDS = [pytest.param(pod.command, id=str(pod)) for pod in WITH_COMMANDS]
COMMANDS += [pytest.param(shlex.split(line)[1:], id=" ".join(line.split()[:2])) for line in ON_HOSTS]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken(pilotfish: Run, started: list[Any], mounted: dict[str, str], command: list[str]) -> None:
    for inside, outside in mounted.items():
        command = [word.replace(inside, outside) for word in command]
    result = pilotfish(*command)
    assert (result.code, result.stderr) == (0, "") and len(started) == 1


def test_the_page_has_a_command_for_each_role() -> None:
    assert sorted(shlex.split(line)[1] for line in ON_HOSTS) == ["draft", "prefill", "serve", "target"]
