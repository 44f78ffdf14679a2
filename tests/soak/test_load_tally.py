"""The tally of the soak's loads: what it counts as whole, equal and flat."""

from __future__ import annotations

from typing import Any

import pytest
from server_load import Asked, Known, Output, Tally, agrees, memory_of

from pilotfish.cli.bench.report import MEBIBYTE
from pilotfish.cli.bench.serving.client import Answer, Event


def answered(*chunks: dict[str, Any], ended: bool = True, status: int = 200, closed: float = 9.0) -> Answer:
    """A stream of a chunk a second."""
    answer = Answer((), 0.0, closed)
    answer.status, answer.ended = status, ended
    answer.events += [Event(float(i), chunk) for i, chunk in enumerate(chunks)]
    return answer


def text_chunk(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}]}


def test_a_cut_answer_agrees_with_what_it_begins() -> None:
    expected = {0: Output("abc", ("length", None))}
    assert agrees(answered(text_chunk("abc", finish="length")), expected)
    assert not agrees(answered(text_chunk("ab", finish="length")), expected)
    assert agrees(answered(text_chunk("ab"), ended=False), expected)
    assert agrees(answered(ended=False), expected)
    assert not agrees(answered(text_chunk("b"), ended=False), expected)
    assert not agrees(answered(text_chunk("a", index=1), ended=False), expected)
    assert not agrees(answered(), expected)


def test_a_tally_knows_what_a_client_did() -> None:
    tally = Tally()
    known = Known(Asked("greedy", "/v1/completions", {"stream": True}), {0: Output("ab", ("stop", None))}, 50)
    tally.add(known, answered(text_chunk("a"), text_chunk("b", finish="stop")), cut=False)
    tally.add(known, answered(text_chunk("a"), ended=False), cut=True)
    tally.add(known, answered(text_chunk("a"), ended=False), cut=False)
    tally.add(known, answered(text_chunk("x"), ended=False), cut=True)
    tally.add(known, answered({"error": {}}, status=500), cut=False)
    assert tally.statuses == {"200": 4, "500": 1} and (tally.aborted, tally.failed) == (2, 1)
    assert tally.unequal["greedy"] == 1


def test_memory_is_flat_or_grows() -> None:
    steady = memory_of([(float(t), (100 + (50 if t < 30 else 0)) * MEBIBYTE) for t in range(61)])
    assert steady["flat"] and steady["mib_per_minute"] == pytest.approx(0.0, abs=1e-6)
    growing = memory_of([(float(t), (100 + t) * MEBIBYTE) for t in range(61)])
    assert not growing["flat"] and growing["mib_per_minute"] == pytest.approx(60.0)
    assert memory_of([(0.0, MEBIBYTE)])["flat"]
