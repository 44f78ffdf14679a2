"""Forwards held back, on a clock of the test's own."""

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pilotfish.config.hardware.pace import Pace
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, SequenceRows
from pilotfish.model.batch import Forwarded
from pilotfish.model.cpu.native_modules import NativeKernels
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kernels import Kernels
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.loading.metadata import GenerationConfig
from pilotfish.model.pacer import Pacer

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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(Kernels, "moment", staticmethod(clock))
    monkeypatch.setattr("pilotfish.model.pacer._sleep", clock.sleep)
    return clock


@pytest.fixture
def pacer(clock: Clock) -> Pacer:  # noqa: ARG001
    return Pacer("target", PACE)


def test_a_forward_returns_on_time_though_sleeps_end_late(clock: Clock, pacer: Pacer) -> None:
    began = clock.time
    clock.time += 0.004
    pacer.hold(began, 10)
    assert clock.time - began == pytest.approx(0.010, abs=1.5e-6)
    assert clock.sleeps[0] == pytest.approx(0.0058) and not any(clock.sleeps[1:])


def test_a_time_shorter_than_a_sleep_is_waited_for_awake(clock: Clock, pacer: Pacer) -> None:
    began = clock.time
    clock.time += 0.0099
    pacer.hold(began, 10)
    assert clock.time - began == pytest.approx(0.010, abs=1.5e-6) and not any(clock.sleeps)


def test_a_forward_that_took_longer_is_counted_and_not_held(clock: Clock, pacer: Pacer) -> None:
    for seconds in (0.001, 0.011, 0.009, 0.02):
        began = clock.time
        clock.time += seconds
        pacer.hold(began, 10)
        assert clock.time - began == pytest.approx(max(seconds, 0.010), abs=1.5e-6)
    assert pacer == Pacer("target", PACE, forwards=4, overruns=2)
    assert list(pacer.taken) == pytest.approx([0.1, 1.1, 0.9, 2.0])
    pacer.reset()
    assert not pacer.taken
    assert pacer == Pacer("target", PACE, forwards=0, overruns=0)


@pytest.mark.parametrize(
    ("forwards", "overruns", "valid"), [(0, 0, True), (100, 1, True), (100, 2, False), (99, 1, False)]
)
def test_more_than_one_overrun_in_a_hundred_is_too_many(forwards: int, overruns: int, valid: bool) -> None:
    assert Pacer("draft", PACE, forwards, overruns).valid is valid


def test_what_people_read() -> None:
    assert str(Pacer("target", Pace.parse("10.4ms"), 123, 0)) == "target 10.4ms, overruns 0 of 123"
    named = Pacer("draft", Pace.parse("llama-3.2-1b@h200"), 9, 2)
    assert str(named) == "draft llama-3.2-1b@h200 (1.04 ms a row), overruns 2 of 9"


# -- in an executor

ROWS = SequenceRows(0, list(range(7)), np.arange(7, dtype=np.int32), NO_NODES, [])


def executor_of(pacer: Pacer | None, run: Callable[[object], Forwarded]) -> TorchExecutor:
    fields = {"vocab_size": 9, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 1, "context": 16}
    config, cpu = SimpleNamespace(**fields), torch.device("cpu")
    generation = GenerationConfig(frozenset(), {})
    types = torch.float32, torch.float32
    model = LoadedModel(Mock(), config, config, generation, *types, cpu, NativeKernels(cpu))
    executor = TorchExecutor(model, 16, pacer)
    executor.run = run  # type: ignore[method-assign, assign]
    return executor


def test_a_forward_is_held_from_its_beginning(clock: Clock, pacer: Pacer) -> None:
    began = clock.time

    def run(_: object) -> Forwarded:
        clock.time += 0.002
        return Forwarded(torch.zeros(0, 9))

    outcome = executor_of(pacer, run).execute([ROWS], NO_SAMPLING)
    assert clock.time - began == pytest.approx(0.007, abs=1.5e-6)
    assert pacer == Pacer("target", PACE, forwards=1, overruns=0)
    assert outcome.seconds.model == pytest.approx(0.007, abs=1.5e-6)


def test_what_fails_is_neither_held_nor_counted(clock: Clock, pacer: Pacer) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        executor_of(pacer, Mock(side_effect=RuntimeError("no memory"))).execute([ROWS], NO_SAMPLING)
    assert clock.sleeps == [] and pacer.forwards == 0
