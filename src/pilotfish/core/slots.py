"""Slots: one token's place in a KV pool. Bookkeeping only; the tensors are in `model/attention.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import EngineError

Slots = NDArray[np.int32]
NO_SLOTS: Slots = np.zeros(0, np.int32)


class SlotPool:
    """A pool of `capacity` slots, numbered from 0, each with a count of owners; one without any is free.

    Invariant, checked on every call that could break it: free ∪ live = all, disjoint.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = np.arange(capacity, dtype=np.int32)[::-1].copy()  # a stack; the first `num_free` count
        self._owners = np.zeros(capacity, np.int32)
        self.num_free = capacity

    def allocate(self, count: int) -> Slots:
        """Take `count` slots, with one owner each; EngineError when fewer are free (callers ask `num_free` first)."""
        if count > self.num_free:
            raise EngineError(f"slots: {count} asked for, {self.num_free} of {self.capacity} free")
        if not count:
            return NO_SLOTS
        self.num_free -= count
        slots = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._owners[slots] = 1
        return slots

    def share(self, slots: Slots) -> None:
        """One more owner for each of these live slots."""
        if not self._owners[slots].all():
            raise EngineError("slots: a free slot cannot be shared")
        self._owners[slots] += 1

    def release(self, slots: Slots | Sequence[int]) -> None:
        """One owner less for each of these slots; EngineError for one that is free already, or is here twice."""
        slots = np.asarray(slots, np.int32)
        if not len(slots):
            return
        owners, every = self._owners[slots], slots.tolist()
        if not owners.all() or len(set(every)) < len(every):
            twice = next(slot for slot in every if not self._owners[slot] or every.count(slot) > 1)
            raise EngineError(f"slots: {twice} released twice")
        self._owners[slots] = owners - 1
        freed = slots[owners == 1]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def check(self, held: Slots | Sequence[int]) -> None:
        """EngineError unless `held` has every slot as often as it has owners."""
        counts = np.bincount(np.asarray(held, np.int32), minlength=self.capacity)
        if not np.array_equal(counts, self._owners):
            raise EngineError(f"slots: {self._owners.sum()} owners are counted, {len(held)} are known")
        free = np.zeros(self.capacity, np.bool_)
        free[self._free[: self.num_free]] = True
        if np.count_nonzero(free) != self.num_free or not np.array_equal(free, self._owners == 0):
            raise EngineError("slots: the free list disagrees with the counts of owners")
