"""Tokenizers with entries that the model has no embedding for, as Gemma 3's: in no grammar, and text where spelled."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import VOCAB, edit_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish import LLM, Constraint, SamplingParams
from pilotfish.core.drafting.vocabulary import (
    added_tokens,
    leave_out,
    text_digest,
    tokenizer_digest,
    why_ids_differ,
    why_unequal,
    without_ids_from,
)
from pilotfish.engine.token_table import token_table
from pilotfish.errors import ParameterError
from pilotfish.model.loading.metadata import load_tokenizer

IMAGE, FRAME = "<image_soft_token>", "[frame]"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TEXT = f"see {IMAGE} and {FRAME}{IMAGE}."


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `VOCAB` embeddings; its tokenizer has two more entries."""
    directory = Path(shutil.copytree(llama, tmp_path_factory.mktemp("larger") / "model"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False), FRAME])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, dtype="float32", threads=1, kv_slots=1024) as llm:
        yield llm


def test_what_spells_an_entry_beyond_the_embedding_is_text(model: Path, llama: Path) -> None:
    tokenizer, plain = load_tokenizer(model), load_tokenizer(llama)
    assert len(AutoTokenizer.from_pretrained(model)) == VOCAB + 2 and len(tokenizer) == VOCAB
    assert tokenizer.encode(TEXT) == plain.encode(TEXT) and tokenizer.decode(plain.encode(TEXT)) == TEXT
    assert tokenizer.encode("<eos>") == [tokenizer.eos_token_id] == plain.encode("<eos>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    assert chat == f"<user>{TEXT}\n<assistant>" and max(tokenizer.encode(chat)) < VOCAB


def test_what_others_compare_stays(model: Path, llama: Path, tmp_path: Path) -> None:
    """A server may have the tokenizer alone; drafts and targets may have embeddings of unequal sizes."""
    alone = Path(shutil.copytree(model, tmp_path / "alone", ignore=shutil.ignore_patterns("config.json")))
    tokenizer, whole = load_tokenizer(model), load_tokenizer(alone)
    assert len(whole) == VOCAB + 2 and text_digest(whole) == text_digest(tokenizer)
    assert tokenizer_digest(whole) == tokenizer_digest(tokenizer) == tokenizer_digest(load_tokenizer(llama))
    assert (added_tokens(whole), added_tokens(tokenizer)) == ({VOCAB: IMAGE, VOCAB + 1: FRAME}, {})
    assert why_ids_differ(tokenizer, load_tokenizer(llama)) is None
    assert token_table(tokenizer, len(tokenizer)).size == VOCAB


def test_an_embedding_that_is_larger_changes_nothing(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    edit_config(copy, vocab_size=VOCAB + 2)
    assert load_tokenizer(copy).encode(IMAGE) == [VOCAB]


def test_the_other_added_tokens_stay_what_they_are(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    flags = {"lstrip": {"lstrip": True}, "rstrip": {"rstrip": True}, "word": {"single_word": True}, "raw": {}}
    for special in (True, False, True):
        extra = [AddedToken(f"<{name}{special}>", normalized=name == "raw", **kind) for name, kind in flags.items()]
        tokenizer.add_tokens([*extra, "  "], special_tokens=special)
    tokenizer.add_tokens([IMAGE])
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    leave_out(tokenizer, len(tokenizer) - 1)
    expected = Tokenizer.from_str(json.dumps(without_ids_from(described, len(tokenizer))))
    assert json.loads(tokenizer.backend_tokenizer.to_str()) == json.loads(expected.to_str())
    text = f"a <lstripTrue>  <rstripFalse> b<wordTrue>c <wordFalse> {IMAGE}<rawFalse>"
    assert tokenizer.encode(text) == expected.encode(text).ids


def bpe() -> Tokenizer:
    pieces = {piece: i for i, piece in enumerate(("<unk>", "a", "b", "ab", "aba", "abab"))}
    return Tokenizer(models.BPE(pieces, [("a", "b"), ("ab", "a"), ("ab", "ab")], unk_token="<unk>"))


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("a", -4.0), ("b", -4.0), ("ab", -5.0), ("aba", -5.0), ("abab", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("make", [bpe, unigram])
def test_entries_of_the_vocabulary_itself(make: Any, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>").save_pretrained(tmp_path)
    whole = load_tokenizer(tmp_path)
    assert whole.encode("abab") == [5]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 4}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abab") == [3, 3] and len(tokenizer) == 4
    assert tokenizer_digest(whole) == tokenizer_digest(tokenizer) and why_unequal(whole, tokenizer) is None


@pytest.mark.parametrize(
    ("constraint", "form"),
    [
        (Constraint.regex(r"[a-c]{3}"), "[a-c]{3}"),
        (Constraint.json({"type": "string", "maxLength": 4}), r'".*"'),
        (Constraint.choice([IMAGE]), IMAGE),
    ],
    ids=["regex", "schema", "spelled"],
)
def test_outputs_follow_grammars(llm: LLM, constraint: Constraint, form: str) -> None:
    params = SamplingParams(max_tokens=64, temperature=1.5, seed=4, structured_outputs=constraint)
    (output,) = llm.generate("a", params)
    said = output.outputs[0]
    assert said.finish_reason == "stop" and re.fullmatch(form, said.text) and max(said.token_ids) < VOCAB


def test_a_prompt_may_spell_them_and_not_name_them(llm: LLM, llama: Path) -> None:
    expected = load_tokenizer(llama).encode(TEXT)
    (output,) = llm.generate(TEXT, SamplingParams(max_tokens=2, bad_words=(IMAGE,)))
    assert output.prompt_token_ids == expected
    with pytest.raises(ParameterError, match=f"prompt: {VOCAB} is not allowed; expected token ids 0 to {VOCAB - 1}"):
        llm.generate([1, VOCAB])
    for field in ("allowed_token_ids", "bad_token_ids", "stop_token_ids", "logit_bias"):
        with pytest.raises(ParameterError, match=f"{field}: {VOCAB} is not allowed"):
            llm.generate("a", SamplingParams(**{field: {VOCAB: 1.0} if field == "logit_bias" else (VOCAB,)}))
