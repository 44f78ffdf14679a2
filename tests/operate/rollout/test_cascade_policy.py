"""A file of a cascade, its rules, and how sure a small model is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import ParameterError
from pilotfish.operate.cascade_policy import CascadeAnswer, Confidence, read_cascade

FILE = """
name = "auto"
tags = ["hard"]
longest = 100
tokens = 4
threshold = -0.8
[small]
target = "/models/small"
kv_slots = 4096
threads = 2
"""
logprobs = st.lists(st.floats(-20, 0), max_size=8)


def test_a_file_says_who_answers() -> None:
    policy = read_cascade(FILE)
    assert (policy.name, policy.tokens, policy.threshold) == ("auto", 4, -0.8)
    assert policy.small.engine_fields == {"kv_slots": 4096, "threads": 2} and policy.small.pools == []
    told = [policy.rule(tag, tokens) for tag, tokens in (("hard", 1), ("hard", 101), (None, 101), ("easy", 100))]
    assert told == ["tag", "tag", "length", None]


def test_what_is_left_out_has_a_default() -> None:
    policy = read_cascade('name = "auto"\nthreshold = -1\n[small]\ntarget = "x"\n')
    assert (policy.tokens, policy.tags, policy.longest) == (16, [], None) and policy.rule(None, 1 << 30) is None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "auto"', 'name = ""', "cascade.name: '' is not allowed; expected 1 to 128 printable characters"),
        ('name = "auto"', 'name = "a\\u0007"', "cascade.name: "),
        ('name = "auto"', f'name = "{"a" * 129}"', "cascade.name: "),
        ('name = "auto"', "", "cascade: None is not allowed; expected what docs/cascade.md says: Object missing"),
        ("threshold = -0.8", "threshold = nan", "cascade.threshold: nan is not allowed"),
        ("threshold = -0.8", "threshold = 2", "cascade.threshold: 2.0 is not allowed"),
        ("threshold = -0.8", 'threshold = "low"', "docs/cascade.md says: Expected `float`, got `str`"),
        ("tokens = 4", "tokens = 0", "cascade.tokens: 0 is not allowed; expected an integer 1 to 256"),
        ("tokens = 4", "tokens = 257", "cascade.tokens: 257 is not allowed"),
        ("longest = 100", "longest = 0", "cascade.longest: 0 is not allowed"),
        ("kv_slots", "slots", "unknown field `slots`"),
        ("tokens = 4", "token = 4", "unknown field `token`"),
        ('"/models/small"', '""', "cascade.small.target: "),
        ("threads = 2", 'keys = ["k"]', "cascade.small.keys: ['k'] is not allowed; expected none without pools"),
        ("[small]", "[small", "cascade: None is not allowed; expected TOML ("),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_that_names_it(old: str, new: str, told: str) -> None:
    with pytest.raises(ParameterError) as raised:
        read_cascade(FILE.replace(old, new))
    assert told in str(raised.value) and "\n" not in str(raised.value)


@given(st.lists(logprobs, min_size=1, max_size=4), st.integers(1, 6), st.floats(-10, 0), st.randoms())
def test_the_least_sure_output_decides(
    outputs: list[list[float]], tokens: int, threshold: float, random: object
) -> None:
    """However the tokens come."""
    confidence, left = Confidence(len(outputs), tokens, threshold), [list(output) for output in outputs]
    order = [place for place, output in enumerate(outputs) for _ in range(len(output) + 1)]
    random.shuffle(order)  # type: ignore[attr-defined]
    for place in order:
        if confidence.verdict == "escalate":
            break
        some, left[place] = left[place][:1], left[place][1:]
        confidence.add(place, some, ended=not some)
    means = [math.fsum(output[:tokens]) / max(len(output[:tokens]), 1) for output in outputs]
    assert confidence.value is not None
    if min(means) < threshold - 1e-9:
        assert confidence.verdict == "escalate" and confidence.value < threshold
    elif min(means) > threshold + 1e-9:
        assert confidence.verdict == "stay" and confidence.value == pytest.approx(min(means), abs=1e-9)


@given(logprobs, logprobs, st.integers(1, 6))
def test_later_tokens_change_nothing(first: list[float], later: list[float], tokens: int) -> None:
    confidence = Confidence(1, tokens, -5.0)
    confidence.add(0, first[:tokens], ended=True)
    verdict, value = confidence.verdict, confidence.value
    confidence.add(0, later, ended=False)
    assert (confidence.verdict, confidence.value) == (verdict, value)


def test_it_is_undecided_until_every_output_is_judged() -> None:
    confidence = Confidence(2, 2, -1.0)
    confidence.add(0, [-0.5, -0.5, -9.0], ended=False)
    assert confidence.verdict is None and confidence.value == -0.5, "the third token does not count"
    confidence.add(1, [-0.2], ended=False)
    assert confidence.verdict is None
    confidence.add(1, [], ended=True)
    assert confidence.verdict == "stay" and confidence.value == -0.5


def test_one_unsure_output_is_enough_at_once() -> None:
    confidence = Confidence(3, 2, -1.0)
    confidence.add(2, [-3.0, -math.inf], ended=False)
    assert confidence.verdict == "escalate" and confidence.value is not None and math.isfinite(confidence.value)


def test_the_side_follows_from_the_escalation() -> None:
    answer = CascadeAnswer()
    assert (answer.side, answer.reason) == (None, "sure")
    answer.answered_by = "small"
    assert answer.side == "small"
    answer.escalated = "tag"
    assert (answer.side, answer.reason) == ("large", "tag")
