"""Medians, ratios, distinct n-grams, first differences."""

import pytest

from pilotfish.bench.compare import Spread, distinct_ngrams, first_difference, pairwise_ratios, quartiles


def test_spread_of_known_values() -> None:
    assert Spread.of([5, 1, 4, 2, 3]) == Spread(1, 2, 3, 4, 5, 5)
    assert Spread.of([1, 2, 3, 4]).median == 2.5
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7, 1)
    assert quartiles([0, 10]) == (2.5, 5, 7.5)


def test_ratios_pair_what_belongs_to_one_round() -> None:
    """The second round ran on a machine of half the speed: each round's ratio is 2 all the same."""
    assert pairwise_ratios([20, 10], [10, 5]) == [2, 2]
    with pytest.raises(ValueError, match="shorter"):
        pairwise_ratios([1, 2], [1])


@pytest.mark.parametrize(
    ("sequences", "share"),
    [
        ([[1, 2, 3, 4, 5]], 1.0),
        ([[1, 1, 1, 1, 1, 1]], 1 / 3),
        ([[1, 2, 1, 2, 1, 2, 1]], 1 / 2),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 1.0),  # outputs that equal each other do not repeat themselves
        ([[1, 1, 1, 1, 1], [1, 2, 3, 4, 5]], 3 / 4),
        ([[1, 2, 3]], 1.0),
        ([], 1.0),
    ],
)
def test_distinct_4grams(sequences: list[list[int]], share: float) -> None:
    assert distinct_ngrams(sequences) == share


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0
