"""Contestants take turns on tiny models."""

from pathlib import Path

import pytest
from support import limits, paths_of, proposed
from typer.testing import CliRunner

from pilotfish.cli.bench.commands import app
from pilotfish.cli.bench.contestants import OFF, drafting, take_turns
from pilotfish.cli.bench.parity import RandomDrafter
from pilotfish.cli.bench.workload import Prompt, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, InputError


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


def test_random_trees_repeat_and_stay_in_the_vocabulary(config: EngineConfig, prompts: list[Prompt]) -> None:
    engine = Engine(config)
    [job] = jobs_at(prompts[:1], 0.8, 4)
    [sample] = engine.submit(job.prompt.text, job.params)
    trees = [proposed(RandomDrafter(9), [sample.request], limits())[0] for _ in range(2)]
    assert paths_of(trees[0]) == paths_of(trees[1])
    assert set(trees[0].tokens.tolist()) <= set(range(9)) | set(sample.request.tokens)


@pytest.mark.parametrize("arguments", [["--shard", "2/1"], ["--threads", "0"], ["--dtype", "int8"], ["--mode", "off"]])
def test_bad_usage(llama: Path, draft: Path, prompt_file: Path, arguments: list[str]) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    result = CliRunner().invoke(app, ["parity", *models, *arguments])
    assert isinstance(result.exception, InputError)
