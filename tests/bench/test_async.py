"""Off, sync and async run side by side on a tiny pair with a draft worker of its own; no test says how fast."""

from collections.abc import Iterator

import pytest
from conftest import Measure
from inline_drafts import inline_drafts
from support import CONTEXT

from pilotfish.bench.contestants import periods_of
from pilotfish.bench.speculation import ASYNC, OFF, parse_sync, run_async, run_cores
from pilotfish.errors import InputError
from pilotfish.observe.records import StepRecord


@pytest.fixture
def _drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with inline_drafts(monkeypatch):
        yield


def record(before: float, ended: float, rows: int = 3, nodes: int = 2) -> StepRecord:
    """A step whose forward takes all its time but the last 0.25 s, of one sequence."""
    moments = (before, before, before, before, before, before, ended - 0.25, ended - 0.25, ended)
    counts = {"depth": 1, "offered": nodes, "accepted": 1, "committed": 2, "hits": 1}
    return StepRecord(*moments, sequences=1, rows=rows, nodes=nodes, **counts)


def test_periods_are_those_between_steps_without_prompt_rows() -> None:
    steps = [record(0, 1), record(1, 3), record(3, 4, rows=80), record(4, 9), record(9, 10)]
    periods = periods_of([steps, [record(0, 7)]])
    expected = {"period_ms": 1500, "p50_ms": 2000, "p99_ms": 2000, "between_ms": 250}  # the second's and the last's
    assert periods == expected
    assert periods_of([[record(0, 1)]]) == {}


def test_a_sync_setting_is_levels_width_and_nodes() -> None:
    assert parse_sync("4x8:16") == (4, 8, 16)
    for text in ("", "4x8", "4:8:16", "0x1:1", "4x8:x", "4x8x2:1", "99x1:1"):
        with pytest.raises(InputError, match="sync"):
            parse_sync(text)


@pytest.mark.usefixtures("_drafts")
def test_all_modes_generate_the_same(measure: Measure) -> None:
    settings = {"sync": "2x2:4", "temperatures": "0", "concurrencies": "1,3", "max_tokens": 12, "repeats": 1}
    results = measure(run_async, "async", pace="target=5ms,draft=1ms", drafter="lm", **settings).results
    for concurrency, result in zip((1, 3), results["results"], strict=True):
        rows = {row["contestant"]: row for row in results["speeds"] if row["concurrency"] == concurrency}
        assert list(rows) == [OFF, "sync 2x2, 4 nodes", ASYNC] and result["best_sync"] == "sync 2x2, 4 nodes"
        assert all(row["equal_outputs"] == 1 and row["period_ms"] >= 5 for row in rows.values())
        assert rows[OFF]["tokens_per_verify_step"] == 1 and rows[OFF]["nodes"] == 0
        assert rows["sync 2x2, 4 nodes"]["tokens_per_verify_step"] > 1  # the draft is the target, a little perturbed
        assert 0 < result["ceiling"] <= 200 * concurrency * CONTEXT


@pytest.mark.usefixtures("_drafts")
def test_each_mode_has_an_engine_of_its_own(measure: Measure) -> None:
    rows = measure(run_cores, "cores", budget="fixed", max_tokens=8, repeats=1, drafter="lm").results["speeds"]
    assert [row["contestant"] for row in rows] == ["off", "sync", "async"]
    assert all(row["equal_outputs"] == 1 for row in rows)
