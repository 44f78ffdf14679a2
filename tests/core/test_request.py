"""Requests end where they should, token by token."""

from __future__ import annotations

import pytest

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason, Request, RequestStats, check_cache_salt
from pilotfish.errors import ParameterError


def request(max_tokens: int = 4, stop_ids: frozenset[int] = frozenset(), room: int = 100) -> Request:
    return Request(0, [1, 2, 3], SamplingParams(max_tokens=max_tokens), 0, stop_ids, room)


def test_tokens_after_a_stop_id_are_not_committed() -> None:
    r = request(stop_ids=frozenset({9}))
    assert r.extend([5, 9, 6]) == [5, 9]
    assert r.output == [5, 9]
    assert r.finish_reason is FinishReason.STOP


def test_tokens_after_the_one_that_completes_a_stop_string_are_not_committed() -> None:
    class Detector:
        def __init__(self) -> None:
            self.given: list[int] = []

        def add(self, token: int) -> bool:
            self.given.append(token)
            return token == 9

    detector = Detector()
    r = Request(0, [1, 2, 3], SamplingParams(max_tokens=2), 0, frozenset(), 100, stop_detector=detector)
    assert r.extend([5, 9, 6]) == r.output == detector.given == [5, 9]
    assert r.finish_reason is FinishReason.STOP  # at the limit too


def test_tokens_beyond_the_limit_are_not_committed() -> None:
    r = request(max_tokens=2)
    assert r.extend([5]) == [5]
    assert r.finish_reason is None
    assert r.num_remaining == 1
    assert r.extend([6, 7]) == [6]
    assert r.finish_reason is FinishReason.LENGTH


def test_a_stop_id_at_the_limit_is_a_stop() -> None:
    r = request(max_tokens=1, stop_ids=frozenset({9}))
    r.extend([9])
    assert r.finish_reason is FinishReason.STOP


def test_the_context_ends_it_too() -> None:
    r = request(max_tokens=50, room=2)
    assert r.extend([5, 6, 7]) == [5, 6]
    assert r.finish_reason is FinishReason.LENGTH


def test_pending_tokens_are_those_without_slots() -> None:
    r = request()
    assert r.num_pending == 3
    r.add_slots([7, 8])
    assert r.num_pending == 1
    r.extend([5])
    r.add_slots([9])
    assert (r.num_pending, r.slots[:3].tolist()) == (1, [7, 8, 9])


def test_stats_count_offers_and_acceptance_by_depth() -> None:
    stats = RequestStats()
    stats.count(3, 2, ["lm"])
    stats.count(3, 3, ["lm", "lm", "ngram"])
    stats.count(0, 0, [])
    assert (stats.verify_steps, stats.draft_tokens, stats.accepted_tokens) == (3, 6, 4)
    assert stats.offered_by_depth == [2, 2, 1]
    assert stats.accepted_by_depth == [2, 1, 1]
    assert stats.accepted_by_origin == {"lm": 3, "ngram": 1}


@pytest.mark.parametrize("salt", [None, "a", "é" * 256])
def test_salts_that_name_a_tenant(salt: str | None) -> None:
    check_cache_salt(salt)


@pytest.mark.parametrize("salt", ["", "a" * 257, b"a", 1])
def test_salts_that_do_not(salt: object) -> None:
    with pytest.raises(ParameterError, match=r"cache_salt: .* 1 to 256 characters"):
        check_cache_salt(salt)  # type: ignore[arg-type]
