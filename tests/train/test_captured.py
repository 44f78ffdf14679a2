"""Drafts that learn captured traffic: what is held out, what is refused, and that it helps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONTEXT, VOCAB, strong_model
from transformers import GenerationConfig

from pilotfish.core.drafting.vocabulary import text_digest
from pilotfish.errors import InputError
from pilotfish.operate.capture.folder import ClaimedFolder
from pilotfish.operate.capture.rows import CapturedRow, token_bytes
from pilotfish.operate.capture.store import CaptureStore, Retention
from pilotfish.progress import PhaseProgress
from pilotfish.train.distil import redistil
from pilotfish.train.evaluate import CHAIN, accepted_of_chains, evaluate_captured
from pilotfish.train.models import build_model, export_model, start_from_target, write_on
from pilotfish.train.recipes import DistilRecipe, LlamaSize
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.captured import LEAST, read_captured

SIZE = LlamaSize(layers=2, hidden=64, heads=2, kv_heads=1, ffn=64)
SMALL = replace(SIZE, layers=1)
START = 1_764_000_000.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Served:
    """A target that was trained on after its draft was made: `folder` has what clients asked and it answered."""

    target: Path
    draft: Path
    folder: Path

    def recipe(self, **given: Any) -> DistilRecipe:
        small = {"sequence_length": 128, "batch_rows": 4, "tokens": 128 * 4 * 40, "learning_rate": 0.01}
        known = {"target": self.target, "draft": self.draft, "captured": (self.folder,)}
        return DistilRecipe(**{**known, **small, **given})

    @cached_property
    def taught(self) -> TaughtTarget:
        return TaughtTarget(self.target, CPU)


def capture(folder: Path, rows: Sequence[CapturedRow]) -> None:
    store = CaptureStore(ClaimedFolder(folder), Retention(1e12, 1 << 30))
    for row in rows:
        store.add("search", [row])
    store.close()


def row(number: int, tokenizer: str, tokens: Sequence[int] = (1, 2, 3, 4), prompt: int = 2) -> CapturedRow:
    known = {"time": START + number, "temperature": float(number % 2), "tag": None, "fingerprint": "f"}
    parts = {"prompt": token_bytes(tokens[:prompt]), "output": token_bytes(tokens[prompt:])}
    return CapturedRow(**known, **parts, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, generation = tmp_path_factory.mktemp("served"), GenerationConfig(eos_token_id=0, pad_token_id=0)
    before, target = strong_model(SIZE, 5), strong_model(SIZE, 6)
    draft = build_model(SMALL, VOCAB, CONTEXT, 7)
    start_from_target(draft, before)
    for model, name in ((target, "target"), (draft, "draft")):
        export_model(model, tokenizer, generation, folder / name)
    torch.manual_seed(0)
    prompts = np.random.default_rng(0).integers(VOCAB, size=(48, 16)).astype(np.uint16)
    digest = text_digest(tokenizer)
    target.generation_config = generation
    texts = [write_on(target.eval(), one, 128, float(n), lambda _: None) for n, one in enumerate(np.split(prompts, 2))]
    mixed = np.stack(texts, 1).reshape(48, -1)  # temperatures 0 and 1 take turns, as `row` says
    capture(folder / "captured", [row(number, digest, text.tolist(), 16) for number, text in enumerate(mixed)])
    return Served(folder / "target", folder / "draft", folder / "captured")


def test_a_draft_learns_the_traffic_of_a_target_that_has_changed(served: Served, watched: Any, tmp_path: Path) -> None:
    made = redistil(served.recipe(), 0.05, tmp_path, tmp_path / "run", watched, "cpu")
    assert made.better and made.gain > 0.05
    assert made.new.divergence < made.present.divergence and made.new.acceptance > made.present.acceptance
    assert made.new.target_loss == pytest.approx(made.present.target_loss), "both on the same outputs"
    assert (tmp_path / "draft" / "model.safetensors").is_file() and (tmp_path / "draft" / "tokenizer.json").is_file()
    names = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sorted(names) == ["checkpoint.pt", "log.jsonl", "recipe.json"], "no tokens of any row"
    told = r"at this pace about .+ to go: evaluation .+, training draft 40 s, evaluation .+ s"
    assert re.fullmatch(told, watched.estimate)
    outputs = [line for line in watched.lines if line.startswith("evaluation: ")]
    assert len(outputs) > 1 and re.search(r": \d of 8 outputs, .+ left$", outputs[-1])  # the second one


def test_a_draft_that_is_not_better_is_not_written(served: Served, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "present").touch()
    short = served.recipe(tokens=128 * 4 * 2)
    made = redistil(short, CHAIN + 1.0, tmp_path, tmp_path / "run", PhaseProgress(), "cpu")
    assert not made.better and [path.name for path in (tmp_path / "draft").iterdir()] == ["present"]


def test_a_draft_that_is_its_target_gains_nothing(served: Served) -> None:
    target = served.taught
    _, held_out = read_captured(served.recipe(), target)
    found = evaluate_captured(target.module, target.module, held_out, 128, PhaseProgress())
    assert found.divergence == pytest.approx(0, abs=1e-6) and found.agreement == 1
    assert found.acceptance == pytest.approx(1) and found.target_loss == found.draft_loss
    assert CHAIN * 0.9 < found.accepted_a_step <= CHAIN + 1e-4  # fewer below an output's last tokens


def test_what_a_chain_gains() -> None:
    assert CHAIN == 4
    chances = torch.tensor([1.0, 0.5, 0.5, 0.0, 1.0])
    assert accepted_of_chains(chances).tolist() == [1.75, 0.75, 0.5, 0.0, 1.0]


# -- lessons


def test_the_newest_are_held_out_whatever_their_folder(served: Served, tmp_path: Path) -> None:
    target, digest = served.taught, text_digest(served.taught.tokenizer)
    rows = [row(number, digest, [number % VOCAB] * 60, prompt=10) for number in range(200)]
    for name, part in (("a", rows[::2]), ("b", rows[1::2])):
        capture(tmp_path / name, part)
    windows, held_out = read_captured(served.recipe(captured=(tmp_path / "a", tmp_path / "b")), target)
    assert [text.tokens[0] for text in held_out] == [number % VOCAB for number in range(180, 200)]
    assert [text.temperature for text in held_out[:2]] == [0.0, 1.0]
    assert set(windows.tokens.tolist()) == set(range(180)) and len(windows.tokens) == 180 * 60


def test_of_a_prompt_its_end_is_read(served: Served, tmp_path: Path) -> None:
    target, digest = served.taught, text_digest(served.taught.tokenizer)
    capture(tmp_path / "long", [row(number, digest, [7] * 500 + [8] * 128 + [9] * 3, 628) for number in range(20)])
    _, held_out = read_captured(served.recipe(captured=(tmp_path / "long",)), target)
    assert all(text.tokens.tolist() == [8] * 128 + [9] * 3 and text.prompt == 128 for text in held_out)
    assert len(held_out) == LEAST


# -- what is refused


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (lambda digest: [row(n, digest if n else "another") for n in range(40)], "another one"),
        (lambda digest: [row(n, digest) for n in range(2 * LEAST - 1)], "16 or more"),
        (lambda digest: [row(n, digest) for n in range(40)], "128 tokens to train on; rows of 128 need 256"),
        (lambda digest: [row(n, digest, [VOCAB] * 4) for n in range(40)], f"below {VOCAB}"),
    ],
)
def test_rows_that_teach_nothing_are_refused(served: Served, tmp_path: Path, rows: Any, told: str) -> None:
    capture(tmp_path / "captured", rows(text_digest(served.taught.tokenizer)))
    with pytest.raises(InputError, match=told) as refused:
        read_captured(served.recipe(captured=(tmp_path / "captured",)), served.taught)
    assert "\n" not in str(refused.value)
