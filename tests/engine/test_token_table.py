"""What tokens stand for, of byte-level BPE and of SentencePiece's kind, and texts that may be parts of others."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from support import CORPUS, SNIPPETS, VOCAB, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pilotfish.core.drafting.vocabulary_map import VocabularyMap
from pilotfish.engine.drafts.draft_pool import mapped_vocabularies
from pilotfish.engine.token_table import token_table
from pilotfish.errors import ParameterError
from pilotfish.model.loading.metadata import load_tokenizer

TEXTS = (*SNIPPETS, "naïve – Größe ☃ 😀 日本語", " two  spaces", "<s> is no token here </s>", "\r\n\ttabs\n")


def sentencepiece(size: int = 600, **options: Any) -> PreTrainedTokenizerFast:
    """As that of Llama 2: a space before each text, bytes that have tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, max_token_length=8)
    words = [word for text in CORPUS for word in text.replace(" ", "▁").split("▁")]
    tokenizer.train_from_iterator([f"▁{word}" for word in words], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are no special tokens
    made = Tokenizer.from_str(json.dumps(described))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **options)


def metaspace(scheme: str = "always") -> PreTrainedTokenizerFast:
    """As a Unigram model of SentencePiece's."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [(piece, -float(len(piece))) for piece in ("▁", "a", "b", "▁a", "ab", "▁ab", "e", "r", "t", "▁ret")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme=scheme)])
    tokenizer.add_special_tokens(["<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level(directory: Path, vocab_size: int = VOCAB) -> Any:
    write_tokenizer(directory, vocab_size)
    return load_tokenizer(directory)


@pytest.fixture(params=["byte level", "sentencepiece", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    make = {"byte level": lambda: byte_level(tmp_path), "sentencepiece": sentencepiece, "metaspace": metaspace}
    return make[request.param]()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_the_bytes_of_its_tokens(tokenizer: Any, text: str) -> None:
    """Without a space before it, and of parts as of the whole."""
    table = token_table(tokenizer, len(tokenizer))
    for start in range(0, len(text), 3):
        spoken = b"".join(table.plain.get(token, b"?") for token in table.encode(text[start:]))
        assert spoken == text[start:].encode()


@pytest.mark.parametrize("make", [byte_level, lambda _: sentencepiece()], ids=["byte level", "sentencepiece"])
def test_tokens_are_what_llguidance_reads(make: Any, tmp_path: Path) -> None:
    """But for the byte with which it marks special tokens."""
    tokenizer = make(tmp_path)
    table = token_table(tokenizer, len(tokenizer))
    other = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=0)
    assert len(table.plain) > 250
    for token, data in table.plain.items():
        assert other.decode_bytes([token]) == data.replace(b"\xff", b"")


def test_special_tokens_are_named_and_stand_for_no_bytes() -> None:
    table = token_table(sentencepiece(), 600)
    assert table.added == {0: "<unk>", 1: "<s>", 2: "</s>"} and not table.added.keys() & table.plain.keys()
    assert table.lead == (1,) and table.roles == {"bos": 1, "eos": 2}
    assert 1 not in table.encode("<s>")


def test_added_tokens_that_are_not_special_are_both(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    table = token_table(tokenizer, len(tokenizer))
    assert table.added[VOCAB] == "<call>" and table.plain[VOCAB] == b"<call>"
    assert VOCAB in table.encode("a <call>")


def test_a_byte_with_a_token_of_its_own_is_written_as_text_where_it_can_be() -> None:
    """Byte-level BPE has one token for `a`, SentencePiece's two."""
    table = token_table(sentencepiece(), 600)
    written = table.spellings()[b"a"]
    assert table.plain[written] == b"a" and written in table.encode("ba a a")
    assert sum(data == b"a" for data in table.plain.values()) == 2


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_one_kind_are_read_by_the_other(text: str, tmp_path: Path) -> None:
    tables = token_table(byte_level(tmp_path), VOCAB), token_table(sentencepiece(), 600)
    for target, draft in (tables, tables[::-1]):
        one = VocabularyMap(target, draft)
        assert len(one.shared.ids) > 100
        read = [piece for token in target.encode(text) for piece in one.pieces(token)]
        assert b"".join(draft.plain[token] for token in read) == text.encode()
        assert b"".join(draft.plain[token] for token in one.written(text.encode())) == text.encode()


def test_tokenizers_of_words_are_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "words")
    draft = byte_level(tmp_path)
    with pytest.raises(ParameterError, match=r"target_tokenizer: .*words cannot be mapped: its tokens are neither"):
        mapped_vocabularies([tmp_path / "words"], draft, VOCAB, ExitStack())


def test_the_drafts_own_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="tokenizers other than the draft's own"):
        mapped_vocabularies([tmp_path], byte_level(tmp_path), VOCAB, ExitStack())
