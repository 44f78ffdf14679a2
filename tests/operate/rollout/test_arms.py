"""What an outcome adds to which sums, that they stay bounded, and that they are the sums, however they are split."""

from collections import defaultdict
from math import log
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.operate.arms import MEASURES, MOST_ARMS, Arm, RolloutArms
from pilotfish.operate.contrast import PERIOD, Contrast, Moments
from pilotfish.operate.intervals import MINIMUM
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


# -- running sums are the sums, whatever the order, the cuts and the merges


VALUES = st.lists(st.floats(-1e4, 1e4), max_size=40)
#: Hour, whether it is the variant's, value.
OBSERVED = st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.floats(-10, 10)), max_size=60)


def moments(values: list[float]) -> Moments:
    made = Moments()
    for value in values:
        made.add(value)
    return made


def contrast(observed: list[tuple[int, bool, float]]) -> Contrast:
    made = Contrast()
    for hour, in_variant, value in sorted(observed, key=lambda one: one[0]):
        made.add(hour * PERIOD + 1.0, value, of_holdout=not in_variant)
    return made


@given(VALUES)
def test_moments_are_those_of_the_values(values: list[float]) -> None:
    made = moments(values)
    assert made.count == len(values)
    if values:
        assert made.mean == pytest.approx(np.mean(values), abs=1e-6)
    if len(values) > 1:
        assert made.variance == pytest.approx(np.var(values, ddof=1), rel=1e-9, abs=1e-6)


@given(VALUES, VALUES)
def test_merged_moments_are_those_of_all(some: list[float], others: list[float]) -> None:
    merged, whole = moments(some), moments(some + others)
    merged.merge(moments(others))
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, abs=1e-6)
    assert merged.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-4)


def test_moments_keep_their_digits_far_from_0() -> None:
    """Sums of squares would lose a variance of 1 beside a mean of a billion."""
    assert moments([1e9 + x for x in (-1.0, 0.0, 1.0)]).variance == pytest.approx(1.0)


@given(OBSERVED)
def test_a_difference_is_the_weighted_mean_of_those_of_its_hours(observed: list[tuple[int, bool, float]]) -> None:
    hours: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for hour, in_variant, value in observed:
        hours[hour][0 if in_variant else 1].append(value)
    both = [(v, h) for v, h in hours.values() if v and h]
    weights = [len(v) * len(h) / (len(v) + len(h)) for v, h in both]
    sums = contrast(observed).total()
    assert sums.weight == pytest.approx(sum(weights))
    differences = [w * (np.mean(v) - np.mean(h)) for w, (v, h) in zip(weights, both, strict=True)]
    assert sums.weighted == pytest.approx(sum(differences), abs=1e-6)
    assert sums.variant.count == sum(len(v) for v, _ in both)
    assert sums.holdout.degrees == sum(len(h) - 1 for _, h in both)


@given(OBSERVED, OBSERVED)
def test_merged_contrasts_compare_each_server_with_itself(
    here: list[tuple[int, bool, float]], there: list[tuple[int, bool, float]]
) -> None:
    merged = contrast(here)
    merged.merge(contrast(there))
    own, other, both = contrast(here).total(), contrast(there).total(), merged.total()
    for name in ("weight", "weighted"):
        assert getattr(both, name) == pytest.approx(getattr(own, name) + getattr(other, name), abs=1e-9)
    for name in ("count", "degrees", "squares", "noise"):
        for arm in ("variant", "holdout"):
            sums = getattr(getattr(own, arm), name) + getattr(getattr(other, arm), name)
            assert getattr(getattr(both, arm), name) == pytest.approx(sums, abs=1e-9)


def test_what_comes_late_counts_in_the_present_hour() -> None:
    made = contrast([(2, True, 1.0), (2, False, 0.0)])
    made.add(1 * PERIOD, 3.0)
    assert made.period == 2 and made.total().weighted == pytest.approx(2 / 3 * 2.0)


def test_nothing_is_said_until_both_arms_have_enough() -> None:
    made = Contrast()
    for count in range(MINIMUM + 1):
        assert made.total().interval(0.05) is None
        made.add(0.0, float(count % 2))
        for _ in range(3):
            made.add(0.0, float(count % 2), of_holdout=True)
    assert made.total().interval(0.05) is not None


def test_pairs_of_single_requests_say_nothing_of_how_much_they_vary() -> None:
    """Such hours have no variance: it would be taken for 0."""
    made = contrast([(hour, in_variant, float(hour % 7)) for hour in range(1, 400) for in_variant in (True, False)])
    assert made.total().variant.count == 399 and made.total().interval(0.05) is None


def test_an_arm_that_has_not_seen_something_rare_is_not_taken_for_constant() -> None:
    made = Contrast()
    for request in range(2000):
        made.add(0.0, float(request % 100 == 0), of_holdout=True)
        if request % 15 == 0:
            made.add(0.0, 0.0)
    interval = made.total().interval(0.05)
    assert interval is not None and interval.holds(0)


def test_arms_that_never_vary_are_equal() -> None:
    made = contrast([(1, in_variant, 1.0) for in_variant in (True, False) for _ in range(200)])
    interval = made.total().interval(0.05)
    assert interval is not None and (interval.low, interval.high) == (0.0, 0.0)
