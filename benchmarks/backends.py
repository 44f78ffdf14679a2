"""Tokens per second in mode async with the draft on our own executor, on llama.cpp and on OpenVINO, paced and not: a
pool of each, in turn. Exit 1 if outputs differ in float32."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

from draft_pools import attached, drafted_by, start_pool
from harness import PAIR, Options, compete, run

from pilotfish.cli.bench.contestants import OFF, PLAIN, Run, speed_of
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Backend
from pilotfish.engine.drafts.draft_pool import refuse_absent
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import precision_here
from pilotfish.engine.processes.placement import split_cores
from pilotfish.errors import ParameterError


def run_backends(options: Options, progress: ProgressBar) -> Report:
    """Plays every prompt in `repeats` rounds after one to warm up, for each pace."""
    backends, config = checked(options.backends), options.engine_config(mode="off")
    prompts = len(options.rows())
    progress.total = len(options.paces) * (options.repeats + 1) * prompts * (1 + len(backends))
    speed = [row for pace in options.paces for row in speed_at(pace, config, backends, options, progress)]
    exact = precision_here(config, config.target).name == "float32"
    return Report({"speed": speed}, failed=exact and any(row["equal_outputs"] < 1 for row in speed))


def checked(names: Sequence[str]) -> list[Backend]:
    """ParameterError for a name that is none; InputError for an engine that is not installed."""
    known = get_args(Backend)
    if unknown := set(names) - set(known):
        raise ParameterError("backends", min(unknown), f"some of {', '.join(known)}")
    for name in names:
        refuse_absent(name)
    return list(dict.fromkeys(names))  # type: ignore[arg-type]


def speed_at(
    pace: str, config: EngineConfig, backends: Sequence[str], options: Options, progress: ProgressBar
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
        contestants = {OFF: PLAIN, **{name: drafted_by(engine, remote) for name, remote in remotes.items()}}
        rounds = compete(engine, contestants, options.rounds(len(options.rows())), options.concurrency, progress)
    return speed_rows(pace, rounds)


def speed_rows(pace: str, rounds: Mapping[str, Sequence[Run]]) -> list[Row]:
    rows: list[dict[str, Any]] = [speed_of(name, rounds) for name in rounds]
    return [{"pace": pace, **row} for row in rows]


if __name__ == "__main__":
    run(
        run_backends,
        *PAIR,
        "concurrency",
        "nodes",
        "leaves",
        "budget",
        threads=1,
        kv_slots=4096,
        backends=["pilotfish", "llama.cpp", "openvino"],
        paces=["target=20ms", "none"],
        repeats=10,
    )
