"""Async against sync and off: on paced devices, and at the machine's own speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from pilotfish.bench.contestants import OFF, PLAIN, Contestant, Run, compete, run_jobs, speed_of, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import Progress, Report, Row
from pilotfish.bench.workload import Job, jobs_at, parse_numbers
from pilotfish.config import EngineConfig
from pilotfish.core.budget import FixedBudget
from pilotfish.core.drafter import Drafter
from pilotfish.draft.combined import CombinedDrafter
from pilotfish.draft.lm import LMDrafter, TreeShape
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.engine.engine import Engine, load
from pilotfish.errors import ParameterError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.pacer import Pacer
from pilotfish.model.runner import Runner

ASYNC = "async"
MODES = (OFF, "sync", ASYNC)
CORES_WARM_UP = 2  # jobs


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


def run_async(options: BenchOptions, progress: Progress) -> Report:
    """Every contestant in turn, `repeats` rounds after one to warm up."""
    config = options.engine_config(mode="async", budget="fixed")
    settings = [SyncSetting.parse(text) for text in options.sync.split(",")]
    temperatures = [float(text) for text in options.temperatures.split(",")]
    numbers = {c: max(c, len(options.rows())) for c in parse_numbers("concurrency", options.concurrencies)}
    turns = options.repeats + 1
    progress.total = turns * (len(settings) + 2) * len(temperatures) * sum(numbers.values())
    speeds, results = list[Row](), list[Row]()
    with Engine(config) as engine:
        contestants = _contestants(engine, settings)
        for temperature, (concurrency, number) in product(temperatures, numbers.items()):
            workload = options.workload(temperature)
            jobs = [workload.jobs(number, turn) for turn in range(turns)]
            rounds = compete(engine, contestants, jobs, concurrency, progress)
            where = {"temperature": temperature, "concurrency": concurrency}
            speeds += [{**where, **speed_of(name, rounds)} for name in rounds]
            results.append({**where, **_against_best_sync(config, concurrency, rounds)})
    return Report({"speeds": speeds, "results": results})


def _contestants(engine: Engine, settings: Sequence[SyncSetting]) -> dict[str, Contestant]:
    """Off and sync take their turns in the async engine."""
    config, remote = engine.config, engine.drafter
    assert config.draft is not None  # EngineConfig checks it
    runner = Runner(load(config, config.draft), engine.memory.slots)
    pacer = None if config.paces.draft is None else Pacer("draft", config.paces.draft)
    executor = TorchExecutor(runner, pacer, engine.model.shape.vocab_size)

    def sync(setting: SyncSetting) -> Drafter:
        lm = LMDrafter(executor, TreeShape(setting.width))
        return CombinedDrafter([lm, NgramDrafter()]) if "ngram" in config.drafters else lm

    grid = {str(one): Contestant(partial(sync, one), FixedBudget(one.nodes, one.levels)) for one in settings}
    return {OFF: PLAIN, **grid, ASYNC: Contestant(lambda: remote, FixedBudget(config.nodes, config.levels))}


def _against_best_sync(config: EngineConfig, concurrency: int, rounds: Mapping[str, Sequence[Run]]) -> Row:
    """Async over the sync setting with the best median. The ceiling is tokens a second if async lost nothing: the most
    tokens a step of sync at no more nodes, over the paced verify."""
    sync = [speed_of(name, rounds) for name in rounds if name not in (OFF, ASYNC)]
    best = max(sync, key=lambda row: row["tokens_per_second"].median)["contestant"]
    own = speed_of(ASYNC, rounds, [best])
    most = max((row["tokens_per_verify_step"] for row in sync if row["nodes"] <= config.nodes), default=0.0)
    pace, rows = config.paces.target, round(concurrency * (1 + own["nodes"]))
    ceiling = 0.0 if pace is None else concurrency * most / pace.seconds(rows)
    return {
        "best_sync": best,
        "async_over_sync": own[f"over_{best}"],
        "ceiling": ceiling,
        "share_of_ceiling": own["tokens_per_second"].median / ceiling if ceiling else 0.0,
    }


def run_cores(options: BenchOptions, progress: Progress) -> Report:
    """Off and sync on all cores, async's target and draft on their own. Contestants take turns, each time with a new
    engine and one sequence at a time."""
    jobs = jobs_at(options.rows(), options.temperature, options.max_tokens)
    progress.total = len(MODES) * options.repeats * len(jobs)
    runs = {mode: partial(_fresh_run, options.engine_config(mode=mode), partial(progress, mode)) for mode in MODES}
    rounds = take_turns(runs, [jobs] * options.repeats, warm_up=0)
    return Report({"speeds": [speed_of(mode, rounds) for mode in MODES]})


def _fresh_run(config: EngineConfig, done: Callable[[], None], jobs: Sequence[Job]) -> Run:
    with Engine(config) as engine:
        run_jobs(engine, jobs[:CORES_WARM_UP], concurrency=1)
        return run_jobs(engine, jobs, 1, done)
