"""Time of a step while other processes keep cores busy: ours, also in a process that imported torch before us, and that
of transformers, in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from pilotfish.bench.contestants import take_turns
from pilotfish.bench.forwards import CONTEXT
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program, children, cpu_seconds, machine_seconds
from pilotfish.bench.report import ProgressBar, Report, Row, percentile, ratios
from pilotfish.bench.shapes import SHAPES, write_random_model
from pilotfish.bench.steps import DEVICE, STEP_ROWS
from pilotfish.config.fields import available_cores
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.model.loading.precision import library_dtype, precision_of
from pilotfish.openmp import POLICY

SHAPE = "344m"
NEIGHBOURS = (0, 1, 2)
#: Seconds for the scheduler to spread new neighbours over the cores.
SETTLE = 0.5
OURS, TRANSFORMERS = "ours", "transformers"
#: What each process runs. A user's process may have imported torch before us, and that of transformers has.
PROGRAMS = {
    OURS: "from pilotfish.bench.stepper import main; main()",
    "ours, torch first": "import torch; from pilotfish.bench.stepper import main; main()",
    TRANSFORMERS: "import torch; from pilotfish.bench.stepper import main; main()",
}


@dataclass(frozen=True)
class SteppedRows:
    """Steps of so many rows of a contestant."""

    contestant: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.contestant}, {self.rows} rows"


CASES = tuple(SteppedRows(contestant, rows) for contestant, rows in product(PROGRAMS, STEP_ROWS))


@dataclass(frozen=True)
class Turn:
    """What a case did beside so many neighbours."""

    neighbours: int
    times: list[float]  # seconds of each step
    others: float  # cores that processes had meanwhile which are not of this bench

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def run_neighbours(options: BenchOptions, progress: ProgressBar) -> Report:
    """`repeats` times, each number of neighbours once; every case has `seconds` beside them."""
    ours = precision_of(options.engine["dtype"], SHAPES[SHAPE], DEVICE, eager=False)
    dtypes = dtypes_of(ours.dtype)
    threads = options.engine["threads"] or available_cores()
    progress.total = options.repeats * len(NEIGHBOURS) * len(CASES)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        write_random_model(SHAPES[SHAPE], ours.dtype, directory)
        programs = {
            name: stack.enter_context(start_stepper(name, directory, dtypes[name], threads)) for name in PROGRAMS
        }
        for program in programs.values():
            assert program.told == {}
        contestants = {case.name: partial(_turn, programs, case, options.seconds) for case in CASES}
        blocks = stack.enter_context(closing(_blocks(options.repeats)))
        turns = take_turns(contestants, blocks, 0, progress)
    steps = [row for case in CASES for row in steps_of(case, dtypes[case.contestant], turns)]
    return Report({"dtype": ours.name, "context": CONTEXT, "steps": steps})


def dtypes_of(dtype: torch.dtype) -> dict[str, str]:
    """By contestant: without instructions for bfloat16 the user of transformers has float32."""
    theirs = library_dtype(dtype, DEVICE)
    return {name: str(theirs if name == TRANSFORMERS else dtype).removeprefix("torch.") for name in PROGRAMS}


def start_stepper(contestant: str, directory: str, dtype: str, threads: int) -> Program:
    """Each contestant starts without our environment's word on how OpenMP waits, as from its user's shell."""
    kind = TRANSFORMERS if contestant == TRANSFORMERS else OURS
    python = ("env", "-u", POLICY, sys.executable, "-c", PROGRAMS[contestant])
    command = [*python, kind, directory, dtype, str(threads)]
    return Program(WorkerSpec(contestant, command), stdin=subprocess.PIPE)


def _blocks(repeats: int) -> Generator[int, None, None]:
    """The neighbours that run until the next is asked for. Another number of them comes first each time."""
    for turn in range(repeats):
        first = turn % len(NEIGHBOURS)
        for neighbours in (*NEIGHBOURS[first:], *NEIGHBOURS[:first]):
            with busy_neighbours(neighbours):
                yield neighbours


@contextmanager
def busy_neighbours(number: int) -> Iterator[list[int]]:
    """Process ids of so many busy neighbours."""
    command = (sys.executable, "-m", "pilotfish.bench.busy")
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(WorkerSpec("busy neighbour", command))) for _ in range(number)]
        for program in programs:
            assert program.told == {}
        time.sleep(SETTLE)
        yield [program.pid for program in programs]


def _turn(programs: Mapping[str, Program], case: SteppedRows, seconds: float, neighbours: int) -> Turn:
    began, others = time.perf_counter(), others_seconds()
    times = programs[case.contestant].ask(rows=case.rows, seconds=seconds)["times"]
    return Turn(neighbours, times, (others_seconds() - others) / (time.perf_counter() - began))


def others_seconds() -> float:
    """CPU time of all processes but this one and its children, while no child ends."""
    return machine_seconds() - sum(map(cpu_seconds, (os.getpid(), *children(os.getpid()))))


def steps_of(case: SteppedRows, dtype: str, turns: Mapping[str, Sequence[Turn]]) -> list[Row]:
    """Medians and p95 of all steps beside each number of neighbours. `over_quiet` are medians of turns over that of the
    turn without neighbours in the same repetition. `others` are the most cores that strangers had in a turn: where it
    is not about 0, the machine was not the bench's own."""
    own = {n: [turn for turn in turns[case.name] if turn.neighbours == n] for n in NEIGHBOURS}
    medians = {n: [turn.median for turn in found] for n, found in own.items()}
    where: Row = {"contestant": case.contestant, "dtype": dtype, "rows": case.rows}
    rows = []
    for n, found in own.items():
        times = [1000 * spent for turn in found for spent in turn.times]
        figures = {"median_ms": statistics.median(times), "p95_ms": percentile(times, 0.95)}
        others = round(max(0.0, *(turn.others for turn in found)), 2)
        beside = {"over_quiet": ratios(medians[n], medians[0]), "others": others}
        rows.append({**where, "neighbours": n, "steps": len(times), **figures, **beside})
    return rows
