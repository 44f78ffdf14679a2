"""A step whose commit fails, in virtual time."""

from __future__ import annotations

import pytest
from support import RandomDrafter

from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.plan.events import VirtualClock
from pilotfish.plan.simulation.acceptance import drawn_acceptance
from pilotfish.plan.simulation.models import Replay, ReplayedModel
from pilotfish.workers.target import TargetWorker

SLOTS, CONTEXT = 200, 120


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
    drafter = RandomDrafter(1 << 15)
    monkeypatch.setattr(drafter, "close", lambda request: closed.append(request.id))
    clock, replay = VirtualClock(), Replay(drawn_acceptance(0.7, sequences=6, output=32))
    executor = ReplayedModel(replay, lambda _: 1.0, clock, SLOTS, CONTEXT)
    scheduler = Scheduler(SlotPool(SLOTS), max_rows=40, max_requests=4)
    worker = TargetWorker(executor, scheduler, drafter, FixedBudget(8, 3), clock)
    prompts, params = [[1] * (3 + 9 * n) for n in range(6)], SamplingParams(max_tokens=25, temperature=0.0)
    requests = [Request(n, one, params, replay.add(n, len(one)), frozenset(), CONTEXT) for n, one in enumerate(prompts)]
    for request in requests:
        worker.scheduler.add(request)
    worker.step()
    if broken == "detector":
        requests[1]._stop_detector = FailsAtThird()
    elif broken == "counts":
        monkeypatch.setattr(requests[1].stats, "count", lambda *_: 1 / 0)
        requests[1].stop_ids = frozenset(range(1 << 15))  # it has ended when its counts fail
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
