"""Parity of mode async: equal outputs, every kind of engine, and what is wrong is found."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from inline_drafts import inline_drafts

from pilotfish.bench import parity_async
from pilotfish.bench.parity import print_parity
from pilotfish.bench.parity_async import NODES, PACE, SETUPS, Setup, num_sequences, run_parity_async
from pilotfish.bench.workload import PARITY_SETTINGS, Prompt
from pilotfish.config import EngineConfig
from pilotfish.core import scheduler
from pilotfish.core.drafter import DraftLimits, NoDrafter
from pilotfish.core.request import Request
from pilotfish.core.tree import Forest, Ints, TokenTree, Verdict, walk
from pilotfish.target.remote import RemoteDrafter


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with inline_drafts(monkeypatch):
        yield


def test_zero_differences(config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    report = run_parity_async(config, prompts, 8, [1], done.append)
    assert report.differing == 0 and not report.failed and not report.differences
    assert len(done) == num_sequences(len(prompts), [1])
    assert all(outcome.compared == len(PARITY_SETTINGS) * len(prompts) for outcome in report.outcomes)
    assert all(outcome.accepted for outcome in report.outcomes)
    drafters = ["async, 1 draft", "async, 3 drafts", "async, 1 draft, paced", "async, 3 drafts, paced"]
    expected = [(name, n) for d in drafters for name, n in ((d, 8), (f"{d}, preempted", 8), (d, 1))]
    assert [(outcome.drafter, outcome.concurrency) for outcome in report.outcomes] == expected
    print_parity(report)
    assert "async, 3 drafts, paced, preempted" in capsys.readouterr().out


def test_what_each_side_runs_on(config: EngineConfig) -> None:
    every = sorted(os.sched_getaffinity(0))
    assert {(setup.workers, setup.pace) for setup in SETUPS} == {(1, ""), (3, ""), (1, PACE), (3, PACE)}
    one, all_cores = Setup(3, PACE).config(config, 1), Setup(1, "").config(config, len(every))
    assert (one.mode, one.nodes, one.draft_workers, one.threads) == ("async", NODES, 3, 1)
    assert one.core_set == {every[0]} and all_cores.core_set == set(every)


def _accepts_first_child(forest: Forest, sampled: Ints) -> list[Verdict]:
    """A wrong rule: a root's first child is accepted whatever the target says; below it the walk is right."""
    roots = forest.starts[:-1] + np.arange(forest.num_trees)
    first, own = forest.starts[:-1], np.diff(forest.starts) > 0
    wrong = sampled.copy()
    wrong[roots[own]] = forest.nodes.tokens[first[own]]
    return walk(forest, wrong)


def test_a_wrong_rule_is_found(config: EngineConfig, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_async, "SETUPS", SETUPS[:1])
    monkeypatch.setattr(scheduler, "walk", _accepts_first_child)
    report = run_parity_async(config, prompts[:1], 8, [1])
    assert report.failed and len(report.differences) == report.differing > 0


def test_a_draft_that_sends_nothing_proves_nothing(
    config: EngineConfig, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: RemoteDrafter, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        return NoDrafter().propose(requests, limits)

    monkeypatch.setattr(parity_async, "SETUPS", SETUPS[:1])
    monkeypatch.setattr(RemoteDrafter, "propose", silent)
    report = run_parity_async(config, prompts[:1], 4, [1])
    assert report.differing == 0 and report.failed and all(outcome.vacuous for outcome in report.outcomes)
