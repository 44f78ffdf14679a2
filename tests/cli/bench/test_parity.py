"""Parity finds nothing where there is nothing, and finds errors that there are."""

import numpy as np
import pytest
from command_runs import Measure

from pilotfish.cli.bench import parity
from pilotfish.cli.bench.parity import (
    CASES,
    PARITY_SETTINGS,
    SETUPS,
    ParityCase,
    run_parity,
)
from pilotfish.core.drafting.drafter import NoDrafter
from pilotfish.core.scheduling import scheduler
from pilotfish.core.trees.tree import Forest, Guesses, Ints, Verdict, walk
from pilotfish.errors import EngineError
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
    cases = [case for case in CASES if case.concurrency > 1]
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
    found = {
        (outcome["drafter"], outcome["concurrency"]) for outcome in report.results["outcomes"] if outcome["differing"]
    }
    assert {("lm 16", 8), ("lm 16", 1), ("random", 8), ("random", 1), ("lm+ngram", 1)} <= found
    assert ("off", 8) not in found
    assert len(report.results["differences"]) == report.results["differing"]
    bfloat16 = measure(run_parity, "parity", thread_counts="1", max_tokens=4, limit=1, dtype="bfloat16")
    assert bfloat16.results["differing"] and not bfloat16.failed  # only a match rate is promised there


def test_drafters_that_offer_nothing_prove_nothing(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CASES", (ParityCase("ngram", 8), ParityCase("lm", 8, 16)))
    monkeypatch.setattr(NgramDrafter, "propose", NoDrafter.propose)
    report = measure(run_parity, "parity", thread_counts="1", max_tokens=8, limit=1)
    assert report.results["differing"] == 0 and report.failed
    assert {outcome["drafter"] for outcome in report.results["outcomes"] if outcome["vacuous"]} == {"ngram"}


def test_a_drafter_that_fails_is_not_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Guesses]:
        raise RuntimeError("broken")

    monkeypatch.setattr(parity, "CASES", (ParityCase("ngram", 8),))
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
