"""The whole recipe on tiny models: what it writes, that it resumes exactly, that it refuses misuse."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotfish.errors import ParameterError
from pilotfish.progress import PhaseProgress
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.pair import train_pair
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.trainer import Trainer


def _train(recipe: PairRecipe, folder: Path) -> Evaluation:
    return train_pair(recipe, folder / "out", folder / "run", PhaseProgress(), "cpu")


@pytest.fixture(scope="module")
def finished(tiny: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluation]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, _train(tiny, folder)


def test_both_directories_load_with_transformers(finished: tuple[Path, Evaluation]) -> None:
    out = finished[0] / "out"
    tokenizers = [AutoTokenizer.from_pretrained(out / role) for role in ("target", "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(out / role)
        assert model.dtype == torch.bfloat16
        assert model.config.max_position_embeddings == 256
        ids = torch.tensor([tokenizers[0]("def alpha")["input_ids"]])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert written.shape[1] <= ids.shape[1] + 4


def test_model_card_names_data_recipe_seed_and_figures(finished: tuple[Path, Evaluation], tiny: PairRecipe) -> None:
    folder, result = finished
    for role in ("target", "draft"):
        card = (folder / "out" / role / "README.md").read_text()
        assert "`beta`" in card and f"seed {tiny.seed}" in card and '"vocab_size": 300' in card
        assert f"{result.target_loss:.3f}" in card and f"{result.greedy_acceptance:.3f}" in card
        assert str(tiny.sources[0]) not in card and str(folder) not in card and "$" not in card


def test_training_helps_and_figures_are_plausible(finished: tuple[Path, Evaluation]) -> None:
    result = finished[1]
    assert result.target_loss < math.log(300) - 0.1
    assert result.divergence > 0
    for share in (result.agreement, result.greedy_acceptance, result.sampled_acceptance):
        assert 0 <= share <= 1


def test_an_interrupted_run_ends_in_the_same_weights(
    finished: tuple[Path, Evaluation], tiny: PairRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert _train(tiny, tmp_path) == finished[1]
    for file in ("target/model.safetensors", "draft/model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (finished[0] / "out" / file).read_bytes()


def test_what_is_damaged_in_a_run_is_made_anew(
    finished: tuple[Path, Evaluation], tiny: PairRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that were cut, as by a disk that was full; the run ends in the same weights."""
    shutil.copytree(finished[0] / "run", tmp_path / "run")
    damaged = ("training.npy", "tokenizer/tokenizer.json", "target/checkpoint.pt")
    for name in damaged:
        path = tmp_path / "run" / name
        os.truncate(path, path.stat().st_size // 2)
    assert _train(tiny, tmp_path) == finished[1]
    assert len(caplog.messages) == len(damaged) and (tmp_path / "run" / "target" / "checkpoint.damaged").exists()
    for file in ("target/model.safetensors", "draft/model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (finished[0] / "out" / file).read_bytes()


def test_a_run_directory_belongs_to_one_recipe(finished: tuple[Path, Evaluation], tiny: PairRecipe) -> None:
    with pytest.raises(ParameterError, match="run"):
        _train(dataclasses.replace(tiny, seed=1), finished[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("vocab_size", 256),
        ("sequence_length", 9000),
        ("batch_rows", 1),
        ("target_tokens", 10),
        ("draft_tokens", 0),
        ("learning_rate", 0.0),
        ("checkpoint_every", 0),
    ],
)
def test_out_of_range_knobs_are_refused(field: str, value: float) -> None:
    with pytest.raises(ParameterError, match=field):
        PairRecipe(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_absent_devices_are_refused(tiny: PairRecipe, tmp_path: Path, device: str) -> None:
    with pytest.raises(ParameterError, match="device"):
        train_pair(tiny, tmp_path / "out", tmp_path / "run", PhaseProgress(), device)


def test_heads_have_to_share_kv_heads_evenly() -> None:
    shape = dataclasses.replace(PairRecipe().target, heads=3)
    with pytest.raises(ParameterError, match="target"):
        PairRecipe(target=shape)


def test_too_little_text_is_refused(tiny: PairRecipe, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    with pytest.raises(ParameterError, match="source"):
        _train(dataclasses.replace(tiny, sources=(tmp_path,)), tmp_path)
