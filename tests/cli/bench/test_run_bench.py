"""`bench run` and `bench tune` on a tiny pair; grids, halving, and contestants by themselves."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from command_runs import Measure
from hypothesis import given
from hypothesis import strategies as st
from inline_drafts import inline_drafts

from pilotfish.cli.bench.contestants import OFF, Run, drafting, periods_of, take_turns
from pilotfish.cli.bench.modes.engines import levels_of, read_levels
from pilotfish.cli.bench.modes.run import run_modes
from pilotfish.cli.bench.modes.settings import grid_of
from pilotfish.cli.bench.modes.tune import halve, run_tune, rungs
from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.workload import Prompt, first_of_each, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, InputError
from pilotfish.workers.records import LevelRecord, StepRecord, Timeline, merge


def test_all_modes_take_part_and_off_is_never_left_out(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"concurrencies": "1,2", "each": 2, "max_tokens": 12, "repeats": 1, "kv_slots": 4096, "level_counts": "1,2"}
    with inline_drafts(monkeypatch):
        report = measure(run_modes, "run", modes="async,sync", budgets="fixed", **short)
    names = ["off", "async", "sync 1 levels", "sync 2 levels"]
    assert [row["setting"] for row in report.results["grid"]] == names
    assert not report.failed
    result = json.loads(report.as_json())
    played = [(row["setting"], row["concurrency"]) for row in result["settings"]]
    assert played == [(name, c) for c in (1, 2) for name in names]
    assert all(row["equal_outputs"] == 1 for row in result["settings"])
    assert len(result["requests"]) == len(names) * 2 * 2  # settings, concurrencies, prompts
    assert all(len(row["times"]) == 12 and row["first"] == row["times"][0] for row in result["requests"])
    alone = [row for row in result["acceptance"] if row["concurrency"] == 1]
    deepest = {row["setting"]: len(row["by_depth"]["offered"]) for row in alone}
    assert deepest["off"] == 0 and deepest["sync 1 levels"] == 1 and deepest["sync 2 levels"] == 2


def test_a_winner_is_measured_again_and_written(measure: Measure, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.toml"
    small = {"node_counts": "2", "level_counts": "2", "widths": "1", "drafters": "lm", "candidates": 1, "each": 1}
    report = measure(run_tune, "tune", modes="off,sync", repeats=1, max_tokens=8, kv_slots=4096, save=chosen, **small)
    results = report.results
    assert {row["setting"] for row in results["tried"]} == {"off", "default", "sync"}
    assert {"off", "default"} <= {row["setting"] for row in results["settings"]}
    assert results["chosen"] in {"off", "default", "sync"}
    written = tomllib.loads(chosen.read_text())
    assert written["mode"] == ("off" if results["chosen"] == "off" else "sync")
    assert ("draft" in written) == (results["chosen"] != "off")
    assert {"requests", "acceptance"} <= json.loads(report.as_json()).keys()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *(({"modes": "sync,fast"}, "modes: 'sync,fast'"), ({"node_counts": "0"}, "nodes: '0'")),
        *(({"drafters": "lm,guess"}, "drafter: 'guess'"), ({"budgets": "none"}, "budget: 'none'")),
        *(({"splits": "0"}, "cores: '0'"), ({"node_counts": "4096"}, "nodes: 4096")),
    ],
)
def test_what_is_no_setting_is_refused_before_anything_is_loaded(given: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        grid_of(BENCHES["run"].options(prompts=Path("none"), **given))


def test_names_say_what_differs() -> None:
    options = BENCHES["run"].options(prompts=Path("none"), node_counts="4,8", leaf_counts="8", level_counts="2,3")
    names = ["off", *(f"sync {d} levels, {n} nodes" for d in (2, 3) for n in (4, 8)), "async 4 nodes", "async 8 nodes"]
    assert [one.name for one in grid_of(options)] == names


def test_a_limit_is_of_each_category() -> None:
    prompts = [Prompt(str(i), "text", kind) for i, kind in enumerate("aaabbc")]
    assert [one.id for one in first_of_each(prompts, 2)] == ["0", "3", "5", "1", "4"]
    assert first_of_each(prompts, None) == prompts


# -- halving


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_where_scores_are_true_the_best_wins(scores: list[int]) -> None:
    played: list[tuple[int, int]] = []

    def play(left: Sequence[int], rounds: int) -> Mapping[int, float]:
        played.append((len(left), rounds))
        return {one: scores[one] for one in left}

    assert scores[halve(range(len(scores)), 2, play)] == max(scores)
    assert played == rungs(len(scores), 2)
    assert all(b[1] == 2 * a[1] and b[0] == (a[0] + 1) // 2 for a, b in pairwise(played))


# -- contestants take turns; times between steps, and between levels, of a run


def test_everybody_plays_every_round_and_goes_first_in_turn() -> None:
    played: list[str] = []
    contestants = {name: lambda work, name=name: played.append(f"{name}{work}") or 10 * work for name in "ab"}
    assert take_turns(contestants, [1, 2, 3]) == {"a": [20, 30], "b": [20, 30]}
    assert played == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_more_sequences_than_a_step_has_rows(llama: Path, draft: Path) -> None:
    """Each running sequence needs a row: the others wait."""
    with Engine(EngineConfig(target=llama, draft=draft, mode="sync", drafter="lm", max_rows=4)) as engine:
        jobs = jobs_at([Prompt("a", "def f(")] * 6, 0.0, 5)
        assert [len(output) for output in drafting(engine, OFF).run(engine, jobs, 6).outputs] == [5] * 6


def test_drafters_are_swapped_only_when_idle(config: EngineConfig, prompts: list[Prompt]) -> None:
    engine = Engine(config)
    [job] = jobs_at(prompts[:1], 0.0, 4)
    engine.submit(job.prompt.text, job.params)
    with pytest.raises(EngineError, match="swapped"):
        drafting(engine, "off").run(engine, [job], 1)


# -- times


def record(before: float, ended: float, rows: int = 3, nodes: int = 2) -> StepRecord:
    """A step whose forward takes all its time but the last 0.25 s, of one sequence."""
    moments = (before, before, before, before, before, before, ended - 0.25, ended - 0.25, ended)
    counts = {"depth": 1, "offered": nodes, "accepted": 1, "committed": 2, "hits": 1}
    return StepRecord(*moments, sequences=1, rows=rows, nodes=nodes, **counts)


def test_periods_are_those_between_steps_without_prompt_rows() -> None:
    steps = [record(0, 1), record(1, 3), record(3, 4, rows=80), record(4, 9), record(9, 10)]
    periods = periods_of([steps, [record(0, 7)]])
    expected = {"period_ms": 1500, "p50_ms": 1500, "p99_ms": 1990, "between_ms": 250}  # the second's and the last's
    assert periods == expected
    assert periods_of([[record(0, 1)]]) == {}


def test_levels_are_those_of_the_runs_without_prompts(tmp_path: Path) -> None:
    """Of the first level, the second reads a prompt; the last one is after the run."""
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, "draft")) as timeline:
        moments = [(0.0, 0.5, 0), (1.0, 2.0, 0), (2.25, 3.0, 9), (3.5, 4.0, 0), (4.25, 4.75, 0)]
        for began, ended, prompt in (*moments, (4.8, 5.0, 0), (9.0, 9.5, 0)):
            timeline.forward(LevelRecord(began, ended, 1, leaves=4, prompt_rows=prompt, nodes=3, used=0, wasted=0))
    merge([path], path.with_name("whole.json"))
    levels = read_levels(path.with_name("whole.json"))
    assert len(levels) == 7
    run = Run(5.0, [[1]], steps=[record(0.75, 1), record(1, 5)])
    figures = levels_of([run], levels)
    assert figures == pytest.approx({"levels": 2, "leaves": 4, "level_ms": 350, "between_levels_ms": 150})
    assert levels_of([run], levels[:2]) == {}
