"""Parity and task success: nothing is found where there is nothing, and errors that there are."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from command_runs import Measure, write_rows

from pilotfish.cli.bench import parity
from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.parity import CASES, PARITY_SETTINGS, SETUPS, ParityCase, run_parity
from pilotfish.cli.bench.tasks.success import chosen_tasks, run_eval
from pilotfish.cli.bench.workload import parse_choices
from pilotfish.config.fields import Mode
from pilotfish.core.drafting.drafter import NoDrafter
from pilotfish.core.scheduling import scheduler
from pilotfish.core.trees.tree import Forest, Guesses, Ints, Verdict, walk
from pilotfish.errors import EngineError, ParameterError
from pilotfish.workers.ngram import NgramDrafter


def _accepts_first_child(forest: Forest, sampled: Ints) -> list[Verdict]:
    """A wrong rule: a root's first child is accepted whatever the target says; below it the walk is right."""
    roots = forest.starts[:-1] + np.arange(forest.num_trees)
    first, own = forest.starts[:-1], np.diff(forest.starts) > 0
    wrong = sampled.copy()
    wrong[roots[own]] = forest.nodes.tokens[first[own]]
    return walk(forest, wrong)


def test_zero_differences(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batched cases; tests/soak has them all."""
    cases = [case for case in CASES if case.batched]
    monkeypatch.setattr(parity, "CASES", cases)
    report = measure(run_parity, "parity", thread_counts="1,2", max_tokens=8, limit=1)
    results = report.results
    assert not report.failed and not results["differences"] and results["differing"] == 0
    assert len(results["outcomes"]) == 2 * len(cases)
    assert all(outcome["compared"] == len(PARITY_SETTINGS) for outcome in results["outcomes"])
    assert not any(outcome["vacuous"] for outcome in results["outcomes"])
    assert all(outcome["accepted"] for outcome in results["outcomes"] if outcome["drafter"].startswith("lm"))
    assert [outcome["threads"] for outcome in results["across_threads"]] == [2]


def test_a_wrong_rule_is_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in CASES if case.name in ("off", "lm 16", "random", "lm+ngram")]
    monkeypatch.setattr(parity, "CASES", cases)
    monkeypatch.setattr(scheduler, "walk", _accepts_first_child)
    report = measure(run_parity, "parity", thread_counts="1", max_tokens=8, limit=1)
    assert report.failed
    outcomes = report.results["outcomes"]
    found = {(outcome["drafter"], outcome["concurrency"]) for outcome in outcomes if outcome["differing"]}
    assert {("lm 16", 8), ("lm 16", 1), ("random", 8), ("random", 1), ("lm+ngram", 1)} <= found
    assert ("off", 8) not in found
    assert len(report.results["differences"]) == report.results["differing"]
    bfloat16 = measure(run_parity, "parity", thread_counts="1", max_tokens=4, limit=1, dtype="bfloat16")
    assert bfloat16.results["differing"] and not bfloat16.failed  # only a match rate is promised there


def test_drafters_that_offer_nothing_prove_nothing(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CASES", (ParityCase("ngram", True), ParityCase("lm", True, 16)))
    monkeypatch.setattr(NgramDrafter, "propose", NoDrafter.propose)
    report = measure(run_parity, "parity", thread_counts="1", max_tokens=8, limit=1)
    assert report.results["differing"] == 0 and report.failed
    assert {outcome["drafter"] for outcome in report.results["outcomes"] if outcome["vacuous"]} == {"ngram"}


def test_a_drafter_that_fails_is_not_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Guesses]:
        raise RuntimeError("broken")

    monkeypatch.setattr(parity, "CASES", (ParityCase("ngram", True),))
    monkeypatch.setattr(NgramDrafter, "propose", broken)
    with pytest.raises(EngineError, match="the drafter failed"):
        measure(run_parity, "parity", thread_counts="1", max_tokens=8, limit=1)


# -- mode async


@pytest.mark.usefixtures("drafts")
def test_no_differences_in_mode_async(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SETUPS", (SETUPS[0], SETUPS[3]))  # one draft unpaced, three paced
    report = measure(run_parity, "parity", compared="async", thread_counts="1", max_tokens=6, limit=1)
    outcomes = report.results["outcomes"]
    assert report.results["differing"] == 0 and not report.failed
    assert all(outcome["accepted"] and outcome["compared"] == len(PARITY_SETTINGS) for outcome in outcomes)
    drafters = ("async, 1 draft", "async, 3 drafts, paced")
    expected = [(name, n) for d in drafters for name, n in ((d, 8), (f"{d}, preempted", 8), (d, 1))]
    assert [(outcome["drafter"], outcome["concurrency"]) for outcome in outcomes] == expected


# -- task success: modes succeed alike, and where their outputs differ the report fails


MODES = ("off", "sync", "async")
SHORT = {"each": 2, "max_tokens": 32, "kv_slots": 4096, "threads": 1}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """The first is solved as it is, the second is not."""
    same = {"test": "def check(f):\n    assert f() == 0", "entry_point": "f"}
    rows = [{"task_id": f"own/{i}", "prompt": f"def f():\n    return {i}\n", **same} for i in range(2)]
    return write_rows(tmp_path / "problems.jsonl", *rows)


@pytest.mark.usefixtures("drafts")
def test_modes_succeed_alike(measure: Measure, problems: Path) -> None:
    given = {**SHORT, "max_tokens": 96, "allow_code_execution": True, "humaneval": str(problems)}
    report = measure(run_eval, "eval", **given, modes=",".join(MODES))
    rows = report.results["categories"]
    assert [row["category"] for row in rows] == ["exact", "json", "tools", "code", "humaneval"]
    assert [row["tasks"] for row in rows] == [2, 2, 2, 2, 2] and not report.failed
    assert report.results["unequal"] == sum(row["unequal"] for row in rows) == 0
    assert rows[1]["off_successes"] and rows[2]["off_successes"]
    for row in rows:
        assert len({row[f"{mode}_successes"] for mode in MODES}) == 1
        assert row["off_tokens_per_verify_step"] == 1 <= row["sync_tokens_per_verify_step"]
    assert any(row["sync_tokens_per_verify_step"] > 1 for row in rows)
    outcomes = report.results["outcomes"]
    for outcome in outcomes:
        assert outcome["equal"] and len({outcome[mode] for mode in MODES}) == 1
        assert outcome["off"] == (outcome["reason"] == "")
        if outcome["category"] in ("json", "tools"):  # what the grammar let end is valid
            assert outcome["off"] or outcome["cut_off"]
    for row in rows:
        own = [outcome for outcome in outcomes if outcome["category"] == row["category"]]
        assert row["off_successes"] == sum(outcome["off"] for outcome in own)
        assert row["off_success_rate"] == row["off_successes"] / len(own)
    assert isinstance(report.results["programs_confined_to_their_directory"], bool)


def test_outputs_that_differ_are_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "walk", _accepts_first_child)
    report = measure(run_eval, "eval", **SHORT, modes="off,sync")
    results = report.results
    assert report.failed and results["unequal"] == sum(row["unequal"] for row in results["categories"]) > 0
    assert results["unequal"] == sum(not outcome["equal"] for outcome in results["outcomes"])
    low = measure(run_eval, "eval", **{**SHORT, "each": 1}, modes="off,sync", dtype="bfloat16")
    assert low.results["unequal"] and not low.failed  # equality is promised in float32


def test_code_is_left_out_unless_it_may_run(measure: Measure) -> None:
    report = measure(run_eval, "eval", **{**SHORT, "each": 1}, modes="off")
    assert [row["category"] for row in report.results["categories"]] == ["exact", "json", "tools"]
    assert report.results["left_out"] == "code: --allow-code-execution runs it"
    assert "programs_confined_to_their_directory" not in report.results


def test_what_is_refused(problems: Path) -> None:
    for modes in ("", "off,off", "fast", "off, sync"):
        with pytest.raises(ParameterError, match=r"^modes: .* expected some of off, sync, async, separated by commas$"):
            parse_choices("modes", modes, get_args(Mode))
    with pytest.raises(ParameterError, match=r"^humaneval: .* expected --allow-code-execution with it"):
        chosen_tasks(BENCHES["eval"].options(humaneval=str(problems)))
