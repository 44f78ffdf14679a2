"""The suffix automaton against search through plain lists."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.workers import automaton
from pilotfish.workers.automaton import MAX_COUNT, Context, Match, SuffixAutomaton

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=6)


def read(sequences: list[list[int]]) -> SuffixAutomaton:
    found = SuffixAutomaton()
    for sequence in sequences:
        found.begin()
        found.extend(sequence)
    return found


def followers(sequences: list[list[int]], context: list[int]) -> Counter[int]:
    """What came after `context`, anywhere."""
    n = len(context)
    ends = [(s, end) for s in sequences for end in range(n, len(s)) if s[end - n : end] == context]
    return Counter(s[end] for s, end in ends)


def occurs(sequences: list[list[int]], string: list[int]) -> bool:
    n = len(string)
    return any(s[end - n : end] == string for s in sequences for end in range(n, len(s) + 1))


def longest_suffix(sequences: list[list[int]], tokens: list[int]) -> int:
    return max(n for n in range(len(tokens) + 1) if occurs(sequences, tokens[len(tokens) - n :]))


def assert_contexts(found: SuffixAutomaton, sequences: list[list[int]], tokens: list[int], match: Match) -> None:
    """`match` is of the last `match.length` tokens: its contexts are suffixes of them with their counts, longest first,
    and no suffix between two of them was followed by anything else."""
    given_contexts = {c.length: c.followers for c in found.contexts(match)}
    assert list(given_contexts) == sorted(given_contexts, reverse=True)
    counts: dict[int, int] = {}
    for n in range(match.length, 0, -1):
        expected = followers(sequences, tokens[len(tokens) - n :])
        counts = given_contexts.get(n, counts)
        assert counts == {token: min(times, MAX_COUNT) for token, times in expected.items()}


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), steps=st.lists(st.integers(1, 5), max_size=10))
def test_the_longest_suffix_seen_before_however_it_grew(tokens: list[int], steps: list[int]) -> None:
    found, length = SuffixAutomaton(), 0
    assert found.seen_before() == Match(0, 0)
    for step in (*steps, len(tokens)):
        found.extend(tokens[length : length + step])
        length = min(length + step, len(tokens))
        match = found.seen_before()
        assert match.length == longest_suffix([tokens[: length - 1]], tokens[:length])
        assert_contexts(found, [tokens[:length]], tokens[:length], match)


@given(sequences=SEQUENCES, tokens=TOKENS)
def test_matches_in_many_sequences(sequences: list[list[int]], tokens: list[int]) -> None:
    """No substring spans two of them, and counts are sums over all."""
    found = read(sequences)
    match = found.match(tokens)
    assert match.length == longest_suffix(sequences, tokens)
    assert_contexts(found, sequences, tokens, match)


@given(sequences=SEQUENCES, tokens=TOKENS, more=TOKENS)
def test_following_goes_on_after_matching(sequences: list[list[int]], tokens: list[int], more: list[int]) -> None:
    found = read(sequences)
    match = found.match(tokens)
    for token in more:
        match = found.follow(match, token)
    assert match == found.match(tokens + more)


@given(sequences=SEQUENCES)
def test_it_is_linear(sequences: list[list[int]]) -> None:
    found = read(sequences)
    assert found.num_tokens == sum(map(len, sequences))
    assert len(found._links) <= 2 * found.num_tokens + 1
    assert sum(map(len, found._transitions)) <= 3 * found.num_tokens


@pytest.mark.parametrize("period", [1, 2, 5])
def test_counts_stop_and_so_does_counting(period: int) -> None:
    """In text that repeats itself each token has as many suffixes seen before as there are tokens before it."""
    found = SuffixAutomaton()
    tokens = [i % period for i in range(600)]
    found.extend(tokens)
    counts = found._counts[1:]
    assert max(counts) == MAX_COUNT
    assert sum(counts) <= MAX_COUNT * (len(found._links) - 1)
    assert_contexts(found, [tokens], tokens, found.match(tokens[-3:]))


def test_contexts_that_anything_follows_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "MAX_FOLLOWERS", 2)
    found = read([[7, 1, 8], [7, 2, 8], [9, 7, 1], [9, 7, 3]])
    assert list(found.contexts(found.match([9, 7]))) == [Context(2, {1: 1, 3: 1})]
    assert list(found.contexts(found.match([7]))) == []
