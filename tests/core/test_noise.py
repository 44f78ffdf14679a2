"""The noise is a protocol: its numbers are pinned, here and in docs/noise-vectors.md."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sizes import sized

from pilotfish.core.sampling.noise import SEED_LIMIT, gumbel, gumbel_of, philox, sample_seed

VECTORS = Path(__file__).parents[2] / "docs" / "noise-vectors.md"
SEEDS = st.integers(0, SEED_LIMIT - 1)
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85

# Random123's kat_vectors, philox 4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(M0 * c0, 1 << 32)
        high1, low1 = divmod(M1 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + W0) % (1 << 32), (k1 + W1) % (1 << 32)
    return [c0, c1, c2, c3]


def tables() -> list[list[list[str]]]:
    """The cells of each table of the page, without its two head rows."""
    found: list[list[list[str]]] = []
    for section in VECTORS.read_text().split("\n## ")[1:]:
        rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
        found.append([[cell.strip() for cell in row] for row in rows[2:]])
    return found


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    key0, key1 = words_of(key)
    c0, c1, c2, c3 = words_of(counter)
    assert list(philox((key0, key1), (c0, c1, c2, c3))) == words_of(result)
    arrays = [np.array([word], np.uint64) for word in (c0, c1, c2, c3)]
    assert [int(word[0]) for word in philox((key0, key1), (*arrays,))] == words_of(result)  # type: ignore[arg-type]
    assert plain_philox(words_of(counter), words_of(key)) == words_of(result)


def test_the_documented_noise_is_the_noise() -> None:
    noise, _ = tables()
    assert len(noise) >= 10
    for seed, position, token, g in noise:
        assert len(g.split(".")[1]) == 12
        assert gumbel(int(seed), int(position), int(token) + 1)[int(token)] == pytest.approx(float(g), abs=1e-12)


def test_the_documented_seeds_are_the_seeds() -> None:
    _, seeds = tables()
    for seed, index, derived in seeds:
        assert sample_seed(int(seed), int(index)) == int(derived)


@given(seed=SEEDS, position=st.integers(0, (1 << 40)), token=st.integers(0, 300_000))
def test_noise_is_what_its_definition_says_of_one_token_as_of_all(seed: int, position: int, token: int) -> None:
    counter = [position & 0xFFFFFFFF, position >> 32, token >> 2, 0]
    word = plain_philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[token & 3]
    expected = -math.log(-math.log((word + 0.5) / 2**32))
    of_all = gumbel(seed, position, token + 1)[token]
    assert of_all == pytest.approx(expected, abs=1e-12)
    assert gumbel_of(seed, position, token) == pytest.approx(of_all, abs=1e-12)


@given(seed=SEEDS, position=st.integers(0, 1 << 20), size=st.integers(1, 50), more=st.integers(0, 9))
def test_a_larger_vocabulary_changes_no_token(seed: int, position: int, size: int, more: int) -> None:
    assert (gumbel(seed, position, size) == gumbel(seed, position, size + more)[:size]).all()


def test_noise_is_bounded() -> None:
    """A token that is further below the best can never win."""
    extremes = -np.log(-np.log((np.array([0, 2**32 - 1]) + 0.5) / 2.0**32))
    assert -3.2 < extremes.min() < -3.1
    assert 22.8 < extremes.max() < 22.9
    values = gumbel(3, 1, 200_000)
    assert values.min() > -3.2 and values.max() < 22.9


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_gumbel_along_every_axis(axis: str) -> None:
    if axis == "token":
        values = gumbel(5, 9, 20_000)
    else:
        places = [(5, i) if axis == "position" else (i, 9) for i in range(sized(1_500, 5_000))]
        values = np.array([gumbel(*place, 4) for place in places]).ravel()
    assert stats.kstest(values, "gumbel_r").pvalue > 0.001


def test_neighbours_are_independent() -> None:
    table = np.array([gumbel(7, position, 2_000) for position in range(3)])
    lags = [(table[0], table[1]), (table[1], table[2]), (table[0][:-1], table[0][1:])]
    assert all(abs(stats.pearsonr(a, b).statistic) < 0.08 for a, b in lags)


@given(seed=SEEDS)
def test_the_first_sample_keeps_the_seed_and_further_ones_have_distinct_doubles(seed: int) -> None:
    assert sample_seed(seed, 0) == seed
    seeds = [sample_seed(seed, index) for index in range(1, 128)]
    assert len({seed, *seeds}) == 128
    assert all(0 <= s < 1 << 53 and int(float(s)) == s for s in seeds)
