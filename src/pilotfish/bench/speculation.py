"""Async against sync and off, on paced devices and at the machine's own speed; budgets against fixed trees."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

from pilotfish.bench.contestants import (
    OFF,
    PLAIN,
    Contestant,
    Run,
    always,
    compete,
    contestant_of,
    over,
    rates,
    speed_of,
    take_turns,
)
from pilotfish.bench.levels import levels_of, read_levels
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row
from pilotfish.bench.workload import Job, jobs_at, parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, DraftLimits
from pilotfish.core.scheduling.budget import AdaptiveBudget, Choice, Effort, FixedBudget, StepLoad
from pilotfish.core.scheduling.step import RequestCommit, Step
from pilotfish.core.trees.tree import Forest
from pilotfish.engine.costs import make_budget
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError
from pilotfish.workers.ngram import NgramDrafter

ASYNC = "async"
MODES = (OFF, "sync", ASYNC)
CORES_WARM_UP = 2  # jobs


def parse_sync(text: str) -> tuple[int, int, int]:
    """Levels, width and nodes of a tree as sync grows and verifies it in every step: `LEVELSxWIDTH:NODES`.
    ParameterError otherwise."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9}):(\d{1,9})", text, re.ASCII)
    levels, width, nodes = map(int, match.groups()) if match else (0, 0, 0)
    if not all(0 < number <= 64 for number in (levels, width, nodes)):
        raise ParameterError("sync", text, "LEVELSxWIDTH:NODES, each 1 to 64, as in 4x8:16")
    return levels, width, nodes


def run_async(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs all contestants in turn, `repeats` rounds after one to warm up."""
    with TemporaryDirectory() as directory:
        timeline = Path(directory) / "timeline.json"
        report, runs = _run_async(options, timeline, progress)
        levels = read_levels(timeline)
    drafts = [{**where, **levels_of(own, levels)} for where, own in runs]
    return replace(report, results={**report.results, "drafts": drafts})


def _run_async(
    options: BenchOptions, timeline: Path, progress: ProgressBar
) -> tuple[Report, list[tuple[Row, list[Run]]]]:
    """The report, and the runs of async."""
    config = options.engine_config(mode="async", budget="fixed", trace=timeline)
    settings = [parse_sync(text) for text in options.sync.split(",")]
    temperatures = [float(text) for text in options.temperatures.split(",")]
    numbers = {c: max(c, len(options.rows())) for c in parse_numbers("concurrency", options.concurrencies)}
    progress.total = (options.repeats + 1) * (len(settings) + 2) * len(temperatures) * sum(numbers.values())
    speeds, results, runs = list[Row](), list[Row](), list[tuple[Row, list[Run]]]()
    with Engine(config) as engine:
        contestants = _contestants(engine, settings)
        for temperature, (concurrency, number) in product(temperatures, numbers.items()):
            jobs = replace(options, temperature=temperature).rounds(number)
            rounds = compete(engine, contestants, jobs, concurrency, progress)
            where = {"temperature": temperature, "concurrency": concurrency}
            speeds += [{**where, **speed_of(name, rounds)} for name in rounds]
            results.append({**where, **_against_best_sync(config, concurrency, rounds)})
            runs.append((where, rounds[ASYNC]))
    return Report({"speeds": speeds, "results": results}), runs


def _contestants(engine: Engine, settings: Sequence[tuple[int, int, int]]) -> dict[str, Contestant]:
    """Off and sync take their turns in the async engine."""
    grid = {sync_name(setting): sync_contestant(engine, setting) for setting in settings}
    return {OFF: PLAIN, **grid, ASYNC: contestant_of(engine)}


def sync_name(setting: tuple[int, int, int]) -> str:
    """Of levels, width and nodes."""
    levels, width, nodes = setting
    return f"sync {levels}x{width}, {nodes} nodes"


def sync_contestant(engine: Engine, setting: tuple[int, int, int]) -> Contestant:
    """Whole trees of so many levels, leaves a level and nodes."""
    levels, width, nodes = setting

    def drafter() -> Drafter:
        lm = engine.drafters.make_lm(width)
        return CombinedDrafter([lm, NgramDrafter()]) if "ngram" in engine.config.drafters else lm

    return Contestant(drafter, partial(FixedBudget, nodes, levels))


def _against_best_sync(config: EngineConfig, concurrency: int, rounds: Mapping[str, Sequence[Run]]) -> Row:
    """Async over the sync setting with the best median. The ceiling is tokens a second if async lost nothing: the most
    tokens a step of sync at no more nodes, over the paced verify."""
    sync = [speed_of(name, rounds) for name in rounds if name not in (OFF, ASYNC)]
    best = max(sync, key=lambda row: row["tokens_per_second"].median)["contestant"]
    own = speed_of(ASYNC, rounds)
    most = max((row["tokens_per_verify_step"] for row in sync if row["nodes"] <= config.nodes), default=0.0)
    pace, rows = config.paces.target, round(concurrency * (1 + own["nodes"]))
    ceiling = 0.0 if pace is None else concurrency * most / pace.seconds(rows)
    return {
        "best_sync": best,
        "async_over_sync": over(ASYNC, best, rounds),
        "ceiling": ceiling,
        "share_of_ceiling": own["tokens_per_second"].median / ceiling if ceiling else 0.0,
    }


def run_cores(options: BenchOptions, progress: ProgressBar) -> Report:
    """Off and sync on all cores, async's target and draft on their own. Contestants take turns, each time with a new
    engine and one sequence at a time."""
    jobs = jobs_at(options.rows(), options.temperature, options.max_tokens)
    progress.total = len(MODES) * options.repeats * len(jobs)
    runs = {mode: partial(_fresh_run, options.engine_config(mode=mode), partial(progress, mode)) for mode in MODES}
    rounds = take_turns(runs, [jobs] * options.repeats, warm_up=0)
    return Report({"speeds": [speed_of(mode, rounds) for mode in MODES]})


def _fresh_run(config: EngineConfig, done: Callable[[], None], jobs: Sequence[Job]) -> Run:
    with Engine(config) as engine:
        contestant = contestant_of(engine)
        contestant.run(engine, jobs[:CORES_WARM_UP], concurrency=1)
        return contestant.run(engine, jobs, 1, done)


# -- budgets

AUTO = "auto"
#: Share that the adaptive budget may lose against the best fixed choice.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Chosen:
    """What an adaptive budget chose in a step."""

    at: float  # seconds, pauses left out
    sequences: int  # that sampled
    choice: Choice
    drafts: bool


class WatchedBudget:
    """An adaptive budget, and what it chose in each step of each run. Its clock stands still while other contestants
    run, or each of its runs would begin with the probes that fell due meanwhile."""

    def __init__(self, budget: AdaptiveBudget) -> None:
        self._budget = budget
        self._now = 0.0  # seconds: the last step, pauses left out
        self._paused = 0.0  # seconds, up to this run
        self.runs: list[list[Chosen]] = []

    def begin_run(self) -> WatchedBudget:
        """Itself, for another run after a pause."""
        self.runs.append([])
        return self

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        if not self.runs[-1]:
            self._paused = now - self._now
        self._now = now - self._paused
        limits = self._budget.limits(load, self._now)
        self.runs[-1].append(Chosen(self._now, load.sequences, self._budget.choice, limits.levels > 0))
        return limits

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:
        return self._budget.nodes(load, offered, draft_seconds, levels)

    def observe(self, step: Step, commits: Sequence[RequestCommit], forward_seconds: float) -> None:
        self._budget.observe(step, commits, forward_seconds)


def run_budget(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs plain decoding, trees of `fixed` nodes and the adaptive budget, `repeats` rounds after a warm-up."""
    engine = Engine(options.engine_config(budget="auto"))
    lm = engine.drafter
    concurrencies, fixed = parse_numbers("concurrency", options.concurrencies), parse_numbers("fixed", options.fixed)
    progress.total = (len(set(fixed)) + 2) * (options.repeats + 1) * options.batches * sum(concurrencies)
    speeds, auto = list[Row](), list[Row]()
    for concurrency in concurrencies:
        budget = make_budget(engine.config, engine.worker.executor, lm)
        assert isinstance(budget, AdaptiveBudget)  # the configuration says so
        watched = WatchedBudget(budget)
        players, jobs = contestants(engine, watched, fixed), options.rounds(options.batches * concurrency)
        rounds = compete(engine, players, jobs, concurrency, progress)
        speeds += [{"concurrency": concurrency, **speed_of(name, rounds)} for name in rounds]
        auto.append(
            {"concurrency": concurrency, **auto_result(rounds), **steady_choices(watched.runs[1:], concurrency)}
        )
    return Report({"speeds": speeds, "auto": auto})


def contestants(engine: Engine, auto: WatchedBudget, fixed: Sequence[int]) -> dict[str, Contestant]:
    """The contestants `off`, `fixed <nodes>` and `auto`."""
    levels = engine.config.levels
    trees = {
        f"fixed {nodes}": Contestant(engine.drafters.make_lm, partial(FixedBudget, nodes, min(nodes, levels)))
        for nodes in sorted(set(fixed))
    }
    return {OFF: PLAIN, **trees, AUTO: Contestant(always(engine.drafters.make_lm()), auto.begin_run)}


def auto_result(rounds: Mapping[str, Sequence[Run]]) -> Row:
    """The adaptive budget over the fixed choice with the best median, plain decoding included."""
    medians = {name: statistics.median(rates(runs)) for name, runs in rounds.items() if name != AUTO}
    best = max(medians, key=lambda name: medians[name])
    ratio = over(AUTO, best, rounds)
    return {"best_fixed": best, "ratio": ratio, f"within_{TOLERANCE:.0%}": ratio.median >= 1 - TOLERANCE}


def steady_choices(runs: Sequence[Sequence[Chosen]], concurrency: int) -> Row:
    """Last choices of each run, changes of choice and probes in steady load, the steps in which all sequences sample. A
    probe drafts where the choice is not to, or the reverse; a change on the first steady step is the load's doing."""
    steady = [[one for one in run if one.sequences == concurrency] for run in runs]
    pairs = [(a, b) for run in runs for a, b in pairwise(run) if a.sequences == b.sequences == concurrency]
    seconds, changes = sum(b.at - a.at for a, b in pairs), sum(a.choice != b.choice for a, b in pairs)
    probes = [one.drafts != (one.choice.effort is Effort.DRAFT) for run in steady for one in run]
    last = [one.choice for run in steady for one in run[-1:]]
    return {
        "choices": dict(Counter(f"{choice.effort.value} {choice.bucket}" for choice in last)),
        "steady_seconds": seconds,
        "changes": changes,
        "changes_per_second": changes / seconds if seconds else 0.0,
        "probe_share": statistics.mean(probes) if probes else 0.0,
    }
