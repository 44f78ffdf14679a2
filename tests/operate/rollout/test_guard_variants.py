"""Who a variant is compared with, what a reload keeps, and what the guard says of itself."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from guard_traffic import (
    GOOD,
    HOLDOUT,
    SLOW,
    UNACCEPTED,
    VARIANT,
    GuardTraffic,
    VariantPace,
    cut,
    detection_table,
    warm,
)
from hypothesis import example, given
from hypothesis import strategies as st
from sizes import in_soak

from pilotfish.errors import ParameterError
from pilotfish.operate.guarding.guard import DEFAULT_POLICY, HISTORY, Guard, GuardEvent, GuardPolicy
from pilotfish.operate.guarding.guard_readings import Comparison, GuardReading, ReadingPairs

DOCUMENT = (Path(__file__).parents[3] / "docs" / "rollout.md").read_text()


# -- who is compared with whom


def test_without_tokens_of_the_holdout_a_slow_variant_is_not_cut() -> None:
    traffic = warm(0)
    traffic.holdout_tokens = 0.0
    assert traffic.run(300, SLOW) == []
    traffic.holdout_tokens = 20.0
    assert traffic.seconds_until("cut", SLOW, 60) < 10


def test_without_tokens_of_the_holdout_its_step_is_known_from_before() -> None:
    """So a variant whose guesses are accepted no more is cut all the same."""
    traffic = warm(0)
    traffic.holdout_tokens = 0.0
    (event, *_) = traffic.run(5, UNACCEPTED)
    assert event.kind == "cut" and event.reason.endswith("no longer faster than the holdout: which is silent")


def test_where_the_holdout_was_never_seen_nothing_is_cut() -> None:
    traffic = GuardTraffic(0, holdout_tokens=0.0)
    traffic.run(300, GOOD)
    assert traffic.run(300, UNACCEPTED) == []


def test_the_holdout_is_never_cut() -> None:
    traffic = cut()
    assert traffic.guard.share(HOLDOUT) == 1.0
    assert traffic.guard.told().keys() == {VARIANT}
    fast = GuardTraffic(1)
    assert fast.run(300, VariantPace(0.1)) == []
    assert fast.guard.share(HOLDOUT) == 1.0


def test_without_a_holdout_nothing_is_ever_cut() -> None:
    guard = Guard("", [VARIANT])
    reading = GuardReading(tokens=100, itl_seconds=5.0, steps=50, guessable=50, sharing=400, accepted=50)
    slow = msgspec.structs.replace(reading, itl_seconds=50.0, accepted=0)
    assert [guard.observe({VARIANT: reading if now < 100 else slow}, float(now)) for now in range(200)] == [[]] * 200
    assert guard.share(VARIANT) == 1.0


def test_variants_are_judged_apart() -> None:
    guard = Guard(HOLDOUT, [VARIANT, "other"])
    step = {HOLDOUT: 0.02, VARIANT: 0.04, "other": 0.01}
    readings = {name: GuardReading(tokens=50, itl_seconds=50 * time, steps=50) for name, time in step.items()}
    events = [event for now in range(20) for event in guard.observe(readings, float(now))]
    assert [(event.variant, event.kind) for event in events] == [(VARIANT, "cut")]


# -- the operator


def test_a_reload_keeps_the_state_of_variants_that_stay() -> None:
    traffic = cut()
    before = traffic.guard.told()[VARIANT]
    traffic.guard.set_variants(HOLDOUT, [HOLDOUT, "third", VARIANT])
    assert traffic.guard.told()[VARIANT] == before
    assert traffic.guard.share("third") == 1.0
    assert traffic.seconds_until("trial", GOOD, 60) == DEFAULT_POLICY.pause
    traffic.guard.set_variants(HOLDOUT, ["third"])
    with pytest.raises(ParameterError, match="variant: 'next' is not allowed; expected one of holdout, third"):
        traffic.guard.share(VARIANT)


def test_a_reload_with_what_there_is_forgets_no_evidence() -> None:
    traffic = warm(0)
    traffic.run(2, VariantPace(3.0))
    traffic.guard.set_variants(HOLDOUT, [VARIANT])
    assert [event.kind for event in traffic.second(VariantPace(3.0))] == ["cut"]


def test_another_holdout_makes_evidence_void() -> None:
    traffic = warm(0)
    traffic.run(2, VariantPace(3.0))
    traffic.guard.set_variants("other", [VARIANT])
    traffic.guard.set_variants(HOLDOUT, [VARIANT])
    assert traffic.second(VariantPace(3.0)) == []


def test_events_are_bounded_and_what_is_told_is_json() -> None:
    guard = Guard(HOLDOUT, [VARIANT], GuardPolicy(pause=1.0, longest_pause=1.0))
    readings = {
        name: GuardReading(tokens=50, itl_seconds=time, steps=50) for name, time in ((HOLDOUT, 1.0), (VARIANT, 3.0))
    }
    seen = [event for now in range(3000) for event in guard.observe(readings, float(now))]
    assert len(seen) > HISTORY and list(guard.events) == seen[-HISTORY:]
    assert msgspec.json.decode(msgspec.json.encode(guard.events), type=list[GuardEvent]) == seen[-HISTORY:]
    told = msgspec.json.decode(msgspec.json.encode(guard.told()))[VARIANT]
    assert told.keys() == {"state", "since", "reason", "next_trial"}
    assert "60.0 ms a token, holdout 20.0 ms" in {event.reason for event in seen}


def test_a_policy_has_bounds() -> None:
    bad = {**dict.fromkeys(("allowance", "trial"), (0.0, 1.5)), **dict.fromkeys(("pause", "patience"), (0.0, math.inf))}
    for field, values in {**bad, "longest_pause": (10.0, math.nan)}.items():
        for value in values:
            with pytest.raises(ParameterError, match=f"^{field}: {value!r} is not allowed; expected "):
                GuardPolicy(**{field: value})


# -- readings

READINGS = st.builds(
    GuardReading,
    tokens=st.integers(0, 100),
    itl_seconds=st.floats(0, 10),
    steps=st.integers(0, 100),
    guessable=st.integers(0, 100),
    accepted=st.integers(0, 400),
    sharing=st.integers(0, 10**6),
)


SHORTEST, LONGEST = (GuardReading(tokens=99, itl_seconds=seconds, steps=9) for seconds in (5e-324, 1e300))


@example([(SHORTEST, LONGEST), (LONGEST, SHORTEST)] * 10)
@given(st.lists(st.tuples(READINGS, READINGS), max_size=50))
def test_no_reading_breaks_it(seconds: list[tuple[GuardReading, GuardReading]]) -> None:
    guard = Guard(HOLDOUT, [VARIANT], GuardPolicy(pause=1.0, longest_pause=2.0))
    for now, (own, holdout) in enumerate(seconds):
        events = guard.observe({VARIANT: own, HOLDOUT: holdout}, float(now))
        assert len(events) <= 1
        assert guard.share(VARIANT) in (0.0, *(DEFAULT_POLICY.trial * 2**doublings for doublings in range(5)), 1.0)


@given(st.lists(st.tuples(READINGS, READINGS), max_size=50))
def test_seconds_that_are_joined_lose_nothing_of_those_with_both(
    seconds: list[tuple[GuardReading, GuardReading]],
) -> None:
    pairs, found = ReadingPairs(), list[Comparison]()
    for own, holdout in seconds:
        if (compared := pairs.add(own, holdout)) is not None:
            found.append(compared)
    assert all(min(compared.own.tokens, compared.holdout.tokens) >= 8 for compared in found)
    both = [own.tokens for own, holdout in seconds if own.has_times and holdout.has_times]
    joined = sum(compared.own.tokens for compared in found)
    assert joined in [sum(both[:n]) for n in range(len(both) + 1)]


def test_few_tokens_make_nobody_look_slower() -> None:
    """A mean of eight tokens' times, skewed as they are, beside one of two hundred."""
    random, found = np.random.default_rng(1), list[Comparison]()
    for _ in range(2000):
        sums = {n: float(random.gamma(n)) for n in (200, 8)}  # of times that vary as much as their mean
        found.append(Comparison(*(GuardReading(tokens=n, itl_seconds=sums[n], steps=n) for n in (200, 8))))
    assert np.mean([compared.slowdown for compared in found]) > 0.05
    assert abs(np.mean([compared.unbiased_slowdown(1.0) for compared in found])) < 0.02


# -- the document


@in_soak
def test_the_document_has_the_times_that_detection_takes() -> None:
    table = "\n".join(detection_table())
    assert table in DOCUMENT, table


def test_the_document_has_the_constants() -> None:
    policy = DEFAULT_POLICY
    for words in (
        f"{100 * policy.allowance:g} %",
        f"{policy.pause:g} seconds",
        f"{policy.longest_pause / 60:g} minutes",
        f"{100 * policy.trial:g} % of its requests",
    ):
        assert words in DOCUMENT
