"""Heads and drafts of a target that exists: what a run writes, that it resumes and repeats exactly, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from pilotfish.errors import InputError, ModelError, ParameterError
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import TargetFacts
from pilotfish.progress import PhaseProgress
from pilotfish.train.distil import train_distil
from pilotfish.train.evaluate_head import HeadEvaluation
from pilotfish.train.export import save_model
from pilotfish.train.head import train_head
from pilotfish.train.models import build_model
from pilotfish.train.recipe import LlamaSize
from pilotfish.train.taught_recipe import DistilRecipe, HeadRecipe, head_recipe
from pilotfish.train.text import lessons, written
from pilotfish.train.text.data import collect, train_tokenizer
from pilotfish.train.trainer import Trainer
from pilotfish.train.write_head import write_head

SIZE = LlamaSize(layers=4, hidden=64, heads=2, kv_heads=1, ffn=64)
#: More than the target writes at a time.
TWICE = {"sampled_tokens": 16 * 128}


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    """A target writes 8 rows at a time, and no more of held-out text. One thread, as tests have: the number counts for
    the last bits."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "SAMPLED_ROWS", 8)
        patch.setattr(lessons, "HELD_OUT_ROWS", 8)
        yield


@pytest.fixture(scope="module")
def target(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, but not without a will."""
    directory = tmp_path_factory.mktemp("target")
    train_tokenizer((document.text for document in collect([sources], ())), 300, 512).save_pretrained(directory)
    model = build_model(SIZE, 300, 512, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
    save_model(model, GenerationConfig(eos_token_id=0, pad_token_id=0), directory)
    return directory


def recipe(target: Path, sources: Path, kind: str, **given: Any) -> HeadRecipe:
    small = {
        "sequence_length": 128,
        "batch_rows": 2,
        "tokens": 128 * 2 * 20,
        "sampled_tokens": 8 * 128,
        "learning_rate": 0.01,
    }
    return head_recipe(kind, target=target, sources=(sources,), held_out=("beta",), **{**small, "depth": 3, **given})


def weights(head: Path) -> bytes:
    return (head / "model.safetensors").read_bytes()


def run(recipe: HeadRecipe, folder: Path) -> HeadEvaluation:
    return train_head(recipe, folder / "out", folder / "run", PhaseProgress(), "cpu")


@pytest.fixture(scope="module")
def finished(target: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadEvaluation]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(recipe(target, sources, "eagle3", **TWICE), folder)


def test_a_run_leaves_its_log_and_its_curves(finished: tuple[Path, HeadEvaluation]) -> None:
    folder, _ = finished
    lines = [json.loads(line) for line in (folder / "run" / "eagle3" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert all(len(line["acceptance"]) == 3 for line in lines)
    drawing = ElementTree.parse(folder / "run" / "curves.svg").getroot()
    assert [text.text for text in drawing.iter() if text.text and "depth" in text.text][1:] == [
        "depth 1",
        "depth 2",
        "depth 3",
    ]


def test_figures_are_plausible(finished: tuple[Path, HeadEvaluation]) -> None:
    result = finished[1]
    for shares, tokens in (
        (result.greedy_acceptance, result.greedy_tokens_a_step),
        (result.sampled_acceptance, result.sampled_tokens_a_step),
    ):
        assert len(shares) == 3 and all(0 <= share <= 1 for share in shares)
        assert 1 <= tokens <= 4


def test_an_interrupted_run_ends_in_the_same_bits(
    finished: tuple[Path, HeadEvaluation],
    target: Path,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = Trainer._advance

    def interrupted(self: Trainer, *args: Any) -> Any:
        if self.step == 12:
            raise KeyboardInterrupt
        return advance(self, *args)

    monkeypatch.setattr(Trainer, "_advance", interrupted)
    every_five = recipe(target, sources, "eagle3", **TWICE, checkpoint_every=5)
    with pytest.raises(KeyboardInterrupt):
        run(every_five, tmp_path)
    monkeypatch.undo()
    assert run(every_five, tmp_path) == finished[1]
    heads = [folder / "out" / "head" for folder in (finished[0], tmp_path)]
    assert weights(heads[0]) == weights(heads[1])


def test_the_head_that_is_written_is_the_one_that_was_trained(
    finished: tuple[Path, HeadEvaluation], target: Path, tmp_path: Path
) -> None:
    files = read_head(finished[0] / "out" / "head", TargetFacts.read(target))
    trained = torch.load(finished[0] / "run" / "eagle3" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(files.tensors[name], trained[name].bfloat16()) for name in trained)
    assert files.spec.projection.layers == (1, 2, 3)
    write_head(files, recipe(target, target, "eagle3", depth=3), tmp_path)
    assert weights(tmp_path) == weights(finished[0] / "out" / "head")


def test_a_lean_head_of_a_float32_target_has_nothing_of_its_target(
    finished: tuple[Path, HeadEvaluation], target: Path, sources: Path, tmp_path: Path
) -> None:
    wide = tmp_path / "target"
    shutil.copytree(target, wide)
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).save_pretrained(wide)
    files = read_head(finished[0] / "out" / "head", TargetFacts.read(wide))
    assert "embed_tokens.weight" in load_file(finished[0] / "out" / "head" / "model.safetensors")
    write_head(files, recipe(wide, sources, "eagle3", lean=True), tmp_path / "lean")
    stored = load_file(tmp_path / "lean" / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    served = read_head(tmp_path / "lean", TargetFacts.read(wide)).tensors
    assert all(torch.equal(served[name].bfloat16(), tensor) for name, tensor in files.tensors.items())


@pytest.mark.parametrize(
    ("kind", "given"),
    [("dspark", {"anchors": 8}), ("mtp", {}), ("medusa", {"draft_vocab": 200}), ("eagle3", {"draft_vocab": 200})],
)
def test_every_kind_learns_and_a_second_run_has_the_same_bits(
    kind: str, given: dict[str, int], target: Path, sources: Path, tmp_path: Path
) -> None:
    short = recipe(target, sources, kind, **given)
    results = [run(short, tmp_path / name) for name in ("first", "second")]
    assert results[0] == results[1]
    assert weights(tmp_path / "first" / "out" / "head") == weights(tmp_path / "second" / "out" / "head")
    files = read_head(tmp_path / "first" / "out" / "head", TargetFacts.read(target))
    assert files.spec.kind == kind and files.spec.draft_vocab == given.get("draft_vocab", 300)
    assert (files.d2t is None) == ("draft_vocab" not in given)
    logs = [(tmp_path / name / "run" / kind / "log.jsonl").read_text().splitlines() for name in ("first", "second")]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_data_of_the_user_s_own(target: Path, tmp_path: Path) -> None:
    """Prompts, which the target answers, and answers that were logged."""
    lines = [{"prompt": f"def alpha_{number}(value):\n"} for number in range(24)]
    lines += [{"prompt": f"def beta_{number}", "response": "(value):\n    return value\n" * 9} for number in range(24)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    small = recipe(target, tmp_path, "mtp", tokens=128 * 2 * 10)
    result = run(dataclasses.replace(small, sources=(), data=(tmp_path / "log.jsonl",)), tmp_path)
    assert len(result.greedy_acceptance) == 3


def test_a_language_model_is_distilled(target: Path, sources: Path, tmp_path: Path) -> None:
    """A new one of a shape, then that one further."""
    small = {"sequence_length": 128, "batch_rows": 2, "tokens": 128 * 2 * 20, "sampled_tokens": 16 * 128}
    shape = LlamaSize(layers=1, hidden=64, heads=2, kv_heads=1, ffn=64)
    starts: dict[str, dict[str, Any]] = {"first": {"shape": shape}, "second": {"draft": tmp_path / "first" / "draft"}}
    divergences = []
    for name, start in starts.items():
        recipe = DistilRecipe(target=target, **start, sources=(sources,), held_out=("beta",), **small)
        result = train_distil(recipe, tmp_path / name, tmp_path / name / "run", PhaseProgress(), "cpu")
        divergences.append(result.divergence)
        draft = AutoModelForCausalLM.from_pretrained(tmp_path / name / "draft")
        assert draft.config.vocab_size == 300 and draft.config.num_hidden_layers == 1
        assert (tmp_path / name / "draft" / "tokenizer.json").is_file()
        assert (tmp_path / name / "run" / "curves.svg").is_file()
    assert divergences[1] < divergences[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "eagle9"}, "kind: 'eagle9'"),
        ({"kind": "eagle3", "layers": 2}, "layers: 2"),
        ({"kind": "eagle3", "feature_layers": (1, 9)}, "feature_layers"),
        ({"kind": "eagle3", "draft_vocab": 300}, "draft_vocab: 300"),
        ({"kind": "dspark", "sequence_length": 1024}, "sequence_length: 1024"),
        ({"kind": "mtp", "tokens": 10}, "tokens: 10"),
        ({"kind": "mtp", "sampled_tokens": 1, "sources": ()}, "data"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    given: dict[str, Any], told: str, target: Path, sources: Path, tmp_path: Path
) -> None:
    if given.get("sources") == ():
        (tmp_path / "short.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
        given = {**given, "data": (tmp_path / "short.jsonl",)}
    with pytest.raises(InputError) as refused:
        run(head_recipe(**{"target": target, "sources": (sources,), **given}), tmp_path)
    assert told in str(refused.value)


def test_targets_and_drafts_that_are_none_are_refused(target: Path, sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        run(recipe(tmp_path, sources, "eagle3"), tmp_path)
    save_model(build_model(SIZE, 280, 512, 0), GenerationConfig(), tmp_path / "other")
    for draft, told in ((tmp_path / "other", "280 tokens"), (tmp_path / "absent", "config.json")):
        with pytest.raises(ModelError, match=told):
            train_distil(DistilRecipe(target=target, draft=draft), tmp_path, tmp_path / "run", PhaseProgress(), "cpu")
    with pytest.raises(ParameterError, match="draft"):
        DistilRecipe(target=target, shape=LlamaSize(1, 64, 3, 2, 64))
