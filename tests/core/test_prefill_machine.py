"""A prefill worker's machine: nothing leaks, nothing is given to the wrong target, whatever comes and in what order."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from handover_world import PLACES, Memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Struct
from msgspec.structs import replace
from sizes import sized

from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.prefill_machine import PrefillLimits, PrefillMachine
from pilotfish.core.prefilling.prefill_messages import (
    MAC_KEY_BYTES,
    MAX_HANDOVERS,
    PREFILL_VERSION,
    Fetch,
    OrderDone,
    OrderFailed,
    PrefillHello,
    PrefillLoad,
    PrefillOrder,
    PrefillRefuse,
    Release,
    Renewal,
    SegmentBytes,
    SegmentGone,
    SegmentReady,
    Taken,
    ToPrefill,
    Welcome,
)
from pilotfish.core.prefilling.prefill_orders import GreetedTarget, OrderEnding, PlacedSegment, TakenOrder
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout, SegmentReference

LEASE, CONTEXT, VOCAB, LAYERS = 10.0, 64, 100, 3
IDENTITY = KVIdentity({"model": "m", "weights": "w"}, KVLayout(LAYERS, 0, 1, [4]))
GREETING = PrefillHello(PREFILL_VERSION, IDENTITY, "target")
WELCOME = Welcome(PREFILL_VERSION, IDENTITY, "model", CONTEXT, bytes(MAC_KEY_BYTES), LEASE, 1 << 12)
LIMITS = PrefillLimits(VOCAB, queued=100, begun=80)
Answer = TypeVar("Answer", bound=Struct)


@dataclass
class Bench:
    """A machine, its places, and what each target was sent."""

    places: Memory = field(default_factory=lambda: Memory(0))
    limits: PrefillLimits = LIMITS
    now: float = 0.0

    def __post_init__(self) -> None:
        keys = iter(range(1, 10_000))
        self.machine = PrefillMachine(WELCOME, self.limits, self.places, lambda: next(keys).to_bytes(MAC_KEY_BYTES))

    def say(self, peer: Peer, *messages: ToPrefill, tenant: str = "", weight: float = 1.0) -> None:
        for message in messages:
            self.machine.receive(peer, message, self.now, tenant, weight)

    def heard(self, peer: Peer, kind: type[Answer]) -> list[Answer]:
        """Messages of a kind to a target, in order; they are taken away."""
        found = [each for each in self.machine.outbox if each.peer == peer and isinstance(each.message, kind)]
        self.machine.outbox = [each for each in self.machine.outbox if each not in found]
        return [each.message for each in found]  # type: ignore[misc]

    def greet(self, *peers: Peer, tenant: str = "", weight: float = 1.0) -> bytes:
        for peer in peers:
            self.say(peer, GREETING, tenant=tenant, weight=weight)
            (welcome,) = self.heard(peer, Welcome)
        return welcome.mac_key

    def export(self, order: TakenOrder, tokens: int, layers: int = LAYERS) -> SegmentReference | None:
        """KV of the next tokens, in the first layers; None where it is not wanted."""
        first = order.first + sum(segment.tokens for segment in order.held.values())
        placed = self.placed(first, tokens, 0, layers, f"{order.peer!r} {order.handover} {order.segments}".encode())
        if not self.machine.segment_ready(order, placed, self.now):
            self.places.free(placed.place)
            return None
        return order.held[order.segments - 1]

    def placed(self, first: int, tokens: int, layer: int, layers: int, data: bytes) -> PlacedSegment:
        place = self.places.take(data)
        assert place is not None
        epoch = self.places.epochs[place]
        return PlacedSegment(first, tokens, layer, layers, place, epoch, len(data), zlib.crc32(data))

    def next_order(self) -> TakenOrder:
        order = self.machine.next_order()
        assert order is not None
        self.machine.started(order, 0, self.now)
        return order


@pytest.fixture
def bench() -> Bench:
    return Bench()


A, B, C = b"a", b"b", b"c"


# -- greetings


def test_a_target_of_the_same_kv_is_welcome_with_a_key_of_its_own(bench: Bench) -> None:
    first, second = bench.greet(A), bench.greet(B)
    assert first != second
    assert bench.greet(A) == first  # its Welcome may have been lost
    assert len(bench.machine.notices) == 2


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (replace(GREETING, version=PREFILL_VERSION + 1), "protocol version: 1, not 2"),
        (replace(GREETING, identity=replace(IDENTITY, facts={"model": "m", "weights": "v"})), "weights: w, not v"),
        (replace(GREETING, identity=replace(IDENTITY, facts={"model": "m"})), "weights: w, not none"),
        (replace(GREETING, identity=replace(IDENTITY, layout=KVLayout(2, 0, 1, [4]))), "layout: 3 layers"),
    ],
    ids=["version", "weights", "lacking", "layout"],
)
def test_another_kv_is_turned_away_with_what_differs(bench: Bench, greeting: PrefillHello, reason: str) -> None:
    bench.say(A, greeting, greeting)
    assert all(reason in away.reason for away in bench.heard(A, PrefillRefuse)) and not bench.heard(A, Welcome)
    assert len(bench.machine.notices) == 1  # a line for the log, not one a second
    bench.say(A, PrefillOrder(1, [1, 2], 0))
    assert "Hello" in bench.heard(A, OrderFailed)[0].reason


def test_a_target_that_becomes_another_one_loses_what_was_held_for_it(bench: Bench) -> None:
    bench.greet(A)
    bench.say(A, PrefillOrder(1, [1, 2], 0))
    bench.export(bench.next_order(), 1)
    bench.say(A, replace(GREETING, identity=replace(IDENTITY, facts={})))
    assert bench.heard(A, PrefillRefuse) and not bench.machine.orders and not bench.places.data
    assert [order.outcome for order in bench.machine.ended] == [OrderEnding.GONE]


def test_a_tenant_has_a_limit_of_targets(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_TARGETS", 2)
    bench.greet(A, B, tenant="one")
    bench.say(C, GREETING, tenant="one")
    assert "there are 2 targets of one" in bench.heard(C, PrefillRefuse)[0].reason
    bench.greet(C, tenant="two")


def test_strangers_are_told_what_they_wait_for(bench: Bench) -> None:
    """And nothing where they do not: a Renewal without an answer has them greet again."""
    key = bench.greet(A)
    bench.say(A, PrefillOrder(1, [1, 2], 0))
    reference = bench.export(bench.next_order(), 2)
    assert reference is not None and reference.authentic(key)
    bench.say(B, PrefillOrder(1, [1], 0), Fetch(reference), Renewal([1]), Taken(1, [0]), Release(1))
    assert [type(each.message) for each in bench.machine.outbox if each.peer == B] == [OrderFailed, SegmentGone]
    assert bench.machine.orders[0].held


# -- orders


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (PrefillOrder(1, [1] * (CONTEXT + 1), 0), f"tokens: {CONTEXT + 1} do not fit into the {CONTEXT}"),
        (PrefillOrder(1, [1, 2], 2), "first: 2 leaves none of 2"),
        (PrefillOrder(1, [1, VOCAB], 0), f"tokens: {VOCAB} is not among the {VOCAB}"),
    ],
)
def test_what_cannot_be_computed_is_refused(bench: Bench, order: PrefillOrder, reason: str) -> None:
    bench.greet(A)
    bench.say(A, order)
    (failed,) = bench.heard(A, OrderFailed)
    assert reason in failed.reason and not failed.busy and not bench.machine.orders
    assert bench.machine.next_order() is None


def test_a_target_that_has_much_waiting_is_told_that_the_worker_is_busy(bench: Bench) -> None:
    """Others are not."""
    bench.greet(A, B)
    bench.say(A, *(PrefillOrder(number, [1] * 40, 0) for number in range(1, 5)))
    failed = bench.heard(A, OrderFailed)
    assert [(each.handover, each.busy) for each in failed] == [(3, True), (4, True)]
    bench.say(B, PrefillOrder(1, [1] * 40, 0))
    assert not bench.heard(B, OrderFailed)


def test_one_order_may_be_longer_than_all_that_may_wait() -> None:
    bench = Bench(limits=PrefillLimits(VOCAB, queued=10, begun=10))
    bench.greet(A)
    bench.say(A, PrefillOrder(1, [1] * 20, 0), PrefillOrder(2, [1], 0))
    assert [each.handover for each in bench.heard(A, OrderFailed)] == [2]
    assert bench.next_order().handover == 1


def test_hand_overs_of_a_target_are_limited(bench: Bench) -> None:
    bench.greet(A)
    target = bench.machine._targets[A]
    bench.say(A, PrefillOrder(MAX_HANDOVERS + 5, [1], 0))
    target.orders.update(dict.fromkeys(range(1, MAX_HANDOVERS), bench.machine.orders[0]))
    bench.say(A, PrefillOrder(MAX_HANDOVERS + 6, [1], 0))
    assert bench.heard(A, OrderFailed)[0].busy


def test_an_order_that_comes_again_is_one_order(bench: Bench) -> None:
    bench.greet(A)
    bench.say(A, PrefillOrder(1, [1, 2], 0), PrefillOrder(1, [3], 0))
    assert list(bench.next_order().tokens) == [1, 2] and bench.machine.next_order() is None


def served(bench: Bench, count: int) -> list[Peer]:
    """Whose orders have their turn, with none begun before it ends."""
    peers = []
    for _ in range(count):
        order = bench.next_order()
        peers.append(order.peer)
        bench.say(order.peer, Release(order.handover))
    return peers


def test_targets_take_turns(bench: Bench) -> None:
    bench.greet(A, B, C)
    bench.say(A, *(PrefillOrder(number, [1] * 10, 0) for number in range(1, 9)))
    bench.say(B, *(PrefillOrder(number, [1] * 10, 0) for number in range(1, 4)))
    bench.say(C, PrefillOrder(1, [1] * 40, 0), PrefillOrder(2, [1] * 10, 0))
    assert served(bench, 12) == [A, B, C, A, B, A, B, A, A, C, A, A]  # until C's 40 tokens are made up for


def test_tenants_have_shares_by_weight(bench: Bench) -> None:
    bench.greet(A, tenant="x", weight=3.0)
    bench.greet(B, tenant="y")
    for peer in (A, B):
        bench.say(peer, *(PrefillOrder(number, [1] * 6, 0) for number in range(1, 17)))
    turns = served(bench, 16)
    assert turns.count(A) == 12


def test_who_was_idle_has_saved_nothing_up(bench: Bench) -> None:
    bench.greet(A, B)
    bench.say(A, *(PrefillOrder(number, [1] * 10, 0) for number in range(1, 10)))
    assert served(bench, 5) == [A] * 5
    bench.say(B, *(PrefillOrder(number, [1] * 10, 0) for number in range(1, 5)))
    assert served(bench, 4).count(B) == 2


def test_a_target_that_takes_nothing_does_not_get_all_slots(bench: Bench) -> None:
    bench.greet(A, B)
    bench.say(A, PrefillOrder(1, [1] * 50, 0), PrefillOrder(2, [1] * 40, 0))
    assert bench.next_order().handover == 1
    assert bench.machine.next_order() is None  # 80 may be begun
    bench.say(B, PrefillOrder(1, [1] * 60, 0))
    assert bench.next_order().peer == B
    bench.say(A, Release(1))
    assert bench.next_order().handover == 2


# -- segments


def begun(bench: Bench, tokens: int = 4, first: int = 0, handover: int = 1, peer: Peer = A) -> TakenOrder:
    bench.greet(peer)
    bench.say(peer, PrefillOrder(handover, [1] * tokens, first))
    return bench.next_order()


def test_the_last_segment_is_followed_by_done(bench: Bench) -> None:
    bench.now = 1.0
    bench.greet(A)
    bench.say(A, PrefillOrder(1, [1] * 6, 2))
    bench.now = 3.0
    order = bench.machine.next_order()
    assert order is not None
    bench.machine.started(order, 3, bench.now)
    bench.now = 7.5
    bench.machine.advanced(order, 6, bench.now)
    for layer, layers in ((0, 2), (2, 1)):
        assert not bench.heard(A, OrderDone)
        assert bench.machine.segment_ready(order, bench.placed(2, 4, layer, layers, b"kv"), bench.now)
    ready = [message.reference for message in bench.heard(A, SegmentReady)]
    assert [(r.number, r.first, r.tokens, r.layer, r.layers) for r in ready] == [(0, 2, 4, 0, 2), (1, 2, 4, 2, 1)]
    assert bench.heard(A, OrderDone) == [OrderDone(1, segments=2, cached=3, queued=2.0, computing=4.5)]
    bench.say(A, Taken(1, [0]))
    assert bench.machine.orders
    bench.say(A, Taken(1, [1]))
    assert not bench.machine.orders and not bench.places.data
    assert [(o.outcome, o.ended, o.size) for o in bench.machine.ended] == [(OrderEnding.RELEASED, 7.5, 4)]


CHANGES: list[dict[str, Any]] = [
    *({name: 7} for name in ("epoch", "handover", "number", "first", "tokens", "layer", "layers", "place", "size")),
    *({"place": 1 << 20}, {"layout": bytes(16)}, {"content": 1}, {"mac": bytes(16)}),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_forged_reference_brings_nothing(bench: Bench, change: dict[str, Any]) -> None:
    reference = bench.export(begun(bench), 2)
    assert reference is not None
    bench.say(A, Fetch(replace(reference, **change)))
    (gone,) = bench.heard(A, SegmentGone)
    assert gone.reason == "the reference was not given to this target" and not bench.heard(A, SegmentBytes)


def test_a_segment_is_fetched_once(bench: Bench) -> None:
    reference = bench.export(begun(bench), 2)
    assert reference is not None
    bench.say(A, Fetch(reference), Fetch(reference))
    assert [bytes(each.data) for each in bench.heard(A, SegmentBytes)] == [b"b'a' 1 0"]
    assert [each.number for each in bench.heard(A, SegmentGone)] == [0]


def test_a_reference_with_the_mac_of_its_holder_brings_no_other_place(bench: Bench) -> None:
    """A target has its own key: it may sign what it likes."""
    order, key = begun(bench), bench.greet(A)
    mine, other = bench.export(order, 2), bench.export(begun(bench, peer=B), 2)
    assert mine is not None and other is not None
    for change in ({"place": other.place}, {"epoch": 3}, {"number": 5}, {"handover": 9}, {"place": 1 << 20}):
        bench.say(A, Fetch(replace(mine, **change).signed(key)))
    bench.say(A, Fetch(replace(other, handover=1).signed(key)), Fetch(other))
    assert len(bench.heard(A, SegmentGone)) == 7 and not bench.heard(A, SegmentBytes)


def test_a_place_that_holds_something_else_by_now_brings_nothing(bench: Bench) -> None:
    reference = bench.export(begun(bench), 2)
    bench.say(A, Release(1), PrefillOrder(1, [2] * 4, 0))
    again = bench.export(bench.next_order(), 2)
    assert reference is not None and again is not None and again.place == reference.place
    bench.say(A, Fetch(reference))
    assert bench.heard(A, SegmentGone) and not bench.heard(A, SegmentBytes)


# -- leases


def test_a_lease_lives_as_long_as_it_is_renewed(bench: Bench) -> None:
    first = begun(bench)
    bench.say(A, PrefillOrder(2, [1] * 4, 0))
    second = bench.next_order()
    for _ in range(4):
        bench.now += LEASE * 0.6
        bench.say(A, Renewal([1, 77]))
        bench.machine.tick(bench.now)
    assert (first.outcome, second.outcome) == ("", OrderEnding.EXPIRED)
    loads = bench.heard(A, PrefillLoad)
    assert [load.leases for load in loads] == [2, 2, 1, 1]


def test_segments_that_are_not_taken_end_their_order(bench: Bench) -> None:
    """Though it is renewed: others want the memory."""
    order = begun(bench)
    bench.export(order, 2)
    for _ in range(3):
        bench.now += LEASE * 0.5
        bench.say(A, Renewal([1]))
        bench.machine.tick(bench.now)
    assert order.outcome == OrderEnding.FAILED and "not taken" in bench.heard(A, OrderFailed)[0].reason
    assert not bench.places.data


def test_the_load_says_what_is_to_be_computed(bench: Bench) -> None:
    order = begun(bench, tokens=10)
    bench.say(A, PrefillOrder(2, [1] * 20, 0))
    bench.machine.advanced(order, 4, bench.now)
    bench.machine.computed(100, 0.2)
    bench.machine.computed(5, 9.0)  # of few tokens most of a forward goes to something else
    bench.machine.free_slots = 55
    bench.say(A, Renewal([1, 2]))
    assert bench.heard(A, PrefillLoad) == [PrefillLoad(queued_tokens=26, free_slots=55, token_ms=2.0, leases=2)]


def test_at_the_end_targets_are_told(bench: Bench) -> None:
    begun(bench)
    begun(bench, peer=B)
    bench.machine.close(bench.now)
    assert bench.heard(A, OrderFailed) and bench.heard(B, OrderFailed) and not bench.machine.orders


# -- anything, in any order


class Anything(RuleBasedStateMachine):
    """Targets that order, take, fetch, forge, release and fall silent while a worker computes and exports."""

    peers = st.sampled_from([A, B, C])
    handovers = st.integers(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.keys: dict[Peer, set[bytes]] = {peer: set() for peer in (A, B, C)}
        self.given: list[tuple[Peer, SegmentReference]] = []
        self.fetched: set[tuple[Peer, bytes]] = set()
        self.begun: list[TakenOrder] = []

    @initialize()
    def greet_some(self) -> None:
        self.greet(A)
        self.greet(B)

    @rule(peer=peers)
    def greet(self, peer: Peer) -> None:
        self.keys[peer].add(self.bench.greet(peer))

    @rule(peer=peers, handover=handovers, tokens=st.integers(1, 40), first=st.integers(0, 10))
    def order(self, peer: Peer, handover: int, tokens: int, first: int) -> None:
        self.bench.say(peer, PrefillOrder(handover, [1] * tokens, first))

    @rule()
    def begin(self) -> None:
        order = self.bench.machine.next_order()
        if order is not None:
            assert order.live and order not in self.begun
            self.bench.machine.started(order, 0, self.bench.now)
            self.begun.append(order)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        """The next tokens of an order, in all layers."""
        order = data.draw(st.sampled_from(self.begun))
        left = order.unsent // LAYERS
        if not left or len(self.bench.places.data) == PLACES:
            return
        count = data.draw(st.integers(1, left))
        secret = f"{order.peer!r} {order.handover} {order.segments} {id(order)}".encode()
        placed = self.bench.placed(len(order.tokens) - left, count, 0, LAYERS, secret)
        if not self.bench.machine.segment_ready(order, placed, self.bench.now):
            assert not order.live
            self.bench.places.free(placed.place)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), peer=peers, forged=st.booleans())
    def fetch(self, data: st.DataObject, peer: Peer, forged: bool) -> None:
        _, reference = data.draw(st.sampled_from(self.given))
        if forged:
            change = data.draw(st.sampled_from(CHANGES))
            reference = replace(reference, **change).signed(
                data.draw(st.sampled_from(sorted(self.keys[peer]) or [b""]))
            )
        self.bench.say(peer, Fetch(reference))

    @precondition(lambda self: self.given)
    @rule(data=st.data(), peer=peers)
    def take(self, data: st.DataObject, peer: Peer) -> None:
        _, reference = data.draw(st.sampled_from(self.given))
        self.bench.say(peer, Taken(reference.handover, [reference.number, reference.number + 1]))

    @rule(peer=peers, handover=handovers)
    def release(self, peer: Peer, handover: int) -> None:
        self.bench.say(peer, Release(handover))

    @rule(peer=peers, handovers=st.lists(handovers))
    def renew(self, peer: Peer, handovers: list[int]) -> None:
        self.bench.say(peer, Renewal(handovers))

    @rule(seconds=st.sampled_from([0.1, LEASE / 2, LEASE, 3 * LEASE]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.machine.tick(self.bench.now)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.bench.machine.fail(data.draw(st.sampled_from(self.begun)), "a forward failed", self.bench.now)

    @invariant()
    def everybody_hears_what_is_his(self) -> None:
        for peer, message in ((each.peer, each.message) for each in self.bench.machine.outbox):
            if isinstance(message, SegmentReady):
                keys = self.keys[peer]
                assert any(message.reference.authentic(key) for key in keys)
                self.given.append((peer, message.reference))
            elif isinstance(message, SegmentBytes):
                data = bytes(message.data)
                assert data.startswith(f"{peer!r} {message.handover} {message.number} ".encode())
                assert (peer, data) not in self.fetched
                self.fetched.add((peer, data))
        self.bench.machine.outbox.clear()

    @invariant()
    def places_are_held_once(self) -> None:
        held = [reference.place for order in self.bench.machine.orders for reference in order.held.values()]
        assert sorted(held) == sorted(self.bench.places.data)

    @invariant()
    def what_has_ended_holds_nothing(self) -> None:
        for order in self.bench.machine.ended:
            assert order.outcome and order.ended is not None and not order.held
            assert order not in self.bench.machine.orders
        self.bench.machine.ended.clear()

    @invariant()
    def queues_are_bounded(self) -> None:
        for target in self.bench.machine._targets.values():
            assert len(target.waiting) <= 1 or target.queued <= LIMITS.queued
            assert all(order.live and order.handover in target.orders for order in target.waiting)
            assert len(_begun(target)) <= 1 or sum(len(order.tokens) for order in _begun(target)) <= LIMITS.begun

    def teardown(self) -> None:
        """In silence all of it is free after a while."""
        for _ in range(3):
            self.bench.now += LEASE + 1
            self.bench.machine.tick(self.bench.now)
        assert not self.bench.machine.orders and not self.bench.machine._targets
        assert not self.bench.places.data


def _begun(target: GreetedTarget) -> list[TakenOrder]:
    waiting: Iterable[TakenOrder] = target.waiting
    return [order for order in target.orders.values() if order.unsent and order not in waiting]


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=sized(25, 100), stateful_step_count=40)
