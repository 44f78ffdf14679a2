"""A draft's tokenizer is the target's, or that with other added tokens; what else differs is said."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inline_drafts import inline_drafts
from support import SNIPPETS, VOCAB, assert_idle, edit_tensors, make_engine, run, write_model, write_tokenizer

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.drafting.vocabulary import MAX_ADDED, added_tokens, tokenizer_digest, why_unequal
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.checks import check_models
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.lm import LMDrafter

#: Embeddings beyond the tokenizer, as most models have them.
PADDED = VOCAB + 64
MORE = ("<more>", "<and more>", "<most>")


def with_tokens(directory: Path, *tokens: str) -> Any:
    """The directory's tokenizer with more special tokens, also on disk."""
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def rewritten(directory: Path, change: Callable[[dict[str, Any]], object]) -> Any:
    """The tokenizer after a change of its file."""
    path = directory / "tokenizer.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    return load_tokenizer(directory)


def test_a_digest_is_that_of_the_base_vocabulary(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_tokenizer(other, VOCAB - 1)
    digest = tokenizer_digest(load_tokenizer(directory))
    assert digest != tokenizer_digest(load_tokenizer(other))
    assert digest == tokenizer_digest(with_tokens(directory, *MORE))
    assert digest != tokenizer_digest(rewritten(directory, lambda fields: fields.update(normalizer={"type": "NFC"})))


def test_added_tokens_are_those_beyond_the_base(directory: Path) -> None:
    assert added_tokens(load_tokenizer(directory)) == {}  # <eos> is of the base
    assert added_tokens(with_tokens(directory, *MORE)) == dict(enumerate(MORE, VOCAB))


def test_a_target_tells_of_so_many(directory: Path) -> None:
    tokenizer = with_tokens(directory, *(f"<{i}>" for i in range(MAX_ADDED + 10)))
    assert list(added_tokens(tokenizer)) == list(range(VOCAB, VOCAB + MAX_ADDED))


def test_what_differs_is_said(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = load_tokenizer(directory)
    assert why_unequal(target, load_tokenizer(directory)) is None
    shorter, swapped, nfc, merged = (tmp_path_factory.mktemp(name) for name in ("a", "b", "c", "d"))
    write_tokenizer(shorter, VOCAB - 2)
    for copy in (swapped, nfc, merged):
        shutil.copytree(directory, copy, dirs_exist_ok=True)
    last = target.convert_ids_to_tokens(VOCAB - 2)
    expected = f"token {last!r} has id {VOCAB - 2} in the target and no id in the draft; 2 tokens differ"
    assert why_unequal(target, load_tokenizer(shorter)) == expected

    def swap(fields: dict[str, Any]) -> None:
        vocabulary = fields["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    ids = [target.convert_tokens_to_ids(one) for one in "ab"]
    expected = f"token 'a' has id {ids[0]} in the target and id {ids[1]} in the draft; 2 tokens differ"
    assert why_unequal(target, rewritten(swapped, swap)) == expected
    changed = rewritten(nfc, lambda fields: fields.update(normalizer={"type": "NFC"}))
    assert why_unequal(target, changed) == "their normalizer differ"
    changed = rewritten(merged, lambda fields: fields["model"]["merges"].reverse())
    assert why_unequal(target, changed) == "their merges differ"


# -- pairs


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), "llama", vocab_size=PADDED)


@pytest.fixture(scope="module")
def stubborn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of `target` with three more tokens, which are always among its guesses."""
    copy = write_model(tmp_path_factory.mktemp("stubborn"), "llama", vocab_size=PADDED, perturbed=0.02)
    with_tokens(copy, *MORE)
    return edit_tensors(copy, lambda tensors: tensors["lm_head.weight"][VOCAB : VOCAB + 3].mul_(3.0))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with three more tokens, and no other change."""
    copy = write_model(tmp_path_factory.mktemp("larger"), "llama", vocab_size=PADDED)
    with_tokens(copy, *MORE)
    return copy


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft without an embedding for any token that is not of the base."""
    return write_model(tmp_path_factory.mktemp("smaller"), "llama", perturbed=0.02)


def watched(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Every token that a draft model proposes from now on."""
    seen: set[int] = set()
    for kind in (LMDrafter, RemoteDrafter):
        propose = kind.propose

        def watching(self: Any, requests: Sequence[Request], limits: DraftLimits, own: Any = propose) -> list[Guesses]:
            trees: list[Guesses] = own(self, requests, limits)
            seen.update(token for tree in trees for token in tree.tokens)
            return trees

        monkeypatch.setattr(kind, "propose", watching)
    return seen


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_surplus_token_is_guessed(mode: Any, target: Path, stubborn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_models(EngineConfig(target=target, draft=stubborn, mode="sync", kv_slots=256)).problems == []
    asked = [SamplingParams(max_tokens=24, seed=i, temperature=0.8 * (i % 2)) for i in range(len(SNIPPETS))]
    expected = run(make_engine(target), SNIPPETS, asked)
    with inline_drafts(monkeypatch):
        seen = watched(monkeypatch)
        with make_engine(target, draft=stubborn, mode=mode, drafter="lm") as engine:
            assert run(engine, SNIPPETS, asked) == expected
            assert_idle(engine)
    assert len(seen) > 20 and seen.isdisjoint(range(VOCAB, VOCAB + len(MORE)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tokens_that_only_the_target_has_harm_nobody(
    mode: Any, larger: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In prompts and in outputs, with a draft that has no embedding for them."""
    prompts = [*SNIPPETS[:3], [40, VOCAB + 1, 41], f"a{MORE[2]}b", SNIPPETS[4]]
    asked = [SamplingParams(max_tokens=64, seed=i, temperature=0.0) for i in range(3)]
    asked += [SamplingParams(max_tokens=24, seed=1)] * 2
    asked.append(SamplingParams(max_tokens=8, seed=5, temperature=0.0, logit_bias={VOCAB: 9.0}))
    expected = run(make_engine(larger), prompts, asked)
    assert VOCAB in expected[-1][:-1]
    with inline_drafts(monkeypatch):
        seen = watched(monkeypatch)
        with make_engine(larger, draft=smaller, mode=mode, drafter="lm") as engine:
            assert run(engine, prompts, asked) == expected
            assert engine.worker.drafter.drafter is engine.drafter
            assert_idle(engine)
    assert len(seen) > 20 and max(seen) < VOCAB
    assert not caplog.records
