"""Requests end where they should, token by token."""

from __future__ import annotations

import pytest

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason, Request, RequestStats, check_cache_salt
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
