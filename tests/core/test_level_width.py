"""A level takes the leaves that pay, by what levels were seen to cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized

from pilotfish.core.drafting.level_choice import LevelWidth


def learned(seconds: Callable[[int], float], most: int = 32, levels: int = 2000) -> LevelWidth:
    """After levels of all widths, in turn."""
    width = LevelWidth(most)
    for level in range(levels):
        rows = 1 + level * 7 % most
        width.observe(rows, seconds(rows))
    return width


def falling(by: float, count: int = 64) -> list[float]:
    return [0.5 * by**rank for rank in range(count)]


def test_what_costs_the_same_is_taken_whole() -> None:
    assert LevelWidth(32).best(falling(0.5)) == 32
    assert learned(lambda _: 0.0026).best(falling(0.5)) == 32


@pytest.mark.parametrize("held", [8, 16])
def test_a_pace_is_filled_and_not_overrun(held: int) -> None:
    """Levels take as long up to `held` leaves, and from there on more for each."""
    width = learned(lambda rows: 0.0026 * max(1.0, rows / held))
    assert held - 2 <= width.best(falling(0.9)) <= held + 3


@settings(max_examples=sized(12, 50))
@given(
    st.floats(0.0001, 0.01),
    st.floats(0.0, 0.01),
    st.lists(st.floats(0.0001, 1.0), min_size=1, max_size=40).map(lambda chances: sorted(chances, reverse=True)),
)
def test_the_width_brings_about_the_most_a_second(fixed: float, each: float, chances: list[float]) -> None:
    """Beside a plain search, with the costs as they are."""
    found = learned(lambda rows: fixed + each * rows, most=16, levels=600).best(chances)
    rates = [sum(chances[:width]) / (fixed + each * width) for width in range(1, min(16, len(chances)) + 1)]
    assert rates[min(found, len(rates)) - 1] >= 0.85 * max(rates)


def test_a_device_that_becomes_slow_is_noticed() -> None:
    width = learned(lambda _: 0.002)
    assert width.best(falling(0.5)) == 32
    for level in range(2000):
        rows = 1 + level * 7 % 32
        width.observe(rows, 0.002 + 0.001 * rows)
    assert width.best(falling(0.5)) < 8
