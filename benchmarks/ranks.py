"""A target in so many ranks: what each takes of memory, what forwards cost, tokens per second. Run it once for each
number of ranks."""

import os
from functools import partial
from pathlib import Path

from harness import PAIR, Options, run

from pilotfish.cli.bench.contestants import PLAIN, Run, rates
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.host_memory import status_bytes
from pilotfish.engine.trial import forward_seconds

#: Of the forwards that are timed.
ROWS = (1, 8, 32, 128)
MIB = 1 << 20


def run_ranks(options: Options, progress: ProgressBar) -> Report:
    """Mode off. In each round so many prompts as run at a time; a first round to warm up."""
    concurrencies = options.concurrencies
    progress.total = (options.repeats + 1) * sum(concurrencies)
    with Engine(options.engine_config(mode="off", draft=None)) as engine:
        runs = {number: _runs(engine, number, options, progress) for number in concurrencies}
        forwards = [{"rows": rows, "ms": 1000 * forward_seconds(engine.executor, rows)} for rows in ROWS]
        speeds = [_speed(number, own) for number, own in runs.items()]
        return Report({"memory": _memory(engine), "forwards": forwards, "speeds": speeds})


def _runs(engine: Engine, number: int, options: Options, progress: ProgressBar) -> list[Run]:
    done = partial(progress, f"{number} at a time")
    return [PLAIN.run(engine, jobs, number, done) for jobs in options.rounds(number)][1:]


def _speed(number: int, runs: list[Run]) -> Row:
    return {"concurrency": number, "tokens_per_second": Spread.of(rates(runs))}


def _memory(engine: Engine) -> list[Row]:
    """MiB beyond what a process has before it holds a model: as planned for rank 0, and what no file backs now."""
    plan = engine.memory
    planned = plan.weights + plan.slots * plan.slot + plan.workspace
    pids = [os.getpid(), *(() if engine.ranks is None else engine.ranks.pids)]
    return [
        {"rank": rank, "planned_mib": planned / MIB, "measured_mib": (_anonymous(pid) - plan.runtime) / MIB}
        for rank, pid in enumerate(pids)
    ]


def _anonymous(pid: int) -> int:
    return status_bytes(Path(f"/proc/{pid}/status"), "RssAnon")


if __name__ == "__main__":
    run(run_ranks, *PAIR, "tensor_parallel", "repeats", kv_slots=4096, concurrencies=[1, 8])
