"""The bench of a target in several ranks."""

from __future__ import annotations

import pytest
from conftest import Measure
from thread_ranks import thread_ranks

from pilotfish.bench.ranks import ROWS, run_ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_number_of_ranks_is_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The second rank is a thread here, without memory of its own."""
    with thread_ranks(monkeypatch):
        given = {"tensor_parallel": ranks, "threads": 1, "max_tokens": 4, "repeats": 1, "concurrencies": "1,2"}
        report = measure(run_ranks, "ranks", **given).results
    assert [row["rank"] for row in report["memory"]] == [0]
    assert [row["rows"] for row in report["forwards"]] == [*ROWS] and all(row["ms"] > 0 for row in report["forwards"])
    assert [row["concurrency"] for row in report["speeds"]] == [1, 2]
    assert all(row["tokens_per_second"].median > 0 for row in report["speeds"])
