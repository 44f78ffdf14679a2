"""A tiny pair, a prompt file over it, an engine's configuration."""

import json
from pathlib import Path

import pytest
from support import SNIPPETS

from pilotfish.bench import machine
from pilotfish.bench.workload import Prompt, load_prompts
from pilotfish.config import EngineConfig


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches describe their machine without measuring it: the probes take longer than all the rest."""
    monkeypatch.setattr(machine, "read_probe", lambda *_: lambda: 10.0)
    monkeypatch.setattr(machine, "matmul_probe", lambda *_: 10.0)


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"own/{index}", "turns": [text]} for index, text in enumerate(SNIPPETS)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def prompts(prompt_file: Path) -> list[Prompt]:
    return load_prompts(prompt_file, limit=2)


@pytest.fixture
def config(llama: Path, draft: Path) -> EngineConfig:
    """What every comparison starts from, in float32."""
    return EngineConfig(
        target=llama, draft=draft, mode="sync", drafter="lm", dtype="float32", threads=1, kv_slots=4096, levels=3
    )
