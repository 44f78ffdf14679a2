"""Benches that pass or fail, and those that need many processes, for as long as it takes: `make soak`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import start_server
from support import SNIPPETS
from typer.testing import CliRunner

from pilotfish.cli.bench.commands import app
from pilotfish.cli.bench.parity import CASES, SETUPS, async_cases
from pilotfish.cli.bench.report import ProgressBar
from pilotfish.cli.bench.serving.command import run_serve
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.tasks.tasks import KINDS
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"own/{index}", "turns": [text]} for index, text in enumerate(SNIPPETS)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def invoke(command: str, prompts: Path, *options: str) -> dict[str, Any]:
    """Runs a bench on the bundled pair; its JSON. It must exit with 0."""
    arguments = [command, "--pair=pycode", f"--prompts={prompts}", "--dtype=float32", "--json", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("threads", ["1", "2"])
def test_every_drafter_is_lossless(prompts: Path, threads: str) -> None:
    report = invoke("parity", prompts, "--threads", threads, "--max-tokens", "32", "--limit", "4")
    assert report["differing"] == 0 and len(report["outcomes"]) == len(CASES)


def test_thread_counts_agree(prompts: Path) -> None:
    report = invoke("parity", prompts, "--threads", "1,2", "--max-tokens", "24", "--limit", "2")
    assert [(outcome["threads"], outcome["differing"]) for outcome in report["across_threads"]] == [(2, 0)]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_every_async_engine_is_lossless(prompts: Path, threads: str) -> None:
    """Outputs are long enough for drafts that share their cores with the target to be heard before the end."""
    report = invoke("parity", prompts, "--mode", "async", "--threads", threads, "--max-tokens", "128", "--limit", "3")
    assert report["differing"] == 0 and len(report["outcomes"]) == sum(len(async_cases(*setup)) for setup in SETUPS)


def test_tasks_succeed_alike_in_all_modes() -> None:
    options = ["--pair=pycode", "--allow-code-execution", "--json"]
    result = CliRunner().invoke(app, ["eval", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["unequal"] == 0 and [row["category"] for row in report["categories"]] == list(KINDS)
    for row in report["categories"]:
        assert row["off_successes"] == row["sync_successes"] == row["async_successes"]
        assert min(row["sync_tokens_per_verify_step"], row["async_tokens_per_verify_step"]) > 1
    grammatical = [task for task in report["outcomes"] if task["category"] in ("json", "tools")]
    assert all(task["off"] or task["cut_off"] for task in grammatical)
    assert sum(task["off"] for task in grammatical) >= 0.8 * len(grammatical)


def test_a_server_under_requests_in_turns() -> None:
    models = resolve_pair("pycode")
    config = EngineConfig(target=models.target, dtype="float32", threads=1, kv_slots=16384, pace="target=4ms")
    with start_server(config) as server:
        asked = {"base_url": server.told["url"], "endpoint": "completions", "workload": "sessions:1,json:1"}
        sizes = {"requests": 8, "turns": 2, "prompt_tokens": 20, "answer_tokens": 6, "concurrencies": "3", "warmup": 1}
        results = run_serve(ServeBenchOptions(**asked, **sizes), ProgressBar()).results
    assert results["settings"][0]["failed"] == 0 and results["tokens_counted_by"] == ["usage"]
    assert all(len(row["times"]) == row["tokens"] for row in results["requests"])
    later = {row["session"]: row["prompt_tokens"] for row in results["requests"] if row["turn"] == 1}
    first = [row for row in results["requests"] if not row["turn"]]
    assert all(row["prompt_tokens"] < later.get(row["session"], 1 << 20) for row in first)


def test_contestants_agree(prompts: Path) -> None:
    """In processes of their own, with whatever is installed of the extra."""
    report = invoke("compare", prompts, "--threads=2", "--max-tokens=24", "--limit=3", "--repeats=1")
    names = [row["contestant"] for row in report["speeds"]]
    assert {"off", "sync", "async", "transformers", "transformers, assisted"} <= set(names)
    assert all(row["as_transformers"]["minimum"] == 1 for row in report["speeds"])
