"""Heads and drafts of a target that exists: what a run writes, that it resumes and repeats exactly, what it refuses."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Watched
from safetensors.torch import load_file
from sizes import sized
from transformers import AutoModelForCausalLM, GenerationConfig

from pilotfish.errors import InputError, ModelError, ParameterError
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.target import TargetFacts
from pilotfish.progress import PhaseProgress
from pilotfish.train.distil import train_distil
from pilotfish.train.evaluate import HeadEvaluation
from pilotfish.train.head import train_head, write_head
from pilotfish.train.models import build_model, export_model
from pilotfish.train.recipes import DistilRecipe, HeadRecipe, LlamaSize, head_recipe

SMALL = {"sequence_length": 128, "batch_rows": 2, "tokens": 128 * 2 * 20, "sampled_tokens": 8 * 128}
LAST = ("medusa",)
#: More than the target writes at a time.
TWICE = {"sampled_tokens": 16 * 128}


def recipe(target: Path, sources: Path, kind: str, **given: Any) -> HeadRecipe:
    small = {**SMALL, "learning_rate": 0.01, "depth": 3}
    return head_recipe(kind, target=target, sources=(sources,), held_out=("beta",), **{**small, **given})


def weights(head: Path) -> bytes:
    return (head / "model.safetensors").read_bytes()


def run(recipe: HeadRecipe, folder: Path, progress: PhaseProgress | None = None) -> HeadEvaluation:
    return train_head(recipe, folder / "out", folder / "run", progress or PhaseProgress(), "cpu")


@dataclass(frozen=True)
class FinishedHead:
    folder: Path
    result: HeadEvaluation
    watched: Watched


@pytest.fixture(scope="module")
def finished(target: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedHead:
    folder, watched = tmp_path_factory.mktemp("finished"), Watched()
    return FinishedHead(folder, run(recipe(target, sources, "eagle3", **TWICE), folder, watched), watched)


def test_a_run_leaves_its_log(finished: FinishedHead) -> None:
    lines = [json.loads(line) for line in (finished.folder / "run" / "eagle3" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert all(len(line["acceptance"]) == 3 for line in lines)


def test_figures_are_plausible(finished: FinishedHead) -> None:
    result = finished.result
    for shares, tokens in (
        (result.greedy_acceptance, result.greedy_tokens_a_step),
        (result.sampled_acceptance, result.sampled_tokens_a_step),
    ):
        assert len(shares) == 3 and all(0 <= share <= 1 for share in shares)
        assert 1 <= tokens <= 4


def test_each_phase_is_told(finished: FinishedHead) -> None:
    watched = finished.watched
    assert watched.phases == [
        *("loading the target", "reading the text", "measuring a step of training eagle3"),
        *("the target's text", "training eagle3", "evaluation", "writing the head"),
    ]
    assert re.fullmatch(
        r"at this pace about .+ to go: the target's text .+, training eagle3 20 s, "
        r"the target's text .+, the target's text .+ \(not measured yet: evaluation\)",
        watched.estimate,
    )
    assert watched.counted("the target's text", "2,048", "tokens") > 1
    assert sum(": 0 of" not in line for line in watched.lines if line.startswith("the target's text: ")) > 3
    steps = [line for line in watched.lines if line.startswith("training eagle3 · loss ")]
    assert len(steps) > 1 and all(re.search(r": \d+ of 20 steps, .+ with what follows", line) for line in steps)
    assert any(re.match(r"evaluation: \d+ of 16 rows, .+ left$", line) for line in watched.lines)


def test_the_head_that_is_written_is_the_trained_one(finished: FinishedHead, target: Path, tmp_path: Path) -> None:
    head = finished.folder / "out" / "head"
    files = read_head(head, TargetFacts.read(target))
    trained = torch.load(finished.folder / "run" / "eagle3" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(files.tensors[name], trained[name].bfloat16()) for name in trained)
    assert files.spec.projection.layers == (1, 2, 3)
    write_head(files, recipe(target, target, "eagle3", depth=3), tmp_path)
    assert weights(tmp_path) == weights(head)


def test_a_lean_head_of_a_float32_target_has_nothing_of_its_target(
    finished: FinishedHead, target: Path, sources: Path, tmp_path: Path
) -> None:
    wide, head = tmp_path / "target", finished.folder / "out" / "head"
    shutil.copytree(target, wide)
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).save_pretrained(wide)
    files = read_head(head, TargetFacts.read(wide))
    assert "embed_tokens.weight" in load_file(head / "model.safetensors")
    write_head(files, recipe(wide, sources, "eagle3", lean=True), tmp_path / "lean")
    stored = load_file(tmp_path / "lean" / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    served = read_head(tmp_path / "lean", TargetFacts.read(wide)).tensors
    assert all(torch.equal(served[name].bfloat16(), tensor) for name, tensor in files.tensors.items())


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("dspark", {"anchors": 8}),
        ("mtp", {}),
        *((kind, {"draft_vocab": 200}) for kind in sized(LAST, (*LAST, "eagle3"))),
    ],
)
def test_every_kind_learns_and_in_the_soak_a_second_run_has_the_same_bits(
    kind: str, given: dict[str, int], target: Path, sources: Path, tmp_path: Path
) -> None:
    short = recipe(target, sources, kind, **given)
    folders = [tmp_path / name for name in sized(("first",), ("first", "second"))]
    results = [run(short, folder) for folder in folders]
    heads = [folder / "out" / "head" for folder in folders]
    files = read_head(heads[0], TargetFacts.read(target))
    assert files.spec.kind == kind and files.spec.draft_vocab == given.get("draft_vocab", 300)
    assert (files.d2t is None) == ("draft_vocab" not in given)
    logs = [(folder / "run" / kind / "log.jsonl").read_text().splitlines() for folder in folders]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0][-1] < losses[0][0]
    assert results[-1] == results[0] and weights(heads[-1]) == weights(heads[0]) and losses[-1] == losses[0]


def test_a_language_model_is_distilled_on_data_of_the_user_s_own(target: Path, tmp_path: Path) -> None:
    """A new one of a shape, then that one further. Prompts, which the target answers, and answers that were logged."""
    lines = [{"prompt": f"def alpha_{number}(value):\n" * 8} for number in range(24)]
    lines += [{"prompt": f"def beta_{number}", "response": "(value):\n    return value\n" * 9} for number in range(24)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {**SMALL, "tokens": 128 * 2 * 10, "data": (tmp_path / "log.jsonl",)}
    starts: dict[str, dict[str, Any]] = {"first": {"shape": TINY}, "second": {"draft": tmp_path / "first" / "draft"}}
    divergences = []
    for name, start in starts.items():
        out = tmp_path / name
        result = train_distil(DistilRecipe(target=target, **start, **data), out, out / "run", PhaseProgress(), "cpu")
        divergences.append(result.divergence)
        draft = AutoModelForCausalLM.from_pretrained(out / "draft")
        assert draft.config.vocab_size == 300 and draft.config.num_hidden_layers == 1
        assert (out / "draft" / "tokenizer.json").is_file()
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
def test_bad_recipes_are_refused(given: dict[str, Any], told: str, target: Path, sources: Path, tmp_path: Path) -> None:
    if given.get("sources") == ():
        (tmp_path / "short.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
        given = {**given, "data": (tmp_path / "short.jsonl",)}
    with pytest.raises(InputError) as refused:
        run(head_recipe(**{"target": target, "sources": (sources,), **given}), tmp_path)
    assert told in str(refused.value)


def test_what_is_no_target_or_draft_is_refused(target: Path, sources: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        run(recipe(tmp_path, sources, "eagle3"), tmp_path)
    export_model(build_model(TINY, 280, 512, 0), tokenizer, GenerationConfig(), tmp_path / "other")
    for draft, told in ((tmp_path / "other", "280 tokens"), (tmp_path / "absent", "config.json")):
        with pytest.raises(ModelError, match=told):
            train_distil(DistilRecipe(target=target, draft=draft), tmp_path, tmp_path / "run", PhaseProgress(), "cpu")
    with pytest.raises(ParameterError, match="draft"):
        DistilRecipe(target=target, shape=LlamaSize(1, 64, 3, 2, 64))
