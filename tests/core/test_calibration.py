"""Learned costs and chances converge to what they are shown, and stay in bounds on the way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.scheduling.calibration import Calibration, GainCurve, LevelCurve, SecondsBySize, StepCosts
from pilotfish.core.trees.tree import ROOT, Guesses, TokenTree


def test_costs_are_lines_between_knots() -> None:
    costs = StepCosts({1: 1.0, 9: 2.0, 17: 6.0})
    np.testing.assert_allclose(costs.over(np.array([1, 5, 9, 13, 17])), [1.0, 1.5, 2.0, 4.0, 6.0])
    assert costs.at(33) == pytest.approx(6.0 + 16 * 5 / 16)


def test_costs_of_padded_rows_are_those_of_the_bucket() -> None:
    costs = StepCosts({16: 1.0, 32: 2.0}, lambda rows: 16 if rows <= 16 else 32)
    assert costs.at(1) == costs.at(16) == 1.0
    assert costs.at(17) == 2.0


@given(
    observed=st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10)), max_size=60),
    knots=st.dictionaries(st.integers(1, 256), st.floats(1e-5, 1), min_size=1, max_size=6),
)
def test_costs_never_fall_with_rows(observed: list[tuple[int, float]], knots: dict[int, float]) -> None:
    costs = StepCosts(knots)
    for rows, seconds in observed:
        costs.observe(rows, seconds)
    over = costs.over(np.arange(1, 400))
    assert (np.diff(over) >= -1e-12).all()
    assert (over > 0).all()


def test_costs_follow_what_is_seen() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0, 16: 2.0})
    for _ in range(400):
        for rows, seconds in ((1, 3.0), (8, 3.5), (16, 5.0)):
            costs.observe(rows, seconds)
    np.testing.assert_allclose(costs.over(np.array([1, 8, 16])), [3.0, 3.5, 5.0], rtol=0.02)


def chain(chance: float, length: int) -> TokenTree:
    tree, node = Guesses(), ROOT
    for depth in range(length):
        node = tree.add(node, 1, math.log(chance) * (depth + 1))
    return tree.tree()


@pytest.mark.parametrize(("believed", "true"), [(0.9, 0.5), (0.4, 0.7)])
def test_beliefs_are_corrected(believed: float, true: float) -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    assert calibration.chances(np.array([math.log(believed)]))[0] == pytest.approx(believed, rel=0.15)
    for _ in range(3000):
        accepted = 0
        while accepted < 4 and rng.random() < true:
            accepted += 1
        scores = chain(believed, 4).scores
        calibration.observe(scores, scores[:accepted])
    got = calibration.chances(chain(believed, 4).scores)
    np.testing.assert_allclose(got[:2], [true, true**2], atol=0.08)


def test_a_tree_without_nodes_teaches_nothing() -> None:
    calibration = Calibration()
    before = calibration.chances(np.array([-0.1, -2.0]))
    calibration.observe(np.zeros(0), np.zeros(0))
    np.testing.assert_array_equal(before, calibration.chances(np.array([-0.1, -2.0])))


def test_gains_are_cumulated_means_by_rank() -> None:
    curve = GainCurve(4, 0.9, 0.5)
    for _ in range(500):
        curve.observe(np.array([0.2, 0.6, 0.6, 0.2, 0.0]), np.array([2, 2, 1]), 4)
    np.testing.assert_allclose(curve.gain(np.array([0.0, 0.5, 1.0, 2.0, 4.0])), [0, 0.2, 0.4, 0.533, 0.533], atol=0.01)


def test_a_cut_tree_teaches_nothing_of_what_was_cut() -> None:
    curve, ranks = GainCurve(4, 0.8, 0.5), np.arange(5.0)
    before = curve.gain(ranks)
    for _ in range(500):
        curve.observe(np.array([0.6, 0.2, 0.2, 0.2]), np.array([2, 2]), 1)
    np.testing.assert_allclose(np.diff(curve.gain(ranks)), [0.4, *np.diff(before)[1:]], atol=0.01)


def test_levels_are_those_of_the_deepest_of_the_best() -> None:
    curve = LevelCurve(6, 4)
    np.testing.assert_array_equal(curve.levels(np.array([0.0, 1.0, 2.5, 6.0, 9.0])), [1, 1, 2.5, 4, 4])
    for _ in range(500):
        curve.observe(np.array([1, 1, 2, 1, 3]), 1, 3, 6)  # five nodes were worth it, six were asked for
    np.testing.assert_allclose(curve.levels(np.arange(1.0, 7)), [1, 1, 2, 2, 3, 3], atol=0.01)


def test_levels_of_many_trees_are_those_of_the_deepest() -> None:
    curve = LevelCurve(3, 4)
    for _ in range(500):
        curve.observe(np.array([1, 1, 2, 3, 1, 1]), 2, 3, 2)
    np.testing.assert_allclose(curve.levels(np.arange(1.0, 4)), [1, 3, 3], atol=0.01)


def test_a_block_is_one_level() -> None:
    curve = LevelCurve(4, 8)
    for _ in range(500):
        curve.observe(np.array([1, 2, 3, 4]), 1, 1, 4)
    np.testing.assert_allclose(curve.levels(np.arange(1.0, 5)), [1, 1, 1, 1], atol=0.01)
    curve.observe(np.zeros(0, np.int64), 1, 1, 4)  # no guesses, nothing learned


def test_seconds_by_size_use_the_nearest_size() -> None:
    seconds = SecondsBySize(7.0)
    assert seconds.at(3) == 7.0
    seconds.observe(1, 1.0)
    seconds.observe(16, 2.0)
    assert (seconds.at(1), seconds.at(12), seconds.at(500)) == (1.0, 2.0, 2.0)
    for _ in range(200):
        seconds.observe(1, 5.0)
    assert seconds.at(1) == pytest.approx(5.0, rel=0.01)


def test_far_beyond_what_was_measured_is_learned() -> None:
    costs = StepCosts({1: 0.3, 2: 0.3, 4: 0.3})
    for _ in range(30):
        costs.observe(256, 6.0)
        costs.observe(1, 0.3)
    assert costs.at(1) == pytest.approx(0.3, rel=0.1)
    assert costs.at(256) == pytest.approx(6.0, rel=0.1)
    assert costs.at(128) == pytest.approx(3.1, rel=0.2)


def test_one_long_pause_says_little() -> None:
    seconds = SecondsBySize(0.0)
    for value in [0.002] * 20 + [1.0]:
        seconds.observe(4, value)
    assert seconds.at(4) < 0.0023
