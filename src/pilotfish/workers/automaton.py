"""A suffix automaton over token sequences: which tokens followed a context, and how often (Blumer et al. 1985)."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

ROOT = 0
NONE = -1
MAX_COUNT = 64  # occurrences are counted up to here, so a state is counted up at most so often
MAX_FOLLOWERS = 128  # a context that more tokens followed is passed over: it predicts little and would cost much


class Match(NamedTuple):
    """The last `length` tokens of some sequence, as a state of an automaton that knows them."""

    state: int
    length: int


class Context(NamedTuple):
    """The tokens that followed a string of `length` tokens: token -> times, at most MAX_COUNT."""

    length: int
    followers: dict[int, int]


class SuffixAutomaton:
    """Every substring of the sequences it has read, and how often each occurred.

    A state stands for the substrings that end at the same places; its link leads to the longest suffix that also ends
    elsewhere. n tokens make at most 2 n states and 3 n transitions, about 450 bytes a token. Reading a token takes
    amortized constant time: counting up the links stops at a state that has reached MAX_COUNT, as all states behind it
    have. `begin` starts another sequence; no substring spans two."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._transitions: list[dict[int, int]] = [{}]
        self._links = [NONE]
        self._lengths = [0]  # of a state's longest substring
        self._counts = [0]  # occurrences, at most MAX_COUNT; the root's are not counted
        self._last = ROOT  # the sequence so far

    def begin(self) -> None:
        self._last = ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._last = self._append(token)
            self._count(self._last)
        self.num_tokens += len(tokens)

    def _append(self, token: int) -> int:
        known = self._transitions[self._last].get(token)
        if known is not None:  # an earlier sequence began like this one
            return self._split(self._last, token, known)
        state = self._add(self._lengths[self._last] + 1, ROOT, 0, {})
        node = self._last
        while node != NONE and token not in self._transitions[node]:
            self._transitions[node][token] = state
            node = self._links[node]
        if node != NONE:
            self._links[state] = self._split(node, token, self._transitions[node][token])
        return state

    def _split(self, node: int, token: int, child: int) -> int:
        """`child`, or a clone of it where it stands for longer strings too."""
        length = self._lengths[node] + 1
        if self._lengths[child] == length:
            return child
        clone = self._add(length, self._links[child], self._counts[child], self._transitions[child].copy())
        self._links[child] = clone
        while node != NONE and self._transitions[node].get(token) == child:
            self._transitions[node][token] = clone
            node = self._links[node]
        return clone

    def _add(self, length: int, link: int, count: int, transitions: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._transitions.append(transitions)
        return len(self._links) - 1

    def _count(self, state: int) -> None:
        while state != ROOT and self._counts[state] < MAX_COUNT:
            self._counts[state] += 1
            state = self._links[state]

    def seen_before(self) -> Match:
        """The longest suffix of the sequence that occurred before its end."""
        state = max(self._links[self._last], ROOT)
        return Match(state, self._lengths[state])

    def match(self, tokens: Sequence[int]) -> Match:
        return reduce(self.follow, tokens, Match(ROOT, 0))

    def follow(self, match: Match, token: int) -> Match:
        """The longest suffix of `match` with `token` at its end that occurs."""
        state, length = match
        while token not in self._transitions[state]:
            if state == ROOT:
                return Match(ROOT, 0)
            state = self._links[state]
            length = self._lengths[state]
        return Match(self._transitions[state][token], length + 1)

    def contexts(self, match: Match) -> Iterator[Context]:
        """Of `match` and of each suffix that also occurs elsewhere, longest first, up to MAX_FOLLOWERS each."""
        state, length = match
        while state != ROOT:
            followers = self._transitions[state]
            if 0 < len(followers) <= MAX_FOLLOWERS:
                yield Context(length, {token: self._counts[child] for token, child in followers.items()})
            state = self._links[state]
            length = self._lengths[state]
