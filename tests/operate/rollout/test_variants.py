"""A file of variants, and which request gets which; a cascade's file, and how sure its small model is."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from pilotfish.errors import ParameterError
from pilotfish.operate.cascade_policy import Confidence, read_cascade
from pilotfish.operate.outcome import context_band, script_of, temperature_band
from pilotfish.operate.variants import Variants, read_variants, unit

FILE = """
sticky = "client"
[[variant]]
name = "holdout"
mode = "off"
holdout = true
share = 0.05
[[variant]]
name = "next"
draft = "r2"
ramp = [{at = 2026-12-01T08:00:00Z, share = 0.01}, {at = 2026-12-03T08:00:00Z, share = 0.5}]
tags = ["canary"]
[[variant]]
name = "present"
draft = "r1"
"""
START = datetime(2026, 12, 1, 8, tzinfo=UTC)
NAMES = [f"request {number}" for number in range(2000)]


def at(hours: float) -> float:
    return (START + timedelta(hours=hours)).timestamp()


def shares(variants: Variants, now: float) -> dict[str, float]:
    got = [variants.assign("me", name, None, now).variant.name for name in NAMES]
    return {name: got.count(name) / len(NAMES) for name in variants.names}


def by_request(text: str = FILE) -> Variants:
    return read_variants(text.replace('"client"', '"request"'))


def test_a_file_says_who_gets_what() -> None:
    variants = by_request()
    assert variants.holdout == "holdout" and variants.drafts == {"r1", "r2"}
    assert [variant.max_nodes for variant in variants.variant] == [0, None, None]
    assert shares(variants, at(-1)) == pytest.approx({"holdout": 0.05, "next": 0.0, "present": 0.95}, abs=0.02)
    assert shares(variants, at(24)) == pytest.approx({"holdout": 0.05, "next": 0.255, "present": 0.695}, abs=0.03)
    assert shares(variants, at(99)) == pytest.approx({"holdout": 0.05, "next": 0.5, "present": 0.45}, abs=0.03)


def test_a_ramp_moves_requests_to_the_variant_that_is_ramped_and_no_other() -> None:
    variants = by_request()
    for before, after in ((0, 10), (10, 47), (47, 60)):
        for name in NAMES:
            first, then = (variants.assign("me", name, None, at(hours)).variant.name for hours in (before, after))
            assert first == then or (first, then) == ("present", "next")


def test_all_requests_of_a_client_get_one() -> None:
    variants = read_variants(FILE)
    assert len({variants.assign("me", name, None, at(30)).variant.name for name in NAMES}) == 1
    found = {variants.assign(client, "request", None, at(30)).variant.name for client in NAMES}
    assert found == {"holdout", "next", "present"}


def test_a_tag_pins_a_request() -> None:
    variants = read_variants(FILE)
    assert {variants.assign(name, name, "canary", at(-9)).variant.name for name in NAMES[:50]} == {"next"}
    assert variants.assign("me", "one", "canary", at(0)).pinned
    assert not variants.assign("me", "one", "another", at(0)).pinned


def test_points_are_even_and_independent_by_use() -> None:
    points = [unit(name) for name in NAMES]
    assert all(0 <= point < 1 for point in points) and sum(points) / len(points) == pytest.approx(0.5, abs=0.02)
    low = [unit(name, "trial") for name, point in zip(NAMES, points, strict=True) if point < 0.1]
    assert sum(low) / len(low) == pytest.approx(0.5, abs=0.05)


HOLDOUT = '[[variant]]\nname = "h"\nmode = "off"\nholdout = true\nshare = 0.1\n'
REST = '[[variant]]\nname = "r"\n'


def ramp(*knots: tuple[str, float]) -> str:
    return f"ramp = [{', '.join(f'{{at = {time}, share = {share}}}' for time, share in knots)}]\n"


TIMES = ("2026-12-01T08:00:00Z", "2026-12-02T08:00:00Z")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "variant"),
        ("[[variant]", "TOML"),
        (HOLDOUT + REST + 'colour = "red"\n', "colour"),
        (HOLDOUT + REST + 'mode = "on"\nshare = 1.5\n', "variant[1].share: 1.5"),
        (HOLDOUT + REST + "share = 0.95\n", "variant.share: 1.05"),
        (HOLDOUT + HOLDOUT + REST, "variant[1].name: 'h'"),
        (HOLDOUT + HOLDOUT.replace('"h"', '"i"') + REST, "variant.holdout"),
        (HOLDOUT.replace('mode = "off"\n', "") + REST, "variant[0].holdout"),
        (HOLDOUT + REST + "nodes = 0\n", "variant[1].nodes: 0"),
        (HOLDOUT + REST + 'mode = "off"\ndraft = "r1"\n', "variant[1].mode"),
        (HOLDOUT + '[[variant]]\nname = "no good"\n', "variant[1].name: 'no good'"),
        (HOLDOUT + REST + ramp((TIMES[0][:-1], 0.1)), "offset of UTC"),
        (HOLDOUT + REST + ramp((TIMES[1], 0.1), (TIMES[0], 0.2)), "later than"),
        (HOLDOUT + REST + ramp((TIMES[0], 0.2), (TIMES[1], 0.1)), "backwards"),
        (HOLDOUT + REST + 'tags = ["a", "a"]\n', "variant.tags: 'a'"),
        ("".join(f'[[variant]]\nname = "v{i}"\nshare = 0.01\n' for i in range(17)) + REST, "variant: 18"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_that_names_it(text: str, told: str) -> None:
    assert told in refused(ParameterError, read_variants, text)


def test_bands_and_scripts() -> None:
    assert [temperature_band(t) for t in (0, 0.2, 0.5, 0.7, 1, 1.5)] == ["0", "<=0.5", "<=0.5", "<=1", "<=1", ">1"]
    bands = {0: "1", 1: "1", 3: "1", 4: "4", 15: "4", 16: "16", 63: "16", 64: "64", 5000: "4096"}
    assert {tokens: context_band(tokens) for tokens in bands} == bands
    scripts = {"def f(x):": "latin", "Привет, x": "cyrillic", "你好吗": "han", "こんにちは": "kana", "안녕": "hangul"}
    assert {text: script_of(text) for text in scripts} == scripts
    assert (script_of("12 + 3"), script_of("ⴰⴱ")) == ("none", "other")


# -- a cascade's file, its rules, and how sure a small model is


CASCADE = """
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
    policy = read_cascade(CASCADE)
    assert (policy.name, policy.tokens, policy.threshold) == ("auto", 4, -0.8)
    assert policy.small.engine_fields == {"kv_slots": 4096, "threads": 2} and policy.small.pools == []
    told = [policy.rule(tag, tokens) for tag, tokens in (("hard", 1), ("hard", 101), (None, 101), ("easy", 100))]
    assert told == ["tag", "tag", "length", None]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "auto"', 'name = ""', "cascade.name: '' is not allowed; expected 1 to 128 printable characters"),
        ('name = "auto"', f'name = "{"a" * 129}"', "cascade.name: "),
        ('name = "auto"', "", "cascade: None is not allowed; expected what docs/cascade.md says: Object missing"),
        ("threshold = -0.8", "threshold = nan", "cascade.threshold: nan is not allowed"),
        ("threshold = -0.8", 'threshold = "low"', "docs/cascade.md says: Expected `float`, got `str`"),
        ("tokens = 4", "tokens = 0", "cascade.tokens: 0 is not allowed; expected an integer 1 to 256"),
        ("longest = 100", "longest = 0", "cascade.longest: 0 is not allowed"),
        ("kv_slots", "slots", "unknown field `slots`"),
        ('"/models/small"', '""', "cascade.small.target: "),
        ("threads = 2", 'keys = ["k"]', "cascade.small.keys: ['k'] is not allowed; expected none without pools"),
        ("[small]", "[small", "cascade: None is not allowed; expected TOML ("),
    ],
)
def test_what_a_cascade_cannot_be(old: str, new: str, told: str) -> None:
    assert told in refused(ParameterError, read_cascade, CASCADE.replace(old, new))


@given(st.lists(logprobs, min_size=1, max_size=4), st.integers(1, 6), st.floats(-10, 0), st.randoms())
def test_the_least_sure_decides(outputs: list[list[float]], tokens: int, threshold: float, random: object) -> None:
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


def test_one_unsure_output_is_enough_at_once() -> None:
    confidence = Confidence(3, 2, -1.0)
    confidence.add(2, [-3.0, -math.inf], ended=False)
    assert confidence.verdict == "escalate" and confidence.value is not None and math.isfinite(confidence.value)
