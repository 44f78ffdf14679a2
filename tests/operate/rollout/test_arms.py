"""What an outcome adds to which sums, what it does not, and that they stay bounded."""

from __future__ import annotations

from math import log
from typing import Any

import msgspec
import pytest

from pilotfish.operate.arms import MEASURES, MOST_ARMS, Arm, RolloutArms
from pilotfish.operate.outcome import Cohort, RequestOutcome

HOUR = 3600.0


def outcome(variant: str = "next", **fields: Any) -> RequestOutcome:
    known: dict[str, Any] = {"ended": HOUR, "ttft": 0.2, "itl": 0.02, "latency": 2.0, "tokens": 100, "steps": 40}
    return RequestOutcome(variant=variant, cohort=Cohort(), **(known | fields))


def arms(*outcomes: RequestOutcome) -> RolloutArms:
    made = RolloutArms(holdout="off", since=0.0)
    for one in outcomes:
        made.add(one)
    return made


def means(arm: Arm) -> dict[str, float]:
    return {name: moments.mean for name, moments in arm.moments.items()}


def test_an_outcome_is_observed_in_each_measure_that_it_has() -> None:
    arm = arms(outcome(valid=True, score=0.75)).arms["next"]
    expected = {"itl": log(0.02), "ttft": log(0.2), "tokens_per_second": log(50.0), "tokens_per_step": 2.5}
    assert means(arm) == pytest.approx(expected | {"valid": 1.0, "score": 0.75, "failed": 0.0})
    assert set(means(arm)) == set(MEASURES)
    assert (arm.requests, arm.tokens) == (1, 100)


def test_what_an_outcome_lacks_is_not_observed() -> None:
    """Times and tokens of 0 have no logarithm. Those of a failed request count."""
    lacking = arms(outcome(failed=True, ttft=None, itl=None, latency=0.0, tokens=0, steps=0))
    assert means(lacking.arms["next"]) == {"failed": 1.0}
    assert set(means(arms(outcome(itl=0.0, ttft=0.0, tokens=0)).arms["next"])) == {"tokens_per_step", "failed"}
    assert means(arms(outcome(failed=True)).arms["next"])["itl"] == pytest.approx(log(0.02))


@pytest.mark.parametrize("apart", ["cut", "pinned"])
def test_requests_that_chance_did_not_place_are_counted_apart(apart: str) -> None:
    arm = arms(outcome(), outcome(itl=9.0, **{apart: True})).arms["next"]
    assert getattr(arm, apart) == 1 and arm.requests == 1
    assert means(arm)["itl"] == pytest.approx(log(0.02))


def test_the_holdout_is_beside_every_variant_that_runs() -> None:
    made = arms(outcome("a"), outcome("b"), outcome("off"), outcome("off", itl=0.04))
    for name in ("a", "b"):
        contrast = made.arms[name].contrasts["itl"]
        assert (contrast.variant.count, contrast.holdout.count) == (1, 2)
        assert contrast.holdout.mean == pytest.approx((log(0.02) + log(0.04)) / 2)
    assert made.arms["off"].contrasts == {} and made.compared == ["a", "b"]


def test_the_holdout_is_beside_no_variant_that_is_cut() -> None:
    """The time in which a variant was cut is not one in which it was compared."""
    made = arms(outcome("a"), outcome("off"), outcome("a", cut=True), outcome("off"), outcome("off"))
    assert made.arms["a"].contrasts["itl"].holdout.count == 1
    made.add(outcome("a"))
    made.add(outcome("off"))
    assert made.arms["a"].contrasts["itl"].holdout.count == 2
    assert made.arms["off"].moments["itl"].count == 4


def test_a_variant_that_only_pinned_requests_have_is_compared_with_nothing() -> None:
    assert arms(outcome("a", pinned=True), outcome("off")).arms["a"].contrasts == {}


def test_feedback_that_comes_later() -> None:
    made = arms(outcome("a"), outcome("off"))
    made.add_score(outcome("a", score=1.0))
    made.add_score(outcome("off", score=0.5))
    for ignored in (outcome("a", score=0.0, cut=True), outcome("a", score=0.0, pinned=True), outcome("a")):
        made.add_score(ignored)
    made.add_score(outcome("never seen", score=0.0))
    assert made.arms["a"].requests == 1 and made.arms["a"].moments["score"].count == 1
    contrast = made.arms["a"].contrasts["score"]
    assert (contrast.variant.mean, contrast.holdout.mean) == (1.0, 0.5)
    assert "never seen" not in made.arms


def test_variants_are_bounded() -> None:
    made = arms(*(outcome(f"v{number}") for number in range(MOST_ARMS + 3)), outcome("v0"))
    assert len(made.arms) == MOST_ARMS and made.left_out == 3 and made.arms["v0"].requests == 2
    made.merge(arms(outcome("w"), outcome("w")))
    assert len(made.arms) == MOST_ARMS and made.left_out == 5


def test_a_round_trip_as_json() -> None:
    made = arms(outcome("a"), outcome("off", valid=False), outcome("a", cut=True), outcome("b", pinned=True))
    record = msgspec.to_builtins(made)
    assert record["holdout"] == "off" and set(record["arms"]) == {"a", "off", "b"}
    again = msgspec.json.decode(msgspec.json.encode(made), type=RolloutArms)
    assert again == made
    again.add(outcome("off"))
    made.add(outcome("off"))
    assert again == made


def test_arms_of_two_servers_are_one() -> None:
    here = arms(outcome("a"), outcome("off"), outcome("a", cut=True))
    there = RolloutArms(holdout="off", since=-5.0, left_out=1)
    for one in (outcome("a", itl=0.04), outcome("off"), outcome("off"), outcome("b", pinned=True)):
        there.add(one)
    here.merge(there)
    assert (here.since, here.left_out) == (-5.0, 1) and set(here.arms) == {"a", "off", "b"}
    a = here.arms["a"]
    assert (a.requests, a.tokens, a.cut, here.arms["b"].pinned) == (2, 200, 1, 1)
    assert a.moments["itl"].mean == pytest.approx((log(0.02) + log(0.04)) / 2)
    sums = a.contrasts["itl"].total()
    assert (sums.variant.count, sums.holdout.count) == (2, 3)
    assert here.arms["off"].moments["itl"].count == 3


def test_sums_that_cannot_be_are_refused() -> None:
    arm = '{"holdout": "off", "since": 0, "arms": {"a": %s}}'
    negative = ('{"requests": -1}', '{"moments": {"itl": {"squares": -1}}}')
    for body in ('{"holdout": "off"}', '{"holdout": "off", "since": -1}', *(arm % fields for fields in negative)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(body, type=RolloutArms)
