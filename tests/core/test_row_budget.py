"""Rows of a step by what they cost: nobody's next token waits, and prompts that are scored make no long step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.step import RowBudget, RowCosts


def request(prompt: int, scored: bool = False, computed: int = 0, told: int = 0) -> Request:
    """Of a prompt of so many tokens, of which `computed` have KV and `told` rows have scored the next."""
    made = Request(0, [1] * prompt, SamplingParams(prompt_logprobs=0 if scored else None), 0, frozenset(), 100)
    made.num_computed, made.num_scored = computed, told
    return made


def taken(requests: list[Request], rows: int, cost: float) -> list[int]:
    budget = RowBudget(rows, len(requests), RowCosts(cost))
    return [budget.take(one) for one in requests]


def test_one_row_for_each_then_in_order_of_arrival() -> None:
    assert taken([request(9), request(1), request(9), request(9)], 16, 5.0) == [9, 1, 5, 1]


def test_rows_that_score_count_for_what_they_cost() -> None:
    decoding = request(5, computed=4)
    assert taken([decoding, request(100, scored=True)], 16, 5.0) == [1, 3]
    assert taken([request(100, scored=True), decoding], 16, 2.5) == [6, 1]
    assert taken([request(4, scored=True), request(9)], 16, 5.0) == [3, 1]
    assert taken([request(2, scored=True), request(9)], 16, 5.0) == [2, 9]  # the last row scores nothing


def test_of_those_that_score_only_the_first_is_sure_of_a_row() -> None:
    decoding, scored = request(5, computed=4), request(100, scored=True)
    assert taken([decoding] * 3 + [scored] * 3 + [decoding], 8, 50.0) == [1, 1, 1, 1, 0, 0, 1]
    assert taken([request(100), scored, scored], 8, 50.0) == [6, 1, 0]


REQUESTS = st.builds(
    lambda prompt, scored, computed, told: request(prompt, scored, min(computed, prompt - 1), told),
    prompt=st.integers(1, 60),
    scored=st.booleans(),
    computed=st.integers(0, 60),
    told=st.integers(0, 60),
)


@given(st.lists(REQUESTS, min_size=1, max_size=8), st.integers(8, 40), st.floats(1, 30))
def test_a_step_is_no_longer_than_one_of_plain_rows(requests: list[Request], rows: int, cost: float) -> None:
    counts, costs = taken(requests, rows, cost), RowCosts(cost)
    pairs = list(zip(requests, counts, strict=True))
    scoring = [len(one.to_score(count)) for one, count in pairs]
    assert sum(counts) <= rows
    assert sum(costs.of(one, count) for one, count in pairs) <= rows + 1e-9 or sum(scoring) == 1
    assert all(count >= 1 for one, count in pairs if not one.to_score(1))
    assert any(scoring) or not any(one.to_score(1) for one in requests)
