"""Forwards held back, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support import VOCAB, random_tree

from pilotfish.core.tree import TokenTree
from pilotfish.model.buckets import CUDA
from pilotfish.model.loader import load_model
from pilotfish.model.pacer import Pacer, Pacing
from pilotfish.model.runner import Batch, Runner, SequenceRows
from pilotfish.plan.pace import Pace

SLOTS = 2048
#: A millisecond a row.
PACE = Pace.parse("1:1ms")


class Clock:
    """Stands still but for sleeps, which end late: as a kernel's do, and a microsecond where nothing is asked for."""

    LATE = 80e-6

    def __init__(self) -> None:
        self.time = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds + self.LATE if seconds else 1e-6


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacer(clock: Clock) -> Pacer:
    return Pacer("target", PACE, clock, clock.sleep)


def test_a_forward_returns_on_time_though_sleeps_end_late(clock: Clock, pacer: Pacer) -> None:
    began = pacer.now()
    clock.time += 0.004
    pacer.hold(began, 10)
    assert clock.time - began == pytest.approx(0.010, abs=1.5e-6)
    assert clock.sleeps[0] == pytest.approx(0.0058) and not any(clock.sleeps[1:])


def test_a_time_shorter_than_a_sleep_is_waited_for_awake(clock: Clock, pacer: Pacer) -> None:
    began = pacer.now()
    clock.time += 0.0099
    pacer.hold(began, 10)
    assert clock.time - began == pytest.approx(0.010, abs=1.5e-6) and not any(clock.sleeps)


def test_a_forward_that_took_longer_is_counted_and_not_held(clock: Clock, pacer: Pacer) -> None:
    for seconds in (0.001, 0.011, 0.009, 0.02):
        began = pacer.now()
        clock.time += seconds
        pacer.hold(began, 10)
        assert clock.time - began == pytest.approx(max(seconds, 0.010), abs=1.5e-6)
    assert pacer.pacing() == Pacing("target", PACE, forwards=4, overruns=2)
    pacer.reset()
    assert pacer.pacing() == Pacing("target", PACE, forwards=0, overruns=0)


@pytest.mark.parametrize(
    ("forwards", "overruns", "valid"), [(0, 0, True), (100, 1, True), (100, 2, False), (99, 1, False)]
)
def test_more_than_one_overrun_in_a_hundred_is_too_many(forwards: int, overruns: int, valid: bool) -> None:
    assert Pacing("draft", PACE, forwards, overruns).valid is valid


def test_what_people_read() -> None:
    assert str(Pacing("target", Pace.parse("10.4ms"), 123, 0)) == "target 10.4ms, overruns 0 of 123"
    named = Pacing("draft", Pace.parse("llama-3.2-1b@h200"), 9, 2)
    assert str(named) == "draft llama-3.2-1b@h200 (1.06 ms a row), overruns 2 of 9"


# -- in a runner


def sequence(tokens: int, nodes: int) -> SequenceRows:
    """A prompt and a random tree, at the first slots."""
    tree = random_tree(np.random.default_rng(0), VOCAB, nodes)
    slots = np.arange(tokens, dtype=np.int32)
    node_slots = {node: tokens + node for node in tree.nodes()}
    return SequenceRows(0, [7] * tokens, slots, tree, list(tree.nodes()), node_slots, kept=[tokens - 1])


@pytest.mark.parametrize("eager", [False, True])
def test_a_runner_takes_the_time_of_its_real_rows(llama: Path, eager: bool, clock: Clock, pacer: Pacer) -> None:
    model = load_model(llama, torch.float32, torch.device("cpu"), eager=eager)
    runner, plain = Runner(model, SLOTS, pacer=pacer), Runner(model, SLOTS)
    for rows in (sequence(3, 0), sequence(40, 7)):
        began = clock.time
        logits = runner.forward([rows])
        assert clock.time - began == pytest.approx(0.001 * rows.num_rows, abs=1.5e-6)
        assert torch.equal(logits, plain.forward([rows]))
    assert pacer.pacing() == Pacing("target", PACE, forwards=2, overruns=0)


def test_all_batches_of_a_forward_are_one(llama: Path, clock: Clock, pacer: Pacer) -> None:
    runner = Runner(load_model(llama, torch.float32, torch.device("cpu"), eager=True), SLOTS, pacer=pacer)
    rows = CUDA[torch.float32].rows[-1] + 10
    runner.buckets = CUDA[torch.float32]
    batches = runner.prepare([sequence(rows, 0)])
    assert len(batches) == 2 and sum(batch.num_rows for batch in batches) == rows
    began = clock.time
    runner.run(batches)
    assert clock.time - began == pytest.approx(0.001 * rows, abs=1.5e-6)
    assert pacer.pacing().forwards == 1


def test_a_forward_that_fails_is_neither_held_nor_counted(
    llama: Path, clock: Clock, pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(load_model(llama, torch.float32, torch.device("cpu"), eager=True), SLOTS, pacer=pacer)

    def fail(_: Sequence[Batch]) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "_run", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.run([])
    assert clock.sleeps == [] and pacer.pacing().forwards == 0


def test_rows_without_padding(llama: Path) -> None:
    runner = Runner(load_model(llama, torch.float32, torch.device("cpu"), eager=True), SLOTS)
    (batch,) = runner.prepare([sequence(5, 3)])
    assert len(batch.input_ids) > batch.num_rows == 8
    empty = TokenTree()
    (batch,) = runner.prepare([SequenceRows(2, [1], np.arange(3, dtype=np.int32), empty, [], {}, kept=[0])])
    assert batch.num_rows == 1
