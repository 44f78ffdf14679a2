"""Benches that pass or fail, and those that need many processes, for as long as it takes: `make soak`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import SNIPPETS
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.disaggregation import ALL_HANDED, AUTO, UNDISTURBED, combined
from pilotfish.bench.parity import CASES, SETUPS, async_cases
from pilotfish.bench.sharing import GROUPS, KILL_PHASES
from pilotfish.bench.tasks import KINDS


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


def test_async_with_draft_workers(prompts: Path) -> None:
    sizes = ("--temperatures", "0.8,0", "--concurrency", "1,4", "--max-tokens", "48", "--repeats", "1")
    report = invoke("async", prompts, "--sync", "2x2:4,4x4:16", *sizes)
    assert all(row["equal_outputs"] == 1 for row in report["speeds"])


def test_a_pool_is_shared_by_weights_and_survived(prompts: Path) -> None:
    sizes = ("--seconds", "2", "--repeats", "2", "--streams", "8", "--max-tokens", "256", "--weights", "3,1")
    report = invoke("sharing", prompts, *sizes)
    heavy, light = report["tenants"]
    assert (heavy["weight"], light["weight"]) == (3, 1) and light["rows_to_last"]["median"] == 1
    assert all(row[name]["median"] > 0 for row in (heavy, light) for name in ("rows_per_second", "tokens_per_second"))
    assert report["leaves_taken"]["median"] > 0
    assert [(row["group"], row["phase"]) for row in report["groups"]] == [(g, p) for g in GROUPS for p in KILL_PHASES]
    assert all(row["tokens_per_second"]["median"] > 0 for row in report["groups"])
    assert sum(row["streams"]["median"] for row in report["groups"] if row["phase"] == "before") == 8
    assert report["seconds_to_move"]["median"] > 0


def test_a_draft_that_stands_still(prompts: Path) -> None:
    sizes = ("--seconds", "2", "--pause", "3", "--repeats", "2", "--max-tokens", "256", "--budget", "fixed")
    before, during, after = invoke("stall", prompts, *sizes)["phases"]
    assert before["tokens_per_step"] > 1 and after["tokens_per_step"] > 1 and during["steps"] > 0


def test_prompts_that_are_computed_elsewhere_disturb_no_output(prompts: Path) -> None:
    load = ["--lengths=200", "--arriving=1000", "--streams=2", "--max-tokens=4", "--seconds=3", "--repeats=1"]
    report = invoke("disaggregation", prompts, *load, "--pace=target=20ms,prefill=20ms", "--kv-slots=16384")
    rows = {row["layout"]: row for row in report["cells"]}
    assert list(rows) == [UNDISTURBED, combined(256), ALL_HANDED, AUTO]
    assert all(row["gap_p99_ms"] >= row["gap_p50_ms"] > 0 for row in rows.values())
    others = [row for name, row in rows.items() if name != UNDISTURBED]
    assert rows[UNDISTURBED]["prompts"] == 0 and all(row["prompts"] == others[0]["prompts"] > 0 for row in others)
    assert all(row["equal_outputs"] == 1 for row in others)
    assert rows[ALL_HANDED]["handed"] == 1 and rows[combined(256)]["handed"] == 0


def test_transfers_of_a_deep_model_are_measured(prompts: Path) -> None:
    arguments = ["hidden-transfer", f"--prompts={prompts}", "--dtype=float32", "--json", "--lengths=70", "--repeats=2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["handovers"]
    assert [row["transport"] for row in rows] == ["shm", "ipc", "tcp"]
    for row in rows:
        assert row["mib"] == 69 * 32 * 2 * 2 * 64 * 4 / (1 << 20)  # all tokens but the last
        assert row["alone_ms"]["minimum"] > 0 and row["work_ms"]["minimum"] > 0


def test_contestants_agree(prompts: Path) -> None:
    """In processes of their own, with whatever is installed of the extra."""
    report = invoke("compare", prompts, "--threads", "2", "--max-tokens", "24", "--limit", "3", "--repeats", "1")
    names = [row["contestant"] for row in report["speeds"]]
    assert {"off", "sync", "async", "transformers", "transformers, assisted"} <= set(names)
    assert all(row["as_transformers"]["minimum"] == 1 for row in report["speeds"])
