"""The guard in virtual time: collapses are cut within seconds, noise cuts nothing, what recovers is restored."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from guard_traffic import (
    GOOD,
    HOLDOUT,
    SLOW,
    UNACCEPTED,
    VARIANT,
    WARM,
    GuardTraffic,
    VariantPace,
    cut,
    detection_table,
    spread_of,
    swings,
    warm,
)
from hypothesis import example, given
from hypothesis import strategies as st
from sizes import in_soak, paired, sized

from pilotfish.operate.guarding.guard import ALLOWANCE, HISTORY, LONGEST_PAUSE, PAUSE, TRIAL, Guard, GuardEvent
from pilotfish.operate.guarding.guard_readings import Comparison, GuardReading, ReadingPairs

HOUR = 3600
DOCUMENT = (Path(__file__).parents[3] / "docs" / "rollout.md").read_text()


# -- collapses


def test_a_variant_that_becomes_half_as_slow_again_is_cut_in_less_than_five_seconds() -> None:
    seconds = [warm(seed).seconds_until("cut", SLOW, 60) for seed in range(20)]
    assert sum(second < 5 for second in seconds) >= 18
    assert max(seconds) <= 8


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_a_variant_whose_guesses_are_accepted_no_more_is_cut_in_less_than_five_seconds(noise: float) -> None:
    seconds = [warm(seed, noise).seconds_until("cut", UNACCEPTED, 60) for seed in range(sized(4, 10))]
    assert max(seconds) < 5


def test_a_variant_that_is_bad_from_its_first_request_on_is_cut() -> None:
    seconds = [GuardTraffic(seed).seconds_until("cut", VariantPace(2.0), 60) for seed in range(sized(4, 10))]
    assert max(seconds) <= 10


def test_a_cut_says_why_in_figures() -> None:
    (slow,), (unaccepted,) = (
        [event for event in cut(pace=pace).events if event.kind == "cut"] for pace in (SLOW, UNACCEPTED)
    )
    assert slow.variant == VARIANT and WARM < slow.at < WARM + 60
    assert slow.reason.endswith("ms") and " ms a token, holdout " in slow.reason
    assert (
        "accepted tokens a step, 1.4" in unaccepted.reason
        and "no longer faster than the holdout: " in unaccepted.reason
    )


def test_fewer_accepted_tokens_cut_no_variant_that_still_pays() -> None:
    for seed in range(sized(2, 5)):
        assert warm(seed).run(300, VariantPace(0.8, accepted=0.5)) == []


#: Where a step's rows cost too much a budget guesses no more, and a variant is as fast as the holdout; so it is where
#: guesses are right no more, and where prompts take all rows.
BUSY, GIVEN_UP, PROMPTS = VariantPace(1.0, 0.0, sharing=64), VariantPace(1.0, 0.01), VariantPace(1.0, 0.0, sharing=0)


def test_a_variant_that_the_budget_has_given_up_is_cut() -> None:
    """Once the drop is seen, in three seconds, it has to be clear that the variant is no longer faster."""
    seconds = [warm(seed).seconds_until("cut", GIVEN_UP, 60) for seed in range(sized(6, 20))]
    assert sum(second < 5 for second in seconds) >= 0.75 * len(seconds) and max(seconds) <= 10


@pytest.mark.parametrize("resting", [BUSY, PROMPTS], ids=["busy", "prompts"])
def test_guesses_that_rest_because_they_do_not_pay_are_no_drop(resting: VariantPace) -> None:
    """In turns; then the drop is one."""
    traffic = GuardTraffic(0, load=swings)
    for seconds in (20, 7, 45, 3, 90) * sized(1, 5):
        assert traffic.run(seconds, GOOD) == traffic.run(seconds, resting) == []
    assert traffic.seconds_until("cut", GIVEN_UP, 60) < 5


# -- noise


NOISES = (
    {"spread": spread_of(0.1), "spikes": 1 / 120},
    {"spread": spread_of(0.2), "spikes": 1 / 120},
    {"spread": spread_of(0.1), "persistent": 0.1},
)


@pytest.mark.parametrize(("noise", "slowdown"), paired(NOISES, (0.7, 1.0, 1.03)))
def test_a_variant_does_not_flap_in_half_an_hour_of_noise(noise: dict[str, float], slowdown: float) -> None:
    changes = []
    for seed in range(sized(2, 5)):
        events = GuardTraffic(seed, load=swings, **noise).run(HOUR // 2, VariantPace(slowdown))
        changes.append(sum(event.kind in ("cut", "restored") for event in events))
    assert sum(changes) <= 2  # one cut, and back; mostly none


def test_a_second_that_stands_still_cuts_nothing() -> None:
    """However long: of a good variant, and of one that the holdout's own pauses make look slow and fast."""
    guard = Guard(HOLDOUT, [VARIANT])
    for second in range(1000):
        times = {HOLDOUT: 0.4, VARIANT: 4.0}
        if second % 50 == 0:
            times[VARIANT] = 1000.0
        if second % 50 == 25:
            times[HOLDOUT] = 100.0
        readings = {name: GuardReading(tokens=20, itl_seconds=time, steps=20) for name, time in times.items()}
        readings[VARIANT] = msgspec.structs.replace(readings[VARIANT], tokens=250)
        assert guard.observe(readings, float(second)) == []


# -- trials


def test_a_cut_variant_rests_and_is_then_tried_with_a_small_share() -> None:
    traffic = cut()
    at = traffic.now
    assert traffic.guard.share(VARIANT) == 0.0
    assert traffic.seconds_until("trial", GOOD, 60) == PAUSE
    assert traffic.guard.share(VARIANT) == TRIAL
    assert traffic.guard.told()[VARIANT].since == at + PAUSE


@pytest.mark.parametrize(("collapse", "recovered"), [(60, GOOD), (600, GOOD), (10, VariantPace(1.0))])
def test_a_variant_that_recovers_is_restored_in_the_time_that_is_stated(collapse: int, recovered: VariantPace) -> None:
    """The pause that runs is no longer than the collapse was, or half a minute; then a trial of less than a minute."""
    for seed in range(sized(1, 3)):
        traffic = warm(seed)
        traffic.run(collapse, SLOW)
        assert traffic.seconds_until("restored", recovered, 1000) <= max(30, collapse) + 60
        assert traffic.guard.share(VARIANT) == 1.0
        assert traffic.run(300, recovered) == []


def test_a_variant_that_stays_bad_is_tried_ever_more_rarely() -> None:
    traffic = cut()
    before = traffic.speculated
    events = traffic.run(HOUR, SLOW)
    trials = [event.at for event in events if event.kind == "trial"]
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert [event.kind for event in events] == ["trial", "failed trial"] * len(trials)
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses[:4]))
    assert max(pauses) < LONGEST_PAUSE + 60
    assert (traffic.speculated - before) / (traffic.tokens * HOUR) < 0.002


def test_a_variant_that_is_cut_soon_after_it_was_restored_rests_longer() -> None:
    traffic = cut()
    traffic.seconds_until("restored", GOOD, 200)
    traffic.seconds_until("cut", SLOW, 60)
    told = traffic.guard.told()[VARIANT]
    assert told.since is not None and told.next_trial == told.since + 2 * PAUSE
    traffic.seconds_until("restored", GOOD, 200)
    traffic.run(int(LONGEST_PAUSE), GOOD)
    traffic.seconds_until("cut", SLOW, 60)
    told = traffic.guard.told()[VARIANT]
    assert told.since is not None and told.next_trial == told.since + PAUSE


def test_a_trial_takes_more_requests_until_it_decides() -> None:
    """Of 60 tokens a second, and 6 of the holdout's, 5 % are none in most seconds."""
    traffic = cut()
    traffic.tokens, traffic.holdout_tokens = 60.0, 6.0
    traffic.seconds_until("trial", VariantPace(1.0), 60)
    shares = []
    while traffic.state == "trial":
        shares.append(traffic.guard.share(VARIANT))
        traffic.second(VariantPace(1.0))
    assert traffic.state == "live" and len(shares) < 300
    assert [shares[second] for second in (0, 29, 31, 61)] == [0.05, 0.05, 0.1, 0.2]


def test_acceptance_that_stays_low_does_no_harm_where_it_costs_nothing() -> None:
    """Its level starts anew with a restored variant: what was cut for a drop and is not slower is not cut again."""
    traffic = warm(0)
    harmless = VariantPace(1.0, accepted=0.15)
    kinds = [event.kind for event in traffic.run(HOUR // 2, harmless)]
    assert kinds == ["cut", "trial", "restored"]


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
    assert traffic.seconds_until("trial", GOOD, 60) == PAUSE
    traffic.guard.set_variants(HOLDOUT, ["third"])
    assert VARIANT not in traffic.guard.told()


@pytest.mark.parametrize(("reloaded", "kinds"), [([HOLDOUT], ["cut"]), (["other", HOLDOUT], [])])
def test_a_reload_forgets_no_evidence_but_another_holdout_makes_it_void(reloaded: list[str], kinds: list[str]) -> None:
    traffic = warm(0)
    traffic.run(2, VariantPace(3.0))
    for holdout in reloaded:
        traffic.guard.set_variants(holdout, [VARIANT])
    assert [event.kind for event in traffic.second(VariantPace(3.0))] == kinds


@patch.multiple("pilotfish.operate.guarding.guard", PAUSE=1.0, LONGEST_PAUSE=1.0)
def test_events_are_bounded_and_what_is_told_is_json() -> None:
    guard = Guard(HOLDOUT, [VARIANT])
    readings = {
        name: GuardReading(tokens=50, itl_seconds=time, steps=50) for name, time in ((HOLDOUT, 1.0), (VARIANT, 3.0))
    }
    seen = [event for now in range(3000) for event in guard.observe(readings, float(now))]
    assert len(seen) > HISTORY and list(guard.events) == seen[-HISTORY:]
    assert msgspec.json.decode(msgspec.json.encode(list(guard.events)), type=list[GuardEvent]) == seen[-HISTORY:]
    told = msgspec.json.decode(msgspec.json.encode(guard.told()))[VARIANT]
    assert told.keys() == {"state", "since", "reason", "next_trial"}
    assert "60.0 ms a token, holdout 20.0 ms" in {event.reason for event in seen}


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
    with patch.multiple("pilotfish.operate.guarding.guard", PAUSE=1.0, LONGEST_PAUSE=2.0):
        guard = Guard(HOLDOUT, [VARIANT])
        for now, (own, holdout) in enumerate(seconds):
            events = guard.observe({VARIANT: own, HOLDOUT: holdout}, float(now))
            assert len(events) <= 1
            assert guard.share(VARIANT) in (0.0, *(TRIAL * 2**doublings for doublings in range(5)), 1.0)


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
    for words in (
        *(f"{100 * ALLOWANCE:g} %", f"{PAUSE:g} seconds"),
        *(f"{LONGEST_PAUSE / 60:g} minutes", f"{100 * TRIAL:g} % of its requests"),
    ):
        assert words in DOCUMENT
