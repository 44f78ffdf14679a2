"""A level: shares of a saturated draft are in proportion to weights, nothing is saved up or wasted; leaves that pay
are taken, by what levels were seen to cost."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized

from pilotfish.core.drafting.level_choice import MAX_TENANTS, FairShare, LevelWidth

WEIGHTS = {"a": 3.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_weights_of_three_to_one(rows: int) -> None:
    share, given_rows = FairShare(), Counter[str]()
    for _ in range(1000):
        given_rows.update(share.split({"a": rows, "b": rows}, WEIGHTS, rows))
    assert sum(given_rows.values()) == 1000 * rows
    assert given_rows["a"] / given_rows["b"] == pytest.approx(3.0, rel=0.01)


def test_absence_is_neither_saved_up_nor_punished() -> None:
    """Each comes and goes; while both are there, three to one."""
    share, both = FairShare(), Counter[str]()
    rng = random.Random(0)
    here = {"a": True, "b": True}
    for _ in range(400):
        for tenant in here:
            here[tenant] ^= rng.random() < 0.1
        wanted = {tenant: 32 for tenant, wants in here.items() if wants}
        for _ in range(10):
            rows = share.split(wanted, WEIGHTS, 32)
            if len(wanted) == 2:
                both.update(rows)
    assert both.total() > 20_000
    assert both["a"] / both["b"] == pytest.approx(3.0, rel=0.01)


def test_prompts_that_were_read_alone_are_no_debt() -> None:
    """Nobody else wanted those rows; those of the last level alone count against the one who comes."""
    share = FairShare()
    for _ in range(100):
        share.split({"b": 1}, WEIGHTS, 32)
        share.charge("b", 64, WEIGHTS["b"])
    levels = [share.split({"b": 32, "c": 32}, WEIGHTS, 32)["b"] for _ in range(4)]
    assert levels[0] == 0 and levels[-1] == 16


def test_few_tenants_are_remembered() -> None:
    share = FairShare()
    for number in range(2 * MAX_TENANTS):
        share.split({}, {}, 32)
        share.charge(f"tenant {number}", 100, 1.0)
    assert len(share._clocks) <= MAX_TENANTS


WANTED = st.dictionaries(st.sampled_from("abc"), st.integers(0, 40))


@given(st.lists(st.tuples(WANTED, st.integers(0, 40)), max_size=20))
def test_no_row_is_wasted_and_none_is_given_unasked(calls: list[tuple[dict[str, int], int]]) -> None:
    share = FairShare()
    for wanted, rows in calls:
        shares = share.split(wanted, WEIGHTS, rows)
        assert shares.keys() == wanted.keys()
        assert all(0 <= shares[tenant] <= wanted[tenant] for tenant in wanted)
        assert sum(shares.values()) == min(rows, sum(wanted.values()))


@given(st.lists(WANTED, max_size=30), st.integers(1, 8))
def test_nobody_starves(calls: list[dict[str, int]], rows: int) -> None:
    """Whatever came before, and whatever others want: a row for each within a round of all weights."""
    share = FairShare()
    for wanted in calls:
        share.split(wanted, WEIGHTS, rows)
    given_rows = Counter[str]()
    for _ in range(10):
        given_rows.update(share.split(dict.fromkeys(WEIGHTS, rows), WEIGHTS, rows))
    assert all(given_rows[tenant] > 0 for tenant in WEIGHTS)
    assert given_rows.total() == 10 * rows


# -- the width


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
