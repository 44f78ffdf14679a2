"""Shadows in virtual time: their target does not notice, and what they promise is what their drafts do when live."""

import math
from functools import cache, partial

import pytest
from msgspec.structs import replace
from sizes import sized

from pilotfish.core.peers.fields import Peer
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.operate import outcome
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, drawn_acceptance
from pilotfish.plan.simulation.drafts import VirtualPool, peer_of, pooled_drafter
from pilotfish.plan.simulation.models import Cost, Replay
from pilotfish.plan.simulation.run import TICK, SimulatedRun, Simulation, VirtualTarget, budget_over, costs_of, simulate
from pilotfish.plan.simulation.setup import MAX_ROWS, Mode, Setup, Speculation, closed_load
from pilotfish.wire.channel import Received
from pilotfish.workers import target_shadow
from pilotfish.workers.ngram import NgramDrafter
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target_shadow import LiveSteps, ShadowMachine, ShadowScore, ShadowSetup

TRACE = drawn_acceptance(0.7, sequences=6, prompt=16, output=64)
#: Of levels, where a step takes 10 ms: two, six and four of them in a step; and how many sequences there are.
PACES = sized([(0.0045, 1), (0.0024, 3)], [(0.0045, 1), (0.0024, 3), (0.0015, 1), (0.0045, 3)])
REQUESTS, OUTPUT = 6, 48


def redrawn(acceptance: float) -> AcceptanceTrace:
    """Of TRACE's target with another draft."""
    other = drawn_acceptance(acceptance, sequences=6, prompt=16, output=64, seed=1)
    guesses = (other.guesses + (TRACE.tokens - other.tokens)[:, None]) % TRACE.pair.vocab_size
    return AcceptanceTrace(TRACE.pair, TRACE.prompts, TRACE.first, TRACE.tokens, guesses, other.log_chances)


BETTER, WORSE = redrawn(0.9), redrawn(0.4)


class Shadow:
    """A draft in a pool of its own, of which a target knows only as its shadow."""

    def __init__(self, simulation: Simulation, target: VirtualTarget, draft: Cost, share: float) -> None:
        setup, self.events = simulation.setup, simulation.events
        speculation = replace(setup.speculation, mode="async")
        own = replace(setup, draft=draft, pools=1, speculation=speculation)
        replay = Replay(TRACE)
        replay._shifts = simulation.replay._shifts
        self.pool = VirtualPool(self.events, replay, own, self.to_target)
        self.drafter = pooled_drafter(own, 0, TRACE.pair.vocab_size, lambda: self.events.now, self.to_pool)
        self.live = LiveSteps(costs_of(own))
        limits = ShadowSetup(target.context, MAX_ROWS, setup.max_requests, prefix_cache=False, share=share)
        beside, budget = [NgramDrafter()] * speculation.ngrams, budget_over(costs_of(own), speculation)
        self.machine = ShadowMachine(target.worker.executor, self.drafter, beside, budget, self.live, limits)
        self.busy = False
        self.count, target.worker.observe = target.worker.observe, self.observe

    def to_pool(self, _: Peer, *frames: bytes) -> None:
        for frame in frames:
            self.events.at(self.events.now, partial(self.pool.deliver, b"target", frame))

    def to_target(self, _: Peer, *frames: bytes) -> None:
        for frame in frames:
            self.events.at(self.events.now, partial(self.drafter.receive, Received(peer_of(0), frame)))

    def tick(self) -> None:
        self.drafter.tick()
        self.pool.tick()
        self.events.at(self.events.now + TICK, self.tick)

    def observe(self, step: StepRecord) -> None:
        self.count(step)
        self.live.observe(step)
        self.live.take_in()

    def ended(self, request: Request) -> None:
        self.machine.ended(request)
        if not self.busy:
            self.plan(self.events.now)

    def plan(self, when: float) -> None:
        self.busy = when < math.inf
        if self.busy:
            self.events.at(when, lambda: self.plan(self.machine.turn(self.events.now, self.drafter.ready)))


class Shadowed(Simulation):
    """Each of its targets has a shadow whose draft guesses as in TRACE."""

    def __init__(self, setup: Setup, trace: AcceptanceTrace, draft: float, share: float = 1.0) -> None:
        super().__init__(setup, trace)
        self.shadows = [Shadow(self, target, flat(draft), share) for target in self.targets]
        for shadow in self.shadows:
            shadow.tick()
        self.events.run(until=lambda: all(shadow.drafter.ready for shadow in self.shadows))

    def scores(self, at_a_time: int) -> list[ShadowScore]:
        self.simulated = self.play(closed_load(REQUESTS, at_a_time, OUTPUT, 6))
        self.events.run(until=lambda: not any(shadow.busy for shadow in self.shadows))
        return [shadow.machine.score for shadow in self.shadows]

    def _committed(self, commit: RequestCommit) -> None:
        if commit.request.finish_reason is not None:
            self.shadows[self._times[commit.request.id].target].ended(commit.request)
        super()._committed(commit)


def flat(seconds: float) -> Cost:
    return lambda _: seconds


STEP = flat(0.010)


def setup(mode: Mode, draft: float, target: Cost = STEP, **fields: object) -> Setup:
    speculation = Speculation(mode=mode, **{"adaptive": False, "wanted": 256, **fields})  # type: ignore[arg-type]
    return Setup(target=target, draft=flat(draft), speculation=speculation)


def run(mode: Mode, draft: float, at_a_time: int, **fields: object) -> SimulatedRun:
    return simulate(setup(mode, draft, **fields), TRACE, closed_load(REQUESTS, at_a_time, OUTPUT, 6))  # type: ignore[arg-type]


def beside_nothing(draft: float, at_a_time: int, **more: float) -> ShadowScore:
    """What a shadow promises of a draft, where its target does not speculate."""
    return Shadowed(setup("off", draft), TRACE, draft, **more).scores(at_a_time)[0]


def speed(steps: list[StepRecord], at_a_time: int) -> float:
    """Tokens a second of a sequence, while so many decode."""
    full = [step for step in steps if target_shadow.decodes(step) and step.sequences == at_a_time]
    return sum(step.committed for step in full) / sum(step.sequences * (step.ended - step.began) for step in full)


@cache
def live(draft: float, at_a_time: int) -> tuple[float, float]:
    """Tokens a step, and a second, of the draft of TRACE where it is live."""
    alone = run("async", draft, at_a_time)
    return alone.tokens_per_step, speed(alone.steps[0], at_a_time)


OTHERS = sized([(WORSE, 0.0024, 3)], [(WORSE, 0.0024, 3), (BETTER, 0.0024, 3), (BETTER, 0.0045, 1)])


@pytest.mark.parametrize(("other", "draft", "at_a_time"), [*((None, *pace) for pace in PACES), *OTHERS])
def test_it_promises_what_it_does_live(other: AcceptanceTrace | None, draft: float, at_a_time: int) -> None:
    """Beside no speculation, and beside another draft."""
    shadowed = Shadowed(setup("async" if other else "off", 0.002), other or TRACE, draft)
    (score,), (per_step, per_second) = shadowed.scores(at_a_time), live(draft, at_a_time)
    assert score.tokens_per_step == pytest.approx(per_step, rel=0.04)
    assert score.tokens_per_second == pytest.approx(per_second, rel=0.07)
    assert abs(shadowed.simulated.tokens_per_step / per_step - 1) > 0.1  # what is live is something else indeed


def test_whatever_the_budget_it_promises_what_it_does_live() -> None:
    """Of a target whose rows are not free, with n-grams beside the draft."""
    by_rows: Cost = lambda load: 0.006 + 0.0005 * load.rows  # noqa: E731
    fields = {"target": by_rows, "adaptive": True, "ngrams": True}
    (score,) = Shadowed(setup("off", 0.0024, **fields), TRACE, 0.0024).scores(3)  # type: ignore[arg-type]
    alone = run("async", 0.0024, 3, **fields)
    assert score.tokens_per_step == pytest.approx(alone.tokens_per_step, rel=0.05)
    assert score.tokens_per_second == pytest.approx(speed(alone.steps[0], 3), rel=0.07)


@pytest.mark.parametrize("mode", sized(["async"], ["off", "sync", "async"]))
def test_its_target_does_not_notice(mode: Mode) -> None:
    with_shadow, alone = Shadowed(setup(mode, 0.0024), TRACE, 0.001), run(mode, 0.0024, 3)
    assert with_shadow.scores(3)[0].steps > 0
    assert with_shadow.simulated == alone


def test_it_counts_every_token_of_the_requests_that_it_follows() -> None:
    score = beside_nothing(0.0024, 1)
    assert (score.requests, score.tokens) == (REQUESTS, REQUESTS * OUTPUT)
    assert score.tokens == score.steps + score.accepted
    assert score.late + score.trees == score.steps  # nothing guesses beside it
    assert score.hits < score.steps
    tried, accepted = score.tried_by_depth, score.accepted_by_depth
    assert len(tried) == target_shadow.DEPTHS == outcome.DEPTHS and tried[0] == score.trees
    assert all(0 <= a <= t for a, t in zip(accepted, tried, strict=True)) and sum(accepted) <= score.accepted
    assert all(deeper <= above for deeper, above in zip(tried[1:], accepted, strict=False))


def test_a_sample_of_requests_is_the_same_whenever_it_is_asked_for() -> None:
    share = 0.4
    score = beside_nothing(0.0024, 1, share=share)
    chosen = [number for number in range(REQUESTS) if target_shadow.in_share(number, share)]
    assert 0 < len(chosen) < REQUESTS
    assert (score.requests, score.tokens) == (len(chosen), len(chosen) * OUTPUT)


def test_the_draft_that_is_always_late_is_plain_decoding() -> None:
    score = beside_nothing(0.015, 1)
    assert score.late == score.steps == score.tokens and score.trees == score.accepted == score.hits == 0
    assert score.tokens_per_second == pytest.approx(100.0)
