"""Lossless or not, with drafts in processes of their own: the tokens of mode async against the target alone, by ==."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pilotfish.bench.drafters import Bench, JobRunner
from pilotfish.bench.parity import (
    BATCH,
    Contestant,
    Difference,
    Outcome,
    ParityReport,
    Run,
    differences_of,
    outcome_of,
    run_contestant,
)
from pilotfish.bench.workload import PARITY_SETTINGS, Job, Prompt, mixed_jobs
from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine

NODES = 16
PACE = "target=10.4ms,draft=2.6ms"
OFF = Contestant("off", 1)


@dataclass(frozen=True)
class Setup:
    """An engine of mode async: how many draft workers it starts, and whether they and the target are paced."""

    workers: int
    pace: str

    @property
    def name(self) -> str:
        drafts = f"async, {self.workers} draft{'s' if self.workers > 1 else ''}"
        return drafts + (", paced" if self.pace else "")

    def config(self, sync: EngineConfig, threads: int) -> EngineConfig:
        """The target has the first `threads` cores, the drafts some of the others. Where it has them all they share
        them, and one draft has as many threads as the target, each of three fewer."""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        placed = replace(sync, threads=threads, cores=cores, draft_workers=self.workers)
        return replace(placed, mode="async", nodes=NODES, pace=self.pace)

    def runs(self) -> list[Contestant]:
        """Of one engine, in order."""
        return [Contestant(self.name, BATCH), Contestant(self.name, BATCH, preempted=True), Contestant(self.name, 1)]


SETUPS = tuple(Setup(workers, pace) for pace in ("", PACE) for workers in (1, 3))


def num_sequences(num_prompts: int, thread_counts: Sequence[int]) -> int:
    """How many sequences `run_parity_async` generates."""
    runs = 1 + sum(len(setup.runs()) for setup in SETUPS)
    return len(thread_counts) * runs * len(PARITY_SETTINGS) * num_prompts


def run_parity_async(
    config: EngineConfig,
    prompts: list[Prompt],
    max_tokens: int,
    thread_counts: Sequence[int],
    done: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """As `run_parity`, from the same `config` of mode sync; `thread_counts` are the target's."""
    began = time.perf_counter()
    jobs = mixed_jobs(prompts, PARITY_SETTINGS, max_tokens)
    outcomes: list[Outcome] = []
    across: list[Outcome] = []
    differences: list[Difference] = []
    references: list[Run] = []
    for threads in thread_counts:
        reference = _alone(config, jobs, threads, done)
        references.append(reference)
        across.append(outcome_of(threads, reference, references[0].outputs))
        for run in _runs(config, jobs, threads, done):
            outcomes.append(outcome_of(threads, run, reference.outputs))
            differences.extend(differences_of(threads, run, reference.outputs, jobs))
    seconds = time.perf_counter() - began
    return ParityReport(config.dtype, len(prompts), max_tokens, outcomes, across[1:], differences, seconds)


def _alone(config: EngineConfig, jobs: list[Job], threads: int, done: Callable[[str], None]) -> Run:
    """The reference: one request at a time, nothing else on the cores."""
    bench = Bench(replace(config, threads=threads))
    return run_contestant(OFF, bench, OFF.make(bench), jobs, threads, done)


def _runs(config: EngineConfig, jobs: list[Job], threads: int, done: Callable[[str], None]) -> Iterator[Run]:
    for setup in SETUPS:
        with Engine(setup.config(config, threads)) as engine:
            for one in setup.runs():
                yield run_contestant(one, JobRunner(engine), engine.drafter, jobs, threads, done)
