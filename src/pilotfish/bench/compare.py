"""The arithmetic of comparisons: medians, ratios pair by pair, and how much outputs repeat themselves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Quartiles and extremes of repeated measurements."""

    minimum: float
    lower: float
    median: float
    upper: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        lower, median, upper = quartiles(values)
        return cls(min(values), lower, median, upper, max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} – {self.upper:.2f})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25, 50 and 75 % by linear interpolation."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def pairwise_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratio of what was measured in the same round, round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def distinct_ngrams(sequences: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that had not occurred earlier in their own output, over all outputs.

    1 means that no output repeats itself. An output that loops has few, and loops are easy to draft.
    """
    total = distinct = 0
    for tokens in sequences:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return distinct / total if total else 1.0


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first unequal token, None for equal sequences."""
    if list(left) == list(right):
        return None
    unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))
