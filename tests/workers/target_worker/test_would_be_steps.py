"""What shadows learn of live steps, and which requests they take in."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from side import make_request
from support import RandomDrafter

from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.calibration import StepCosts
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.workers import target_shadow as shadow
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target_shadow import LiveSteps, ShadowMachine, ShadowSetup


def record(began: float, ended: float, before: float | None = None, **counts: int) -> StepRecord:
    given = {"sequences": 1, "rows": 1, "nodes": 0, "committed": 1, **counts}
    zeros = dict.fromkeys(("depth", "offered", "accepted", "hits"), 0)
    return StepRecord(began if before is None else before, *[began] * 5, *[ended] * 3, **given, **zeros)


def live_steps(*records: StepRecord, seconds: float = 0.010) -> LiveSteps:
    live = LiveSteps(StepCosts({1: seconds, 256: seconds}))
    for one in records:
        live.observe(one)
    live.take_in()
    return live


def test_the_rate_is_that_of_a_sequence_and_the_error_that_of_the_costs() -> None:
    steps = [record(i * 0.02, i * 0.02 + 0.02, sequences=2, rows=6, nodes=4, committed=5) for i in range(3)]
    live = live_steps(*steps)
    assert live.speed.value == pytest.approx(5 / (2 * 0.02)) and live.sequences == 2
    assert 0.5 < live.error <= 1.0  # they take twice as long as was believed
    again = live_steps(*steps * 100)
    assert again.costs.at(6) == pytest.approx(0.020, rel=0.01) and abs(again.error) < 0.2


def test_prompts_and_pauses_say_nothing_of_a_steps_time() -> None:
    prompt, paused = record(0.0, 5.0, rows=200), record(9.0, 9.5, before=5.0)
    live = live_steps(prompt, paused, record(9.5, 9.51))
    assert live.speed.value == pytest.approx(100) and live.costs.at(1) == pytest.approx(0.010)


def test_time_that_a_step_drafts_is_not_the_forwards() -> None:
    drafted = StepRecord(0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.51, 0.51, 0.51, 1, 5, 4, 4, 4, 2, 3, 1)
    live = live_steps(drafted)
    assert live.error == pytest.approx(0.0) and live.speed.value == pytest.approx(3 / 0.51)


#: All of an executor that a machine looks at.
EXECUTOR: Any = SimpleNamespace(vocab_size=100)


class Followed(RandomDrafter):
    """Which requests it was asked for, and told of."""

    def __init__(self) -> None:
        super().__init__(EXECUTOR.vocab_size)
        self.asked, self.closed = set[int](), list[int]()

    def propose(self, requests: Any, limits: Any) -> Any:
        self.asked |= {request.id for request in requests}
        return super().propose(requests, limits)

    def close(self, request: Request) -> None:
        self.closed.append(request.id)


def machine(live: LiveSteps, **options: Any) -> tuple[ShadowMachine, Followed]:
    drafter, setup = Followed(), ShadowSetup(2048, 64, 8)
    return ShadowMachine(EXECUTOR, drafter, [], FixedBudget(8, 8), live, setup, **options), drafter


def ended(number: int, output: int = 5, reason: FinishReason = FinishReason.LENGTH) -> Request:
    request = make_request(number)
    request.extend([7] * output)
    request.finish_reason = reason
    return request


def run(one: ShadowMachine, now: float = 0.0) -> float:
    """Until there is nothing to do; when that is."""
    while (due := one.turn(now)) < math.inf:
        now = due
    return now


def test_steps_come_as_often_as_live_ones() -> None:
    one, drafter = machine(live_steps())
    one.ended(ended(3))
    assert one.turn(100.0) == pytest.approx(100.010)
    assert one.turn(100.005) == pytest.approx(100.010)  # not yet
    assert one.turn(100.013) == pytest.approx(100.020)  # a little late: it keeps the pace
    assert one.turn(105.0) == pytest.approx(105.010)
    run(one, 105.010)
    assert one.score.tokens == 5 and drafter.closed == [3] and not one._known


def test_it_follows_as_many_at_a_time_as_run_live() -> None:
    one, drafter = machine(live_steps(*[record(0.0, 0.01, sequences=3, rows=3)] * 50))
    for number in range(4):
        one.ended(ended(number))
    assert one.turn(0.0) == math.inf and not drafter.asked  # they would soon be fewer
    one.ended(ended(4))
    one.turn(0.0)
    assert drafter.asked == {0, 1, 2}
    run(one, 0.010)
    assert sorted(drafter.closed) == [0, 1, 2, 3, 4] and one.score.requests == 5


def test_none_is_followed_while_the_draft_is_not_ready() -> None:
    one, drafter = machine(live_steps())
    one.ended(ended(0))
    assert one.turn(0.0, ready=False) == math.inf and not drafter.asked
    run(one)
    assert drafter.closed == [0]


def test_what_has_no_output_or_failed_is_left_out() -> None:
    one, drafter = machine(live_steps())
    for request in (ended(0, output=0, reason=FinishReason.ABORT), ended(1, reason=FinishReason.ERROR), ended(2)):
        one.ended(request)
    run(one)
    assert drafter.asked == {2}


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "MAX_WAITING", 25)  # tokens: of two requests
    one, drafter = machine(live_steps())
    for number in range(5):
        one.ended(ended(number))
    run(one)
    assert drafter.closed == [0, 1]
    one.ended(ended(5))
    run(one)
    assert drafter.closed == [0, 1, 5]


def test_a_request_is_left_as_it_is() -> None:
    """Its outcome may be told to others still."""
    one, _ = machine(live_steps())
    request = ended(0)
    before = (list(request.tokens), request.finish_reason, request.num_computed)
    one.ended(request)
    run(one)
    assert before == (request.tokens, request.finish_reason, request.num_computed)


def test_what_the_loop_takes_longer_than_the_live_one_counts() -> None:
    """Where live steps have no trees to propose and to walk down."""
    ticks = iter(0.001 * number for number in range(1000))
    one, _ = machine(live_steps(record(0.0, 0.010)), cpu_seconds=lambda: next(ticks))
    one.ended(ended(0))
    first = one.turn(0.0)
    second = one.turn(first) - first
    assert (first, second) == pytest.approx((0.010, 0.012))  # a millisecond each to begin, and to end
