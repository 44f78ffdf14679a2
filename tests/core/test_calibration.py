"""Learned costs and chances, of a tree's nodes too, converge to what they are shown, and stay in bounds on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sizes import sized

from pilotfish.core.scheduling.calibration import GainCurve, LevelCurve, SecondsBySize, StepCosts
from pilotfish.core.trees.child_calibration import DEPTHS, RANKS, ChildCalibration, ChildOutcome
from pilotfish.core.trees.lookahead import Lookahead


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


def test_gains_are_cumulated_means_by_rank() -> None:
    curve = GainCurve(4, 0.9, 0.5)
    for _ in range(500):
        curve.observe(np.array([0.2, 0.6, 0.6, 0.2, 0.0]), 3, 4)
    np.testing.assert_allclose(curve.gain(np.array([0, 0.5, 1, 2, 4])), [0, 0.233, 0.467, 0.533, 0.533], atol=0.01)


def test_a_cut_tree_teaches_nothing_of_what_was_cut() -> None:
    curve, ranks = GainCurve(4, 0.8, 0.5), np.arange(5.0)
    before = curve.gain(ranks)
    for _ in range(500):
        curve.observe(np.array([0.6, 0.2, 0.2, 0.2]), 2, 1)
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


ONE = np.array([False])


def chances(calibration: ChildCalibration, depth: int, believed: list[float], greedy: bool = False) -> list[float]:
    adjusted = calibration.calibrated(np.array([greedy]), np.array([depth]), np.log([believed]))
    return np.exp(adjusted[0]).tolist()


def taught(believed: list[float], real: list[float], depth: int = 1, greedy: bool = False) -> ChildCalibration:
    """After many tokens of which each child was the right one as often as `real` says."""
    calibration, random = ChildCalibration(), np.random.default_rng(0)
    for _ in range(sized(2000, 4000)):
        rank = int(np.searchsorted(np.cumsum(real), random.random()))
        told = np.log(chances(calibration, depth, believed, greedy)).tolist()
        calibration.observe(greedy, [ChildOutcome(depth, told, rank if rank < len(real) else -1)])
    return calibration


def test_nothing_changes_before_anything_is_seen() -> None:
    assert np.allclose(chances(ChildCalibration(), 1, [0.6, 0.2, 0.1]), [0.6, 0.2, 0.1])


@pytest.mark.parametrize(("believed", "real"), [([0.5, 0.3, 0.1], [0.8, 0.08, 0.05]), ([0.6, 0.2, 0.1],) * 2])
def test_chances_become_those_that_were_seen(believed: list[float], real: list[float]) -> None:
    assert np.allclose(chances(taught(believed, real), 1, believed), real, atol=0.04)


def test_depths_and_greedy_sequences_are_apart() -> None:
    calibration = taught([0.5, 0.3], [0.9, 0.05], depth=2)
    assert np.allclose(chances(calibration, 1, [0.5, 0.3]), [0.5, 0.3])
    assert np.allclose(chances(calibration, 2, [0.5, 0.3], greedy=True), [0.5, 0.3])


def test_what_is_deeper_or_further_back_than_is_counted_is_like_the_last() -> None:
    calibration = taught([0.9] + [0.001] * (RANKS + 3), [0.2], depth=DEPTHS + 5)
    assert chances(calibration, DEPTHS + 40, [0.9])[0] < 0.4
    assert chances(calibration, DEPTHS - 1, [0.9])[0] > 0.89


@given(arrays(np.float64, (3, 5), elements=st.floats(1e-9, 1.0)), st.integers(0, 200))
def test_children_are_no_likelier_than_one_together(weights: np.ndarray, seed: int) -> None:
    believed = np.sort(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0))[:, ::-1]
    calibration, random = ChildCalibration(), np.random.default_rng(seed)
    for _ in range(20):
        row = believed[random.integers(3)]
        calibration.observe(False, [ChildOutcome(1, np.log(row).tolist(), int(random.integers(-1, 5)))])
    adjusted = np.exp(calibration.calibrated(np.zeros(3, bool), np.ones(3, int), np.log(believed)))
    assert (adjusted.sum(axis=1) <= 1 + 1e-9).all() and np.isfinite(adjusted).all()


def test_a_tree_says_what_became_of_its_children() -> None:
    tree = Lookahead()
    tree.add([0], [2], [4, 5], [-0.5, -2.0], 8)  # nodes 1 and 2
    tree.expand([2], [8])
    tree.add([2], [2], [6, 9], [-0.25, -3.0], 8)  # nodes 3 and 4
    found = tree.outcomes([5, 9, 1])
    assert [(one.depth, one.rank) for one in found] == [(1, 1), (2, 1)]
    assert np.allclose(found[0].log_chances, [-0.5, -2.0]) and np.allclose(found[1].log_chances, [-0.25, -3.0])
    assert [(one.depth, one.rank) for one in tree.outcomes([3, 5])] == [(1, -1)]
    assert tree.outcomes([4, 6])[1:] == [] and Lookahead().outcomes([1]) == []
