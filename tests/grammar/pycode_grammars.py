"""The bundled pair's tokenizer and its grammars, made when a test first asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from pilotfish.engine.pairs import resolve_pair
from pilotfish.grammar.compile import Grammars

VOCAB, EOS = 4100, 0  # of a model whose vocabulary is padded


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_pair("pycode").target)


@cache
def grammars() -> Grammars:
    return new_grammars()


def new_grammars(eos_ids: Sequence[int] = (EOS,)) -> Grammars:
    return Grammars(tokenizer(), VOCAB, eos_ids)


def ids(text: str) -> list[int]:
    tokens: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return tokens
