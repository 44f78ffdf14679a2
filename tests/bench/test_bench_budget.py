"""The bench of budgets, on a tiny pair; no test says how fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

import pytest
from conftest import Invoke, Measure

from pilotfish.bench.contestants import Run, compete, speed_of
from pilotfish.bench.report import ProgressBar, Spread
from pilotfish.bench.speculation import AUTO, WatchedBudget, auto_result, contestants, run_budget, steady_choices
from pilotfish.bench.workload import Prompt, Workload
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import DType
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.scheduling.budget import AdaptiveBudget, Choice, Effort, FixedBudget, StepLoad
from pilotfish.engine.engine import Engine
from pilotfish.errors import InputError
from pilotfish.model.cpu.native import load_kernels


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not load_kernels(), reason="no compiler"))]
)
def test_budget(measure: Measure, dtype: DType) -> None:
    sizes = {"concurrencies": "1,3", "fixed": "2,4", "max_tokens": 12, "batches": 2, "repeats": 2}
    results = measure(run_budget, "budget", dtype=dtype, threads=1, levels=3, **sizes).results
    names = ["off", "fixed 2", "fixed 4", AUTO]
    speeds = [(row["concurrency"], row["contestant"]) for row in results["speeds"]]
    assert speeds == [(c, name) for c in (1, 3) for name in names]
    assert all(row["tokens_per_second"].count == 2 and row["equal_outputs"] == 1 for row in results["speeds"])
    for auto in results["auto"]:
        assert auto["best_fixed"] in names[:-1] and auto["ratio"].count == sum(auto["choices"].values()) == 2
        assert auto["steady_seconds"] > 0


def test_contestants_are_what_their_names_say(config: EngineConfig, prompts: list[Prompt]) -> None:
    """And their outputs differ where the jobs do."""
    engine, workload = Engine(config), Workload(prompts, 0.8, 12)
    auto = cast(WatchedBudget, Unwatched())
    players = contestants(engine, auto, [4, 2])
    assert list(players) == ["off", "fixed 2", "fixed 4", AUTO]
    jobs = [workload.jobs(4, turn) for turn in (0, 1, 2)]
    assert len({job.params.seed for turn in jobs for job in turn}) == 12
    rounds = compete(engine, players, jobs, 2, ProgressBar())
    drafted, steps = (
        {name: runs[0].total(count) for name, runs in rounds.items()} for count in ("draft_tokens", "verify_steps")
    )
    assert drafted["off"] == 0 and steps["off"] == 4 * 12
    for few, many in (("off", AUTO), (AUTO, "fixed 2"), ("fixed 2", "fixed 4")):
        assert drafted[few] < drafted[many] and steps[few] > steps[many]
    other = {"off": [rounds["off"][0]] * 2, "other": rounds["off"]}
    assert speed_of("other", other)["equal_outputs"] == 0.5


class Unwatched(FixedBudget):
    """In place of an adaptive budget: a node a step."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def begin_run(self) -> FixedBudget:
        """Nobody watches."""
        return self


DRAFT, PLAIN = Choice(Effort.DRAFT, 8), Choice(Effort.NONE, 0)


@dataclass
class Scripted:
    """Says what an adaptive budget would, step by step: what it has chosen, and whether it drafts."""

    script: Iterator[tuple[Choice, bool]]
    choice: Choice = DRAFT
    times: list[float] = field(default_factory=list)

    def limits(self, load: StepLoad, now: float) -> DraftLimits:  # noqa: ARG002
        self.times.append(now)
        self.choice, drafts = next(self.script)
        return DraftLimits(8, 8, int(drafts), 0.0)


def test_only_steady_load_counts() -> None:
    chosen = (DRAFT, PLAIN, PLAIN, DRAFT, DRAFT, PLAIN)
    drafts = (True, False, True, False, True, False)
    watched = WatchedBudget(cast(AdaptiveBudget, Scripted(zip(chosen, drafts, strict=True))))
    watched.begin_run()
    for now, sequences in enumerate((2, 2, 2, 2)):  # seconds 0 to 3: two changes, two probes
        watched.limits(StepLoad(sequences, sequences, 256), float(now))
    four = {"choices": {"draft 8": 1}, "steady_seconds": 3.0, "changes": 2, "changes_per_second": 2 / 3}
    assert steady_choices(watched.runs, 2) == {**four, "probe_share": 0.5}
    watched.limits(StepLoad(1, 1, 256), 4.0)
    watched.limits(StepLoad(2, 2, 256), 7.0)  # what the new load has it choose is no change in steady load
    assert steady_choices(watched.runs, 2) == {**four, "choices": {"none 0": 1}, "probe_share": 0.4}
    nothing = {"choices": {}, "steady_seconds": 0, "changes": 0, "changes_per_second": 0.0, "probe_share": 0.0}
    assert steady_choices(watched.runs[1:], 2) == nothing


def test_its_clock_stands_still_while_others_run() -> None:
    scripted = Scripted(cycle([(DRAFT, True)]))
    watched = WatchedBudget(cast(AdaptiveBudget, scripted))
    for run in ((100.0, 101.0, 103.0), (200.0, 201.0), (300.0, 305.0)):
        watched.begin_run()
        for now in run:
            watched.limits(StepLoad(1, 1, 256), now)
    assert scripted.times == [0.0, 1.0, 3.0, 3.0, 4.0, 4.0, 9.0]
    assert [[one.at for one in run] for run in watched.runs] == [[0.0, 1.0, 3.0], [3.0, 4.0], [4.0, 9.0]]
    assert steady_choices(watched.runs, 1)["steady_seconds"] == 9.0


@pytest.mark.parametrize(("auto", "ratio", "within"), [((19, 42, 20), 1.05, True), ((19, 36, 9), 0.9, False)])
def test_auto_is_compared_with_the_best_median_round_by_round(
    auto: tuple[int, ...], ratio: float, within: bool
) -> None:
    def runs(*speeds: int) -> list[Run]:
        return [Run(1.0, [[0] * speed]) for speed in speeds]

    rounds = {"off": runs(10, 10, 90), "fixed 2": runs(20, 40, 10), AUTO: runs(*auto)}
    result = auto_result(rounds)
    assert result["best_fixed"] == "fixed 2" and result["ratio"].median == ratio and result["within_5%"] == within
    assert result["ratio"] == Spread.of([auto[0] / 20, auto[1] / 40, auto[2] / 10])


def test_command(invoke: Invoke) -> None:
    sizes = ("--threads", "1", "--concurrency", "2", "--fixed", "3", "--repeats", "1", "--max-tokens", "4")
    report = invoke("budget", *sizes, "--temperature", "0")
    assert [row["contestant"] for row in report["speeds"]] == ["off", "fixed 3", AUTO]
    assert report["temperature"] == 0 and report["auto"][0]["concurrency"] == 2
    assert report["machine"]["read_gb_per_s"] == 10.0
    for bad in (("--fixed", "0"), ("--concurrency", "x")):
        with pytest.raises(AssertionError) as raised:
            invoke("budget", *bad)
        assert InputError.__name__ in str(raised.value) or "integers" in str(raised.value)
