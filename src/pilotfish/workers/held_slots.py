"""Slots that a prefill worker holds for its exporter, beside those that running requests own."""

from __future__ import annotations

from collections import Counter

from pilotfish.core.cache.slots import SlotPool, Slots
from pilotfish.core.prefilling.prefill_orders import TakenOrder


class HeldSlots:
    """By order: what is to be exported stays as it is, though its request has ended. What an order has lost is read in
    vain at worst: a segment of it is given to nobody."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._held: dict[TakenOrder, list[Slots]] = {}
        self._out: Counter[TakenOrder] = Counter()  # exports that are under way

    @property
    def slots(self) -> list[int]:
        """All, as often as they are held."""
        return [slot for held in self._held.values() for slots in held for slot in slots.tolist()]

    def export(self, order: TakenOrder, slots: Slots) -> None:
        self._hold(order, slots)
        self._out[order] += 1

    def exported(self, order: TakenOrder) -> None:
        if order in self._held:
            self._out[order] -= 1

    def hold_path(self, order: TakenOrder, slots: Slots) -> None:
        """Of all tokens of a request that has ended, where the cache has them: what is above slots that are held must
        be held too, or it would count as slots that can be had."""
        if self._out[order]:
            self._hold(order, slots)

    def let_go(self, order: TakenOrder) -> None:
        for slots in self._held.pop(order, ()):
            self._pool.release(slots)
        del self._out[order]

    def done(self) -> list[TakenOrder]:
        return [order for order in self._held if not self._out[order] or not order.live]

    def _hold(self, order: TakenOrder, slots: Slots) -> None:
        self._pool.share(slots)
        self._held.setdefault(order, []).append(slots)
