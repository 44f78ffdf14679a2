"""Where two vocabularies differ is said by the first token, its ids, and how many there are."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.core.drafting.vocabulary import clash, difference
from pilotfish.core.drafting.vocabulary_map import Unshared

BASE = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        (BASE, dict(BASE), None),
        (BASE, {"a": 0, "c": 1, "b": 2}, "token 'b' has id 1 in the target and id 2 in the draft; 2 tokens differ"),
        (BASE, {"a": 0, "b": 1}, "token 'c' has id 2 in the target and no id in the draft; 1 tokens differ"),
        ({}, BASE, "token 'a' has no id in the target and id 0 in the draft; 3 tokens differ"),
    ],
)
def test_base_vocabularies_are_equal_or_not(target: dict[str, int], draft: dict[str, int], reason: str | None) -> None:
    assert difference(target, draft) == reason


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ({}, {}, None),
        ({}, {7: "<x>"}, None),
        ({7: "<x>"}, {}, None),
        ({7: "<x>", 8: "<y>"}, {8: "<y>", 9: "<z>"}, None),
        ({7: "<x>"}, {8: "<x>"}, "token '<x>' has id 7 in the target and id 8 in the draft; 1 tokens differ"),
        ({7: "<x>"}, {7: "<y>"}, "token '<x>' has id 7 in the target and no id in the draft; 2 tokens differ"),
        (
            {7: "\x1b[2J"},
            {8: "\x1b[2J"},
            "token '\\x1b[2J' has id 7 in the target and id 8 in the draft; 1 tokens differ",
        ),
    ],
)
def test_added_tokens_may_be_missing_but_not_differ(
    target: dict[int, str], draft: dict[int, str], reason: str | None
) -> None:
    assert clash(target, draft) == reason


def test_a_mask_of_what_is_not_shared() -> None:
    tokens = np.array([0, 5, 9, 10, 11])
    assert Unshared().mask(tokens).tolist() == [False] * 5
    assert Unshared(np.array([5]), 10).mask(tokens).tolist() == [False, True, False, True, True]
