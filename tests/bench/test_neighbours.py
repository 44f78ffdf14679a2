"""Steps beside busy neighbours, on a tiny shape; no test says how fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import Measure
from sizes import in_soak, sized
from transformers.modeling_outputs import CausalLMOutputWithPast

from pilotfish.bench import neighbours
from pilotfish.bench.neighbours import (
    CASES,
    NEIGHBOURS,
    OURS,
    PROGRAMS,
    TRANSFORMERS,
    SteppedRows,
    Turn,
    busy_neighbours,
    dtypes_of,
    run_neighbours,
    start_stepper,
    steps_of,
)
from pilotfish.bench.programs import Program, children, cpu_seconds, machine_seconds
from pilotfish.bench.shapes import SHAPES, VOCAB, llama, write_random_model
from pilotfish.bench.stepper import LEAST, STEPPERS, WARM_UP, step_seconds
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.errors import EngineError
from pilotfish.model.loading import precision
from pilotfish.openmp import POLICY

TINY = llama(layers=2, hidden=64, heads=2, kv_heads=1, ffn=96)
HOLDER = """
import signal, time
from pilotfish.bench.neighbours import busy_neighbours

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started with it ignored
with busy_neighbours(2) as pids:
    print(*pids, flush=True)
    time.sleep(600)
"""
PATIENCE = 30.0  # seconds for what takes a moment


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(TINY, torch.float32, str(directory))
    return directory


@in_soak
def test_neighbours(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children(os.getpid()))  # other tests' engines may have some
    monkeypatch.setitem(SHAPES, neighbours.SHAPE, TINY)
    monkeypatch.setattr(neighbours, "SETTLE", 0.0)
    results = measure(run_neighbours, "neighbours", repeats=1, threads=1, seconds=0.01).results
    expected = [(case.contestant, case.rows, number) for case in CASES for number in NEIGHBOURS]
    assert [(row["contestant"], row["rows"], row["neighbours"]) for row in results["steps"]] == expected
    for row in results["steps"]:
        assert row["steps"] >= LEAST and 0 < row["median_ms"] <= row["p95_ms"] and row["over_quiet"].count == 1
        assert row["neighbours"] or row["over_quiet"].median == 1
    assert set(children(os.getpid())) <= before


def test_figures() -> None:
    """Medians and p95 of all steps; ratios within repetitions, whose blocks come in any order."""
    case = SteppedRows("ours", 8)
    times = [(0, [1.0, 1.0, 4.0]), (1, [2.0]), (2, [3.0]), (1, [8.0]), (2, [20.0]), (0, [2.0])]
    turns = {case.name: [Turn(number, own, sum(own) / 100) for number, own in times]}
    quiet, one, two = steps_of(case, "float32", turns)
    assert (quiet["steps"], quiet["median_ms"], quiet["p95_ms"], quiet["over_quiet"].median) == (4, 1500, 4000, 1)
    assert (one["neighbours"], one["median_ms"], one["over_quiet"].median) == (1, 5000, 3)  # of 2/1 and 8/2
    assert (two["over_quiet"].minimum, two["over_quiet"].maximum) == (3, 10)
    assert [row["others"] for row in (quiet, one, two)] == [0.06, 0.08, 0.2]


def test_each_block_has_its_neighbours_and_another_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []

    @contextmanager
    def counted(number: int) -> Iterator[None]:
        running.append(number)
        try:
            yield
        finally:
            running.remove(number)

    monkeypatch.setattr(neighbours, "busy_neighbours", counted)
    blocks = neighbours._blocks(3)
    seen = [(number, list(running)) for number in blocks]
    assert seen == [(number, [number]) for number in (0, 1, 2, 1, 2, 0, 2, 0, 1)] and not running
    blocks = neighbours._blocks(1)
    next(blocks)
    blocks.close()
    assert not running


def test_neighbours_are_busy_and_end() -> None:
    with busy_neighbours(1) as [pid]:
        before, machine, end = cpu_seconds(pid), machine_seconds(), time.monotonic() + PATIENCE
        while cpu_seconds(pid) < before + 0.2 and time.monotonic() < end:
            time.sleep(0.01)
        assert cpu_seconds(pid) >= before + 0.2 and machine_seconds() >= machine + 0.1
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", sized([signal.SIGKILL], [signal.SIGINT, signal.SIGKILL]))
def test_no_neighbour_is_left_behind(number: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with holder:
        assert holder.stdout is not None
        pids = holder.stdout.readline().split()
        assert len(pids) == 2
        holder.send_signal(number)
        end = time.monotonic() + PATIENCE
        while any(map(_runs, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        left = [pid for pid in pids if _runs(pid)]
        holder.kill()
    assert not left


def _runs(pid: bytes) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_both_take_the_same_step_again_and_again(tiny_model: Path) -> None:
    """One row is the same token after the same context for both."""
    with torch.inference_mode():
        ours, theirs = (STEPPERS[name](tiny_model, torch.float32) for name in ("ours", TRANSFORMERS))
        for rows in (3, 1, 16, 1):
            logits, output = ours.prepare(rows)(), theirs.prepare(rows)()
            assert isinstance(logits, torch.Tensor) and isinstance(output, CausalLMOutputWithPast)
            assert output.logits is not None and output.logits[0].shape == logits.shape == (rows, VOCAB)
            if rows == 1:
                torch.testing.assert_close(logits, output.logits[0], rtol=0, atol=1e-5)
        assert len(step_seconds(ours, 2, 0.0)) == LEAST and WARM_UP > 0


@in_soak
def test_processes_start_as_from_a_shell(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our word on how OpenMP waits; each answers, and a bad question is told."""
    monkeypatch.setenv(POLICY, "passive")
    for name in (OURS, TRANSFORMERS):
        with start_stepper(name, str(tiny_model), "float32", 1) as program:
            assert program.told == {}
            assert POLICY.encode() not in Path(f"/proc/{program.pid}/environ").read_bytes()
            assert len(program.ask(rows=2, seconds=0.0)["times"]) == LEAST
            with pytest.raises(EngineError, match=f"^{name}: exited with code 1: "):
                program.ask(rows="many", seconds=0.0)


def test_a_program_that_has_ended_is_told() -> None:
    command = [sys.executable, "-c", "print('{}', flush=True); raise SystemExit('it is gone')"]
    with Program(WorkerSpec("one", command), stdin=subprocess.PIPE) as program:
        assert program.told == {}
        program.wait()
        with pytest.raises(EngineError, match="one: exited with code 1: it is gone"):
            program.ask(text="x" * (1 << 20))


@pytest.mark.parametrize(("native", "theirs"), [(True, "bfloat16"), (False, "float32")])
def test_transformers_multiplies_what_the_processor_can(
    native: bool, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _: native)
    assert dtypes_of(torch.bfloat16) == {**dict.fromkeys(PROGRAMS, "bfloat16"), TRANSFORMERS: theirs}
    assert set(dtypes_of(torch.float32).values()) == {"float32"}
