"""Running sums are the sums, whatever the order, the cuts and the merges; periods are compared each in itself."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.operate.contrast import PERIOD, Contrast, Moments
from pilotfish.operate.intervals import MINIMUM

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
        (made.add_variant if in_variant else made.add_holdout)(hour * PERIOD + 1.0, value)
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
    made.add_variant(1 * PERIOD, 3.0)
    assert made.period == 2 and made.total().weighted == pytest.approx(2 / 3 * 2.0)


def test_nothing_is_said_until_both_arms_have_enough() -> None:
    made = Contrast()
    for count in range(MINIMUM + 1):
        assert made.total().interval(0.05) is None
        made.add_variant(0.0, float(count % 2))
        for _ in range(3):
            made.add_holdout(0.0, float(count % 2))
    assert made.total().interval(0.05) is not None


def test_pairs_of_single_requests_say_nothing_of_how_much_they_vary() -> None:
    """Such hours have no variance: it would be taken for 0."""
    made = contrast([(hour, in_variant, float(hour % 7)) for hour in range(1, 400) for in_variant in (True, False)])
    assert made.total().variant.count == 399 and made.total().interval(0.05) is None


def test_an_arm_that_has_not_seen_something_rare_is_not_taken_for_constant() -> None:
    made = Contrast()
    for request in range(2000):
        made.add_holdout(0.0, float(request % 100 == 0))
        if request % 15 == 0:
            made.add_variant(0.0, 0.0)
    interval = made.total().interval(0.05)
    assert interval is not None and interval.holds(0)


def test_arms_that_never_vary_are_equal() -> None:
    made = contrast([(1, in_variant, 1.0) for in_variant in (True, False) for _ in range(200)])
    interval = made.total().interval(0.05)
    assert interval is not None and (interval.low, interval.high) == (0.0, 0.0)
