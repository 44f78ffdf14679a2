"""The committed predictions are the model's; how far they are from what was published; rounds of speculation."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.plan.published import PUBLISHED, RUNS, summaries
from pilotfish.plan.rounds import (
    chain_speedup,
    levels_hidden,
    outcome_cache_round,
    rerooted_round,
    speculate_seconds,
    sync_round,
    tokens_of_chain,
)

#: `predicted` of each row of `pilotfish plan published --json` that has it.
COMMITTED = Path(__file__).with_name("predictions.json")
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
#: The mean absolute error that is allowed.
MOST = {"plain": 0.15, "sync": 0.15, "async": 0.20}


def test_the_predictions_are_those_of_the_model() -> None:
    made = {name: row.predicted for name, row in PUBLISHED.items() if row.predicted is not None}
    assert json.loads(COMMITTED.read_text()) == made


def test_every_run_has_a_figure() -> None:
    assert RUNS.keys() <= PUBLISHED.keys()
    assert all(set(row.unverified) <= {"inputs", "published"} for row in PUBLISHED.values())


@pytest.mark.parametrize("mode", MOST)
def test_predicted_rows_are_close_in_the_mean(mode: str) -> None:
    summary = summaries()[mode]
    assert summary.rows >= 3 and summary.mean <= MOST[mode]


@pytest.mark.parametrize("unit", ["tok/s", "ms"])
def test_asynchronous_rates_and_times_are_close_each_on_their_own(unit: str) -> None:
    rows = [row for row in PUBLISHED.values() if (row.kind, row.mode, row.unit) == ("predicted", "async", unit)]
    errors = [abs(row.error or 0.0) for row in rows]
    assert len(errors) >= 6 and sum(errors) / len(errors) <= MOST["async"]


def test_a_row_calibrates_is_predicted_or_says_what_it_lacks() -> None:
    """One that calibrates is exact, but for the rate of the run whose draft's time is what does."""
    for name, row in PUBLISHED.items():
        if row.kind == "lacks":
            assert row.lacks and not row.calibrates and row.predicted is None and row.error is None, name
        else:
            assert row.published is not None and row.error is not None and not row.lacks, name
        if row.kind == "calibrates":
            assert abs(row.error or 0.0) < (0.03 if name == "ssd-70b-1b-async-1" else 1e-4), name


def test_the_page_has_the_errors_of_every_mode() -> None:
    page = PAGE.read_text()
    for mode, of in summaries().items():
        assert f"| {mode} | {of.rows} | {of.mean:.1%} | {of.most:.1%} |" in page


# -- rounds of speculation by hand, and laws that hold whatever the numbers


shares = st.floats(0, 1)
seconds = st.floats(1e-6, 1.0)


def test_by_hand() -> None:
    assert tokens_of_chain(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert chain_speedup(0.5, 3, 0.1) == pytest.approx(1.875 / 1.3)
    assert sync_round(10e-3, 2e-3, 5, 1e-3, 0.1e-3) == pytest.approx(21.1e-3)
    assert speculate_seconds(2e-3, 3e-3, 4, 0.5e-3) == pytest.approx(16.5e-3)
    assert outcome_cache_round(10e-3, 16e-3, 5e-3, 0.8, 1e-3) == pytest.approx(18e-3)
    assert levels_hidden(10e-3, 3e-3) == 3 and levels_hidden(10e-3, 3e-3, 2e-3) == 2 and levels_hidden(1e-3, 3e-3) == 1
    assert rerooted_round(10e-3, 3e-3, 3, 0.5, 1e-3) == pytest.approx(12.5e-3)


@given(seconds, seconds, st.integers(1, 16), shares, seconds)
def test_drafting_beside_is_never_slower(verify: float, level: float, guesses: int, hit: float, fixed: float) -> None:
    in_turn = sync_round(verify, level, guesses, fixed)
    assert outcome_cache_round(verify, guesses * level, 0.0, hit, fixed) <= in_turn
    assert rerooted_round(verify, level, guesses, 1.0, fixed) <= in_turn


@given(seconds, seconds)
def test_hidden_levels_end_with_the_target_or_are_one(verify: float, level: float) -> None:
    depth = levels_hidden(verify, level)
    assert depth == 1 or depth * level <= verify * (1 + 1e-9)
