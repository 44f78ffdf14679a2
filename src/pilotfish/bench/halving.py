"""Successive halving (Jamieson, Talwalkar, 2016): all candidates play a few rounds, the better half twice as many, and
so on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Candidate = TypeVar("Candidate", bound=Hashable)
#: Plays candidates in so many rounds, in turns; a score of each, more is better.
PlayRounds = Callable[[Sequence[Candidate], int], Mapping[Candidate, float]]


def rungs(candidates: int, first: int) -> list[tuple[int, int]]:
    """How many play, and how many rounds, until one of two is to be chosen; at least one rung."""
    steps = [(candidates, first)]
    while steps[-1][0] > 2:
        steps.append(((steps[-1][0] + 1) // 2, 2 * steps[-1][1]))
    return steps


def halve(candidates: Sequence[Candidate], first: int, play: PlayRounds[Candidate]) -> Candidate:
    """The one with the best score in the last rung. Of equal ones the first stays."""
    left = list(candidates)
    for count, rounds in rungs(len(left), first):
        left = left[:count]
        scores = play(left, rounds)
        left.sort(key=lambda one: -scores[one])
    return left[0]
