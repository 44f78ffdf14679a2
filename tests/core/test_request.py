"""Requests end where they should, token by token. Nobody's next token waits, and prompts that are scored make no long
step."""

from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason, Request, RequestStats, check_cache_salt
from pilotfish.core.scheduling.step import RowBudget, RowCosts
from pilotfish.errors import ParameterError


def request(max_tokens: int = 4, stop_ids: frozenset[int] = frozenset(), room: int = 100) -> Request:
    return Request(0, [1, 2, 3], SamplingParams(max_tokens=max_tokens), 0, stop_ids, room)


NINE = frozenset({9})


@pytest.mark.parametrize(
    ("of", "given", "kept", "left", "reason"),
    [
        (request(stop_ids=NINE), [5, 9, 6], [5, 9], 2, FinishReason.STOP),
        (request(max_tokens=1, stop_ids=NINE), [9], [9], 0, FinishReason.STOP),  # at the limit
        (request(max_tokens=3), [5, 6], [5, 6], 1, None),
        (request(max_tokens=2), [5, 6, 7], [5, 6], 0, FinishReason.LENGTH),
        (request(max_tokens=50, room=2), [5, 6, 7], [5, 6], 0, FinishReason.LENGTH),  # of the context
    ],
)
def test_tokens_after_its_end_are_not_committed(
    of: Request, given: list[int], kept: list[int], left: int, reason: FinishReason | None
) -> None:
    assert of.extend(given) == of.output == kept
    assert (of.num_remaining, of.finish_reason) == (left, reason)


def test_tokens_after_the_one_that_completes_a_stop_string_are_not_committed() -> None:
    detector = Mock(side_effect=lambda token: token == 9)
    r = Request(0, [1, 2, 3], SamplingParams(max_tokens=2), 0, frozenset(), 100, stop_detector=detector)
    assert r.extend([5, 9, 6]) == r.output == [5, 9] and detector.call_args_list == [call(5), call(9)]
    assert r.finish_reason is FinishReason.STOP  # at the limit too


def test_stats_count_offers_and_acceptance_by_depth() -> None:
    stats = RequestStats()
    stats.count(3, 2, ["lm"])
    stats.count(3, 3, ["lm", "lm", "ngram"])
    stats.count(0, 0, [])
    assert (stats.verify_steps, stats.draft_tokens, stats.accepted_tokens) == (3, 6, 4)
    assert stats.offered_by_depth == [2, 2, 1]
    assert stats.accepted_by_depth == [2, 1, 1]
    assert stats.accepted_by_origin == {"lm": 3, "ngram": 1}


@pytest.mark.parametrize("salt", ["", "a" * 257, b"a", 1])
def test_salts_that_name_no_tenant(salt: object) -> None:
    check_cache_salt("é" * 256)
    with pytest.raises(ParameterError, match=r"cache_salt: .* 1 to 256 characters"):
        check_cache_salt(salt)  # type: ignore[arg-type]


def prompt_of(prompt: int, scored: bool = False, computed: int = 0, told: int = 0) -> Request:
    """Of a prompt of so many tokens, of which `computed` have KV and `told` rows have scored the next."""
    made = Request(0, [1] * prompt, SamplingParams(prompt_logprobs=0 if scored else None), 0, frozenset(), 100)
    made.num_computed, made.num_scored = computed, told
    return made


def taken(requests: list[Request], rows: int, cost: float) -> list[int]:
    budget = RowBudget(rows, len(requests), RowCosts(cost))
    return [budget.take(one) for one in requests]


def test_one_row_for_each_then_in_order_of_arrival() -> None:
    assert taken([prompt_of(9), prompt_of(1), prompt_of(9), prompt_of(9)], 16, 5.0) == [9, 1, 5, 1]


def test_rows_that_score_count_for_what_they_cost() -> None:
    decoding = prompt_of(5, computed=4)
    assert taken([decoding, prompt_of(100, scored=True)], 16, 5.0) == [1, 3]
    assert taken([prompt_of(100, scored=True), decoding], 16, 2.5) == [6, 1]
    assert taken([prompt_of(4, scored=True), prompt_of(9)], 16, 5.0) == [3, 1]
    assert taken([prompt_of(2, scored=True), prompt_of(9)], 16, 5.0) == [2, 9]  # the last row scores nothing


def test_of_those_that_score_only_the_first_is_sure_of_a_row() -> None:
    decoding, scored = prompt_of(5, computed=4), prompt_of(100, scored=True)
    assert taken([decoding] * 3 + [scored] * 3 + [decoding], 8, 50.0) == [1, 1, 1, 1, 0, 0, 1]
    assert taken([prompt_of(100), scored, scored], 8, 50.0) == [6, 1, 0]


REQUESTS = st.builds(
    lambda prompt, scored, computed, told: prompt_of(prompt, scored, min(computed, prompt - 1), told),
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
