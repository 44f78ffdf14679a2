"""Statistics by cohort and minute; the parts of a change of a mean: exact, and zero where nothing happened."""

import tracemalloc
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from explained_traffic import HOUR, Traffic, counted
from hypothesis import assume, given
from hypothesis import strategies as st
from pages import table

from pilotfish.operate.explaining import cohorts
from pilotfish.operate.explaining.cohorts import DIMENSIONS, Cell, CellKey, CohortWindows
from pilotfish.operate.explaining.decomposition import Decomposition, Portions, product_effects
from pilotfish.operate.outcome import Cohort, RequestOutcome

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


# -- statistics by cohort and minute


def outcome(ended: float = 0.0, tag: str = "chat", **figures: int) -> RequestOutcome:
    return RequestOutcome(ended=ended, variant="on", cohort=Cohort(tag=tag), **{"steps": 1, **figures})


def cells(windows: CohortWindows) -> list[Cell]:
    return [cell for one in windows.told(0.0).windows for cell in one.cells]


def begins(windows: CohortWindows) -> list[float]:
    return [one.begin for one in windows.told(0.0).windows]


def total(found: Sequence[Cell], name: str) -> int:
    return sum(getattr(cell, name) for cell in found)


def test_a_cell_has_the_sums_of_its_requests() -> None:
    first = {"tokens": 9, "steps": 4, "trees": 3, "late": 1, "nodes": 24, "accepted": 5}
    second = {"tokens": 4, "steps": 3, "trees": 2, "nodes": 7, "accepted": 1}
    shallow, deep = ([3, 3], [3, 2]), ([2, 1, 1], [1])
    outcomes = [
        msgspec.structs.replace(outcome(**sums), tried_by_depth=tried, accepted_by_depth=accepted)
        for sums, (tried, accepted) in ((first, shallow), (second, deep))
    ]
    windows = counted(outcomes)
    (cell,) = cells(windows)
    assert (cell.key.variant, cell.key.tag, cell.key.output) == ("on", "chat", "text")
    assert (cell.requests, cell.tokens, cell.steps, cell.trees, cell.late, cell.nodes) == (2, 13, 7, 5, 1, 31)
    assert (cell.accepted, cell.accepted_squared, cell.accepted_steps, cell.steps_squared) == (6, 26, 23, 25)
    assert (cell.tried_by_depth, cell.accepted_by_depth) == ([5, 4, 1], [4, 2])


def test_requests_without_a_step_are_left_out() -> None:
    assert cells(counted([outcome(steps=0)])) == []


def test_intervals_that_meet_share_no_request_and_lose_none() -> None:
    outcomes = Traffic(requests=500).outcomes(0, begin=30.0)
    told = counted(outcomes).told(2 * HOUR)
    for middle in (600.0, 601.0, 1000.5):
        first, second = told.between(0.0, middle), told.between(middle, 2 * HOUR)
        for name in ("requests", "steps", "accepted"):
            expected = len(outcomes) if name == "requests" else sum(getattr(one, name) for one in outcomes)
            assert total(first, name) + total(second, name) == expected
        assert total(first, "requests") > 0 < total(second, "requests")


def test_between_joins_cells_of_one_key_and_leaves_windows_as_they_are() -> None:
    windows = counted([outcome(ended=minute * 60.0, accepted=2) for minute in range(3)])
    told = windows.told(0.0)
    for _ in range(2):
        (cell,) = told.between(0.0, 180.0)
        assert (cell.requests, cell.accepted) == (3, 6)


def test_the_newest_windows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "KEPT_WINDOWS", 3)
    windows = CohortWindows()
    for ended in (30.0, 90.0, 150.0, 228.0, 216.0):
        windows.add(outcome(ended=ended))
    assert begins(windows) == [60.0, 120.0, 180.0]
    windows.add(outcome(ended=18.0))
    assert begins(windows) == [60.0, 120.0, 180.0]


def test_a_window_has_so_many_cells_and_counts_the_rest_as_other() -> None:
    windows = counted([outcome(tag=str(number % 400), accepted=1) for number in range(1000)])
    found = cells(windows)
    assert len(found) == cohorts.MAX_CELLS
    assert total(found, "requests") == total(found, "accepted") == 1000
    (other,) = [cell for cell in found if cell.key == CellKey()]
    assert {getattr(other.key, name) for name in DIMENSIONS} == {"other"}
    assert other.requests == 1000 - sum(3 if number < 200 else 2 for number in range(cohorts.MAX_CELLS - 1))


def test_beyond_so_many_cells_the_oldest_windows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "TOTAL_CELLS", 10)
    windows = CohortWindows()
    for number in range(40):
        windows.add(outcome(ended=number // 4 * 60.0, tag=str(number)))
        assert len(cells(windows)) <= 10
    assert begins(windows) == [480.0, 540.0]


def test_a_cell_is_about_a_kilobyte() -> None:
    figures = {"tokens": 900, "steps": 700, "trees": 600, "nodes": 5000, "accepted": 500}
    depths = {"tried_by_depth": [600 - n for n in range(8)], "accepted_by_depth": [500 - n for n in range(8)]}
    outcomes = [outcome(tag=str(number), **figures, **depths) for number in range(200)]
    tracemalloc.start()
    try:
        windows = counted(outcomes)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 1400 * len(cells(windows))


def test_a_request_whose_variant_was_cut_says_nothing_of_drafts() -> None:
    one, plain = outcome(tokens=4, trees=1, accepted=3), outcome(tokens=9, steps=9)
    cut = msgspec.structs.replace(plain, cut=True)
    ((whole,), (rest,)) = (cells(counted([one, other, other])) for other in (plain, cut))
    assert (whole.requests, whole.steps, whole.cut) == (3, 19, 0)
    assert (rest.requests, rest.steps, rest.accepted, rest.cut) == (1, 1, 3, 2)
