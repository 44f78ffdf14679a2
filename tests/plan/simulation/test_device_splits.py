"""Splits of devices between target and draft: the table, what is fitted, what is simulated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pilotfish.config.hardware.shapes import MODELS
from pilotfish.plan.simulation import device_splits
from pilotfish.plan.simulation.device_splits import SPLITS, SplitCurve, SplitPoint, curves, runs_of


@pytest.fixture(scope="module")
def few() -> object:
    """Few tokens, two halvings, one setting in turn."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"REQUESTS": 2, "OUTPUT": 32, "HALVINGS": 2, "SYNC_LEVELS": (3,)}.items():
            patch.setattr(device_splits, name, value)
        yield


def test_the_table_names_models_and_what_each_is_fitted_to() -> None:
    for name, pair in SPLITS.pairs.items():
        assert {pair.target, pair.draft} <= MODELS.keys()
        assert bool(pair.like) != bool((pair.tokens or pair.rate) and 0 < pair.at < SPLITS.devices), name
        assert set(pair.best) <= {2, 4, 6}
        assert not pair.like or not SPLITS.pairs[pair.like].like


@pytest.mark.usefixtures("few")
def test_a_pair_has_a_point_for_each_split_and_one_in_turn() -> None:
    table = replace(SPLITS, pairs={"qwen2-72b": SPLITS.pairs["qwen2-72b"]})
    done: list[None] = []
    (curve,) = curves(table, lambda: done.append(None)).values()
    assert len(done) == runs_of(table) == 2 + 8
    assert [point.target for point in curve.points] == list(range(1, 9))
    assert [a.verify > b.verify for a, b in zip(curve.points, curve.points[1:], strict=False)] == [True] * 7
    assert all(point.rate > 1 / point.verify for point in curve.points)
    tokens = [point.tokens for point in curve.points]
    assert tokens[0] > tokens[5]  # a target that takes longer leaves time for more levels


def test_the_best_has_even_numbers_of_devices_for_both() -> None:
    rates = [10.0, 20.0, 90.0, 40.0, 30.0, 35.0, 99.0, 100.0]
    curve = SplitCurve(0.8, [SplitPoint(n, rate, 3.0, 0.01, 0.002) for n, rate in enumerate(rates, 1)])
    assert curve.best.target == 4
    assert (curve.behind(4), curve.behind(2)) == (0, -0.5)


@pytest.mark.parametrize(("published", "error"), [({"tokens": 3.0}, 0.1), ({"rate": 150.0}, -0.2)])
def test_the_error_is_of_what_was_published(published: dict[str, float], error: float) -> None:
    pair = device_splits.SplitPair(target="a", draft="b", best=(4,), sources=(), **published)
    assert pair.error(SplitPoint(4, 120.0, 3.3, 0.01, 0.002)) == pytest.approx(error)
