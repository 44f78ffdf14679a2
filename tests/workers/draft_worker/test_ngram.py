"""Prompt lookup: the longest suffix seen before, and what followed it the last time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support import limits, proposed

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.workers.ngram import NgramDrafter, NgramIndex


def naive(tokens: list[int], max_n: int) -> tuple[int, int] | None:
    """The definition, by search."""
    for n in range(min(max_n, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return n, end
    return None


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), steps=st.lists(st.integers(1, 5), max_size=10))
def test_lookup_is_the_search(tokens: list[int], steps: list[int]) -> None:
    """However the sequence grew."""
    index, length = NgramIndex(4), 1
    for step in (0, *steps):
        length = min(length + step, len(tokens))
        index.update(tokens[:length])
        assert index.lookup(tokens[:length]) == naive(tokens[:length], 4)


def request(tokens: list[int]) -> Request:
    return Request(0, tokens, SamplingParams(), 0, frozenset(), 100)


def test_it_proposes_what_followed_as_a_chain() -> None:
    (tree,) = proposed(NgramDrafter(), [request([1, 2, 3, 4, 5, 6, 1, 2])], limits(3))
    assert tree.tokens.tolist() == [3, 4, 5]
    assert tree.depths.tolist() == [1, 2, 3]


def test_closing_forgets() -> None:
    drafter = NgramDrafter()
    first = request([1, 2, 1])
    drafter.propose([first], limits(3))
    drafter.close(first)
    drafter.close(first)
    (tree,) = proposed(drafter, [request([3, 1])], limits(3))
    assert len(tree) == 0
