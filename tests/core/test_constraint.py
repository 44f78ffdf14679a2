"""Constraints: how they are made, what is refused, and trees below an output that follows a grammar."""

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import paths_of

from pilotfish.core.sampling import constraint as constraints
from pilotfish.core.trees.tree import GRAMMAR, LM, ROOT, Guesses
from pilotfish.errors import ParameterError


def test_a_schema_is_taken_as_an_object_and_as_text() -> None:
    schema = {"type": "string", "enum": ["ä"]}
    assert constraints.Constraint.json(schema) == constraints.Constraint.json('{"type": "string", "enum": ["ä"]}')
    assert json.loads(constraints.Constraint.json(True).text) is True


def test_a_choice_is_a_grammar_of_literals() -> None:
    assert constraints.Constraint.choice(["yes", 'a "b"\n']).text == 'start: TEXT\nTEXT: "yes" | "a \\"b\\"\\n"'


@pytest.mark.parametrize("texts", [[], [""], ["a", ""]])
def test_an_empty_choice_is_refused(texts: list[str]) -> None:
    with pytest.raises(ParameterError, match=r"^structured_outputs: .* a choice of one or more texts"):
        constraints.Constraint.choice(texts)


@pytest.mark.parametrize("text", ["", "a" * (constraints.MAX_LENGTH + 1)])
def test_a_text_of_another_length_is_refused(text: str) -> None:
    for make in (constraints.Constraint.json, constraints.Constraint.regex, constraints.Constraint.grammar):
        with pytest.raises(ParameterError, match=f"^structured_outputs: '{len(text)} characters' is not allowed"):
            make(text)


def test_it_travels() -> None:
    constraint = constraints.Constraint("regex", "a+", after=[3, 4])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=constraints.Constraint) == constraint
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "lua", "text": "a"}, constraints.Constraint)


# -- trees


class Sentences:
    """A GrammarState: the output is one of some sentences, of tokens below 64."""

    def __init__(self, *sentences: Sequence[int]) -> None:
        self.sentences = [tuple(sentence) for sentence in sentences]
        self.output: tuple[int, ...] = ()
        self.problem: str | None = None

    def extend(self, token: int) -> None:
        self.output += (token,)

    @property
    def ended(self) -> bool:
        return self.next([]) == set()

    def next(self, path: Sequence[int]) -> set[int]:
        before = (*self.output, *path)
        return {s[len(before)] for s in self.sentences if s[: len(before)] == before and len(s) > len(before)}

    def allows(self, path: Sequence[int]) -> bool:
        return path[-1] in self.next(path[:-1])

    def forced(self, path: Sequence[int]) -> list[int]:
        forced = list[int]()
        while len(choices := self.next([*path, *forced])) == 1:
            forced += choices
        return forced

    def mask(self, path: Sequence[int], bits: constraints.Bits) -> None:
        bits[:] = 0
        for token in self.next(path):
            bits[token // 32] |= np.array(1 << token % 32, np.uint32).view(np.int32)


def test_a_guess_of_what_is_forced_keeps_its_score_and_name() -> None:
    kept = constraints.constrained(Guesses.chain([1], [-2.0], LM), Sentences([1, 2]), 16)
    assert (kept.tokens, kept.origins) == ([1, 2], [LM, GRAMMAR])
    assert kept.scores == pytest.approx([-2.0, -2.0 + constraints.FORCED])


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.floats(-5, 0)), max_size=10),
    st.integers(0, 12),
)
def test_every_node_is_legal_and_the_best_stay(
    sentences: list[list[int]], nodes: list[tuple[int, int, float]], most: int
) -> None:
    tree, state = Guesses(), Sentences(*sentences)
    for parent, token, score in nodes:
        tree.add(parent - 1 if parent - 1 < len(tree) else ROOT, token, score, LM)
    legal = {path for path in set(paths_of(tree.tree())) if all(state.allows(path[: i + 1]) for i in range(len(path)))}
    whole = constraints.constrained(tree, state, 1000)
    assert legal <= set(paths_of(whole.tree()))
    assert all(state.allows(path) for path in set(paths_of(whole.tree())))
    forced = {(*p, *state.forced(p)[: i + 1]) for p in [(), *legal] for i in range(len(state.forced(p)))}
    assert set(paths_of(whole.tree())) == legal | forced
    kept = constraints.constrained(tree, state, most)
    assert len(kept) == min(most, len(whole))
    assert sorted(kept.scores) == sorted(sorted(whole.scores)[len(whole) - len(kept) :])


def test_masks_are_in_the_order_of_their_paths() -> None:
    one, other = Sentences([1, 2], [1, 40]), Sentences([63])
    asked = constraints.masks_when_asked(
        [constraints.MaskedPaths(one, [[], [1]]), constraints.MaskedPaths(other, [[]])], 64
    )
    got = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in asked()]
    assert got == [[1], [2, 40], [63]]
    assert asked().shape == (3, constraints.words(64))


def test_a_grammar_that_comes_late_catches_up() -> None:
    states: list[Sentences | None] = [None, None, Sentences([1, 2, 3, 4])]
    followed = constraints.FollowedGrammar(lambda: states.pop(0), [1])
    assert followed.state() is None
    followed.extend([2])
    assert followed.state() is None
    state = followed.state()
    assert isinstance(state, Sentences)
    assert state.output == (1, 2)
    followed.extend([3])
    assert followed.state() is state
    assert state.output == (1, 2, 3)
    state.problem = "a limit"
    assert followed.state() is None
