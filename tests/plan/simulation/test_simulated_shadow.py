"""Shadows in virtual time: their target does not notice, and what they promise is what their drafts do when live."""

from __future__ import annotations

from functools import cache

import pytest

from pilotfish.core.drafting.shadow import DEPTHS, in_share
from pilotfish.operate import outcome
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, drawn_acceptance, redrawn_acceptance
from pilotfish.plan.simulation.models import Cost
from pilotfish.plan.simulation.run import SimulatedRun, simulate
from pilotfish.plan.simulation.setup import Mode, Setup, Speculation, closed_load
from pilotfish.plan.simulation.shadows import SimulatedShadow
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target_shadow import decodes

TRACE = drawn_acceptance(0.7, sequences=6, prompt=16, output=64)
BETTER, WORSE = (redrawn_acceptance(TRACE, acceptance, seed=1) for acceptance in (0.9, 0.4))
#: Of levels, where a step takes 10 ms: six, four and two of them in a step; and how many sequences there are.
PACES = ((0.0015, 1), (0.0024, 3), (0.0045, 1), (0.0045, 3))
REQUESTS, OUTPUT = 6, 48


def flat(seconds: float) -> Cost:
    return lambda _: seconds


STEP = flat(0.010)


def run(
    mode: Mode,
    draft: float,
    at_a_time: int,
    trace: AcceptanceTrace = TRACE,
    shadow: SimulatedShadow | None = None,
    *,
    target: Cost = STEP,
    **fields: object,
) -> SimulatedRun:
    speculation = Speculation(mode=mode, **{"adaptive": False, "wanted": 256, **fields})  # type: ignore[arg-type]
    setup = Setup(target=target, draft=flat(draft), speculation=speculation)
    return simulate(setup, trace, closed_load(REQUESTS, at_a_time, OUTPUT, 6), shadow=shadow)


def speed(steps: list[StepRecord], at_a_time: int) -> float:
    """Tokens a second of a sequence, while so many decode."""
    full = [step for step in steps if decodes(step) and step.sequences == at_a_time]
    return sum(step.committed for step in full) / sum(step.sequences * (step.ended - step.began) for step in full)


@cache
def live(draft: float, at_a_time: int) -> tuple[float, float]:
    """Tokens a step, and a second, of the draft of TRACE where it is live."""
    alone = run("async", draft, at_a_time)
    return alone.tokens_per_step, speed(alone.steps[0], at_a_time)


@pytest.mark.parametrize(("draft", "at_a_time"), PACES)
def test_beside_no_speculation_it_promises_what_it_does_live(draft: float, at_a_time: int) -> None:
    score = run("off", draft, at_a_time, shadow=SimulatedShadow(flat(draft), TRACE)).shadows[0]
    per_step, per_second = live(draft, at_a_time)
    assert score.tokens_per_step == pytest.approx(per_step, rel=0.04)
    assert score.tokens_per_second == pytest.approx(per_second, rel=0.07)


@pytest.mark.parametrize(
    ("other", "draft", "at_a_time"), [(BETTER, 0.0024, 3), (BETTER, 0.0045, 1), (WORSE, 0.0024, 3)]
)
def test_beside_another_draft_it_promises_the_same(other: AcceptanceTrace, draft: float, at_a_time: int) -> None:
    shadowed = run("async", 0.002, at_a_time, other, SimulatedShadow(flat(draft), TRACE))
    score, (per_step, per_second) = shadowed.shadows[0], live(draft, at_a_time)
    assert score.tokens_per_step == pytest.approx(per_step, rel=0.04)
    assert score.tokens_per_second == pytest.approx(per_second, rel=0.07)
    assert abs(shadowed.tokens_per_step / per_step - 1) > 0.1  # the live draft is another one indeed


def test_whatever_the_budget_it_promises_what_it_does_live() -> None:
    """Of a target whose rows are not free, with n-grams beside the draft."""
    by_rows: Cost = lambda load: 0.006 + 0.0005 * load.rows  # noqa: E731
    fields = {"target": by_rows, "adaptive": True, "ngrams": True}
    score = run("off", 0.0024, 3, shadow=SimulatedShadow(flat(0.0024), TRACE), **fields).shadows[0]  # type: ignore[arg-type]
    alone = run("async", 0.0024, 3, **fields)  # type: ignore[arg-type]
    assert score.tokens_per_step == pytest.approx(alone.tokens_per_step, rel=0.05)
    assert score.tokens_per_second == pytest.approx(speed(alone.steps[0], 3), rel=0.07)


@pytest.mark.parametrize("mode", ["off", "sync", "async"])
def test_its_target_does_not_notice(mode: Mode) -> None:
    with_shadow = run(mode, 0.0024, 3, shadow=SimulatedShadow(flat(0.001), BETTER))
    alone = run(mode, 0.0024, 3)
    assert with_shadow.steps == alone.steps
    assert (with_shadow.requests, with_shadow.stats) == (alone.requests, alone.stats)
    assert with_shadow.shadows[0].steps > 0


def test_it_counts_every_token_of_the_requests_that_it_follows() -> None:
    score = run("off", 0.0024, 1, shadow=SimulatedShadow(flat(0.0024), TRACE)).shadows[0]
    assert (score.requests, score.tokens) == (REQUESTS, REQUESTS * OUTPUT)
    assert score.tokens == score.steps + score.accepted
    assert score.late + score.trees == score.steps  # nothing guesses beside it
    assert score.hits < score.steps
    tried, accepted = score.tried_by_depth, score.accepted_by_depth
    assert len(tried) == DEPTHS == outcome.DEPTHS and tried[0] == score.trees
    assert all(0 <= a <= t for a, t in zip(accepted, tried, strict=True)) and sum(accepted) <= score.accepted
    assert all(deeper <= above for deeper, above in zip(tried[1:], accepted, strict=False))


def test_a_sample_of_requests_is_the_same_whenever_it_is_asked_for() -> None:
    share = 0.4
    score = run("off", 0.0024, 1, shadow=SimulatedShadow(flat(0.0024), TRACE, share)).shadows[0]
    chosen = [number for number in range(REQUESTS) if in_share(number, share)]
    assert 0 < len(chosen) < REQUESTS
    assert (score.requests, score.tokens) == (len(chosen), len(chosen) * OUTPUT)


def test_the_draft_that_is_always_late_is_plain_decoding() -> None:
    score = run("off", 0.015, 1, shadow=SimulatedShadow(flat(0.015), TRACE)).shadows[0]
    assert score.late == score.steps == score.tokens and score.trees == score.accepted == score.hits == 0
    assert score.tokens_per_second == pytest.approx(100.0)


def test_each_target_has_a_shadow() -> None:
    speculation = Speculation(mode="off", adaptive=False)
    setup = Setup(target=STEP, targets=2, speculation=speculation)
    shadow = SimulatedShadow(flat(0.0024), TRACE)
    scores = simulate(setup, TRACE, closed_load(REQUESTS, 2, OUTPUT, 6), shadow=shadow).shadows
    assert [score.requests for score in scores] == [REQUESTS / 2] * 2
