"""Live servers over the bundled pair are asked for JSON, choices, expressions, grammars and calls: what ends is valid,
and the same in all modes, whole and as a stream."""

from __future__ import annotations

import pytest
from openai_cases import Case
from openai_fleet import Fleet
from structured_cases import CASES, CHECKED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_what_they_must_be_and_equal(bundled: Fleet, mode: str, case: Case) -> None:
    plain, _ = bundled.at_once("off")[case]
    for choice in plain.choices.values():
        CHECKED[case](choice)
    whole, streamed = bundled.at_once(mode)[case]
    assert whole == streamed == plain
