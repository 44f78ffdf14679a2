"""deploy/ and docs/cluster.md: the commands there are ones that the command line takes."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_runs import Run
from manifests import KEYS, ROOT, WITH_COMMANDS
from pages import codes, table

from pilotfish.server.auth import file_entry, new_secret
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair


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
