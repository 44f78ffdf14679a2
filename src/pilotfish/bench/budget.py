"""The adaptive budget beside fixed trees and plain decoding, by how many sequences run at a time."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from pilotfish.bench.compare import Spread, pairwise_ratios
from pilotfish.bench.drafters import Bench, JobRunner
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.quantization import equal_outputs
from pilotfish.bench.report import print_table
from pilotfish.bench.watched import WatchedBudget
from pilotfish.bench.workload import Job, Prompt
from pilotfish.config import EngineConfig
from pilotfish.core.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.drafter import Drafter, NoDrafter
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.costs import make_budget
from pilotfish.engine.sample import Sample

AUTO = "auto"
#: What the adaptive budget may lose against the best fixed choice.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Workload:
    """What every contestant generates in a round: `batches` times as many sequences as run at a time."""

    prompts: list[Prompt]
    temperature: float
    max_tokens: int
    batches: int

    def jobs(self, concurrency: int, turn: int) -> list[Job]:
        """Of one round: prompts over and over, each time with another seed."""
        laps = enumerate(islice(cycle(self.prompts), self.num_jobs(concurrency)))
        return [self._job(prompt, turn * self.batches * concurrency + index) for index, prompt in laps]

    def num_jobs(self, concurrency: int) -> int:
        return concurrency * self.batches

    def _job(self, prompt: Prompt, offset: int) -> Job:
        params = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=prompt.seed + offset)
        return Job(prompt, f"T={self.temperature:g}", params)


@dataclass(frozen=True)
class BudgetSpeed:
    """One contestant at one concurrency: tokens of all sequences a second, prompts' forwards included."""

    concurrency: int
    contestant: str
    tokens_per_second: Spread
    equal_outputs: float  # share of the outputs that are those of plain decoding


@dataclass(frozen=True)
class AutoResult:
    """The adaptive budget at one concurrency. Its steady load: steps in which all sequences sample."""

    concurrency: int
    best_fixed: str  # by its median; plain decoding counts as fixed
    ratio: Spread  # adaptive over best fixed, round by round
    choices: dict[str, int]  # in how many rounds it was the last choice of the steady load
    steady_seconds: float
    changes: int  # of choice, in steady load
    changes_per_second: float
    probe_share: float  # of the steady load's steps, those that drafted where the choice was not to, or the reverse


@dataclass(frozen=True)
class BudgetReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    quantization: str
    prompts: int
    temperature: float
    max_tokens: int
    batches: int
    repeats: int
    nodes: int
    levels: int
    width: int
    speeds: list[BudgetSpeed]
    auto: list[AutoResult]


@dataclass(frozen=True)
class Contestant:
    """A drafter and the budget that it gets."""

    drafter: Drafter
    budget: Budget


@dataclass(frozen=True)
class Run:
    """All jobs of a round by one contestant."""

    seconds: float
    samples: list[Sample]

    @property
    def tokens_per_second(self) -> float:
        return sum(len(sample.token_ids) for sample in self.samples) / self.seconds


#: Runs of each contestant in order of rounds.
Rounds = dict[str, list[Run]]


def run_budget(
    config: EngineConfig,
    workload: Workload,
    concurrencies: Sequence[int],
    fixed: Sequence[int],
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> BudgetReport:
    """Plain decoding, trees of `fixed` nodes and the adaptive budget, `repeats` rounds after a warm-up. `machine` is
    probed unless given. `done` is called with a label for each sequence."""
    bench = Bench(replace(config, budget="auto"))
    speeds: list[BudgetSpeed] = []
    auto: list[AutoResult] = []
    for concurrency in concurrencies:
        watched = WatchedBudget(adaptive_budget(bench), concurrency)
        players = contestants(bench, watched, fixed)
        rounds = _measure(bench, players, watched, workload, concurrency, repeats, done)
        speeds.extend(speed_of(concurrency, name, runs, rounds["off"]) for name, runs in rounds.items())
        auto.append(auto_result(concurrency, rounds, watched))
    return BudgetReport(
        machine=machine or describe_machine(config.dtype),
        target=str(config.target),
        draft=str(config.draft),
        dtype=config.dtype,
        quantization=config.quantization,
        prompts=len(workload.prompts),
        temperature=workload.temperature,
        max_tokens=workload.max_tokens,
        batches=workload.batches,
        repeats=repeats,
        nodes=config.nodes,
        levels=config.levels,
        width=config.width,
        speeds=speeds,
        auto=auto,
    )


def num_sequences(workload: Workload, concurrencies: Sequence[int], fixed: Sequence[int], repeats: int) -> int:
    """How many sequences `run_budget` generates, warm-up included."""
    return (len(set(fixed)) + 2) * (repeats + 1) * sum(map(workload.num_jobs, concurrencies))


def adaptive_budget(bench: Bench) -> AdaptiveBudget:
    """A fresh one, as the engine makes it."""
    budget = make_budget(bench.engine.config, bench.engine.worker.executor, bench.lm_drafter)
    assert isinstance(budget, AdaptiveBudget)  # the configuration says so
    return budget


def contestants(bench: Bench, auto: Budget, fixed: Sequence[int]) -> dict[str, Contestant]:
    """`off`, `fixed <nodes>` and `auto`, each with a drafter of its own."""
    levels = bench.engine.config.levels
    trees = {
        f"fixed {nodes}": Contestant(bench.lm(), FixedBudget(nodes, min(nodes, levels))) for nodes in sorted(fixed)
    }
    off = Contestant(NoDrafter(), FixedBudget(1, 1))  # of which nothing is drafted
    return {"off": off, **trees, AUTO: Contestant(bench.lm(), auto)}


def _measure(
    bench: Bench,
    players: dict[str, Contestant],
    watched: WatchedBudget,
    workload: Workload,
    concurrency: int,
    repeats: int,
    done: Callable[[str], None],
) -> Rounds:
    """One round to warm up, then `repeats`, in which contestants take turns in going first."""
    rounds: Rounds = {name: [] for name in players}
    names = list(players)
    for turn in range(repeats + 1):
        jobs, first = workload.jobs(concurrency, turn), turn % len(names)
        if turn == 1:
            watched.clear()
        for name in (*names[first:], *names[:first]):
            if name == AUTO:
                watched.begin_run()
            run = run_jobs(bench, players[name], jobs, concurrency, partial(done, f"{name}, {concurrency} at a time"))
            if turn > 0:
                rounds[name].append(run)
    return rounds


def run_jobs(
    bench: JobRunner, player: Contestant, jobs: Sequence[Job], concurrency: int, done: Callable[[], None]
) -> Run:
    bench.engine.use(player.drafter, player.budget)
    bench.engine.worker.scheduler.max_requests = concurrency
    began = time.perf_counter()
    samples = [bench.engine.submit(job.prompt.text, job.params)[0] for job in jobs]
    bench.drain(done)
    return Run(time.perf_counter() - began, samples)


def speed_of(concurrency: int, name: str, runs: list[Run], plain: list[Run]) -> BudgetSpeed:
    equal = [equal_outputs(run.samples, off.samples) for run, off in zip(runs, plain, strict=True)]
    return BudgetSpeed(concurrency, name, Spread.of([run.tokens_per_second for run in runs]), statistics.mean(equal))


def auto_result(concurrency: int, rounds: Rounds, watched: WatchedBudget) -> AutoResult:
    speeds = {name: [run.tokens_per_second for run in runs] for name, runs in rounds.items()}
    best = best_fixed(speeds)
    return AutoResult(
        concurrency,
        best,
        Spread.of(pairwise_ratios(speeds[AUTO], speeds[best])),
        dict(Counter(f"{choice.effort.value} {choice.bucket}" for choice in watched.last_choices)),
        watched.seconds,
        watched.changes,
        watched.changes / watched.seconds if watched.seconds else 0.0,
        watched.probes / watched.steps if watched.steps else 0.0,
    )


def best_fixed(speeds: dict[str, list[float]]) -> str:
    """The contestant with the best median, the adaptive budget left out."""
    return max((name for name in speeds if name != AUTO), key=lambda name: statistics.median(speeds[name]))


def print_budget(report: BudgetReport) -> None:
    tree = f"auto up to {report.nodes} nodes, up to {report.levels} levels of {report.width} leaves"
    precision = f"{report.dtype}, quantization {report.quantization}, T={report.temperature:g}"
    size = f"{report.batches} x concurrency sequences of {report.max_tokens} tokens, {report.repeats} rounds"
    columns = ("at a time", "contestant", "tokens/s: median (quartiles)", "min", "max", "outputs as off")
    print_table(f"{report.target}, {precision}, {size}, {tree}", columns, map(_speed_row, report.speeds))
    watched = ("choices", "steady s", "changes", "a second", "probes")
    compared = ("at a time", "best fixed", "auto over it", f"within {TOLERANCE:.0%}")
    print_table("the adaptive budget", (*compared, *watched), map(_auto_row, report.auto))


def _speed_row(speed: BudgetSpeed) -> tuple[object, ...]:
    spread = speed.tokens_per_second
    ends = (f"{spread.minimum:.1f}", f"{spread.maximum:.1f}", f"{speed.equal_outputs:.0%}")
    return (speed.concurrency, speed.contestant, spread, *ends)


def _auto_row(auto: AutoResult) -> tuple[object, ...]:
    within = "yes" if auto.ratio.median >= 1 - TOLERANCE else "no"
    choices = ", ".join(f"{choice} ({rounds})" for choice, rounds in auto.choices.items())
    steady = (f"{auto.steady_seconds:.1f}", auto.changes, f"{auto.changes_per_second:.2f}", f"{auto.probe_share:.1%}")
    return (auto.concurrency, auto.best_fixed, auto.ratio, within, choices, *steady)
