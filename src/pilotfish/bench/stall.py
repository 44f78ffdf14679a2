"""The target's steps while its draft stands still."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pilotfish.bench.budget import Workload
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.pools import Listener, on_target_cores, place, start_pool
from pilotfish.bench.report import print_table
from pilotfish.bench.streams import Streams
from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.observe.records import StepRecord

PHASES = ("before", "during", "after")
#: By what a step during a stall may be longer than the 99th percentile of those before, in ms.
ALLOWANCE_MS = 5.0


@dataclass(frozen=True)
class PhaseSteps:
    """Steps of one phase, over all stalls. Times are from the end of one step to the end of the next, of steps in which
    no prompt is computed: those have more rows, with a draft or without."""

    phase: str
    steps: int
    prompt_steps: int  # left out
    p50_ms: float
    p99_ms: float
    max_ms: float
    tokens_per_step: float  # of all sequences


@dataclass(frozen=True)
class StallReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    pace: str
    prompts: int
    temperature: float
    max_tokens: int
    streams: int
    seconds: float  # before and after
    pause: float  # seconds
    repeats: int
    nodes: int
    budget: str
    phases: list[PhaseSteps]
    overruns: float  # share of the target's forwards that took longer than their pace
    allowance_ms: float
    holds: bool  # no step during the stall is longer than the p99 before, and the allowance


def run_stall(
    config: EngineConfig,
    workload: Workload,
    streams: int,
    seconds: float,
    pause: float,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> StallReport:
    """`config` is of mode off, with a draft. `machine` is probed unless given. `done` is called with a label for each
    of PHASES of each stall, and for the warm-up."""
    placement = place(1)
    with start_pool(config, placement.drafts[0]) as pool:
        target = replace(on_target_cores(config, placement), mode="async", draft_pool=(pool.told["endpoint"],))
        with Engine(target) as engine:
            machine = machine or describe_machine(config.dtype)
            running = Streams(engine, workload, streams)
            running.run_for(seconds)
            done("warm-up")
            stalls = [_stall(engine, running, pool, seconds, pause, done) for _ in range(repeats)]
            overruns = max((pacing.share for pacing in engine.pacing()), default=0.0)
    phases = [phase_of(name, [record for stall in stalls for record in stall[name]]) for name in PHASES]
    return StallReport(
        machine=machine,
        target=str(config.target),
        draft=str(config.draft),
        dtype=config.dtype,
        pace=config.pace,
        prompts=len(workload.prompts),
        temperature=workload.temperature,
        max_tokens=workload.max_tokens,
        streams=streams,
        seconds=seconds,
        pause=pause,
        repeats=repeats,
        nodes=config.nodes,
        budget=config.budget,
        phases=phases,
        overruns=overruns,
        allowance_ms=ALLOWANCE_MS,
        holds=phases[1].max_ms <= phases[0].p99_ms + ALLOWANCE_MS,
    )


def num_windows(repeats: int) -> int:
    """How often `run_stall` calls `done`."""
    return 1 + len(PHASES) * repeats


def _stall(
    engine: Engine, running: Streams, pool: Listener, seconds: float, pause: float, done: Callable[[str], None]
) -> dict[str, list[StepRecord]]:
    """The steps of each phase. Signals are sent between two steps."""
    records: dict[str, list[StepRecord]] = {phase: [] for phase in PHASES}
    for phase, sent, lasting in zip(
        PHASES, (None, signal.SIGSTOP, signal.SIGCONT), (seconds, pause, seconds), strict=True
    ):
        engine.worker.observe = records[phase].append
        if sent is not None:
            pool.signal(sent)
        running.run_for(lasting)
        done(phase)
    return records


def phase_of(phase: str, records: Sequence[StepRecord]) -> PhaseSteps:
    """Of at least one step without a prompt."""
    decoding = [record for record in records if record.rows == record.sequences + record.nodes]
    periods = np.array([1000 * (record.ended - record.before) for record in decoding])
    p50, p99 = np.percentile(periods, (50, 99)).tolist()
    tokens = sum(record.committed for record in decoding)
    left_out = len(records) - len(decoding)
    return PhaseSteps(phase, len(decoding), left_out, p50, p99, float(periods.max()), tokens / len(decoding))


def print_stall(report: StallReport) -> None:
    paced = f"paced {report.pace}" if report.pace else "not paced"
    size = f"streams: {report.streams}, T={report.temperature:g}, {report.repeats} x {report.pause:g} s"
    columns = ("the draft's stop", "steps", "p50 ms", "p99 ms", "max ms", "tokens/step", "left out: with prompts")
    print_table(f"{report.target}, {report.dtype}, {paced}, {size}", columns, map(_row, report.phases))
    claim = f"during: no step over the p99 before + {report.allowance_ms:g} ms"
    print_table("", (claim, "overruns of the target"), [("yes" if report.holds else "no", f"{report.overruns:.1%}")])


def _row(phase: PhaseSteps) -> tuple[object, ...]:
    times = (f"{phase.p50_ms:.2f}", f"{phase.p99_ms:.2f}", f"{phase.max_ms:.2f}")
    return (phase.phase, phase.steps, *times, f"{phase.tokens_per_step:.2f}", phase.prompt_steps)
