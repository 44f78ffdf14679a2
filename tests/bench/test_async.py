"""Off, sync and async run side by side on a tiny pair with a draft worker of its own; no test says how fast."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conftest import Measure
from inline_drafts import inline_drafts
from support import CONTEXT

from pilotfish.bench.contestants import Run, periods_of
from pilotfish.bench.levels import levels_of, read_levels
from pilotfish.bench.speculation import ASYNC, OFF, parse_sync, run_async, run_cores
from pilotfish.errors import InputError
from pilotfish.workers.records import LevelRecord, StepRecord, Timeline, merge


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


def test_levels_are_those_of_the_runs_without_prompts(tmp_path: Path) -> None:
    """Of the first level, the second reads a prompt; the last one is after the run."""
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, "draft")) as timeline:
        moments = (
            (0.0, 0.5, 0),
            (1.0, 2.0, 0),
            (2.25, 3.0, 9),
            (3.5, 4.0, 0),
            (4.25, 4.75, 0),
            (4.8, 5.0, 0),
            (9.0, 9.5, 0),
        )
        for began, ended, prompt in moments:
            timeline.level(LevelRecord(began, ended, 1, leaves=4, prompt_rows=prompt, nodes=3, used=0, wasted=0))
    merge([path], path.with_name("whole.json"))
    levels = read_levels(path.with_name("whole.json"))
    assert len(levels) == 7
    run = Run(5.0, [[1]], steps=[record(0.75, 1), record(1, 5)])
    figures = levels_of([run], levels)
    assert figures == pytest.approx({"levels": 2, "leaves": 4, "level_ms": 350, "between_levels_ms": 150})
    assert levels_of([run], levels[:2]) == {}


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
