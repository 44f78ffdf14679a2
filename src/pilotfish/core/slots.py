"""Slots: one token's place in a KV pool. Bookkeeping only; the tensors are in `model/attention.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pilotfish.errors import EngineError


class SlotPool:
    """A pool of `capacity` slots, numbered from 0, each either free or live.

    Invariant, checked on every call that could break it: free ∪ live = all, disjoint.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * capacity

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots; EngineError when fewer are free (callers ask `num_free` first)."""
        if count > len(self._free):
            raise EngineError(f"slots: {count} asked for, {len(self._free)} of {self.capacity} free")
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._is_free[slot] = 0
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back; EngineError for one that is free already."""
        for slot in slots:
            if self._is_free[slot]:
                raise EngineError(f"slots: {slot} released twice")
            self._is_free[slot] = 1
            self._free.append(slot)

    def check(self, live: Sequence[int]) -> None:
        """EngineError unless `live` are exactly the slots that are not free."""
        if len(set(live)) != len(live):
            raise EngineError("slots: one slot has two owners")
        if {s for s in range(self.capacity) if not self._is_free[s]} != set(live):
            raise EngineError(f"slots: {self.capacity - self.num_free} live, {len(live)} have an owner")
        if len(self._free) != sum(self._is_free):
            raise EngineError("slots: the free list disagrees with the flags")
