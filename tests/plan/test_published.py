"""The committed predictions are the model's, and how far they are from what was published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.plan.published import PUBLISHED, RUNS, predictions, summaries

#: Made by `pilotfish plan predictions`.
COMMITTED = Path(__file__).with_name("predictions.json")
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
#: The mean absolute error that is allowed.
MOST = {"plain": 0.15, "sync": 0.15, "async": 0.20}


def test_the_predictions_are_those_of_the_model() -> None:
    assert json.loads(COMMITTED.read_text()) == predictions()


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
