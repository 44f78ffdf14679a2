"""Intervals are the published ones, and hold at all times at once: of shares exactly, of means in watched rollouts."""

from functools import cache
from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import table
from sizes import sized
from watched_rollouts import Floats, Traffic, constant, first_seen, latencies

from pilotfish.operate.contrast import Contrast
from pilotfish.operate.intervals import MINIMUM, TUNED_FOR, mean_interval, radius, requests_needed, share_interval
from pilotfish.operate.report import about

ALPHA = 0.05
#: Requests of which a variant of 5 % has 300, and in the soak 2,000.
UNEVEN = sized(6_000, 40_000)
ROLLOUTS = sized(150, 1000)


# -- means


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3])
@pytest.mark.parametrize("n", [1, 100, 5000])
def test_the_radius_is_that_of_the_paper(alpha: float, n: int) -> None:
    """Equation 9 of the paper, with the rho for which rho² n = log(1 + rho² n) - 2 log(alpha) at the tuned n."""
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if middle > log(1 + middle) - 2 * log(alpha) else (middle, high)
    rho, sigma = sqrt(low / TUNED_FOR), 3.0
    published = sigma * sqrt(2 * (n * rho**2 + 1) / (n**2 * rho**2) * log(sqrt(n * rho**2 + 1) / alpha))
    assert float(radius(sigma**2 / n, n, alpha)) == pytest.approx(published, rel=1e-6)


def test_a_mean_of_few_observations_has_no_interval() -> None:
    assert mean_interval(MINIMUM - 1, 5.0, 1.0, ALPHA) is None
    interval = mean_interval(MINIMUM, 5.0, 1.0, ALPHA)
    assert interval is not None and interval.low < 5 < interval.high
    assert interval.high - 5 == pytest.approx(5 - interval.low)


# -- shares


@cache
def share_holds(count: int, total: float, p: float, alpha: float) -> bool:
    interval = share_interval(count, total, alpha)
    return interval is not None and interval.holds(p)


@pytest.mark.parametrize(("p", "low", "high"), [(0.01, 0, 1), (0.3, 0, 1), (0.97, 0, 1), (0.4, 0.25, 0.75)])
def test_shares_are_ever_missed_with_a_chance_of_alpha_at_most(p: float, low: float, high: float) -> None:
    """The exact chance, watched after each of 100 values that are `high` with chance p, else `low`."""
    alpha, reached, missed = 0.2, {0: 1.0}, 0.0
    mean = low + p * (high - low)
    for count in range(1, 101):
        after: dict[int, float] = {}
        for highs, chance in reached.items():
            after[highs] = after.get(highs, 0.0) + chance * (1 - p)
            after[highs + 1] = after.get(highs + 1, 0.0) + chance * p
        out = [n for n in after if not share_holds(count, low * (count - n) + high * n, mean, alpha)]
        missed += sum(after.pop(n) for n in out)
        reached = after
    assert missed <= alpha
    assert (low, high) != (0, 1) or missed > alpha / 20  # or it says less than it could


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(1e-6, 0.5))
def test_an_interval_of_a_share_is_a_part_of_0_to_1_around_it(count: int, share: float, alpha: float) -> None:
    interval = share_interval(count, share * count, alpha)
    assert interval is not None and 0 <= interval.low <= interval.estimate <= interval.high <= 1
    wider = share_interval(count, share * count, alpha / 2)
    assert wider is not None and wider.low <= interval.low and wider.high >= interval.high
    mirrored = share_interval(count, (1 - share) * count, alpha)
    assert mirrored is not None and mirrored.low == pytest.approx(1 - interval.high, abs=1e-9)


def test_shares_of_all_and_nothing() -> None:
    assert share_interval(0, 0.0, ALPHA) is None
    never, always = share_interval(1000, 0.0, ALPHA), share_interval(1000, 1000.0, ALPHA)
    assert never is not None and never.low == never.estimate == 0 and 0.001 < never.high < 0.01
    assert always is not None and always.high == always.estimate == 1 and 0.99 < always.low < 0.999


# -- differences, watched after every request


def rare(chance: float) -> object:
    return lambda random, shape: (random.random(shape) < chance).astype(float)


def daily(time: Floats) -> Floats:
    """The load of two days, the second busier."""
    return 0.3 * np.sin(4 * np.pi * time) + 0.2 * time


SAME = {
    "half each": Traffic(1, 4000, constant(0.5)),
    "5 % beside 95 %": Traffic(1, UNEVEN, constant(0.05)),
    "hours of a changing load": Traffic(40, 100, constant(0.5), daily),
    "a share that rises under a changing load": Traffic(40, 100, lambda time: 0.01 + 0.5 * time, daily),
    "few requests an hour": Traffic(400, 10, constant(0.3), daily),
    "something rare, 5 % beside 95 %": Traffic(1, UNEVEN, constant(0.05), draw=rare(0.005)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SAME)
def test_of_equal_variants_at_most_5_in_100_ever_seem_to_differ(name: str) -> None:
    false_alarms = np.isfinite(first_seen(SAME[name], ROLLOUTS, ALPHA, seed=1)).mean()
    assert false_alarms <= ALPHA


def test_what_is_watched_is_what_a_contrast_says() -> None:
    traffic = Traffic(8, 150, lambda time: 0.2 + 0.5 * time, daily, effect=-0.2)
    watched = traffic.make(np.random.default_rng(3), 1)
    looks, contrast, told = watched.looks(ALPHA), Contrast(), 0
    for look, (value, in_variant) in enumerate(zip(watched.values.flat, watched.in_variant.flat, strict=True)):
        contrast.add(3600.0 * (1 + look // traffic.requests), float(value), of_holdout=not in_variant)
        interval = contrast.total().interval(ALPHA)
        assert (interval is None) == np.isinf(looks.radius[0, look])
        if interval is not None:
            told += 1
            assert interval.estimate == pytest.approx(looks.difference[0, look])
            assert interval.high - interval.estimate == pytest.approx(looks.radius[0, look])
    assert told > 500


# -- power


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_a_tenth_is_seen_within_the_requests_that_are_said_to_be_needed(share: float) -> None:
    deviation = float(latencies(np.random.default_rng(0), (100_000,)).std())
    needed = requests_needed(log(1.1), deviation, share, ALPHA)
    assert needed <= (2500 if share == 0.5 else 12_000)
    seen = first_seen(Traffic(1, needed, constant(share), effect=log(1.1)), ROLLOUTS, ALPHA, seed=2)
    assert np.isfinite(seen).mean() >= 0.9
    early = first_seen(Traffic(1, needed // 4, constant(share), effect=log(1.1)), ROLLOUTS, ALPHA, seed=2)
    assert np.isfinite(early).mean() < 0.5


@given(st.floats(0.01, 0.5), st.floats(0.05, 2), st.floats(0.01, 0.5), st.floats(0.001, 0.2))
def test_smaller_differences_in_more_noise_need_more(d: float, deviation: float, share: float, alpha: float) -> None:
    needed = requests_needed(d, deviation, share, alpha)
    assert needed >= MINIMUM / share
    assert requests_needed(d / 2, deviation, share, alpha) >= needed
    assert requests_needed(d, 2 * deviation, share, alpha) >= needed
    assert requests_needed(d, deviation, share, alpha / 2) >= needed
    assert requests_needed(d, deviation, share / 2, alpha) >= needed
    assert requests_needed(d, deviation, 1 - share, alpha) == pytest.approx(needed, abs=1)


def test_the_table_of_the_page() -> None:
    """Requests of both arms by difference, spread and shares."""
    rows = table("rollout.md", "How many requests a difference takes")
    assert len(rows) == 9
    for difference, spread, *cells in rows:
        size, deviation = log(1 + float(difference.removesuffix(" %")) / 100), float(spread)
        needed = [requests_needed(size, deviation, share, ALPHA) for share in (0.5, 0.05)]
        assert cells == [about(number) for number in needed]
