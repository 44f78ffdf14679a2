"""The bench of free requests beside constrained ones."""

from __future__ import annotations

import pytest
from conftest import Measure

from pilotfish.bench.constrained import CONSTRAINED, FREE, GapWindow, report_of, run_constrained
from pilotfish.workers.records import StepRecord


def test_both_kinds_are_measured(measure: Measure) -> None:
    report = measure(
        run_constrained, "constrained", mode="sync", pace="target=1ms", seconds=0.3, repeats=1, streams=4, max_tokens=24
    )
    gaps = {row["neighbours"]: row for row in report.results["gaps"]}
    assert set(gaps) == {FREE, CONSTRAINED}
    assert all(row["gaps"] > 0 and row["p99_ms"].minimum > 0 for row in gaps.values())
    assert all(row["neighbours_tokens_per_verify_step"] >= 1 for row in gaps.values())
    steps = {row["neighbours"]: row for row in report.results["steps"]}
    assert all(row["steps"] > 0 and row["forward_ms"] > 0 for row in steps.values())


def window(*gaps: float) -> GapWindow:
    record = StepRecord(0, *[0.0] * 4, 0.001, 0.002, 0.004, 0.005, sequences=1, rows=1, nodes=2, depth=1, offered=2,
                        accepted=1, committed=2, hits=0)  # fmt: skip
    return GapWindow(list(gaps), [record], tokens=6, verified=2)


@pytest.mark.parametrize(("worst", "holds"), [(10.9, True), (11.1, False)])
def test_it_holds_while_the_slowest_gaps_are_as_before(worst: float, holds: bool) -> None:
    results = report_of(
        {FREE: [window(5, 10)] * 3, CONSTRAINED: [window(5, worst), window(5, worst), window(5, 90)]}, 0
    )
    assert results.results["holds"] is holds
    assert results.results["p99_ratio"].median == pytest.approx(worst / 10)
    assert [row["neighbours_tokens_per_verify_step"] for row in results.results["gaps"]] == [3, 3]
    assert results.results["steps"][0]["verify_ms"] == pytest.approx(2)
