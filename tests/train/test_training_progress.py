"""What a training says of itself where no terminal is: of each of its phases, and of the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.distil import train_distil
from pilotfish.train.head import train_head
from pilotfish.train.models import WrittenTokens
from pilotfish.train.pair import train_pair
from pilotfish.train.recipe import LlamaSize, PairRecipe
from pilotfish.train.taught_recipe import DistilRecipe, head_recipe
from pilotfish.train.text import lessons, written
from pilotfish.train.text.data import TokenBatch
from pilotfish.train.trainer import Learnt, Schedule, Trainer

#: Done of total, rate, what remains of the phase and of all.
COUNTED = r": [\d,]+ of {total} {unit}, .+ (a second|each), about .+ left, .+ with what follows"


def counted(lines: list[str], phase: str, total: str, unit: str) -> int:
    """How many lines tell of a phase all that can be known."""
    return sum(re.match(re.escape(phase) + COUNTED.format(total=total, unit=unit), line) is not None for line in lines)


@pytest.fixture(scope="module")
def target(tiny: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    train_pair(tiny, folder, folder / "run", PhaseProgress(), "cpu")
    return folder / "target"


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "SAMPLED_ROWS", 8)
    monkeypatch.setattr(lessons, "HELD_OUT_ROWS", 8)


def test_a_pair_tells_of_each_phase(tiny: PairRecipe, watched: Any, tmp_path: Path) -> None:
    train_pair(tiny, tmp_path, tmp_path / "run", watched, "cpu")
    assert watched.phases == [
        "reading the sources",
        "training the tokenizer",
        "tokenizing the sources",
        "measuring a step of training target",
        "measuring a step of training draft",
        "training target",
        "the target's text",
        "training draft",
        "evaluation",
        "writing the pair",
    ]
    (estimate,) = [line for line in watched.lines if line.startswith("at this pace")]
    assert re.fullmatch(
        r"at this pace about \d+ s to go: training target \d+ s, training draft \d+ s "
        r"\(not measured yet: the target's text, evaluation\)",
        estimate,
    )
    assert counted(watched.lines, "the target's text", "6,144", "tokens") > 1


@pytest.mark.usefixtures("few_rows")
def test_a_head_tells_of_each_phase(target: Path, sources: Path, watched: Any, tmp_path: Path) -> None:
    small = {"sequence_length": 128, "batch_rows": 2, "tokens": 128 * 2 * 20, "sampled_tokens": 16 * 128}
    recipe = head_recipe("eagle3", target=target, sources=(sources,), held_out=("beta",), depth=3, **small)
    train_head(recipe, tmp_path, tmp_path / "run", watched, "cpu")
    assert watched.phases == [
        "loading the target",
        "reading the text",
        "measuring a step of training eagle3",
        "the target's text",
        "training eagle3",
        "evaluation",
        "writing the head",
    ]
    (estimate,) = [line for line in watched.lines if line.startswith("at this pace")]
    assert re.fullmatch(
        r"at this pace about .+ to go: the target's text .+, training eagle3 20 s, "
        r"the target's text .+, the target's text .+ \(not measured yet: evaluation\)",
        estimate,
    )
    assert counted(watched.lines, "the target's text", "2,048", "tokens") > 1
    assert sum(": 0 of" not in line for line in watched.lines if line.startswith("the target's text: ")) > 3
    steps = [line for line in watched.lines if line.startswith("training eagle3 · loss ")]
    assert len(steps) > 1 and all(re.search(r": \d+ of 20 steps, .+ with what follows", line) for line in steps)
    assert any(re.match(r"evaluation: \d+ of 16 rows, .+ left$", line) for line in watched.lines)


@pytest.mark.usefixtures("few_rows")
def test_a_draft_tells_of_each_phase(target: Path, watched: Any, tmp_path: Path) -> None:
    """Here the target answers prompts."""
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"prompt": f"def alpha_{n}"}) for n in range(40)))
    small = {"sequence_length": 128, "batch_rows": 2, "tokens": 128 * 2 * 20, "sampled_tokens": 16 * 128}
    shape = LlamaSize(layers=1, hidden=64, heads=2, kv_heads=1, ffn=64)
    recipe = DistilRecipe(target=target, shape=shape, data=(tmp_path / "asked.jsonl",), **small)
    train_distil(recipe, tmp_path, tmp_path / "run", watched, "cpu")
    assert watched.phases == [
        "loading the models",
        "reading the text",
        "measuring a step of training draft",
        "the target's text",
        "training draft",
        "evaluation",
        "writing the draft",
    ]
    assert counted(watched.lines, "the target's text", "2,048", "tokens") > 1
    assert any(re.match(r"evaluation: \d+ of \d+ rows, ", line) for line in watched.lines)


def test_answers_that_end_early_are_counted_to_the_end() -> None:
    told = list[float]()
    heard = WrittenTokens(100, 7, told.append)
    for _ in range(3):
        assert not heard(torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 5)).any()
    assert told == [14, 14, 14]
    heard.rest()
    assert sum(told) == 100


# -- what a step takes


def trainer(directory: Path, steps: int = 6) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    schedule = Schedule(tokens=steps, tokens_per_step=1, learning_rate=0.1, checkpoint_every=4)

    def loss_of(x: torch.Tensor) -> Learnt:
        return Learnt((model(x) - x).square().sum())

    return Trainer(model, [model.weight], schedule, directory, loss_of)


def test_steps_that_are_measured_train_nothing(watched: Any, tmp_path: Path) -> None:
    measured, fresh = trainer(tmp_path / "draft"), trainer(tmp_path / "fresh")
    batch = [torch.eye(8)]
    assert measured.plan(batch, watched) == PlannedPhase("training draft", 6, 1.0)
    assert not (tmp_path / "draft").exists()
    for one in (measured, fresh):
        one.run(lambda _: batch, watched)
    assert torch.equal(measured.matrices[0], fresh.matrices[0])
    assert not torch.equal(measured.matrices[0], trainer(tmp_path).matrices[0])


def test_of_a_run_that_goes_on_the_rest_is_planned(watched: Any, tmp_path: Path) -> None:
    """Its last checkpoint was at step 4."""
    interrupted, batch = trainer(tmp_path / "draft"), [torch.eye(8)]

    def batch_at(step: int) -> list[torch.Tensor]:
        if step == 5:
            raise KeyboardInterrupt
        return batch

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(batch_at, watched)
    assert trainer(tmp_path / "draft").plan(batch, watched).units == 2
    trainer(tmp_path / "draft").run(lambda _: batch, watched)
    assert trainer(tmp_path / "draft").plan(batch, watched) == PlannedPhase("training draft", 0)


def test_a_step_that_takes_long_is_measured_once(tmp_path: Path) -> None:
    slow, clock = trainer(tmp_path), iter([0.0, 60.0])
    assert slow._measured([torch.eye(8)], lambda: next(clock)) == 60.0


def test_a_blank_batch_has_the_shape_of_others() -> None:
    blank = TokenBatch.blank(3, 5)
    assert blank.tokens.shape == (3, 6) and blank.positions.tolist() == [[0, 1, 2, 3, 4]] * 3
