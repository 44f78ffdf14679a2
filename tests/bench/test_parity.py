"""Parity finds nothing where there is nothing, and finds what is wrong."""

import dataclasses

import numpy as np
import pytest

from pilotfish.bench.parity import num_sequences, print_parity, run_parity, runs
from pilotfish.bench.workload import PARITY_SETTINGS, Prompt
from pilotfish.config import EngineConfig
from pilotfish.core import scheduler
from pilotfish.core.drafter import NoDrafter
from pilotfish.core.tree import Forest, Ints, TokenTree, Verdict, walk
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.errors import EngineError


def test_zero_differences(config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    report = run_parity(config, prompts, 8, [1, 2], done.append)
    assert report.differing == 0 and not report.failed and not report.differences
    assert len(done) == num_sequences(len(prompts), [1, 2])
    assert len(report.outcomes) == 2 * (len(runs()) - 1)
    assert all(outcome.compared == len(PARITY_SETTINGS) * len(prompts) for outcome in report.outcomes)
    assert not any(outcome.vacuous for outcome in report.outcomes)
    assert all(outcome.accepted for outcome in report.outcomes if outcome.drafter.startswith("lm"))
    assert [outcome.threads for outcome in report.across_threads] == [2]
    print_parity(report)
    assert "lm 48" in capsys.readouterr().out


def _accepts_first_child(forest: Forest, sampled: Ints) -> list[Verdict]:
    """A wrong rule: a root's first child is accepted whatever the target says; below it the walk is right."""
    roots = forest.starts[:-1] + np.arange(forest.num_trees)
    first, own = forest.starts[:-1], np.diff(forest.starts) > 0
    wrong = sampled.copy()
    wrong[roots[own]] = forest.nodes.tokens[first[own]]
    return walk(forest, wrong)


def test_a_wrong_rule_is_found(
    config: EngineConfig, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "walk", _accepts_first_child)
    report = run_parity(config, prompts[:1], 8, [1])
    assert report.failed
    found = {(outcome.drafter, outcome.concurrency) for outcome in report.outcomes if outcome.differing}
    assert {("lm 16", 8), ("lm 16", 1), ("random", 8), ("random", 1), ("lm+ngram", 1)} <= found
    assert ("off", 8) not in found
    assert len(report.differences) == report.differing
    assert not dataclasses.replace(report, dtype="bfloat16").failed  # only a match rate is promised there
    print_parity(report)
    assert "first differences" in capsys.readouterr().out


def test_drafters_that_offer_nothing_prove_nothing(
    config: EngineConfig, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", NoDrafter.propose)
    report = run_parity(config, prompts[:1], 8, [1])
    assert report.differing == 0 and report.failed
    assert {outcome.drafter for outcome in report.outcomes if outcome.vacuous} == {"ngram"}


def test_a_drafter_that_fails_is_not_measured(
    config: EngineConfig, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[TokenTree]:
        raise RuntimeError("broken")

    monkeypatch.setattr(NgramDrafter, "propose", broken)
    with pytest.raises(EngineError, match="the drafter failed"):
        run_parity(config, prompts[:1], 8, [1])
