"""A draft on our own executor and on other engines: what a level costs by its leaves, and tokens a second in mode async
with a pool of each. Back-ends take turns."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, get_args

from pilotfish.bench.contestants import OFF, PLAIN, Run, compete, speed_of, take_turns
from pilotfish.bench.leveller import CONTEXT, LEVELS, MOST_LEAVES, MOST_SESSIONS
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.pools import contestant_of
from pilotfish.bench.programs import Program, attached, start_pool
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, ratios
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Backend, available_cores
from pilotfish.engine.drafts.draft_backends import refuse_absent
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import precision_here
from pilotfish.engine.processes.placement import split_cores
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.errors import ParameterError

LEAVES = (1, 2, 4, 8, 16, MOST_LEAVES)
SESSIONS = (1, MOST_SESSIONS)
WARM_UP = 2  # trees


@dataclass(frozen=True)
class LevelCase:
    """Levels of so many leaves, of all sessions together, on a back-end."""

    backend: str
    sessions: int
    leaves: int

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.sessions} sessions, {self.leaves} leaves"


def run_backends(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs `repeats` trees of each kind; then every prompt in as many rounds after one to warm up, for each pace."""
    backends, paces = parse_backends(options.backends), options.paces.split()
    config = options.engine_config(mode="off")
    cases = [LevelCase(*one) for one in product(backends, SESSIONS, LEAVES) if one[2] >= one[1]]
    jobs = options.rounds(len(options.rows()))
    rounds = len(paces) * len(jobs) * len(jobs[0]) * (1 + len(backends))
    progress.total = len(cases) * (WARM_UP + options.repeats) + rounds
    levels = levels_by_leaves(cases, level_times(cases, config, options.repeats, progress))
    speed = [row for pace in paces for row in speed_at(pace, config, backends, options, progress)]
    exact = precision_here(config, config.target).name == "float32"
    results = {"context": CONTEXT, "levels_of_a_tree": LEVELS, "levels": levels, "speed": speed}
    return Report(results, failed=exact and any(row["equal_outputs"] < 1 for row in speed))


def parse_backends(text: str) -> list[Backend]:
    """ParameterError for a name that is none, or twice there; InputError for an engine that is not installed."""
    names, known = text.split(","), get_args(Backend)
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ParameterError("backends", text, f"some of {', '.join(known)}, each once")
    for name in names:
        refuse_absent(name)
    return names  # type: ignore[return-value]


# -- levels


def level_times(
    cases: Sequence[LevelCase], config: EngineConfig, repeats: int, progress: ProgressBar
) -> dict[str, list[float]]:
    """By case, in turns: the median second of a tree's levels, but for the first, which follows another tree."""
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(start_leveller(name, config)) for name in dict.fromkeys(c.backend for c in cases)
        }
        for program in programs.values():
            assert program.told == {}
        contestants = {case.name: partial(_tree, programs[case.backend], case) for case in cases}
        return take_turns(contestants, range(WARM_UP + repeats), WARM_UP, progress)


def start_leveller(backend: str, config: EngineConfig) -> Program:
    """On its CPU, with as many threads as each other."""
    options = (backend, "", str(config.draft), config.dtype, str(config.threads or available_cores()))
    command = [sys.executable, "-m", "pilotfish.bench.leveller", *options]
    return Program(WorkerSpec(f"levels of {backend}", command), stdin=subprocess.PIPE)


def _tree(program: Program, case: LevelCase, _: object) -> float:
    times: list[float] = program.ask(sessions=case.sessions, leaves=case.leaves)["times"]
    return statistics.median(times[1:])


def levels_by_leaves(cases: Sequence[LevelCase], times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Milliseconds of a level; `over_first` are over those of the first back-end in the same round."""
    first, rows = cases[0].backend, list[Row]()
    for case in cases:
        own, others = times[case.name], times[replace(case, backend=first).name]
        spread = Spread.of([1000 * one for one in own])
        where: Row = {"backend": case.backend, "sessions": case.sessions, "leaves": case.leaves}
        rows.append({**where, "level_ms": spread, "over_first": ratios(own, others).median})
    return rows


# -- mode async


def speed_at(
    pace: str, config: EngineConfig, backends: Sequence[str], options: BenchOptions, progress: ProgressBar
) -> list[Row]:
    """Without a draft, then with a pool of each back-end; all pools are on the same cores, and one at a time drafts."""
    placement = split_cores(frozenset(os.sched_getaffinity(0)), "", "", 1)
    paced = replace(config, pace="" if pace == "none" else pace)
    own = replace(paced, cores=",".join(map(str, sorted(placement.target))), threads=0)
    (cores,) = placement.workers
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(start_pool(paced, cores, () if name == "pilotfish" else ("--backend", name)))
            for name in backends
        }
        engine = stack.enter_context(Engine(own))
        remotes = {
            name: stack.enter_context(attached(engine, pool.told["endpoint"])).drafter for name, pool in pools.items()
        }
        contestants = {OFF: PLAIN, **{name: contestant_of(engine, remote) for name, remote in remotes.items()}}
        rounds = compete(engine, contestants, options.rounds(len(options.rows())), options.concurrency, progress)
    return speed_rows(pace, rounds)


def speed_rows(pace: str, rounds: Mapping[str, Sequence[Run]]) -> list[Row]:
    rows: list[dict[str, Any]] = [speed_of(name, rounds) for name in rounds]
    return [{"pace": pace, **row} for row in rows]
