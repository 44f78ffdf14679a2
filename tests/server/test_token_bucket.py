"""Token buckets never give more than flowed in; the rate of completions follows what was observed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.server.limits import CompletionRate, TokenBucket

AMOUNTS = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 70), st.floats(0, 1)), max_size=60)


@given(st.integers(1, 60), AMOUNTS)
def test_no_window_takes_more_than_a_minutes_worth_and_what_flowed_in(per_minute: int, calls: list) -> None:
    """Also where a part of what was taken is put back: what stays taken is bounded."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, [(0.0, 0)]
    for pause, amount, returned in calls:
        now += pause
        if amount <= per_minute and bucket.seconds(amount, now) == 0:
            bucket.take(amount, now)
            bucket.take(-int(amount * returned), now)
            taken.append((now, amount - int(amount * returned)))
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= per_minute * (1 + (taken[last][0] - start) / 60) + 1e-3


@given(st.integers(1, 10**9), AMOUNTS, st.integers(1, 10**9))
def test_after_the_seconds_that_it_names_it_is_there(per_minute: int, calls: list, amount: int) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for pause, wanted, _ in calls:
        now += pause
        if wanted <= per_minute and bucket.seconds(wanted, now) == 0:
            bucket.take(wanted, now)
    amount = min(amount, per_minute)
    seconds = bucket.seconds(amount, now)
    assert 0 <= seconds <= 60 * (1 + 1e-9)
    assert bucket.seconds(amount, now + math.ceil(seconds)) == 0


def test_it_holds_a_minutes_worth_at_most() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(-1000, 0.0)
    bucket.take(60, 1e6)
    assert bucket.seconds(1, 1e6) == pytest.approx(1.0)
    assert bucket.seconds(30, 1e6 + 10) == pytest.approx(20.0)


def test_without_a_rate_there_is_always_enough() -> None:
    bucket = TokenBucket(None, 0.0)
    for _ in range(3):
        assert bucket.seconds(10**12, 0.0) == 0
        bucket.take(10**12, 0.0)
        bucket.take(-1, 1.0)


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
def test_the_estimate_is_the_rate_from_the_first_seconds_on(rate: float) -> None:
    completions = CompletionRate(0.0)
    for second in range(1, 200):
        completions.observe(1, second / rate)
        assert completions.seconds(10, second / rate) == pytest.approx(10 / rate, rel=0.1)


def test_the_estimate_follows_a_change_and_skips_idle_time() -> None:
    completions = CompletionRate(0.0)
    for second in range(100):
        completions.observe(1, float(second))
    completions.resume(10_000.0)
    assert completions.seconds(5, 10_000.0) == pytest.approx(5.0, rel=0.1)
    for tick in range(1, 1000):
        completions.observe(1, 10_000.0 + tick / 10)
    assert completions.seconds(5, 10_100.0) == pytest.approx(0.5, rel=0.1)


def test_nothing_observed_is_no_estimate() -> None:
    assert CompletionRate(0.0).seconds(1, 5.0) == math.inf
    assert CompletionRate(0.0).seconds(0, 5.0) == 0
