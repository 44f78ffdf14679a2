"""`pilotfish train pair`: options to a recipe, a recipe to a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.train import pair as pair_module
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.recipe import LlamaSize, PairRecipe

RESULT = Evaluation(*(0.5 for _ in Evaluation.__annotations__))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `train_pair` was called with."""
    seen: list[tuple[Any, ...]] = []

    def train_pair(recipe: PairRecipe, out: Path, run: Path, _: object, device: str) -> Evaluation:
        seen.append((recipe, out, run, device))
        return RESULT

    monkeypatch.setattr(pair_module, "train_pair", train_pair)
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


@pytest.mark.parametrize(
    "options",
    [
        ("--target-shape", "1,2"),
        ("--draft-shape", "a,b,c,d,e"),
        ("--vocab-size", 3),
        ("--threads", -1),
        ("--source", "/nowhere"),
    ],
)
def test_bad_options_are_one_line(pilotfish, tmp_path: Path, options: tuple[object, ...]) -> None:
    result = pilotfish("train", "pair", "--out", tmp_path, *options)
    assert (result.code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
