"""`pilotfish train`: options to a recipe, a recipe to a pair, a head or a draft."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_runs import Refused

from pilotfish.progress import PhaseProgress
from pilotfish.train import distil as distil_module
from pilotfish.train import head as head_module
from pilotfish.train import pair as pair_module
from pilotfish.train.evaluate import Evaluation, HeadEvaluation
from pilotfish.train.recipes import DistilRecipe, LlamaSize, PairRecipe, head_recipe

RESULT = Evaluation(*(0.5 for _ in Evaluation.__annotations__))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What trainings were called with."""
    seen: list[tuple[Any, ...]] = []
    head = HeadEvaluation((0.8, 0.7), 2.36, (0.6, 0.5), 1.9)
    for module, name, result in (
        (pair_module, "train_pair", RESULT),
        (head_module, "train_head", head),
        (distil_module, "train_distil", RESULT),
    ):

        def train(recipe: Any, out: Path, run: Path, _: object, device: str, result: Any = result) -> Any:
            seen.append((recipe, out, run, device))
            return result

        monkeypatch.setattr(module, name, train)
    return seen


def test_options_left_out_take_the_recipe_s_values(pilotfish, calls: list[Any], tmp_path: Path) -> None:
    result = pilotfish("train", "pair", "--out", tmp_path, "--threads", 1, "--json")
    assert result.code == 0 and json.loads(result.stdout) == RESULT.__dict__
    assert calls == [(PairRecipe(), tmp_path, tmp_path / "run", "auto")]


def test_options_given_reach_the_recipe(pilotfish, calls: list[Any], tmp_path: Path) -> None:
    options = ("--source", tmp_path, "--source", "b", "--held-out", "c", "--target-shape", "1,64,2,1,64", "--seed", 3)
    result = pilotfish("train", "pair", "--out", "o", "--run", "r", "--device", "cpu", "--threads", 1, *options)
    assert result.code == 0 and "target loss" in result.stdout
    recipe = PairRecipe(sources=(tmp_path, Path("b")), held_out=("c",), target=LlamaSize(1, 64, 2, 1, 64), seed=3)
    assert calls == [(recipe, Path("o"), Path("r"), "cpu")]


def test_a_head_takes_its_kind_s_values(pilotfish, calls: list[Any], tmp_path: Path) -> None:
    options = ("--target", tmp_path, "--kind", "dspark", "--out", "o", "--threads", 1)
    result = pilotfish("train", "head", *options)
    assert result.code == 0
    assert result.stdout.splitlines()[0].split() == ["greedy", "acceptance", "0.800", "0.700"]
    more = ("--data", "a.jsonl", "--data", "b.jsonl", "--feature-layers", "1,3", "--depth", 7, "--draft-vocab", 64)
    assert pilotfish("train", "head", *options, *more, "--json").code == 0
    given = {"data": (Path("a.jsonl"), Path("b.jsonl")), "feature_layers": (1, 3), "depth": 7, "draft_vocab": 64}
    recipes = [head_recipe("dspark", target=tmp_path, **some) for some in ({}, given)]
    assert calls == [(recipe, Path("o"), Path("o/run"), "auto") for recipe in recipes]


def test_a_draft_starts_from_a_model_or_a_shape(pilotfish, calls: list[Any], tmp_path: Path) -> None:
    options = ("--target", tmp_path, "--out", "o", "--threads", 1)
    assert all(pilotfish("train", "distil", *options, "--draft", draft).code == 0 for draft in ("d", "2,64,2,1,64"))
    starts: list[dict[str, Any]] = [{"draft": Path("d")}, {"shape": LlamaSize(2, 64, 2, 1, 64)}]
    assert [call[0] for call in calls] == [DistilRecipe(target=tmp_path, **start) for start in starts]


@pytest.mark.parametrize(
    "options",
    [
        *(("pair", "--target-shape", "1,2"), ("pair", "--draft-shape", "a,b,c,d,e"), ("pair", "--threads", -1)),
        *(("pair", "--source", "/nowhere"), ("head", "--kind", "eagle9")),
        *(("head", "--kind", "eagle3", "--feature-layers", "a"), ("head", "--kind", "mtp", "--target", "/nowhere")),
        *(("distil", "--draft", "1,2"), ("distil", "--draft", "1,64,3,2,64")),
        ("distil", "--draft", "/nowhere", "--sequence-length", 5),
    ],
)
def test_bad_options_are_one_line(refused: Refused, tmp_path: Path, options: tuple[object, ...]) -> None:
    command, *given = options
    target = () if command == "pair" else ("--target", tmp_path)
    refused("train", command, "--out", tmp_path, *target, *given)


@pytest.mark.parametrize("command", ["pair", "head", "distil"])
def test_help_shows_the_default_of_each_option(pilotfish, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    _, *options = re.split(r"│ \*? *--", pilotfish("train", command, "--help").stdout)
    shown = {name: text for name, _, text in (option.partition(" ") for option in options)}
    without = {name for name, text in shown.items() if not re.search(r"\[(default: .+|required)\]", text)}
    assert without == {"json", "help"}
    defaults = {
        "pair": {"target-shape": "6,384,6,2,1024", "target-tokens": "24576000", "package": "click, filelock, "},
        "head": {"depth": "(4; dspark: 5)", "layers": "(1; dspark: 2)", "learning-rate": "0.008", "lean": "(off)"},
        "distil": {"learning-rate": "0.002", "tokens": "1024000", "data": "(none)", "margin": "(0.05)"},
    }
    assert all(f"[default: {default}" in shown[name] for name, default in defaults[command].items())


def test_a_training_says_on_stderr_how_far_it_is(pilotfish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train_pair(_: PairRecipe, *folders_and_progress: Any) -> Evaluation:
        progress: PhaseProgress = folders_and_progress[2]
        with progress.phase("training target", 40, "steps", done=10):
            progress.tell(last=True)
        return RESULT

    monkeypatch.setattr(pair_module, "train_pair", train_pair)
    result = pilotfish("train", "pair", "--out", tmp_path, "--threads", 1, "--json")
    assert result.code == 0 and json.loads(result.stdout) == RESULT.__dict__
    assert result.stderr.splitlines()[-1] == "training target: 10 of 40 steps, 0 s so far"
