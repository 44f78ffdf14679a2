"""Tokens as text and bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pilotfish.server.answers.logprobs import token_text


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Words that begin with a lower one eighth block, and single bytes."""
    vocab = {"<unk>": 0, "▁the": 1, "x": 2, "<0xE2>": 3, "<0x41>": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_words_keep_their_space(sentencepiece: Any) -> None:
    names = token_text(sentencepiece)
    assert [names(token)[0] for token in (1, 2, 3, 4)] == [" the", "x", "bytes:\\xe2", "A"]
    assert names(3)[1] == [0xE2]


def test_bytes_add_up_to_the_text(tokenizer: Any) -> None:
    text = "def f(a):\n\treturn 'naïve ☃ 😀'"
    names = token_text(tokenizer)
    assert bytes(byte for token in tokenizer.encode(text) for byte in names(token)[1]).decode() == text


def test_special_tokens_are_themselves(tokenizer: Any) -> None:
    assert token_text(tokenizer)(tokenizer.eos_token_id) == ("<eos>", list(b"<eos>"))


def test_ids_beyond_the_vocabulary_are_empty(tokenizer: Any) -> None:
    """Some models have more logits than their tokenizer has tokens."""
    assert token_text(tokenizer)(100_000) == ("", [])
