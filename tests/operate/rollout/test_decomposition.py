"""The parts of a change of a mean: exact, and zero where nothing of their kind happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pages import table

from pilotfish.operate.explaining.decomposition import Decomposition, Portions, product_effects

weights = st.integers(0, 100_000)
rates = st.floats(0, 8)


def portions(weights: list[float], rates: list[float]) -> Portions:
    steps = np.array(weights, np.float64)
    return Portions(np.array(rates) * steps, steps)


@st.composite
def pairs(draw: st.DrawFn) -> Decomposition:
    """Some cohorts may be absent on either side, or on both."""
    count = draw(st.integers(1, 12))
    columns = [draw(st.lists(kind, min_size=count, max_size=count)) for kind in (weights, rates, weights, rates)]
    assume(sum(columns[0]) > 0 and sum(columns[2]) > 0)
    return Decomposition(portions(*columns[:2]), portions(*columns[2:]))


@given(pairs())
def test_the_parts_add_up_to_the_change(parts: Decomposition) -> None:
    assert parts.mix + parts.within + parts.interaction == pytest.approx(parts.change, abs=1e-12)


@given(pairs())
def test_common_cohorts_carry_all_of_within_and_interaction(parts: Decomposition) -> None:
    changes = np.where(parts.common, parts.after.rates - parts.before.rates, 0.0)
    assert parts.drift_weights @ changes == pytest.approx(parts.within + parts.interaction, abs=1e-12)


@given(st.lists(st.tuples(weights, weights, rates), min_size=1, max_size=12))
def test_mix_alone_is_mix_alone(rows: list[tuple[int, int, float]]) -> None:
    before, after, same = ([row[place] for row in rows] for place in range(3))
    assume(sum(before) > 0 and sum(after) > 0)
    parts = Decomposition(portions(before, same), portions(after, same))
    assert parts.within == pytest.approx(0, abs=1e-12) and parts.interaction == pytest.approx(0, abs=1e-12)
    assert parts.mix == pytest.approx(parts.change, abs=1e-12)


@given(st.lists(st.tuples(st.integers(1, 100_000), rates, rates), min_size=1, max_size=12), st.integers(1, 9))
def test_rates_alone_are_within_alone(rows: list[tuple[int, float, float]], times: int) -> None:
    shares, old, new = ([row[place] for row in rows] for place in range(3))
    parts = Decomposition(portions(shares, old), portions([share * times for share in shares], new))
    assert parts.mix == pytest.approx(0, abs=1e-12) and parts.interaction == pytest.approx(0, abs=1e-12)
    assert parts.within == pytest.approx(parts.change, abs=1e-12)


def test_a_new_cohort_is_mix_where_the_others_stay() -> None:
    parts = Decomposition(portions([60, 40, 0], [1.0, 1.0, 0.0]), portions([45, 30, 25], [1.0, 1.0, 0.2]))
    assert parts.mixes == pytest.approx([0, 0, -0.2]) and parts.within == pytest.approx(0)


def test_a_new_cohort_has_changed_as_the_others_did() -> None:
    """A fifth of the traffic is under a new name; guesses got worse everywhere."""
    parts = Decomposition(portions([80, 20, 0], [1.0, 1.0, 0.0]), portions([80, 0, 20], [0.7, 0.0, 0.7]))
    assert parts.within + parts.interaction == pytest.approx(0.8 * -0.3 + 0.2 * 0.8 * -0.3)
    assert abs(parts.mix) < abs(parts.change) / 10


def test_with_nothing_in_common_all_is_mix() -> None:
    parts = Decomposition(portions([10, 0], [1.0, 0.0]), portions([0, 10], [0.0, 0.4]))
    assert (parts.mix, parts.within, parts.interaction) == pytest.approx((-0.6, 0.0, 0.0))


def test_the_example_of_the_page() -> None:
    rows = {cells[0]: [float(cell) for cell in cells[1:]] for cells in table("explaining.md", "An example")}
    names = ("code", "chat")
    shares, rates_of = ([[rows[name][place] for name in names] for place in both] for both in ((0, 1), (2, 3)))
    parts = Decomposition(portions(shares[0], rates_of[0]), portions(shares[1], rates_of[1]))
    for place, name in enumerate(names):
        within = parts.before.shares[place] * parts.rate_changes[place]
        interaction = parts.share_changes[place] * parts.rate_changes[place]
        assert rows[name][4:] == pytest.approx([parts.mixes[place], within, interaction])
    assert rows["all"][2:] == pytest.approx(
        [parts.before.mean, parts.after.mean, parts.mix, parts.within, parts.interaction]
    )


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=4))
def test_effects_of_factors_add_up(pairs: list[tuple[float, float]]) -> None:
    before, after = ([pair[place] for pair in pairs] for place in range(2))
    effects = product_effects(before, after)
    assert sum(effects) == pytest.approx(float(np.prod(after) - np.prod(before)), abs=1e-9)
    assert all(effect == 0 for effect, old, new in zip(effects, before, after, strict=True) if old == new)


def test_effects_of_three_factors_are_das_guptas() -> None:
    before, after = [0.9, 0.8, 1.5], [0.7, 0.95, 1.1]
    for place in range(3):
        (b, new_b), (c, new_c) = [pair for other, pair in enumerate(zip(before, after, strict=True)) if other != place]
        expected = (after[place] - before[place]) * ((b * c + new_b * new_c) / 3 + (b * new_c + new_b * c) / 6)
        assert product_effects(before, after)[place] == pytest.approx(expected)
