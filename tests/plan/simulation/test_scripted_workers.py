"""The production scheduler, worker and drafters over scripted models in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_executor import ScriptedExecutor
from sizes import sized
from support import RandomDrafter

from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import Drafter, NoDrafter
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.executor import Outcome, Sampling, SequenceRows
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.plan.events import VirtualClock
from pilotfish.workers.lm import LMDrafter
from pilotfish.workers.target import TargetWorker

VOCAB, SLOTS, CONTEXT = 7, 200, 120


def scripted(seed: int) -> object:
    """Logits that are any function of the whole sequence."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return np.random.default_rng([seed, len(tokens), *tokens]).normal(0, 2, VOCAB)

    return logits


def executor(clock: VirtualClock, seed: int = 0, seconds: float = 1.0) -> ScriptedExecutor:
    """A forward costs `seconds` and a hundredth of it for each row."""
    return ScriptedExecutor(scripted(seed), VOCAB, SLOTS, CONTEXT, lambda rows: seconds * (1 + rows / 100), clock)


def make_worker(drafter: Drafter, clock: VirtualClock, slots: int = SLOTS) -> TargetWorker:
    scheduler = Scheduler(SlotPool(slots), max_rows=40, max_requests=4)
    return TargetWorker(executor(clock), scheduler, drafter, FixedBudget(8, 3), clock)


def make_requests(count: int, **params: float) -> list[Request]:
    given = SamplingParams(max_tokens=25, **params)  # type: ignore[arg-type]
    return [Request(n, [n % VOCAB] * (3 + 9 * n), given, 50 + n, frozenset(), CONTEXT) for n in range(count)]


def run(worker: TargetWorker, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        worker.scheduler.add(request)
    while worker.scheduler.busy:
        worker.step()
        worker.scheduler.check()
    return [request.output for request in requests]


@given(temperature=st.sampled_from([0.0, 0.7]), slots=st.sampled_from([SLOTS, 90]), seed=st.integers(0, 99))
@settings(max_examples=sized(2, 20))
def test_no_drafter_changes_an_output(temperature: float, slots: int, seed: int) -> None:
    plain = run(make_worker(NoDrafter(), VirtualClock()), make_requests(5, temperature=temperature))
    clock = VirtualClock()
    same = LMDrafter(executor(clock, seconds=0.1), 2, 3, clock)
    other = LMDrafter(executor(clock, seed=1, seconds=0.1), 2, 3, clock)
    for drafter in (RandomDrafter(VOCAB, seed=seed), same, other):
        requests = make_requests(5, temperature=temperature)
        assert run(make_worker(drafter, clock, slots), requests) == plain
    assert sum(r.stats.accepted_tokens for r in requests) > 0


def test_a_draft_that_is_the_target_is_always_right_and_saves_virtual_time() -> None:
    """T = 0: with chains of three every step brings four tokens."""
    clock, alone = VirtualClock(), VirtualClock()
    drafter = LMDrafter(executor(clock, seconds=0.1), 1, 1, clock)
    (request,) = make_requests(1, temperature=0.0)
    outputs = run(make_worker(drafter, clock), [request])
    assert outputs == run(make_worker(NoDrafter(), alone), make_requests(1, temperature=0.0))
    assert request.stats.accepted_tokens == request.stats.draft_tokens
    assert request.stats.verify_steps == math.ceil(25 / 4)
    assert clock.now < alone.now / 2


def test_a_forward_that_fails_ends_its_requests_and_frees_all_slots() -> None:
    class Failing(ScriptedExecutor):
        def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
            if self.clock.now > 5:
                raise ZeroDivisionError
            return super().execute(rows, sampling)

    clock = VirtualClock()
    worker = make_worker(RandomDrafter(VOCAB), clock)
    worker.executor = Failing(scripted(0), VOCAB, SLOTS, CONTEXT, lambda _: 1.0, clock)
    requests = make_requests(6)
    for request in requests:
        worker.scheduler.add(request)
    with pytest.raises(ZeroDivisionError):
        while True:
            worker.step()
    assert [r.finish_reason for r in requests] == [FinishReason.ABORT] * 4 + [None] * 2
    assert worker.scheduler.pool.num_free == SLOTS and len(worker.scheduler.waiting) == 2


class FailsAtThird:
    """A detector of stop strings."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, token: int) -> bool:  # noqa: ARG002
        self.tokens += 1
        if self.tokens == 3:
            raise ZeroDivisionError
        return False


@pytest.mark.parametrize("broken", ["detector", "counts", "walk"])
def test_a_commit_that_fails_ends_its_requests_and_frees_all_slots(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four requests the second cannot commit; two wait."""
    closed: list[int] = []
    drafter = RandomDrafter(VOCAB)
    monkeypatch.setattr(drafter, "close", lambda request: closed.append(request.id))
    worker = make_worker(drafter, VirtualClock())
    requests = make_requests(6)
    for request in requests:
        worker.scheduler.add(request)
    worker.step()
    if broken == "detector":
        requests[1]._stop_detector = FailsAtThird()
    elif broken == "counts":
        monkeypatch.setattr(requests[1].stats, "count", lambda *_: 1 / 0)
        requests[1].stop_ids = frozenset(range(VOCAB))  # it has ended when its counts fail
    else:
        monkeypatch.setattr("pilotfish.core.scheduling.scheduler.walk", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        while worker.scheduler.busy:
            worker.step()
    worker.scheduler.check()
    assert requests[1].finish_reason is (FinishReason.STOP if broken == "counts" else FinishReason.ABORT)
    assert {r.finish_reason for r in (requests[0], *requests[2:4])} == {FinishReason.ABORT}
    assert worker.scheduler.pool.num_free == SLOTS and len(worker.scheduler.waiting) == 2
    assert sorted(closed) == [0, 1, 2, 3]
