"""A tiny pair, a prompt file over it, and benches that run on them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_runs import Measure, write_rows
from support import SNIPPETS

from pilotfish.cli.bench import report
from pilotfish.cli.bench.options import BENCHES, BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report
from pilotfish.cli.bench.workload import Prompt, load_prompts
from pilotfish.config.engine import EngineConfig


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches describe their machine without measuring it: the probes take longer than all the rest."""
    monkeypatch.setattr(report, "read_probe", lambda *_: lambda: 10.0)
    monkeypatch.setattr(report, "matmul_probe", lambda *_: lambda: 10.0)


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": f"own/{index}", "turns": [text]} for index, text in enumerate(SNIPPETS)]
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *rows)


@pytest.fixture
def prompts(prompt_file: Path) -> list[Prompt]:
    return load_prompts(prompt_file, limit=2)


@pytest.fixture
def config(llama: Path, draft: Path) -> EngineConfig:
    """The engine of every comparison, in float32."""
    return EngineConfig(
        target=llama, draft=draft, mode="sync", drafter="lm", dtype="float32", threads=1, kv_slots=4096, levels=3
    )


@pytest.fixture
def measure(llama: Path, draft: Path, prompt_file: Path) -> Measure:
    """A bench on two prompts in float32. Its parts are as many as it said; its report can be shown."""

    def run(function: Callable[[BenchOptions, ProgressBar], Report], command: str, **given: Any) -> Report:
        bench, progress = BENCHES[command], ProgressBar()
        tiny = {"target": llama, "draft": draft, "dtype": "float32", "prompts": prompt_file, "limit": 2}
        options = bench.options(**{**tiny, **given})
        report = replace(function(options, progress), conditions=bench.conditions(options))
        assert progress.tasks[0].completed == progress.total
        report.show()
        return report

    return run
