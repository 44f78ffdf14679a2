"""The adaptive budget beside fixed trees and plain decoding, by how many sequences run at a time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from pilotfish.bench.contestants import OFF, PLAIN, Contestant, LoadedPair, Run, compete, rates, speed_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import Progress, Report, Row, ratios
from pilotfish.bench.workload import parse_numbers
from pilotfish.core.budget import AdaptiveBudget, Choice, Effort, FixedBudget, StepLoad
from pilotfish.core.drafter import DraftLimits
from pilotfish.core.step import RequestCommit, Step
from pilotfish.core.tree import Forest
from pilotfish.engine.costs import make_budget

AUTO = "auto"
#: Share that the adaptive budget may lose against the best fixed choice.
TOLERANCE = 0.05


class WatchedBudget:
    """An adaptive budget, and its behaviour in steady load: while `concurrency` sequences sample. Its clock stands
    still while other contestants run, or each of its runs would begin with the probes that fell due meanwhile."""

    def __init__(self, budget: AdaptiveBudget, concurrency: int) -> None:
        self._budget, self._concurrency = budget, concurrency
        self._resumes = True  # whether the next step is the first of a run
        self._paused = 0.0  # seconds, up to this run
        self._now = 0.0  # of the last step, pauses left out
        self._steady = False  # whether the last step's load was
        self.clear()

    def clear(self) -> None:
        """Count from here on; what the budget has learned stays."""
        self.steps = self.probes = self.changes = 0
        self.seconds = 0.0
        self.last_choices: list[Choice] = []  # of each run

    def begin_run(self) -> None:
        """Another run follows, after a pause."""
        self._resumes, self._steady = True, False
        self.last_choices.append(self._budget.choice)

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        if self._resumes:
            self._resumes, self._paused = False, now - self._now
        before, last, self._now = self._budget.changes, self._now, now - self._paused
        limits = self._budget.limits(load, self._now)
        steady = load.sequences == self._concurrency
        if steady:
            self._count(limits)
        if steady and self._steady:  # a change on the first steady step is the load's doing
            self.changes += self._budget.changes - before
            self.seconds += self._now - last
        self._steady = steady
        return limits

    def _count(self, limits: DraftLimits) -> None:
        """A step in steady load."""
        self.steps += 1
        self.probes += (limits.levels > 0) != (self._budget.choice.effort is Effort.DRAFT)
        self.last_choices[-1] = self._budget.choice

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:
        return self._budget.nodes(load, offered, draft_seconds, levels)

    def observe(self, step: Step, commits: Sequence[RequestCommit], forward_seconds: float) -> None:
        self._budget.observe(step, commits, forward_seconds)


def run_budget(options: BenchOptions, progress: Progress) -> Report:
    """Plain decoding, trees of `fixed` nodes and the adaptive budget, `repeats` rounds after a warm-up."""
    pair = LoadedPair(options.engine_config(budget="auto"))
    concurrencies, fixed = parse_numbers("concurrency", options.concurrencies), parse_numbers("fixed", options.fixed)
    workload, turns = options.workload(), options.repeats + 1
    progress.total = (len(set(fixed)) + 2) * turns * options.batches * sum(concurrencies)
    speeds, auto = list[Row](), list[Row]()
    for concurrency in concurrencies:
        watched = WatchedBudget(adaptive_budget(pair), concurrency)
        players = contestants(pair, watched, fixed)
        jobs = [workload.jobs(options.batches * concurrency, turn) for turn in range(turns)]
        compete(pair.engine, players, jobs[:1], concurrency, progress)
        watched.clear()
        rounds = compete(pair.engine, players, jobs[1:], concurrency, progress, warm_up=0)
        speeds += [{"concurrency": concurrency, **speed_of(name, rounds)} for name in rounds]
        auto.append({"concurrency": concurrency, **auto_result(rounds, watched)})
    return Report({"speeds": speeds, "auto": auto})


def adaptive_budget(pair: LoadedPair) -> AdaptiveBudget:
    """A new one, as the engine makes it."""
    budget = make_budget(pair.engine.config, pair.engine.worker.executor, pair.lm_drafter)
    assert isinstance(budget, AdaptiveBudget)  # the configuration says so
    return budget


def contestants(pair: LoadedPair, auto: WatchedBudget, fixed: Sequence[int]) -> dict[str, Contestant]:
    """`off`, `fixed <nodes>` and `auto`."""
    levels = pair.engine.config.levels
    trees = {
        f"fixed {nodes}": Contestant(pair.lm, FixedBudget(nodes, min(nodes, levels))) for nodes in sorted(set(fixed))
    }
    return {OFF: PLAIN, **trees, AUTO: Contestant(pair.lm, auto, auto.begin_run)}


def auto_result(rounds: Mapping[str, Sequence[Run]], watched: WatchedBudget) -> Row:
    """The adaptive budget over the fixed choice with the best median, plain decoding included. Its last choices of each
    round, its changes of choice and its probes count in steady load, the steps in which all sequences sample; a probe
    drafts where the choice is not to, or the reverse."""
    speeds = {name: rates(runs) for name, runs in rounds.items()}
    best = max((name for name in speeds if name != AUTO), key=lambda name: statistics.median(speeds[name]))
    ratio = ratios(speeds[AUTO], speeds[best])
    return {
        "best_fixed": best,
        "ratio": ratio,
        f"within_{TOLERANCE:.0%}": ratio.median >= 1 - TOLERANCE,
        "choices": dict(Counter(f"{choice.effort.value} {choice.bucket}" for choice in watched.last_choices)),
        "steady_seconds": watched.seconds,
        "changes": watched.changes,
        "changes_per_second": watched.changes / watched.seconds if watched.seconds else 0.0,
        "probe_share": watched.probes / watched.steps if watched.steps else 0.0,
    }
