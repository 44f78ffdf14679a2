"""Chances of a tree's nodes, corrected by what came of nodes in such places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sizes import sized

from pilotfish.core.trees.child_calibration import DEPTHS, RANKS, ChildCalibration, ChildOutcome
from pilotfish.core.trees.lookahead import Lookahead

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
