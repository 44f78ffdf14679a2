"""Contestants take turns on tiny models; times between steps, and between levels, of a run."""

from contextlib import closing
from pathlib import Path

import pytest

from pilotfish.cli.bench.contestants import OFF, Run, drafting, periods_of, take_turns
from pilotfish.cli.bench.modes.engines import levels_of, read_levels
from pilotfish.cli.bench.workload import Prompt, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError
from pilotfish.workers.records import LevelRecord, StepRecord, Timeline, merge


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
    expected = {"period_ms": 1500, "p50_ms": 2000, "p99_ms": 2000, "between_ms": 250}  # the second's and the last's
    assert periods == expected
    assert periods_of([[record(0, 1)]]) == {}


def test_levels_are_those_of_the_runs_without_prompts(tmp_path: Path) -> None:
    """Of the first level, the second reads a prompt; the last one is after the run."""
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, "draft")) as timeline:
        moments = [(0.0, 0.5, 0), (1.0, 2.0, 0), (2.25, 3.0, 9), (3.5, 4.0, 0), (4.25, 4.75, 0)]
        for began, ended, prompt in (*moments, (4.8, 5.0, 0), (9.0, 9.5, 0)):
            timeline.level(LevelRecord(began, ended, 1, leaves=4, prompt_rows=prompt, nodes=3, used=0, wasted=0))
    merge([path], path.with_name("whole.json"))
    levels = read_levels(path.with_name("whole.json"))
    assert len(levels) == 7
    run = Run(5.0, [[1]], steps=[record(0.75, 1), record(1, 5)])
    figures = levels_of([run], levels)
    assert figures == pytest.approx({"levels": 2, "leaves": 4, "level_ms": 350, "between_levels_ms": 150})
    assert levels_of([run], levels[:2]) == {}
