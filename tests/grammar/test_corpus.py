"""Grammars against independent judges: jsonschema-rs with formats, regular expressions of another library, parsers of
Python and JSON. Random legal tokens lead to valid texts."""

import random
from collections import Counter

import numpy as np
import pytest
from constraint_checks import is_valid, may_become_valid
from grammar_corpus import Entry, Grammar, Regex, Schema, entries
from pycode_grammars import EOS, VOCAB, accepts, grammars, tokenizer
from sizes import sized

from pilotfish.core.sampling.constraint import words
from pilotfish.grammar.schema import FORMATS, MANY, NAMED, ONE, PLAIN
from pilotfish.grammar.state import MatcherState

ENTRIES = list(entries())
MAX_TOKENS = 512
everywhere = pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])


def test_the_corpus_is_broad() -> None:
    kinds = Counter(type(entry.source) for entry in ENTRIES)
    assert kinds[Schema] >= 100 and kinds[Regex] >= 15 and kinds[Grammar] >= 12
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    keywords = " ".join(entry.constraint.text for entry in ENTRIES if isinstance(entry.source, Schema))
    assert all(f'"{keyword}"' in keywords for keyword in (ONE | MANY | NAMED | PLAIN) - {"additionalItems"})
    assert all(f'"format": "{name}"' in keywords for name in FORMATS)


@everywhere
def test_a_grammar_and_the_judge_agree_on_instances(entry: Entry) -> None:
    assert entry.valid and entry.invalid
    for text in entry.valid:
        assert is_valid(entry, text) and accepts(entry.constraint, text), text
        assert all(may_become_valid(entry, text[:end]) for end in range(1, len(text), sized(4, 1)))
    for text in entry.invalid:
        assert not accepts(entry.constraint, text), text
        only_form = isinstance(entry.source, Grammar) and (entry.source.reader or "%json" in entry.source.grammar)
        assert only_form or not is_valid(entry, text), text


def random_output(entry: Entry, seed: int) -> tuple[str, bool]:
    """A text of legal tokens, half of the time one that is short; and whether it is whole."""
    state = MatcherState(grammars().compile(entry.constraint).deep_copy())
    rng, bits, tokens = random.Random(seed), np.zeros(words(VOCAB), np.int32), list[int]()
    while len(tokens) < MAX_TOKENS and not state.ended:
        state.mask([], bits)
        legal = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        assert legal.size, tokenizer().decode(tokens)
        short = legal[legal < 300]
        token = int(rng.choice(short if short.size and rng.random() < 0.5 else legal))
        if token == EOS:
            return tokenizer().decode(tokens), True
        tokens.append(token)
        state.extend(token)
    assert state.problem is None
    return tokenizer().decode(tokens, skip_special_tokens=True), state.ended


@everywhere
def test_random_legal_tokens_lead_to_valid_texts(entry: Entry) -> None:
    for seed in range(sized(2, 8)):
        text, whole = random_output(entry, seed)
        if whole:
            assert is_valid(entry, text), text
        else:
            assert may_become_valid(entry, text.rstrip("\ufffd")), text
