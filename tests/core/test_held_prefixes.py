"""What servers know of targets' prefixes: what the targets said, no more after a gap, and never another tenant's."""

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import (
    ROUTING_KEY_BYTES,
    Held,
    HeldCopies,
    HeldPrefixes,
    RoutingKey,
    routing_keys,
)

KEYS = [bytes([number]) * ROUTING_KEY_BYTES for number in range(8)]
changes = st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(KEYS))))


def test_tenants_have_other_keys_for_the_same_tokens() -> None:
    tokens = list(range(2 * OBJECT_TOKENS))
    keys = [key for salt in (None, "", "a", "b") for key in routing_keys(salt, tokens)]
    assert len(set(keys)) == 8
    assert {len(key) for key in keys} == {ROUTING_KEY_BYTES}


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
