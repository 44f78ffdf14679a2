"""Where requests go: to KV that is there, unless others have less to do; to nobody in a herd; always to a candidate.
What servers know of targets' prefixes: what the targets said, no more after a gap, and never another tenant's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing import held_prefixes
from pilotfish.core.routing.autoscaling import CALM, GOAL, targets_wanted
from pilotfish.core.routing.held_prefixes import Held, HeldCopies, HeldPrefixes, RoutingKey, routing_keys
from pilotfish.core.routing.router import ReplicaLoad, Router, RouteRequest

REPLICAS = ["a", "b", "c", "d"]


def request(pages: int, first: int = 0, salt: str | None = None, session: str | None = None) -> RouteRequest:
    tokens = [first, *range(1, OBJECT_TOKENS * pages + 10)]
    return RouteRequest(len(tokens), routing_keys(salt, tokens), session)


def load(pending: int = 0, live: int = 0, waiting: int = 0, room: int = 100) -> ReplicaLoad:
    return ReplicaLoad(pending, live, waiting, room)


def told(**loads: ReplicaLoad) -> Router:
    """A router to whom replicas have reported; all others of REPLICAS that they are idle."""
    router = Router()
    for replica in REPLICAS:
        router.told(replica, loads.get(replica, load()))
    return router


def holding(router: Router, replica: str, keys: Sequence[RoutingKey]) -> Router:
    router.held.apply(replica, Held(0, list(keys), whole=True))
    return router


def test_a_request_goes_where_its_prefix_is() -> None:
    router = holding(told(), "c", request(4).keys[:3])
    route = router.choose(request(4), REPLICAS)
    assert (route.replica, route.cached) == ("c", 3 * OBJECT_TOKENS)


@pytest.mark.parametrize(
    ("there", "elsewhere", "replica"),
    [
        (load(), load(), "a"),
        (load(pending=3 * OBJECT_TOKENS), load(), "a"),  # 4 pages are there, less than what waits
        (load(pending=5 * OBJECT_TOKENS), load(), "b"),
        (load(pending=5 * OBJECT_TOKENS), load(pending=2 * OBJECT_TOKENS), "a"),
        (load(live=100 * OBJECT_TOKENS), load(), "a"),
        (load(live=300 * OBJECT_TOKENS), load(), "b"),
        (load(room=1), load(), "a"),
        (load(room=0), load(), "b"),
        (load(waiting=1), load(), "b"),  # for slots, if not for room
        (load(waiting=3, room=0), load(waiting=3, room=0), "a"),
    ],
)
def test_a_prefix_is_worth_as_much_as_it_spares(there: ReplicaLoad, elsewhere: ReplicaLoad, replica: str) -> None:
    router = holding(told(a=there, b=elsewhere), "a", request(4).keys)
    assert router.choose(request(4), ["a", "b"]).replica == replica


def test_the_last_token_is_never_cached() -> None:
    tokens = [0] * (2 * OBJECT_TOKENS)
    keys = routing_keys(None, tokens)
    router = holding(told(), "a", keys)
    assert router.choose(RouteRequest(len(tokens), keys), ["a"]).cached == 2 * OBJECT_TOKENS - 1


def test_a_hot_prefix_spreads_between_two_reports() -> None:
    router = holding(told(), "a", request(4).keys)
    chosen = [router.choose(request(4), REPLICAS).replica for _ in range(400)]
    assert chosen[0] == "a" and set(chosen) == set(REPLICAS)
    assert chosen.count("a") < 200


def test_requests_that_share_nothing_spread_evenly() -> None:
    router = told()
    chosen = [router.choose(request(10, first), REPLICAS).replica for first in range(100)]
    assert all(20 <= chosen.count(replica) <= 30 for replica in REPLICAS)


def test_a_promise_counts_until_the_second_report() -> None:
    """The first may have been on its way."""
    router = told()
    first = router.choose(request(10, 1), ["a", "b"]).replica
    other = "b" if first == "a" else "a"
    assert router.choose(request(20, 2), ["a", "b"]).replica == other
    router.told(other, load())
    assert router.choose(request(5, 3), ["a", "b"]).replica == first
    router.told(other, load())
    assert router.choose(request(5, 3), ["a", "b"]).replica == other


def test_what_was_never_sent_or_has_ended_does_not_count() -> None:
    router = told()
    route = router.choose(request(10), REPLICAS)
    router.told(route.replica, load())
    for _ in range(2):
        router.ended(route)
    again = router.choose(request(10), REPLICAS)
    assert (again.replica, again.work) == (route.replica, route.work)


def test_a_replica_that_has_reported_nothing_is_like_the_others() -> None:
    router = Router()
    router.told("a", load(pending=1000))
    router.told("b", load(pending=3000))
    chosen = [router.choose(request(20, number), ["b", "new", "a"]).replica for number in range(5)]
    assert chosen == ["a", "new", "a", "b", "new"]


def test_what_is_gone_is_forgotten() -> None:
    router = holding(told(a=load(pending=10_000)), "a", request(4).keys)
    router.forget("a")
    router.told("a", load())
    assert router.choose(request(4), ["a"]).cached == 0
    assert router.held.expected("a") == 0


def test_sessions_and_equal_beginnings_stay_where_nothing_else_tells_replicas_apart() -> None:
    for number in range(20):
        whose = {told().choose(request(4, turn, session=f"s{number}"), REPLICAS).replica for turn in range(5)}
        alike = {told().choose(request(pages, number), REPLICAS).replica for pages in range(1, 6)}
        assert len(whose) == len(alike) == 1
    assert len({told().choose(request(4, session=f"s{number}"), REPLICAS).replica for number in range(40)}) == 4


@given(st.sampled_from(REPLICAS), st.integers(0, 1000))
def test_only_the_sessions_of_a_replica_that_goes_move(gone: str, number: int) -> None:
    one = request(4, session=str(number))
    before = told().choose(one, REPLICAS).replica
    after = told().choose(one, [replica for replica in REPLICAS if replica != gone]).replica
    assert after != gone and (before in (gone, after))


loads = st.builds(ReplicaLoad, *[st.integers(0, 5000)] * 2, *[st.integers(0, 20)] * 2)


@given(st.lists(st.tuples(st.sampled_from(REPLICAS), loads | st.none()), max_size=30), st.data())
def test_more_load_makes_no_replica_chosen(events: list[tuple[str, ReplicaLoad | None]], data: st.DataObject) -> None:
    """Whatever was reported and promised before. None: a request is routed."""
    candidates = data.draw(st.lists(st.sampled_from(REPLICAS), min_size=1, unique=True))
    busier, routers = data.draw(st.sampled_from(candidates)), (Router(), Router())
    last = data.draw(loads)
    for router in routers:
        for place, (replica, reported) in enumerate(events):
            if reported is None:
                router.choose(request(place % 7, place), [replica])
            else:
                router.told(replica, reported)
    routers[0].told(busier, last)
    routers[1].told(busier, replace(last, pending_tokens=last.pending_tokens + 500, waiting=last.waiting + 1))
    before, after = (router.choose(request(5), candidates).replica for router in routers)
    assert before in candidates
    assert after == before or before == busier


# -- what servers know


KEYS = [bytes([number]) * held_prefixes.ROUTING_KEY_BYTES for number in range(8)]
changes = st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(KEYS))))


def test_tenants_have_other_keys_for_the_same_tokens() -> None:
    tokens = list(range(2 * OBJECT_TOKENS))
    keys = [key for salt in (None, "", "a", "b") for key in routing_keys(salt, tokens)]
    assert len(set(keys)) == 8
    assert {len(key) for key in keys} == {held_prefixes.ROUTING_KEY_BYTES}


@given(st.lists(changes, max_size=6), st.integers(0, 6))
def test_a_copy_is_what_the_target_holds(rounds: list[list[tuple[bool, set[RoutingKey]]]], joined: int) -> None:
    """From whenever the server has begun to follow, with changes pending or not."""
    own, held, copies = HeldPrefixes(), set[RoutingKey](), HeldCopies()
    for turn, of_round in enumerate(rounds):
        for added, keys in of_round:
            (own.add if added else own.remove)(keys)
            held = held | keys if added else held - keys
        if turn == joined:
            copies.apply("a", own.whole())
        if (told := own.changes()) is not None and turn >= joined:
            copies.apply("a", told)
        if turn >= joined:
            assert {key for key in KEYS if copies.matched([key]) == {"a": 1}} == held
            assert copies.expected("a") > 0
    assert own.changes() is None


def test_after_a_gap_nothing_is_known_until_all_is_told() -> None:
    copies, own = HeldCopies(), HeldPrefixes()
    assert copies.expected("a") == 0
    copies.apply("a", own.whole())
    own.add(KEYS[:1])
    lost = own.changes()
    own.add(KEYS[1:2])
    late = own.changes()
    assert lost is not None
    assert late is not None
    copies.apply("a", late)
    assert (copies.matched(KEYS[:2]), copies.expected("a")) == ({}, 0)
    copies.apply("a", late)  # not the one that was lost either
    assert copies.matched(KEYS[:2]) == {}
    copies.apply("a", own.whole())
    assert (copies.matched(KEYS[:2]), copies.expected("a")) == ({"a": 2}, 3)


@given(st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(KEYS))), st.sets(st.sampled_from("abcd")))
def test_the_longest_prefix_of_each_replica(held: dict[str, set[RoutingKey]], gone: set[str]) -> None:
    copies = HeldCopies()
    for replica, keys in held.items():
        copies.apply(replica, Held(0, list(keys), whole=True))
    for replica in gone:
        copies.forget(replica)
    there = {replica: keys for replica, keys in held.items() if keys and replica not in gone}
    assert copies.matched(KEYS) == {replica: 1 + max(map(KEYS.index, keys)) for replica, keys in there.items()}


# -- how many targets


PARTS = st.lists(st.floats(0, 8), max_size=64)
COUNTS = st.integers(1, 64)


@pytest.mark.parametrize(
    ("demands", "now", "wanted"),
    [
        ([], 1, 1),
        ([0.0, 0.0], 2, 1),
        ([0.8], 1, 1),
        ([0.81], 1, 2),
        ([3.2], 1, 4),  # requests wait
        ([0.65, 0.65], 2, 2),  # one could not do it
        ([0.35, 0.35], 2, 2),  # one could, but would soon be too few
        ([0.3, 0.3], 2, 1),
        ([0.9, 0.0], 2, 2),  # the second one starts
    ],
)
def test_as_many_as_the_work_fills(demands: list[float], now: int, wanted: int) -> None:
    assert targets_wanted(demands, now) == wanted


@given(PARTS, COUNTS)
def test_what_is_wanted_is_wanted_again(demands: list[float], now: int) -> None:
    """No two numbers follow each other for ever."""
    wanted = targets_wanted(demands, now)
    assert wanted >= 1 and targets_wanted(demands, wanted) == wanted


@given(PARTS, COUNTS)
def test_enough_and_not_far_too_many(demands: list[float], now: int) -> None:
    wanted, work = targets_wanted(demands, now), sum(demands)
    assert work <= (GOAL + 1e-6) * wanted
    assert wanted <= max(1, work / CALM + 1)


@given(PARTS, COUNTS, st.floats(0, 8))
def test_more_work_never_wants_fewer(demands: list[float], now: int, more: float) -> None:
    assert targets_wanted([*demands, more], now) >= targets_wanted(demands, now)
