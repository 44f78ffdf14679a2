"""Constraints: how they are made and what is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from pilotfish.core.sampling.constraint import MAX_LENGTH, Constraint, words
from pilotfish.errors import ParameterError


def test_a_schema_is_taken_as_an_object_and_as_text() -> None:
    schema = {"type": "string", "enum": ["ä"]}
    assert Constraint.json(schema) == Constraint.json('{"type": "string", "enum": ["ä"]}')
    assert json.loads(Constraint.json(True).text) is True


def test_a_choice_is_a_grammar_of_literals() -> None:
    assert Constraint.choice(["yes", 'a "b"\n']).text == 'start: TEXT\nTEXT: "yes" | "a \\"b\\"\\n"'


@pytest.mark.parametrize("texts", [[], [""], ["a", ""]])
def test_an_empty_choice_is_refused(texts: list[str]) -> None:
    with pytest.raises(ParameterError, match=r"^structured_outputs: .* a choice of one or more texts"):
        Constraint.choice(texts)


@pytest.mark.parametrize("text", ["", "a" * (MAX_LENGTH + 1)])
def test_a_text_of_another_length_is_refused(text: str) -> None:
    for make in (Constraint.json, Constraint.regex, Constraint.grammar):
        with pytest.raises(ParameterError, match=f"^structured_outputs: '{len(text)} characters' is not allowed"):
            make(text)


def test_it_travels() -> None:
    constraint = Constraint("regex", "a+", after=[3, 4])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=Constraint) == constraint
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "lua", "text": "a"}, Constraint)


@pytest.mark.parametrize(("vocab_size", "count"), [(1, 1), (32, 1), (33, 2), (128256, 4008)])
def test_words_of_a_mask(vocab_size: int, count: int) -> None:
    assert words(vocab_size) == count
