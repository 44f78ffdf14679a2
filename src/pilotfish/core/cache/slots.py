"""Slots: one token's place in a KV pool. Bookkeeping only; the tensors are in `model/attention.py`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import EngineError

Slots = NDArray[np.int32]
NO_SLOTS: Slots = np.zeros(0, np.int32)
GONE = -1  # in place of a slot that was given back


def present(slots: Slots) -> Slots:
    there: Slots = slots[slots != GONE]
    return there


class SlotPool:
    """Slots, numbered from 0, with counts of owners. One without owners is free, or idle: kept by a prefix cache.
    Invariant, checked on every call that could break it: free ∪ idle ∪ live = all, disjoint."""

    def __init__(self, capacity: int, window: int = 0) -> None:
        """A row sees the last `window` positions, its own included, in every layer; 0: some layer sees all."""
        self.capacity = capacity
        self.window = window
        self._free = np.arange(capacity, dtype=np.int32)[::-1].copy()  # a stack; the first `num_free` count
        self._owners = np.zeros(capacity, np.int32)
        self._kept = np.zeros(capacity, np.bool_)  # by a cache, beside or after its owners
        self.num_free = capacity
        self.num_idle = 0

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_idle

    def first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) if self.window else 0

    def allocate(self, count: int) -> Slots:
        """Take `count` slots, with one owner each; EngineError when fewer are free."""
        if count > self.num_free:
            raise EngineError(f"slots: {count} asked for, {self.num_free} of {self.capacity} free")
        self.num_free -= count
        slots = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._owners[slots] = 1
        return slots

    def share(self, slots: Slots) -> None:
        owners = self._owners[slots]
        if not (owners.all() or self._kept[slots[owners == 0]].all()):
            raise EngineError("slots: a free slot cannot be shared")
        self.num_idle -= len(slots) - int(np.count_nonzero(owners))
        self._owners[slots] = owners + 1

    def release(self, slots: Slots | Sequence[int]) -> None:
        """Remove one owner of each slot; EngineError for a slot without one, or given twice."""
        slots = np.asarray(slots, np.int32)
        if not len(slots):
            return
        owners, every = self._owners[slots], slots.tolist()
        if not owners.all() or len(set(every)) < len(every):
            twice = next(slot for slot in every if not self._owners[slot] or every.count(slot) > 1)
            raise EngineError(f"slots: {twice} released twice")
        self._owners[slots] = owners - 1
        left = slots[owners == 1]
        freed = left[~self._kept[left]]
        self.num_idle += len(left) - len(freed)
        self._push(freed)

    def keep(self, slots: Slots) -> None:
        if not self._owners[slots].all() or self._kept[slots].any():
            raise EngineError("slots: what is kept must be live, and not be kept already")
        self._kept[slots] = True

    def drop(self, slots: Slots) -> None:
        if not self._kept[slots].all():
            raise EngineError("slots: what is not kept cannot be dropped")
        self._kept[slots] = False
        idle = slots[self._owners[slots] == 0]
        self.num_idle -= len(idle)
        self._push(idle)

    def owned(self, slots: Slots) -> int:
        return int(np.count_nonzero(self._owners[slots]))

    def unowned(self, slots: Slots) -> NDArray[np.bool_]:
        return np.equal(self._owners[slots], 0)

    def _push(self, freed: Slots) -> None:
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def check(self, held: Slots | Sequence[int], kept: Slots | Sequence[int] = ()) -> None:
        """EngineError unless `held` has every slot once per owner, and `kept` exactly the kept ones."""
        counts = np.bincount(np.asarray(held, np.int32), minlength=self.capacity)
        if not np.array_equal(counts, self._owners):
            raise EngineError(f"slots: {self._owners.sum()} owners are counted, {len(held)} are known")
        if not np.array_equal(np.bincount(np.asarray(kept, np.int32), minlength=self.capacity), self._kept):
            raise EngineError(f"slots: {self._kept.sum()} are kept, {len(kept)} are known")
        free, unused = np.zeros(self.capacity, np.bool_), self._owners == 0
        free[self._free[: self.num_free]] = True
        if np.count_nonzero(free) != self.num_free or not np.array_equal(free, unused & ~self._kept):
            raise EngineError("slots: the free list disagrees with the counts of owners")
        if self.num_idle != np.count_nonzero(unused & self._kept):
            raise EngineError(f"slots: {self.num_idle} idle ones are counted wrong")
