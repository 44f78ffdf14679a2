"""Contestants: engines and drafters that generate the same work in turn."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from typing import Protocol, TypeVar

import numpy as np

from pilotfish.cli.bench.report import Row, Spread, distinct_ngrams, equal_share, ratios
from pilotfish.cli.bench.workload import Job
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import drafter_kinds
from pilotfish.core.drafting.drafter import Drafter, DraftLimits, NoDrafter
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget, StepLoad
from pilotfish.core.scheduling.request import RequestStats
from pilotfish.engine.engine import Engine
from pilotfish.engine.trial import make_budget
from pilotfish.errors import EngineError
from pilotfish.workers.records import StepRecord

OFF = "off"
Work = TypeVar("Work")
Result = TypeVar("Result")


def take_turns(
    contestants: Mapping[str, Callable[[Work], Result]],
    rounds: Iterable[Work],
    warm_up: int = 1,
    done: Callable[[str], None] = lambda *_: None,
) -> dict[str, list[Result]]:
    """Returns each contestant's results in order of rounds. Every contestant plays every round, in rotating order;
    results of the first `warm_up` rounds are dropped. `done` is called with the name of who has played."""
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn, work in enumerate(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            result = contestants[name](work)
            done(name)
            if turn >= warm_up:
                results[name].append(result)
    return results


@dataclass(frozen=True)
class OutputTimes:
    """When an output was begun, and when its tokens came: seconds of `perf_counter`. A step has one."""

    began: float  # its first row in a step
    times: list[float]  # [tokens]


@dataclass(frozen=True)
class Run:
    """Outputs of one contestant in one round, the time they took, and counts."""

    seconds: float
    outputs: list[list[int]]
    stats: list[RequestStats] = field(default_factory=list)  # of each output
    steps: list[StepRecord] = field(default_factory=list)
    overruns: float = 0.0  # share of the target's forwards
    texts: list[str] = field(default_factory=list)  # of each output
    ends: list[str] = field(default_factory=list)  # of each output: its finish reason, or the error
    times: list[OutputTimes] = field(default_factory=list)  # of each output
    logprobs: list[list[float]] = field(default_factory=list)  # of each output's tokens, where its job asked for them

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.stats)

    def by_depth(self, name: str) -> list[int]:
        """Sums of the requests' counts by depth: depth d is at index d - 1."""
        return [sum(column) for column in zip_longest(*(getattr(one, name) for one in self.stats), fillvalue=0)]

    @property
    def accepted_by_origin(self) -> dict[str, int]:
        return dict(sum((Counter(one.accepted_by_origin) for one in self.stats), Counter[str]()))

    def spent(self, *parts: str) -> float:
        return sum(ended - began for step in self.steps for began, ended in map(step.parts.__getitem__, parts))


def joined(runs: Sequence[Run]) -> Run:
    outputs, stats = [output for run in runs for output in run.outputs], [one for run in runs for one in run.stats]
    return Run(sum(run.seconds for run in runs), outputs, stats, [step for run in runs for step in run.steps])


class Timed(Protocol):
    @property
    def tokens_per_second(self) -> float: ...


def rates(runs: Sequence[Timed]) -> list[float]:
    return [run.tokens_per_second for run in runs]


def over(name: str, other: str, rounds: Mapping[str, Sequence[Timed]]) -> Spread:
    return ratios(rates(rounds[name]), rates(rounds[other]))


def speed_of(name: str, rounds: Mapping[str, Sequence[Run]]) -> Row:
    """Tokens of all sequences a second, prompts' forwards included. `nodes` are those verified in a step of a sequence,
    `hit_share` counts steps after which a tree was left, `overruns` are a share of the target's forwards."""
    runs, own = rounds[name], joined(rounds[name])
    steps = own.total("verify_steps")
    return {
        "contestant": name,
        "tokens_per_second": Spread.of(rates(runs)),
        "distinct_4grams": distinct_ngrams(own.outputs),
        "over_off": over(name, OFF, rounds),
        "tokens_per_verify_step": own.tokens / steps,
        "nodes": own.total("draft_tokens") / steps,
        "hit_share": own.total("hits") / steps,
        "equal_outputs": equal_share(own.outputs, joined(rounds[OFF]).outputs),
        **periods_of([run.steps for run in runs]),
        "overruns": statistics.mean(run.overruns for run in runs),
    }


def periods_of(runs: Sequence[Sequence[StepRecord]]) -> Row:
    """Milliseconds from the end of one step to the end of the next, where neither had rows of prompts. `between_ms` is
    the mean part of it outside the device's work: the forward, and sampling."""
    pairs = [pair for steps in runs for pair in pairwise(steps) if not any(map(has_prompt_rows, pair))]
    if not pairs:
        return {}
    periods = [1000 * (step.ended - before.ended) for before, step in pairs]
    mean, forward = statistics.mean(periods), statistics.mean(1000 * (s.verified - s.prepared) for _, s in pairs)
    p50, p99 = np.percentile(periods, (50, 99)).tolist()
    return {"period_ms": mean, "p50_ms": p50, "p99_ms": p99, "between_ms": mean - forward}


def has_prompt_rows(step: StepRecord) -> bool:
    return step.rows != step.sequences + step.nodes


def check_drafter(engine: Engine) -> None:
    """EngineError if the drafter failed: a service goes on without it, a measurement of it must not."""
    if engine.worker.drafter.drafter is not engine.drafter:
        raise EngineError("the drafter failed and was dropped; the log says why")


def overruns(engine: Engine) -> float:
    return next((pacing.share for pacing in engine.pacing() if pacing.role == "target"), 0.0)


@dataclass(frozen=True)
class Contestant:
    drafter: Callable[[], Drafter]
    budget: Callable[[], Budget]

    def run(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        concurrency: int,
        done: Callable[[], None] = lambda *_: None,
        cache_salt: str | None = None,
    ) -> Run:
        """Generate all jobs in an idle engine, `concurrency` at a time, in order of arrival; `done` is called for each.
        With a `cache_salt` a suffix drafter guesses from outputs of jobs that ended before. EngineError if the drafter
        failed, or while requests run."""
        engine.use(self.drafter(), self.budget())
        scheduler = engine.worker.scheduler
        scheduler.max_requests = min(concurrency, scheduler.max_rows)
        steps: list[StepRecord] = []
        engine.worker.observe = steps.append
        began = time.perf_counter()
        samples = [engine.submit(job.prompt.text, job.params, cache_salt)[0] for job in jobs]
        times: dict[int, list[float]] = {one.request_id: [] for one in samples}
        while engine.busy:
            deltas = engine.step()
            now = time.perf_counter()
            for delta in deltas:
                times[delta.id] += [now] * len(delta.tokens)
                if delta.finish is not None:
                    done()
        check_drafter(engine)
        seconds = time.perf_counter() - began
        outputs, stats = [one.token_ids for one in samples], [one.request.stats for one in samples]
        texts, ends = [one.text for one in samples], [str(one.error or one.finish_reason) for one in samples]
        passed = [OutputTimes(one.started + (one.queued or 0.0), times[one.request_id]) for one in samples]
        scored = [[token.logprob for token in one.logprobs] for one in samples]
        return Run(seconds, outputs, stats, steps, overruns(engine), texts, ends, passed, scored)


PLAIN = Contestant(NoDrafter, partial(FixedBudget, 1, 1))


def contestant_of(engine: Engine) -> Contestant:
    return Contestant(always(engine.drafter), always(engine.worker.budget))


def drafting(engine: Engine, drafter: str, nodes: int = 0) -> Contestant:
    """`off`, or what EngineConfig.drafter may name; trees of so many nodes, or as configured, are verified in full.
    `engine` is of mode sync."""
    config, kinds = engine.config, () if drafter == OFF else drafter_kinds(drafter)
    return Contestant(partial(engine.drafters.make, kinds), partial(FixedBudget, nodes or config.nodes, config.levels))


class PausedBudget:
    """Adaptive; its clock stands still while others run: else runs would begin with probes that fell due meanwhile."""

    def __init__(self, budget: AdaptiveBudget) -> None:
        self._budget, self.nodes, self.observe = budget, budget.nodes, budget.observe
        self._begins = True
        self._now = self._paused = 0.0  # seconds: the last step, pauses left out; the pauses up to this run

    def begin_run(self) -> "PausedBudget":
        self._begins = True
        return self

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        if self._begins:
            self._paused, self._begins = now - self._now, False
        self._now = now - self._paused
        return self._budget.limits(load, self._now)


def budgets_of(config: EngineConfig, engine: Engine, drafter: Drafter) -> Callable[[], Budget]:
    """Fixed, or one that adapts and keeps what it learns from run to run."""
    if config.budget == "fixed":
        return partial(FixedBudget, config.nodes, config.levels)
    budget = make_budget(config, engine.worker.executor, drafter)
    assert isinstance(budget, AdaptiveBudget)  # the configuration says so
    return PausedBudget(budget).begin_run


def always(one: Result) -> Callable[[], Result]:
    return lambda: one
