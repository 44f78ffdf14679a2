"""Async with drafts in pools: a network between target and pool, and a pool that stands still."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np

from pilotfish.bench.contestants import (
    OFF,
    PLAIN,
    Contestant,
    Run,
    always,
    check_drafter,
    compete,
    has_prompt_rows,
    over,
    overruns,
    speed_of,
)
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program, attached, pools_beside, start_proxy
from pilotfish.bench.report import ProgressBar, Report, Row, bar_of
from pilotfish.bench.speculation import WatchedBudget
from pilotfish.bench.workload import Workload, parse_milliseconds
from pilotfish.core.scheduling.budget import AdaptiveBudget
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Ints
from pilotfish.engine.costs import make_budget
from pilotfish.engine.drafts.remote_drafts import RemoteDrafter
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.workers.records import StepRecord

#: The least share of plain decoding's speed that a draft may leave, at any distance.
FLOOR = 0.98
PHASES = ("before", "during", "after")
#: By how much a step during a stall may be longer than the 99th percentile of those before, in ms.
ALLOWANCE_MS = 5.0


# -- a network


def run_network(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs every prompt in `repeats` rounds after one to warm up."""
    round_trips = parse_milliseconds("round_trips", options.round_trips)
    jobs = options.rounds(len(options.rows()))
    progress.total = (len(round_trips) + 1) * len(jobs) * len(jobs[0])
    with ExitStack() as stack:
        (pool,), config = stack.enter_context(pools_beside(options.engine_config(mode="off")))
        engine = stack.enter_context(Engine(config))
        contestants = {OFF: PLAIN}
        for round_trip in round_trips:
            endpoint = stack.enter_context(start_proxy(pool, round_trip, options.mbit)).told["endpoint"]
            remote = stack.enter_context(attached(engine, endpoint))
            contestants[f"{round_trip:g} ms"] = contestant_of(engine, remote.drafter)
        rounds = compete(engine, contestants, jobs, options.concurrency, progress)
        [load] = [one.load for one in remote.pools]
    return Report({**distances_of(rounds), "level_ms": 0.0 if load is None else load.step_ms})


def contestant_of(engine: Engine, drafter: RemoteDrafter) -> Contestant:
    """Async with the engine's own budget; the clock of an adaptive one stands still while others run."""
    budget = make_budget(engine.config, engine.worker.executor, drafter)
    budgets = WatchedBudget(budget).begin_run if isinstance(budget, AdaptiveBudget) else always(budget)
    return Contestant(always(drafter), budgets)


def distances_of(rounds: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Plain decoding, then every round trip, over plain decoding and over the nearest; a bar for each, with a stroke
    where plain decoding is."""
    nearest = list(rounds)[1]
    distances = [speed_of(name, rounds) | {"over_nearest": over(name, nearest, rounds)} for name in rounds]
    medians = {row["contestant"]: row["tokens_per_second"].median for row in distances}
    most = max(medians.values())
    bars = [{"round_trip": name, "bar": bar_of(rate / most, medians[OFF] / most)} for name, rate in medians.items()]
    holds = all(row["over_off"].median >= FLOOR for row in distances)
    return {"distances": distances, "bars": bars, "floor": FLOOR, "holds": holds}


# -- streams


@dataclass(frozen=True)
class Window:
    """Tokens that came in a while."""

    seconds: float
    counts: Ints  # of each stream

    def rate(self, streams: Sequence[int]) -> float:
        """Sum of some streams, per second."""
        return float(self.counts[streams].sum()) / self.seconds


class EndlessStreams:
    """So many sequences of a workload at a time, in an engine that nobody else uses: where one ends, the next takes its
    place."""

    def __init__(self, engine: Engine, workload: Workload, number: int) -> None:
        self.engine = engine
        engine.worker.scheduler.max_requests = number
        self._jobs = chain.from_iterable(workload.jobs(len(workload.prompts), lap) for lap in count())
        self._samples = [self._next() for _ in range(number)]
        self.tokens: Ints = np.zeros(number, dtype=np.int64)  # that each stream was given so far

    def _next(self) -> Sample:
        job = next(self._jobs)
        return self.engine.submit(job.prompt.text, job.params)[0]

    @property
    def requests(self) -> list[Request]:
        """The running request of each stream."""
        return [sample.request for sample in self._samples]

    def step(self) -> None:
        given = {delta.id: len(delta.tokens) for delta in self.engine.step()}
        check_drafter(self.engine)
        self.tokens = self.tokens + np.array([given.get(sample.request_id, 0) for sample in self._samples])
        self._samples = [sample if sample.finish_reason is None else self._next() for sample in self._samples]

    def run(self, until: Callable[[], bool]) -> Window:
        """Step once, then on until `until` is true."""
        began, before = time.perf_counter(), self.tokens
        self.step()
        while not until():
            self.step()
        return Window(time.perf_counter() - began, self.tokens - before)

    def run_for(self, seconds: float) -> Window:
        """Step for so long, and until the last step is over."""
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() >= end)


@contextmanager
def streams_on_pools(options: BenchOptions, number: int) -> Iterator[tuple[EndlessStreams, list[Program]]]:
    """Streams that so many pools draft for, after some seconds to warm up."""
    with pools_beside(options.engine_config(mode="off"), number) as (pools, config):
        endpoints = tuple(pool.told["endpoint"] for pool in pools)
        with Engine(replace(config, mode="async", draft_pool=endpoints)) as engine:
            streams = EndlessStreams(engine, options.workload(), options.streams)
            streams.run_for(options.seconds)
            yield streams, pools


# -- a pool that stands still


def run_stall(options: BenchOptions, progress: ProgressBar) -> Report:
    """Stops the pool `repeats` times, after a warm-up. What is to be shown: no step during a stall is longer than the
    99th percentile of those before and ALLOWANCE_MS."""
    progress.total = 1 + len(PHASES) * options.repeats
    with streams_on_pools(options, 1) as (running, (pool,)):
        progress("warm-up")
        stalls = [_stall(running, pool, options, progress) for _ in range(options.repeats)]
        late = overruns(running.engine)
    phases = [phase_of(name, [record for stall in stalls for record in stall[name]]) for name in PHASES]
    holds = phases[1]["max_ms"] <= phases[0]["p99_ms"] + ALLOWANCE_MS
    return Report({"phases": phases, "overruns": late, "allowance_ms": ALLOWANCE_MS, "holds": holds})


def _stall(
    running: EndlessStreams, pool: Program, options: BenchOptions, progress: ProgressBar
) -> dict[str, list[StepRecord]]:
    """The steps of each phase. Signals are sent between two steps."""
    records: dict[str, list[StepRecord]] = {phase: [] for phase in PHASES}
    signals, lengths = (None, signal.SIGSTOP, signal.SIGCONT), (options.seconds, options.pause, options.seconds)
    for phase, sent, seconds in zip(PHASES, signals, lengths, strict=True):
        running.engine.worker.observe = records[phase].append
        if sent is not None:
            pool.send_signal(sent)
        running.run_for(seconds)
        progress(phase)
    return records


def phase_of(phase: str, records: Sequence[StepRecord]) -> Row:
    """Summary of steps, of which at least one has no prompt; the others are left out, for they have more rows, with a
    draft or without. Times are from the end of one step to the end of the next; tokens are of all sequences."""
    decoding = [record for record in records if not has_prompt_rows(record)]
    periods = np.array([1000 * (record.ended - record.before) for record in decoding])
    p50, p99 = np.percentile(periods, (50, 99)).tolist()
    return {
        "phase": phase,
        "steps": len(decoding),
        "prompt_steps": len(records) - len(decoding),
        "p50_ms": p50,
        "p99_ms": p99,
        "max_ms": float(periods.max()),
        "tokens_per_step": sum(record.committed for record in decoding) / len(decoding),
    }
