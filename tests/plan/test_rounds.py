"""Rounds of speculation by hand, and laws that hold whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.plan.rounds import (
    chain_speedup,
    levels_hidden,
    outcome_cache_round,
    rerooted_round,
    speculate_seconds,
    sync_round,
    tokens_of_chain,
)

shares = st.floats(0, 1)
seconds = st.floats(1e-6, 1.0)


def test_by_hand() -> None:
    assert tokens_of_chain(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert chain_speedup(0.5, 3, 0.1) == pytest.approx(1.875 / 1.3)
    assert sync_round(10e-3, 2e-3, 5, 1e-3, 0.1e-3) == pytest.approx(21.1e-3)
    assert speculate_seconds(2e-3, 3e-3, 4, 0.5e-3) == pytest.approx(16.5e-3)
    assert outcome_cache_round(10e-3, 16e-3, 5e-3, 0.8, 1e-3) == pytest.approx(18e-3)
    assert levels_hidden(10e-3, 3e-3) == 3 and levels_hidden(10e-3, 3e-3, 2e-3) == 2 and levels_hidden(1e-3, 3e-3) == 1
    assert rerooted_round(10e-3, 3e-3, 3, 0.5, 1e-3) == pytest.approx(12.5e-3)


@given(seconds, seconds, st.integers(1, 16), shares, seconds)
def test_drafting_beside_the_target_is_never_slower_than_in_turn(
    verify: float, level: float, guesses: int, hit: float, fixed: float
) -> None:
    in_turn = sync_round(verify, level, guesses, fixed)
    assert outcome_cache_round(verify, guesses * level, 0.0, hit, fixed) <= in_turn
    assert rerooted_round(verify, level, guesses, 1.0, fixed) <= in_turn


@given(seconds, seconds)
def test_hidden_levels_end_with_the_target_or_are_one(verify: float, level: float) -> None:
    depth = levels_hidden(verify, level)
    assert depth == 1 or depth * level <= verify * (1 + 1e-9)
