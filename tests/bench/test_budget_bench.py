"""The bench of budgets, on a tiny pair; no test says how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.budget import (
    AUTO,
    AutoResult,
    BudgetReport,
    Run,
    Workload,
    auto_result,
    contestants,
    num_sequences,
    print_budget,
    run_budget,
    run_jobs,
    speed_of,
)
from pilotfish.bench.compare import Spread
from pilotfish.bench.drafters import Bench
from pilotfish.bench.machine import Machine
from pilotfish.bench.watched import WatchedBudget
from pilotfish.bench.workload import Prompt
from pilotfish.config import DType, EngineConfig
from pilotfish.core.budget import AdaptiveBudget, Choice, Effort, FixedBudget, StepLoad
from pilotfish.core.drafter import DraftLimits
from pilotfish.engine.sample import Sample
from pilotfish.errors import InputError
from pilotfish.model.native import load_kernels

MACHINE = Machine("none", 1, 1, "0", "0", 1.0, 1.0)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not load_kernels(), reason="no compiler"))]
)
def test_budget(config: EngineConfig, prompts: list[Prompt], dtype: DType) -> None:
    done: list[str] = []
    workload = Workload(prompts, 0.8, 12, batches=2)
    report = run_budget(replace(config, dtype=dtype), workload, [1, 3], [2, 4], 2, MACHINE, done.append)
    assert len(done) == num_sequences(workload, [1, 3], [2, 4], 2) == 4 * 3 * 2 * (1 + 3)
    names = ["off", "fixed 2", "fixed 4", AUTO]
    assert [(one.concurrency, one.contestant) for one in report.speeds] == [(c, name) for c in (1, 3) for name in names]
    assert all(one.tokens_per_second.count == 2 and one.equal_outputs == 1 for one in report.speeds)
    for auto in report.auto:
        assert auto.best_fixed in names[:-1] and auto.ratio.count == sum(auto.choices.values()) == 2
        assert auto.steady_seconds > 0


def test_contestants_are_what_their_names_say(config: EngineConfig, prompts: list[Prompt]) -> None:
    """And what they generate differs where the jobs do."""
    bench, workload = Bench(config), Workload(prompts, 0.8, 12, batches=2)
    players = contestants(bench, FixedBudget(1, 1), [4, 2])
    assert list(players) == ["off", "fixed 2", "fixed 4", AUTO]
    jobs = workload.jobs(2, 0)
    assert len(jobs) == 4 and len({job.params.seed for turn in (0, 1) for job in workload.jobs(2, turn)}) == 8
    runs = {name: run_jobs(bench, player, jobs, 2, lambda: None) for name, player in players.items()}
    drafted = {name: [s.request.stats.draft_tokens for s in run.samples] for name, run in runs.items()}
    steps = {name: [s.request.stats.verify_steps for s in run.samples] for name, run in runs.items()}
    assert drafted["off"] == [0] * 4 and steps["off"] == [12] * 4
    for few, many in (("off", AUTO), (AUTO, "fixed 2"), ("fixed 2", "fixed 4")):
        assert sum(drafted[few]) < sum(drafted[many]) and sum(steps[few]) > sum(steps[many])
    other = run_jobs(bench, players["off"], workload.jobs(2, 1), 2, lambda: None)
    assert speed_of(2, "other", [other, runs["off"]], [runs["off"]] * 2).equal_outputs == 0.5


@dataclass
class Scripted:
    """Says what an adaptive budget would, step by step: what it has chosen, and whether it drafts."""

    script: Iterator[tuple[Choice, bool]]
    choice: Choice = Choice(Effort.DRAFT, 8)  # noqa: RUF009  # frozen
    changes: int = 0
    times: list[float] = field(default_factory=list)

    def limits(self, load: StepLoad, now: float) -> DraftLimits:  # noqa: ARG002
        self.times.append(now)
        before = self.choice
        self.choice, drafts = next(self.script)
        self.changes += before != self.choice
        return DraftLimits(8, 8, int(drafts), 0.0)


def test_only_steady_load_counts() -> None:
    draft, off = Choice(Effort.DRAFT, 8), Choice(Effort.NONE, 0)
    chosen = (draft, off, off, draft, draft, off)
    drafts = (True, False, True, False, True, False)
    watched = WatchedBudget(cast(AdaptiveBudget, Scripted(zip(chosen, drafts, strict=True))), 2)
    watched.begin_run()
    for now, sequences in enumerate((2, 2, 2, 2)):  # seconds 0 to 3: two changes, two probes
        watched.limits(StepLoad(sequences, sequences), float(now))
    assert (watched.steps, watched.changes, watched.probes, watched.seconds) == (4, 2, 2, 3.0)
    watched.limits(StepLoad(1, 1), 4.0)
    watched.limits(StepLoad(2, 2), 7.0)  # what the new load has it choose is no change in steady load
    assert (watched.steps, watched.changes, watched.probes, watched.seconds) == (5, 2, 2, 3.0)
    assert watched.last_choices == [off]
    watched.clear()
    assert (watched.steps, watched.changes, watched.seconds, watched.last_choices) == (0, 0, 0.0, [])


def test_its_clock_stands_still_while_others_run() -> None:
    scripted = Scripted(cycle([(Choice(Effort.DRAFT, 8), True)]))
    watched = WatchedBudget(cast(AdaptiveBudget, scripted), 1)
    for run in ((100.0, 101.0, 103.0), (200.0, 201.0), (300.0, 305.0)):
        watched.begin_run()
        for now in run:
            watched.limits(StepLoad(1, 1), now)
    assert scripted.times == [0.0, 1.0, 3.0, 3.0, 4.0, 4.0, 9.0]
    assert (watched.steps, watched.seconds, len(watched.last_choices)) == (7, 9.0, 3)


@dataclass
class Tokens:
    token_ids: list[int]


def test_auto_is_compared_with_the_best_median_round_by_round() -> None:
    def runs(*speeds: int) -> list[Run]:
        return [Run(1.0, cast(list[Sample], [Tokens([0] * speed)])) for speed in speeds]

    watched = WatchedBudget(cast(AdaptiveBudget, Scripted(iter(()))), 4)
    watched.begin_run()
    rounds = {"off": runs(10, 10, 90), "fixed 2": runs(20, 40, 10), AUTO: runs(19, 42, 20)}
    result = auto_result(4, rounds, watched)
    assert (result.best_fixed, result.ratio) == ("fixed 2", Spread.of([0.95, 1.05, 2.0]))
    assert result.choices == {"draft 8": 1} and result.changes_per_second == 0


@pytest.mark.parametrize(("ratio", "within"), [(0.96, "yes"), (0.94, "no")])
def test_the_report_says_whether_it_is_near(ratio: float, within: str, capsys: pytest.CaptureFixture[str]) -> None:
    auto = AutoResult(4, "fixed 2", Spread.of([ratio]), {"draft 8": 2, "none 0": 1}, 10.0, 5, 0.5, 0.1)
    sizes = (1, 0.8, 12, 2, 3, 8, 8, 2)
    print_budget(BudgetReport(MACHINE, "target", "draft", "float32", "none", *sizes, [], [auto]))
    out = capsys.readouterr().out
    assert within in out.split() and "draft 8 (2), none 0 (1)" in out


def test_command(llama: Path, draft: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "budget.json"
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file), "--max-tokens", "4"]
    sizes = ["--threads", "1", "--concurrency", "2", "--fixed", "3", "--repeats", "1", "--temperature", "0"]
    result = CliRunner().invoke(app, ["budget", *models, *sizes, "--json", "--out", str(out)])
    assert result.exit_code == 0 and json.loads(result.stdout) == json.loads(out.read_text())
    report = json.loads(result.stdout)
    assert [one["contestant"] for one in report["speeds"]] == ["off", "fixed 3", AUTO]
    assert report["temperature"] == 0 and report["auto"][0]["concurrency"] == 2
    for bad in (["--fixed", "0"], ["--concurrency", "x"]):
        assert isinstance(CliRunner().invoke(app, ["budget", *models, *bad]).exception, InputError)
