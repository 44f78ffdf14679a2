"""The whole recipe on tiny models: what it writes and says, that it resumes exactly, that it refuses misuse."""

import dataclasses
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FinishedPair
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotfish.errors import ParameterError
from pilotfish.progress import PhaseProgress
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.pair import train_pair
from pilotfish.train.recipes import PairRecipe
from pilotfish.train.trainer import Trainer


def _train(recipe: PairRecipe, folder: Path, device: str = "cpu") -> Evaluation:
    return train_pair(recipe, folder / "out", folder / "run", PhaseProgress(), device)


def _assert_same(folder: Path, finished: FinishedPair) -> None:
    for file in ("target/model.safetensors", "draft/model.safetensors"):
        assert (folder / "out" / file).read_bytes() == (finished.folder / "out" / file).read_bytes()


def test_both_directories_load_with_transformers(finished_pair: FinishedPair) -> None:
    out = finished_pair.folder / "out"
    tokenizers = [AutoTokenizer.from_pretrained(out / role) for role in ("target", "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(out / role)
        assert model.dtype == torch.bfloat16
        assert model.config.max_position_embeddings == 256
        ids = torch.tensor([tokenizers[0]("def alpha")["input_ids"]])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert written.shape[1] <= ids.shape[1] + 4


def test_model_card_names_data_recipe_seed_and_figures(finished_pair: FinishedPair, tiny: PairRecipe) -> None:
    folder, result = finished_pair.folder, finished_pair.result
    for role in ("target", "draft"):
        card = (folder / "out" / role / "README.md").read_text()
        assert "`beta`" in card and f"seed {tiny.seed}" in card and '"vocab_size": 300' in card
        assert f"{result.target_loss:.3f}" in card and f"{result.greedy_acceptance:.3f}" in card
        assert str(tiny.sources[0]) not in card and str(folder) not in card and "$" not in card


def test_training_helps_and_figures_are_plausible(finished_pair: FinishedPair) -> None:
    result = finished_pair.result
    assert result.target_loss < math.log(300) - 0.1
    assert result.divergence > 0
    for share in (result.agreement, result.greedy_acceptance, result.sampled_acceptance):
        assert 0 <= share <= 1


def test_each_phase_is_told(finished_pair: FinishedPair) -> None:
    watched = finished_pair.watched
    assert watched.phases == [
        *("reading the sources", "training the tokenizer", "tokenizing the sources"),
        *("measuring a step of training target", "measuring a step of training draft"),
        *("training target", "the target's text", "training draft", "evaluation", "writing the pair"),
    ]
    assert re.fullmatch(
        r"at this pace about \d+ s to go: training target \d+ s, training draft \d+ s "
        r"\(not measured yet: the target's text, evaluation\)",
        watched.estimate,
    )
    assert watched.counted("the target's text", "1,024", "tokens") > 1


def test_an_interrupted_run_ends_in_the_same_weights(
    finished_pair: FinishedPair, tiny: PairRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer._advance
    for stage, step in (("target", 6), ("draft", 5)):  # each two steps or one after a checkpoint

        def interrupted(self: Trainer, *args: Any, at: tuple[str, int] = (stage, step)) -> float:
            if (self.directory.name, self.step) == at:
                raise KeyboardInterrupt
            return advance(self, *args)

        monkeypatch.setattr(Trainer, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _train(tiny, tmp_path)
    monkeypatch.undo()
    torch.set_num_threads(1)
    assert _train(tiny, tmp_path) == finished_pair.result
    _assert_same(tmp_path, finished_pair)


def test_what_is_damaged_in_a_run_is_made_anew(
    finished_pair: FinishedPair, tiny: PairRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(finished_pair.folder / "run", tmp_path / "run")
    damaged = ("training.npy", "tokenizer/tokenizer.json", "target/checkpoint.pt")
    for name in damaged:
        path = tmp_path / "run" / name
        os.truncate(path, path.stat().st_size // 2)
    assert _train(tiny, tmp_path) == finished_pair.result
    assert len(caplog.messages) == len(damaged) and (tmp_path / "run" / "target" / "checkpoint.damaged").exists()
    _assert_same(tmp_path, finished_pair)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", -1), ("vocab_size", 256), ("sequence_length", 9000), ("batch_rows", 1)),
        *(("target_tokens", 10), ("draft_tokens", 0), ("learning_rate", 0.0)),
        ("checkpoint_every", 0),
        ("target", dataclasses.replace(PairRecipe().target, heads=3)),  # of which 2 kv_heads have no equal shares
    ],
)
def test_recipes_that_cannot_be_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=field):
        PairRecipe(**{field: value})


def test_runs_that_cannot_be_are_refused(finished_pair: FinishedPair, tiny: PairRecipe, tmp_path: Path) -> None:
    for device in ("abacus", "cuda:99"):
        with pytest.raises(ParameterError, match="device"):
            _train(tiny, tmp_path, device)
    with pytest.raises(ParameterError, match="run"):
        _train(dataclasses.replace(tiny, seed=1), finished_pair.folder)
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    with pytest.raises(ParameterError, match="source"):
        _train(dataclasses.replace(tiny, sources=(tmp_path,)), tmp_path)
