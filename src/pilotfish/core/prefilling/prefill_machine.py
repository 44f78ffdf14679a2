"""The prefill worker's half of the hand-over protocol: targets that greet, and their orders.

    PrefillHello ──► Welcome, or PrefillRefuse     Renewal ──► leases live; PrefillLoad
    PrefillOrder ──► a queue ──► next_order ──► the caller computes it: started, advanced
                     the caller exports it: segment_ready ──► SegmentReady, and after the last one OrderDone
    Fetch ──► SegmentBytes, once                Taken, Release, the end of a lease ──► places are free

The machine has no model, socket or clock: `workers/` owns those.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pilotfish.core.peers.fields import MAX_TEXT, Peer
from pilotfish.core.peers.peer import Listener
from pilotfish.core.prefilling import prefill_messages as messages
from pilotfish.core.prefilling.prefill_orders import OrderEnding, OrderingTarget, PlacedSegment, TakenOrder
from pilotfish.core.prefilling.segments import SegmentReference

FORGOTTEN = 2  # leases of silence after which a target is forgotten
MAX_REASONS = 64  # reasons to turn targets away that are logged, each once
#: Tokens of a forward from which a token's time is learned, and the learning rate.
MEASURED, RATE = 64, 0.2


class SegmentPlaces(Protocol):
    def view(self, reference: SegmentReference) -> memoryview | None:
        """The segment's bytes; None if they are gone."""

    def free(self, place: int) -> None:
        """References to the place are void from now on."""


@dataclass(frozen=True)
class PrefillLimits:
    vocab_size: int
    queued: int  # tokens of one target's orders that may wait, one order apart
    begun: int  # tokens of one target's orders that may hold slots, one order apart


class PrefillMachine(Listener[OrderingTarget]):
    """Ended orders are appended to `ended`."""

    def __init__(
        self, welcome: messages.Welcome, limits: PrefillLimits, places: SegmentPlaces, new_key: Callable[[], bytes]
    ) -> None:
        """`welcome` is told to each target, with a key for MACs of its own from `new_key`."""
        super().__init__()
        self.welcome = welcome
        self.ended: list[TakenOrder] = []
        self.free_slots = 0
        self.token_seconds = 0.0  # that KV of a token lately took; 0 before any was measured
        self._limits = limits
        self._places = places
        self._new_key = new_key
        self._layout = welcome.identity.layout.digest()
        self._layers = welcome.identity.layout.layers
        self._last_turn = 0.0  # of the target whose turn came last
        self._reasons: set[str] = set()

    @property
    def orders(self) -> list[TakenOrder]:
        return [order for target in self._targets.values() for order in target.orders.values()]

    def tick(self, now: float) -> None:
        for order in self.orders:
            if now > order.expires:
                self._end(order, OrderEnding.EXPIRED, now)
            elif order.held and now - order.moved > self.welcome.lease:
                self.fail(order, "its segments were not taken in time", now)
        for peer, target in list(self._targets.items()):
            if now - target.heard > FORGOTTEN * self.welcome.lease:
                self._forget(peer, now)

    def close(self, now: float) -> None:
        for order in self.orders:
            self.fail(order, "the worker ends", now)

    def _forget(self, peer: Peer, now: float) -> None:
        for order in list(self._targets[peer].orders.values()):
            self._end(order, OrderEnding.GONE, now)
        del self._targets[peer]

    def _end(self, order: TakenOrder, outcome: OrderEnding, now: float) -> None:
        target = self._targets[order.peer]
        del target.orders[order.handover]
        if order in target.waiting:
            target.waiting.remove(order)
        for reference in order.held.values():
            self._places.free(reference.place)
        order.held.clear()
        order.outcome, order.ended = outcome, now
        self.ended.append(order)

    # -- messages

    def receive(
        self, peer: Peer, message: messages.ToPrefill, now: float, tenant: str = "", weight: float = 1.0
    ) -> None:
        target = self._targets.get(peer)
        if isinstance(message, messages.PrefillHello):
            self._greet(peer, message, OrderingTarget(tenant, now, weight, self._new_key()))
            return
        if target is None:
            self._answer_stranger(peer, message)
            return
        target.heard = now
        match message:
            case messages.Renewal():
                self._renew(peer, target, message, now)
            case messages.PrefillOrder():
                self._order(peer, target, message, now)
            case messages.Fetch():
                self._fetch(peer, target, message.reference, now)
            case messages.Taken():
                self._taken(target, message, now)
            case messages.Release():
                if (order := target.orders.get(message.handover)) is not None:
                    self._end(order, OrderEnding.RELEASED, now)

    def malformed(self, peer: Peer, reason: str) -> None:
        self._count_malformed(peer, reason)

    def _greet(self, peer: Peer, greeting: messages.PrefillHello, new: OrderingTarget) -> None:
        """A known target stays who it was: its Welcome may have been lost."""
        known = self._targets.get(peer)
        reason = self._mismatch(greeting) or (self._too_many(new.tenant) if known is None else None)
        if reason is not None:
            if known is not None:
                self._forget(peer, new.heard)
            self._turn_away(peer, reason)
            return
        if known is None:
            self._targets[peer] = known = new
            self._note(logging.INFO, f"a target of {greeting.model} has come")
        known.heard = new.heard
        self._send(peer, replace(self.welcome, mac_key=known.mac_key))

    def _mismatch(self, greeting: messages.PrefillHello) -> str | None:
        if greeting.version != messages.PREFILL_VERSION:
            return f"protocol version: {messages.PREFILL_VERSION}, not {greeting.version}"
        return self.welcome.identity.difference(greeting.identity)

    def _turn_away(self, peer: Peer, reason: str) -> None:
        self._send(peer, messages.PrefillRefuse(reason[:MAX_TEXT]))
        if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
            self._note(logging.WARNING, f"turned a target away: {reason}")

    def _answer_stranger(self, peer: Peer, message: messages.ToPrefill) -> None:
        """It greets again once its Renewals have had no answer."""
        if isinstance(message, messages.PrefillOrder):
            self._send(peer, messages.OrderFailed(message.handover, "no Hello came before"))
        elif isinstance(message, messages.Fetch):
            self._gone(peer, message.reference, "no Hello came before")

    def _renew(self, peer: Peer, target: OrderingTarget, renewal: messages.Renewal, now: float) -> None:
        for number in renewal.handovers:
            if (order := target.orders.get(number)) is not None:
                order.expires = now + self.welcome.lease
        self._send(peer, self.load())

    def load(self) -> messages.PrefillLoad:
        orders = self.orders
        pending = sum(order.pending for order in orders if order.unsent)
        return messages.PrefillLoad(
            min(pending, (1 << 31) - 1), self.free_slots, 1000 * self.token_seconds, len(orders)
        )

    # -- orders

    def _order(self, peer: Peer, target: OrderingTarget, message: messages.PrefillOrder, now: float) -> None:
        if message.handover in target.orders:
            return
        reason = self._unservable(message)
        busy = None if reason else self._saturated(target, message)
        if reason or busy:
            self._send(peer, messages.OrderFailed(message.handover, reason or busy or "", busy=busy is not None))
            return
        digest = "" if message.salt is None else message.salt.hex()
        salt = f"{target.tenant} {digest}" if target.tenant or digest else None
        order = TakenOrder(peer, message, salt, self._layers, now, now + self.welcome.lease)
        target.orders[message.handover] = order
        if not target.waiting:
            target.clock = max(target.clock, self._last_turn)
        target.waiting.append(order)

    def _unservable(self, message: messages.PrefillOrder) -> str | None:
        count, context = len(message.tokens), self.welcome.context
        if count > context:
            return f"tokens: {count} do not fit into the {context} that the worker has"
        if message.first >= count:
            return f"first: {message.first} leaves none of {count} tokens"
        if (most := max(message.tokens)) >= self._limits.vocab_size:
            return f"tokens: {most} is not among the {self._limits.vocab_size} that the model has"
        return None

    def _saturated(self, target: OrderingTarget, message: messages.PrefillOrder) -> str | None:
        if len(target.orders) >= messages.MAX_HANDOVERS:
            return f"{messages.MAX_HANDOVERS} hand-overs are held already"
        queued = target.queued
        if queued and queued + len(message.tokens) > self._limits.queued:
            return f"{queued} tokens wait already"
        return None

    def next_order(self) -> TakenOrder | None:
        """Targets take turns by tokens over weight: the one with least is next. Idle ones save nothing up. Passes over
        a target whose orders hold many slots: it may not take its segments."""
        target = min(filter(self._may_begin, self._targets.values()), key=lambda one: one.clock, default=None)
        if target is None:
            return None
        order = target.waiting.popleft()
        self._last_turn = target.clock
        target.clock += len(order.tokens) / target.weight
        return order

    def _may_begin(self, target: OrderingTarget) -> bool:
        if not target.waiting:
            return False
        begun = target.begun
        return not begun or begun + len(target.waiting[0].tokens) <= self._limits.begun

    def started(self, order: TakenOrder, cached: int, now: float) -> None:
        order.started, order.cached = now, cached
        order.pending -= cached

    def advanced(self, order: TakenOrder, reached: int, now: float) -> None:
        """KV of its first `reached` tokens is there, or was before it had to be computed again."""
        order.pending = min(order.pending, len(order.tokens) - reached)
        if not order.pending:
            order.computed = now

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= MEASURED or not self.token_seconds:
            taken = seconds / tokens
            self.token_seconds += (RATE if self.token_seconds else 1.0) * (taken - self.token_seconds)

    def fail(self, order: TakenOrder, reason: str, now: float) -> None:
        if order.live:
            self._send(order.peer, messages.OrderFailed(order.handover, reason[:MAX_TEXT]))
            self._end(order, OrderEnding.FAILED, now)

    # -- segments

    def segment_ready(self, order: TakenOrder, placed: PlacedSegment, now: float) -> bool:
        """Tell the target of a segment. False if the order has ended: the place is then still the caller's."""
        if not order.live:
            return False
        reference = SegmentReference(
            **vars(placed), handover=order.handover, sequence=order.sequence, number=order.segments, layout=self._layout
        ).signed(self._targets[order.peer].mac_key)
        order.held[order.segments] = reference
        order.segments += 1
        order.size += placed.size
        order.unsent -= placed.tokens * placed.layers
        order.moved = now
        self._send(order.peer, messages.SegmentReady(reference))
        if not order.unsent:
            self._done(order, now)
        return True

    def _done(self, order: TakenOrder, now: float) -> None:
        started = now if order.started is None else order.started
        computing = (now if order.computed is None else order.computed) - started
        queued = started - order.ordered
        self._send(order.peer, messages.OrderDone(order.handover, order.segments, order.cached, queued, computing))

    def _fetch(self, peer: Peer, target: OrderingTarget, reference: SegmentReference, now: float) -> None:
        found = self._found(target, reference)
        if isinstance(found, str):
            self._gone(peer, reference, found)
        else:
            order = target.orders[reference.handover]
            order.fetched.add(reference.number)
            order.moved = now
            self._send(peer, messages.SegmentBytes(reference.handover, reference.number, found))

    def _found(self, target: OrderingTarget, reference: SegmentReference) -> memoryview | str:
        if not reference.authentic(target.mac_key):
            return "the reference was not given to this target"
        order = target.orders.get(reference.handover)
        if order is None:
            return "the hand-over has ended"
        if order.held.get(reference.number) != reference or reference.number in order.fetched:
            return "it was taken already"
        data = self._places.view(reference)
        return "its memory is another one's" if data is None else data

    def _gone(self, peer: Peer, reference: SegmentReference, reason: str) -> None:
        self._send(peer, messages.SegmentGone(reference.handover, reference.number, reason))

    def _taken(self, target: OrderingTarget, message: messages.Taken, now: float) -> None:
        order = target.orders.get(message.handover)
        if order is None:
            return
        for number in message.numbers:
            if (reference := order.held.pop(number, None)) is not None:
                self._places.free(reference.place)
                order.moved = now
        if not order.held and not order.unsent:
            self._end(order, OrderEnding.RELEASED, now)
