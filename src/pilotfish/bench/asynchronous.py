"""Async against the best sync setting and against off, on paced devices; how near async comes to losing nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

from pilotfish.bench.compare import Spread, distinct_ngrams, pairwise_ratios
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import Job, Prompt, jobs_at
from pilotfish.config import EngineConfig
from pilotfish.core.budget import FixedBudget
from pilotfish.core.drafter import Drafter, NoDrafter
from pilotfish.draft.combined import CombinedDrafter
from pilotfish.draft.lm import LMDrafter, TreeShape
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.engine.engine import Engine, load
from pilotfish.engine.sample import Sample
from pilotfish.errors import ParameterError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.pacer import Pacer
from pilotfish.model.runner import Runner
from pilotfish.observe.records import StepRecord

OFF, ASYNC = "off", "async"


@dataclass(frozen=True)
class SyncSetting:
    """A tree as sync grows and verifies it, in every step."""

    levels: int
    width: int
    nodes: int

    def __str__(self) -> str:
        return f"sync {self.levels}x{self.width}, {self.nodes} nodes"

    @classmethod
    def parse(cls, text: str) -> SyncSetting:
        """`LEVELSxWIDTH:NODES`; ParameterError otherwise."""
        shape, _, nodes = text.partition(":")
        numbers = [*shape.split("x"), nodes]
        if len(numbers) != 3 or not all(number.isdecimal() and 0 < int(number) <= 64 for number in numbers):
            raise ParameterError("sync", text, "LEVELSxWIDTH:NODES, each 1 to 64, as in 4x8:16")
        return cls(*map(int, numbers))


@dataclass(frozen=True)
class Periods:
    """Milliseconds from the end of one step to the end of the next, of steps without prompt rows."""

    mean: float
    p50: float
    p99: float
    between: float  # mean part of it outside the device's work: the forward, and sampling


@dataclass(frozen=True)
class ModeSpeed:
    """One contestant: tokens of all sequences a second, over its rounds."""

    contestant: str
    tokens_per_second: Spread
    over_off: Spread
    tokens_per_step: float  # of a sequence
    nodes: float  # verified a step of a sequence
    hit_rate: float
    distinct_4grams: float
    equal_outputs: float  # share equal to those of off
    periods: Periods
    overruns: float  # share of the target's forwards


@dataclass(frozen=True)
class AsyncResult:
    """All contestants at one temperature and concurrency."""

    temperature: float
    concurrency: int
    speeds: list[ModeSpeed]
    best_sync: str
    async_over_sync: Spread
    #: Tokens a second if async lost nothing: the most tokens a step of sync at no more nodes, over the paced verify.
    ceiling: float
    share_of_ceiling: float


@dataclass(frozen=True)
class AsyncReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    pace: str
    nodes: int
    leaves: int
    drafter: str
    prompts: int
    max_tokens: int
    repeats: int
    results: list[AsyncResult]


@dataclass(frozen=True)
class Contestant:
    """A drafter, made anew for each run, and what may be verified."""

    name: str
    make: Callable[[], Drafter]
    budget: FixedBudget


@dataclass(frozen=True)
class Run:
    """All jobs of a round by one contestant."""

    seconds: float
    samples: list[Sample]
    steps: list[StepRecord]
    overruns: float

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass
class Arena:
    """An async engine in which sync and off take their turns: same target, same devices' paces."""

    engine: Engine
    draft: TorchExecutor

    @classmethod
    def open(cls, config: EngineConfig) -> Arena:
        """`config` is of mode async."""
        assert config.draft is not None  # EngineConfig checks it
        engine = Engine(config)
        pace = config.paces.draft
        pacer = None if pace is None else Pacer("draft", pace)
        runner = Runner(load(config, config.draft), engine.memory.slots)
        return cls(engine, TorchExecutor(runner, pacer, engine.model.shape.vocab_size))

    def contestants(self, grid: Sequence[SyncSetting]) -> list[Contestant]:
        config = self.engine.config
        remote = self.engine.drafter
        off = Contestant(OFF, NoDrafter, FixedBudget(1, 1))
        sync = [Contestant(str(s), lambda s=s: self._sync(s), FixedBudget(s.nodes, s.levels)) for s in grid]  # type: ignore[misc]
        return [off, *sync, Contestant(ASYNC, lambda: remote, FixedBudget(config.nodes, config.levels))]

    def _sync(self, setting: SyncSetting) -> Drafter:
        lm = LMDrafter(self.draft, TreeShape(setting.width))
        return CombinedDrafter([lm, NgramDrafter()]) if "ngram" in self.engine.config.drafters else lm

    def run(self, player: Contestant, jobs: Sequence[Job], concurrency: int, done: Callable[[str], None]) -> Run:
        """All jobs, `concurrency` at a time."""
        engine = self.engine
        engine.use(player.make(), player.budget)
        engine.worker.scheduler.max_requests = concurrency
        steps: list[StepRecord] = []
        engine.worker.observe = steps.append
        engine.reset_pacing()
        began = time.perf_counter()
        samples = [engine.submit(job.prompt.text, job.params)[0] for job in jobs]
        while engine.busy:
            for delta in engine.step():
                if delta.sample.finish_reason is not None:
                    done(f"{player.name}, {concurrency} at a time")
        seconds = time.perf_counter() - began
        pacing = next((p for p in engine.pacing() if p.role == "target"), None)
        return Run(seconds, samples, steps, 0.0 if pacing is None else pacing.share)


def run_async(
    config: EngineConfig,
    prompts: list[Prompt],
    grid: Sequence[SyncSetting],
    temperatures: Sequence[float],
    concurrencies: Sequence[int],
    max_tokens: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> AsyncReport:
    """Every contestant in turn, `repeats` rounds after one to warm up. `machine` is probed unless given."""
    machine = machine or describe_machine(config.dtype)
    arena = Arena.open(config)
    with arena.engine:
        players = arena.contestants(grid)
        results = []
        for temperature in temperatures:
            for concurrency in concurrencies:
                rounds = _measure(arena, players, prompts, temperature, concurrency, max_tokens, repeats, done)
                results.append(_result(config, temperature, concurrency, rounds))
    return AsyncReport(
        machine=machine,
        target=str(config.target),
        draft=str(config.draft),
        dtype=config.dtype,
        pace=config.pace,
        nodes=config.nodes,
        leaves=config.leaves,
        drafter=config.drafter,
        prompts=len(prompts),
        max_tokens=max_tokens,
        repeats=repeats,
        results=results,
    )


def num_sequences(prompts: int, grid: int, temperatures: int, concurrencies: Sequence[int], repeats: int) -> int:
    """How many sequences `run_async` generates, warm-up included."""
    return (grid + 2) * temperatures * sum((repeats + 1) * max(prompts, c) for c in concurrencies)


def _measure(
    arena: Arena,
    players: Sequence[Contestant],
    prompts: list[Prompt],
    temperature: float,
    concurrency: int,
    max_tokens: int,
    repeats: int,
    done: Callable[[str], None],
) -> dict[str, list[Run]]:
    rounds: dict[str, list[Run]] = {player.name: [] for player in players}
    for turn in range(repeats + 1):
        jobs = _jobs(prompts, temperature, concurrency, max_tokens, turn)
        first = turn % len(players)
        for player in (*players[first:], *players[:first]):
            run = arena.run(player, jobs, concurrency, done)
            if turn > 0:
                rounds[player.name].append(run)
    return rounds


def _jobs(prompts: list[Prompt], temperature: float, concurrency: int, max_tokens: int, turn: int) -> list[Job]:
    """Each prompt once, or over and over until there is one for each sequence; another seed each round."""
    jobs = islice(cycle(jobs_at(prompts, temperature, max_tokens)), max(len(prompts), concurrency))
    return [
        replace(job, params=replace(job.params, seed=job.prompt.seed + 1000 * turn + lap))
        for lap, job in enumerate(jobs)
    ]


def _result(config: EngineConfig, temperature: float, concurrency: int, rounds: dict[str, list[Run]]) -> AsyncResult:
    speeds = [speed_of(name, runs, rounds[OFF]) for name, runs in rounds.items()]
    sync = [speed for speed in speeds if speed.contestant not in (OFF, ASYNC)]
    best = max(sync, key=lambda speed: speed.tokens_per_second.median)
    ratios = pairwise_ratios(_rates(rounds[ASYNC]), _rates(rounds[best.contestant]))
    same_nodes = [speed for speed in sync if speed.nodes <= config.nodes]
    most = max((speed.tokens_per_step for speed in same_nodes), default=0.0)
    pace = config.paces.target
    own = next(speed for speed in speeds if speed.contestant == ASYNC)
    rows = round(concurrency * (1 + own.nodes))
    ceiling = concurrency * most / pace.seconds(rows) if pace is not None else 0.0
    share = own.tokens_per_second.median / ceiling if ceiling else 0.0
    return AsyncResult(temperature, concurrency, speeds, best.contestant, Spread.of(ratios), ceiling, share)


def _rates(runs: Sequence[Run]) -> list[float]:
    return [run.tokens / run.seconds for run in runs]


def speed_of(name: str, runs: list[Run], off: list[Run]) -> ModeSpeed:
    """Of rounds in which both ran the same jobs."""
    stats = [sample.request.stats for run in runs for sample in run.samples]
    steps = sum(s.verify_steps for s in stats)
    outputs = [[s.token_ids for s in run.samples] for run in runs]
    plain = [[s.token_ids for s in run.samples] for run in off]
    equal = [a == b for x, y in zip(outputs, plain, strict=True) for a, b in zip(x, y, strict=True)]
    return ModeSpeed(
        contestant=name,
        tokens_per_second=Spread.of(_rates(runs)),
        over_off=Spread.of(pairwise_ratios(_rates(runs), _rates(off))),
        tokens_per_step=sum(run.tokens for run in runs) / steps,
        nodes=sum(s.draft_tokens for s in stats) / steps,
        hit_rate=sum(s.hits for s in stats) / steps,
        distinct_4grams=distinct_ngrams([tokens for output in outputs for tokens in output]),
        equal_outputs=statistics.mean(equal),
        periods=periods_of([run.steps for run in runs]),
        overruns=statistics.mean(run.overruns for run in runs),
    )


def periods_of(runs: Sequence[Sequence[StepRecord]]) -> Periods:
    """Over all pairs of neighbours of which neither had rows of prompts."""
    periods, forwards = [], []
    for steps in runs:
        for before, step in pairwise(steps):
            if all(s.rows == s.sequences + s.nodes for s in (before, step)):
                periods.append(1000 * (step.ended - before.ended))
                forwards.append(1000 * (step.verified - step.prepared))
    if not periods:
        return Periods(0.0, 0.0, 0.0, 0.0)
    ranked = sorted(periods)
    mean = statistics.mean(periods)
    return Periods(mean, ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100], mean - statistics.mean(forwards))


def print_async(report: AsyncReport) -> None:
    about = f"{report.target}, {report.dtype}, {report.pace or 'not paced'}, {report.prompts} prompts"
    shape = f"{report.max_tokens} tokens, {report.repeats} rounds, async: {report.nodes} nodes, {report.leaves} leaves"
    columns = ("contestant", "tokens/s: median (quartiles)", "over off", "tokens/step", "nodes", "hits")
    more = ("period ms: mean", "p50", "p99", "between", "overruns", "4-grams", "as off")
    for result in report.results:
        title = f"T={result.temperature:g}, {result.concurrency} at a time: {about}, {shape}"
        print_table(title, (*columns, *more), map(_row, result.speeds))
        ratio = f"async over {result.best_sync}: {result.async_over_sync}"
        ceiling = f"ceiling {result.ceiling:.1f} tokens/s, of which async reaches {result.share_of_ceiling:.2f}"
        print_table("", ("result",), [(ratio,), (ceiling,)])


def _row(speed: ModeSpeed) -> tuple[object, ...]:
    periods = speed.periods
    times = (f"{periods.mean:.2f}", f"{periods.p50:.2f}", f"{periods.p99:.2f}", f"{periods.between:.2f}")
    shares = (f"{speed.overruns:.1%}", f"{speed.distinct_4grams:.2f}", f"{speed.equal_outputs:.0%}")
    per_step = (f"{speed.tokens_per_step:.2f}", f"{speed.nodes:.1f}", f"{speed.hit_rate:.2f}")
    return (speed.contestant, speed.tokens_per_second, speed.over_off, *per_step, *times, *shares)
