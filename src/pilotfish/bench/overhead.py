"""What the prefix cache costs where no request begins as another did: speed with it over speed without, in pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice

from pilotfish.bench.contestants import OFF, Run, contestant_of, joined, over, rates, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, equal_share, ratios
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.engine.engine import Engine

ON = "on"


@dataclass(frozen=True)
class SaltedJobs:
    """The jobs of a round, and whose they are: equal prompts of two rounds are two tenants'."""

    jobs: Sequence[Job]
    salt: str


@dataclass(frozen=True)
class PaidRun:
    """A run, and the CPU time that all threads of this process took for it."""

    run: Run
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.run.tokens_per_second


def run_overhead(options: BenchOptions, progress: ProgressBar) -> Report:
    """In one engine two schedulers take turns over the same slots, the cache's pool filled first: every slot that is
    taken later has to be evicted."""
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    progress.total = 2 * len(concurrencies) * (options.repeats + 1)
    rows: list[Row] = []
    with Engine(options.engine_config(prefix_cache=True)) as engine:
        caching, config = engine.worker.scheduler, engine.config
        _fill(options, engine)
        plain = Scheduler(SlotPool(caching.pool.capacity, caching.pool.window), config.max_rows, config.max_requests)
        plays = {name: partial(_play, engine, scheduler) for name, scheduler in ((OFF, plain), (ON, caching))}
        for number in concurrencies:
            work = [_jobs(options, number, turn) for turn in range(options.repeats + 1)]
            rounds = take_turns(plays, work, done=lambda name, n=number: progress(f"{name}, {n} at a time"))  # type: ignore[misc]
            rows.append({"concurrency": number, **overhead_of(rounds)})
    return Report({"overhead": rows})


def _fill(options: BenchOptions, engine: Engine) -> None:
    scheduler = engine.worker.scheduler
    assert scheduler.cache is not None  # as configured
    turns = count(-1, -1)
    while not scheduler.cache.evicted:
        _play(engine, scheduler, _jobs(options, 1, next(turns)))


def _jobs(options: BenchOptions, number: int, turn: int) -> SaltedJobs:
    """So many prompts for a round; each round goes on in the file where the one before it ended."""
    prompts = options.rows()
    chosen = islice(cycle(prompts), turn * number % len(prompts), None)
    jobs = [prompt.job(options.temperature, options.max_tokens, turn) for prompt in islice(chosen, number)]
    return SaltedJobs(jobs, f"{number} at a time, round {turn}")


def _play(engine: Engine, scheduler: Scheduler, work: SaltedJobs) -> PaidRun:
    engine.worker.scheduler = scheduler
    began = time.process_time()
    run = contestant_of(engine).run(engine, work.jobs, len(work.jobs), cache_salt=work.salt)
    return PaidRun(run, time.process_time() - began)


def overhead_of(rounds: Mapping[str, Sequence[PaidRun]]) -> Row:
    """`on_over_off` is the ratio of tokens a second, `cpu_on_over_off` that of CPU seconds, which others on the machine
    disturb less."""
    own, other = (joined([paid.run for paid in rounds[name]]) for name in (ON, OFF))
    cpu = {name: [paid.cpu_seconds for paid in rounds[name]] for name in rounds}
    return {
        "pairs": len(rounds[ON]),
        "off": Spread.of(rates(rounds[OFF])),
        "on": Spread.of(rates(rounds[ON])),
        "on_over_off": over(ON, OFF, rounds),
        "cpu_on_over_off": ratios(cpu[ON], cpu[OFF]),
        "cached_tokens": own.total("cached_tokens"),
        "equal_outputs": equal_share(own.outputs, other.outputs),
    }
