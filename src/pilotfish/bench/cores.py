"""Off, sync and async at the machine's own speed: off and sync on all cores, async's target and draft on their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pilotfish.bench.asynchronous import ModeSpeed, Run, speed_of
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import Job, Prompt, jobs_at
from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.observe.records import StepRecord

OFF = "off"
WARM_UP_JOBS = 2


@dataclass(frozen=True)
class CoresReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    cores: int
    budget: str
    prompts: int
    temperature: float
    max_tokens: int
    repeats: int
    speeds: list[ModeSpeed]


def contestants(config: EngineConfig) -> dict[str, EngineConfig]:
    """`config` is of mode sync; it and async may be given any budget."""
    off = replace(config, mode="off")
    return {OFF: off, "sync": config, "async": replace(config, mode="async")}


def run_cores(
    config: EngineConfig,
    prompts: list[Prompt],
    temperature: float,
    max_tokens: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> CoresReport:
    """Each contestant in turn, an engine of its own each time, one sequence at a time. `machine` is probed unless
    given."""
    machine = machine or describe_machine(config.dtype)
    jobs = jobs_at(prompts, temperature, max_tokens)
    players = contestants(config)
    rounds: dict[str, list[Run]] = {name: [] for name in players}
    names = list(players)
    for turn in range(repeats):
        for name in (*names[turn % 3 :], *names[: turn % 3]):
            rounds[name].append(_run(players[name], name, jobs, done))
    return CoresReport(
        machine=machine,
        target=str(config.target),
        draft=str(config.draft),
        dtype=config.dtype,
        cores=config.num_threads,
        budget=config.budget,
        prompts=len(prompts),
        temperature=temperature,
        max_tokens=max_tokens,
        repeats=repeats,
        speeds=[speed_of(name, runs, rounds[OFF]) for name, runs in rounds.items()],
    )


def _run(config: EngineConfig, name: str, jobs: list[Job], done: Callable[[str], None]) -> Run:
    with Engine(config) as engine:
        for job in jobs[:WARM_UP_JOBS]:
            engine.submit(job.prompt.text, job.params)
        while engine.busy:
            engine.step()
        steps: list[StepRecord] = []
        engine.worker.observe = steps.append
        began = time.perf_counter()
        samples = []
        for job in jobs:
            samples += engine.submit(job.prompt.text, job.params)
            while engine.busy:
                engine.step()
            done(name)
        return Run(time.perf_counter() - began, samples, steps, 0.0)


def print_cores(report: CoresReport) -> None:
    about = f"{report.target}, {report.dtype}, T={report.temperature:g}, budget {report.budget}"
    size = f"{report.prompts} prompts, {report.max_tokens} tokens, {report.repeats} rounds, {report.cores} cores"
    columns = (
        "mode",
        "tokens/s: median (quartiles)",
        "over off",
        "tokens/step",
        "nodes",
        "hits",
        "period ms",
        "as off",
    )
    print_table(f"{about}, {size}", columns, map(_row, report.speeds))


def _row(speed: ModeSpeed) -> tuple[object, ...]:
    per_step = (f"{speed.tokens_per_step:.2f}", f"{speed.nodes:.1f}", f"{speed.hit_rate:.2f}")
    rest = (f"{speed.periods.mean:.2f}", f"{speed.equal_outputs:.0%}")
    return (speed.contestant, speed.tokens_per_second, speed.over_off, *per_step, *rest)
