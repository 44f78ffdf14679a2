"""Coding agents as they come: a conversation in which the model calls a tool, reads its result and ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer
from scripted_model import write_scripted

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")
PACKAGES = ("@openai/codex@0.171.0", "opencode-ai@1.18.33")
NOTE = "the word is halibut"
SAID = ("These", " notes", " name", " a", " fish", " that", " lives", " deep", " below", " cold", " seas", ".")
#: A turn ends with a cue: no tools are offered, a tool has answered, or it is to be called.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "<assistant>{% if not tools %}<cue:title>"
    "{% elif messages[-1].role == 'tool' %}<cue:end>{% else %}<cue:call>{% endif %}"
)
#: The beginning of a call, of the tool with which each agent runs commands, and how it begins the command.
CALLS = {
    "codex": ('\n<tool_call>\n{"name": "exec_command", ', '"arguments": {"cmd": "cat '),
    "opencode": ('\n<tool_call>\n{"name": "bash", ', '"arguments": {"description": "Reads.", "command": "cat '),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", directory]
    subprocess.run([*command, *PACKAGES], check=True)
    return directory / "node_modules" / ".bin"


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, LiveServer]]:
    agent, mode = request.param
    call = ["I look.", *CALLS[agent], 'notes.txt"}}\n</tool_call>']
    script = {"<cue:call>": call, "<cue:end>": SAID, "<cue:title>": ["A title"]}
    model = write_scripted(tmp_path / "model", script, TEMPLATE, context=65536)
    options = {} if mode == "off" else {"draft": model, "pace": "target=20ms"}
    names = {"served_model_name": "tiny", "kv_slots": 100_000}
    with LiveServer(model, mode=mode, **names, **options) as server:
        yield agent, server
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert (accepted > 0) == (mode == "async")


def lines_of(command: Sequence[str | Path], home: Path, project: Path) -> list[dict[str, Any]]:
    """What an agent tells of its work, as JSON."""
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    environment = {**os.environ, **quiet, "HOME": str(home), "PWD": str(project)}
    done = subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def codex(server: LiveServer, programs: Path, home: Path, project: Path) -> tuple[str, str]:
    """What the command printed, and what the agent said last."""
    (home / ".codex").mkdir(parents=True)
    catalog = home / "catalog.json"
    catalog.write_text(json.dumps(server.get("/v1/models?client_version=1")[1]))
    (home / ".codex" / "config.toml").write_text(
        f'model = "tiny"\nmodel_provider = "pilotfish"\nmodel_catalog_json = "{catalog}"\n[model_providers.pilotfish]\n'
        f'name = "Pilotfish"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    lines = lines_of([programs / "codex", "exec", *flags, "What do the notes say?"], home, project)
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    assert [item["type"] for item in items] == ["agent_message", "command_execution", "agent_message"]
    return items[1]["aggregated_output"], items[2]["text"]


def opencode(server: LiveServer, programs: Path, home: Path, project: Path) -> tuple[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1"},
        "models": {"tiny": {"limit": {"context": 65536, "output": 4096}}},
    }
    models = {"model": "pilotfish/tiny", "small_model": "pilotfish/tiny", "enabled_providers": ["pilotfish"]}
    config = {**models, "provider": {"pilotfish": provider}, "share": "disabled"}
    (project / "opencode.json").write_text(json.dumps(config))
    command = [programs / "opencode", "run", "--format", "json", "What do the notes say?"]
    parts = [line["part"] for line in lines_of(command, home, project)]
    (call,) = (part for part in parts if part["type"] == "tool")
    return call["state"]["output"], [part["text"] for part in parts if part["type"] == "text"][-1]


AGENTS: dict[str, Callable[..., tuple[str, str]]] = {"codex": codex, "opencode": opencode}


@pytest.mark.parametrize(
    "served", [(agent, mode) for agent in AGENTS for mode in ("off", "async")], ids=str, indirect=True
)
def test_a_tool_is_called_and_read(served: tuple[str, LiveServer], programs: Path, tmp_path: Path) -> None:
    agent, server = served
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "notes.txt").write_text(NOTE)
    printed, said = AGENTS[agent](server, programs, home, project)
    assert printed.strip() == NOTE and said.strip() == "".join(SAID)
