"""Hand-overs between a target's machine and prefill workers' machines, whatever happens to messages, memory, workers
and pools: what a hand-over says that it brought is there, and right; nothing is held when all have ended."""

from collections import Counter
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest
from handover_world import IDENTITY, LAYERS, LAYOUT, WELCOME, World
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import Event, histories, random_events
from msgspec.structs import replace
from sizes import sized

from pilotfish.core.peers.peer import SILENCE
from pilotfish.core.prefilling.handover import WHOLE, HandOver, HandOverReport
from pilotfish.core.prefilling.handover_machine import GONE, OUTCOMES, HandOverMachine
from pilotfish.core.prefilling.incoming import Incoming, Landing
from pilotfish.core.prefilling.prefill_messages import OrderDone, OrderFailed, PrefillOrder, SegmentGone, SegmentReady
from pilotfish.core.prefilling.prefill_pools import MAX_DOUBLINGS, MAX_FAILURES, REFUSED, PrefillPool, mismatch
from pilotfish.core.prefilling.segments import SegmentReference, sequence_digest

COMMON = {"deliver": 24, "compute": 12, "work": 12, "settle": 5, "begin": 4, "tick": 6, "wait": 4, "join": 1}
FAULTS = {"drop": 0.2, "repeat": 0.2, "reorder": 0.2, "flip": 0.2, "lie": 0.3, "damage": 0.3, "cancel": 0.4}
RARE = {"disconnect": 0.1, "restart": 0.15, "drain": 0.15, "leave": 0.15}
#: What goes wrong in a long run.
KINDS = (
    FAULTS | RARE,
    {"lie": 6.0, "damage": 3.0, "cancel": 0.1},
    {"compute": 1.0, "wait": 8.0},
    {"drop": 0.3, "flip": 0.2, "restart": 0.3},
)


@settings(max_examples=sized(6, 60), deadline=None)
@given(histories(COMMON | FAULTS | RARE, 120), st.booleans())
def test_whatever_happens_what_came_is_right_and_nothing_is_held(events: list[Event], fetches: bool) -> None:
    world = World(fetches)
    world.rounds(8)
    world.live(events)
    world.heal()
    world.end()


@pytest.mark.parametrize("fetches", [False, True])
def test_long_random_runs_see_every_ending(fetches: bool) -> None:
    outcomes, refused, brought = Counter[str](), Counter[str](), 0
    for seed in range(16):
        rng, world = Random(seed), World(fetches)
        world.live(random_events(rng, COMMON | KINDS[seed % len(KINDS)], 1200))
        world.end()
        outcomes += world.outcomes
        brought += world.brought
        for pool in world.target.pools:
            refused.update(pool.drops.counts)
    unseen = {reason for reason in REFUSED if not refused[reason]}
    assert set(outcomes) == set(OUTCOMES)
    assert brought > 1000
    assert unseen <= ({"late", "stale"} if fetches else {"late", "gone"}), refused


def test_another_pool_is_refused_in_one_line() -> None:
    welcome = World().workers[0].machine.welcome
    lines = {
        "weights: 77b0, not 0a1b": replace(welcome, identity=replace(IDENTITY, facts={"weights": "77b0"})),
        "protocol version: 9, not 1": replace(welcome, version=9),
        "layout: heads 1 to 2, not 0 to 0": replace(
            welcome, identity=replace(IDENTITY, layout=replace(LAYOUT, first_head=1, heads=2))
        ),
        f"layout: {LAYERS} layers of [1, 2] bytes a head, not {LAYERS} layers of [1, 1] bytes a head": replace(
            welcome, identity=replace(IDENTITY, layout=replace(LAYOUT, planes=[1, 2]))
        ),
    }
    for line, theirs in lines.items():
        assert mismatch(theirs, IDENTITY) == line
    assert mismatch(welcome, IDENTITY) is None
    more = replace(welcome, identity=replace(IDENTITY, layout=replace(LAYOUT, heads=4)))
    assert mismatch(more, IDENTITY) == "layout: heads 0 to 3, not 0 to 0"  # nothing is cut out of it


def test_a_pool_that_is_refused_serves_once_it_is_another() -> None:
    world = World()
    welcome = world.workers[0].machine.welcome
    wrong = replace(welcome, identity=replace(IDENTITY, facts={"weights": "77b0"}))
    world.workers[0].machine.welcome = wrong
    world.rounds(4)
    pool, other = world.target.pools
    assert not pool.ready and other.ready
    assert pool.refusal in ("weights: 77b0, not 0a1b", "weights: 0a1b, not 77b0")  # whoever saw it first
    world.workers[0].machine.welcome = welcome
    world.rounds(40)
    assert pool.ready and pool.refusal is None


def begun(world: World, tokens: int = 60) -> HandOver:
    """A hand-over of so many tokens under way."""
    option = world.target.option(list(range(tokens)), 0, None, 0, 0, world.now)
    assert option is not None
    handover = HandOver(list(range(tokens)), np.arange(tokens, dtype=np.int32))
    world.target.begin(handover, option, world.now)
    world.wanted.append(handover)
    return handover


def served(world: World) -> World:
    world.rounds(8)
    assert all(pool.ready for pool in world.target.pools)
    return world


def test_a_pool_that_falls_silent_ends_its_hand_overs_and_comes_back() -> None:
    world = served(World())
    handover = begun(world)
    world.post()
    world.now += SILENCE + 0.1
    world.target.tick(world.now)
    world.settle()
    assert handover.count == 0 and handover.report.outcome == GONE
    assert not any(pool.ready for pool in world.target.pools)
    world.rounds(4)
    assert all(pool.ready for pool in world.target.pools)


def test_a_worker_that_was_started_again_ends_its_hand_overs_at_once() -> None:
    """Under the same address: another key, other memory."""
    world = served(World())
    handover = begun(world)
    number = int(world.target.pools[0].name == handover.report.pool) ^ 1
    world.restart(number)
    world.target.receive(world.target.pools[number], world.workers[number].machine.welcome, world.now)
    world.settle()
    assert handover.report.outcome == GONE
    world.rounds(8)
    assert world.target.pools[number].ready
    begun(world)
    world.rounds(8)
    assert world.outcomes[WHOLE] == 1


@pytest.mark.parametrize(("busy", "times"), [(True, 1), (False, MAX_FAILURES)])
def test_a_pool_that_is_busy_or_fails_too_often_is_left_alone(busy: bool, times: int) -> None:
    world = served(World())
    pool, *others = world.target.pools
    for other in others:
        world.target.leave(other)
    for _ in range(times):
        assert pool.takes(60, world.now)
        begun(world)
        (incoming,) = world.target.at(pool)
        world.target.receive(pool, OrderFailed(incoming.number, "too much", busy=busy), world.now)
        world.settle()
    assert not pool.takes(60, world.now)


def test_what_another_pool_says_of_a_hand_over_counts_for_nothing() -> None:
    world = served(World())
    handover = begun(world)
    (order,) = [o.message for o in world.target.outbox if isinstance(o.message, PrefillOrder)]
    (other,) = [pool for pool in world.target.pools if pool.name != handover.report.pool]
    assert other.welcome is not None
    tokens, digest = len(order.tokens), sequence_digest(order.tokens)
    size = tokens * LAYERS * LAYOUT.token_bytes  # one segment has everything
    reference = SegmentReference(0, order.handover, digest, 0, 0, tokens, 0, LAYERS, 0, size, LAYOUT.digest(), 0)
    for message in (
        SegmentReady(reference),
        SegmentReady(reference.signed(other.welcome.mac_key)),
        OrderDone(order.handover, 0, 0, 0.0, 0.0),
        OrderFailed(order.handover, "no"),
        SegmentGone(order.handover, 0, "no"),
    ):
        world.target.receive(other, message, world.now)
        world.settle()
        assert handover.count is None
    assert not any(other.drops.counts.values())
    world.rounds(8)
    assert world.outcomes[WHOLE] == 1


def test_a_pool_that_fails_again_and_again_is_left_alone_longer_and_longer() -> None:
    pool = served(World()).target.pools[0]
    pauses = []
    for _ in range(MAX_FAILURES + MAX_DOUBLINGS + 3):
        now = 100.0
        pool.failed(now)
        pauses.append(next(k for k in range(200) if pool.takes(1, now + k)))
    assert pauses[: MAX_FAILURES - 1] == [0] * (MAX_FAILURES - 1)
    assert pauses[MAX_FAILURES - 1 :] == [min(2**k, 2**MAX_DOUBLINGS) for k in range(MAX_DOUBLINGS + 4)]
    pool.succeeded(HandOverReport(tokens=5))
    pool.failed(500.0)
    assert pool.takes(1, 500.0)
    assert [notice.text for notice in pool.notices][-2:] == [
        "pool 0 is left alone: 3 hand-overs failed one after the other",
        "pool 0 is used again",
    ]


# -- what a report says of a hand-over's time


seconds = st.floats(0, 100)


def incoming(report: HandOverReport, *landings: tuple[float, float]) -> Incoming:
    handover = HandOver(range(4), np.arange(4, dtype=np.int32), report=report)
    pool = PrefillPool("east", b"0", welcome=WELCOME)
    return Incoming(1, handover, pool, 0.0, 9.0, 1.0, landings=[Landing(*one) for one in landings])


@pytest.mark.parametrize(
    ("outcome", "parts", "exposed", "lost", "hidden"),
    [
        (WHOLE, (0.5, 1.25), 0.25, 0.0, 0.375),  # the pool had computed by 8.75
        (WHOLE, (0.0, 0.0), 0.0, 0.0, 0.0),  # it did not say how long it took: no part is known
        ("late", (0.0, 0.0), 0.0, 2.0, 0.0),  # all time is lost
    ],
)
def test_lost_and_hidden(outcome: str, parts: tuple[float, float], exposed: float, lost: float, hidden: float) -> None:
    report = HandOverReport(outcome=outcome, began=7.0, seconds=2.0, queued=parts[0], computing=parts[1])
    assert (report.exposed, report.lost) == (exposed, lost)
    assert incoming(report, (7.75, 0.125), (8.75, 0.25), (9.0, 0.375)).hidden == hidden


@given(seconds, seconds, seconds, st.sampled_from([WHOLE, "gone"]))
def test_no_part_is_less_than_nothing(whole: float, queued: float, computing: float, outcome: str) -> None:
    """Clocks of two processes may disagree."""
    report = HandOverReport(outcome=outcome, seconds=whole, queued=queued, computing=computing)
    assert 0 <= min(report.exposed, report.lost) <= max(report.exposed, report.lost) <= report.seconds


def test_a_place_that_is_freed_after_the_orders_end_is_no_refusal() -> None:
    """The pool may free it while it is being read."""
    for ended in (False, True):
        one = incoming(HandOverReport())
        one.ended, machine = ended, Mock()
        HandOverMachine.refuse(machine, one, "stale", 0.0)
        assert one.pool.drops.counts["stale"] == machine._stop.call_count == (0 if ended else 1)
