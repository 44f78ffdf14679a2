from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.routing.autoscaling import CALM, GOAL, demand, targets_wanted

PARTS = st.lists(st.floats(0, 8), max_size=64)
COUNTS = st.integers(1, 64)


@pytest.mark.parametrize(
    ("demands", "now", "wanted"),
    [
        ([], 1, 1),
        ([0.0, 0.0], 2, 1),
        ([0.8], 1, 1),
        ([0.81], 1, 2),
        ([3.2], 1, 4),  # requests wait
        ([0.65, 0.65], 2, 2),  # one could not do it
        ([0.35, 0.35], 2, 2),  # one could, but would soon be too few
        ([0.3, 0.3], 2, 1),
        ([0.9, 0.0], 2, 2),  # the second one starts
    ],
)
def test_as_many_as_the_work_fills(demands: list[float], now: int, wanted: int) -> None:
    assert targets_wanted(demands, now) == wanted


@given(PARTS, COUNTS)
def test_what_is_wanted_is_wanted_again(demands: list[float], now: int) -> None:
    """No two numbers follow each other for ever."""
    wanted = targets_wanted(demands, now)
    assert wanted >= 1 and targets_wanted(demands, wanted) == wanted


@given(PARTS, COUNTS)
def test_enough_and_not_far_too_many(demands: list[float], now: int) -> None:
    wanted, work = targets_wanted(demands, now), sum(demands)
    assert work <= (GOAL + 1e-6) * wanted
    assert wanted <= max(1, work / CALM + 1)


@given(PARTS, COUNTS, st.floats(0, 8))
def test_more_work_never_wants_fewer(demands: list[float], now: int, more: float) -> None:
    assert targets_wanted([*demands, more], now) >= targets_wanted(demands, now)


def test_demand_is_of_what_is_scarcer() -> None:
    assert demand(8, 32, 900, 1000) == 0.9
    assert demand(48, 32, 100, 1000) == 1.5
