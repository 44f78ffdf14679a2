"""Tiers of KV below a pool: host memory, then disk. Implements `core.cache.tiers.Tiers` with two threads.

    scheduler's thread      copying                         disk
    save ─────────────────► read slots, checksum ─► host ─► write what host evicts
    load ─────────────────► verify, write slots ◄────────── read
    poll ◄── what came

A slot is written only under the lock of its load, and never after the load was ended: others may have the slots then.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, root_key
from pilotfish.core.cache.slots import Slots
from pilotfish.core.cache.tiers import DISK, HOST, KVLoad, TierCounts, TierUse
from pilotfish.core.scheduling.calibration import RecentMean
from pilotfish.core.trees.tree import Ints
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.lanes import IDLE, URGENT, Lane
from pilotfish.kv.objects import Damage, KVObject

#: Objects that wait to be saved, and bytes of those that wait for the disk; more are given up.
MAX_SAVING, MAX_UNWRITTEN = 256, 256 << 20
STUCK = 1.0  # seconds after which a call of the disk counts as hung
#: A load ends after so many times the seconds that computing would take, but not before `LEAST`.
PATIENCE, LEAST = 2.0, 0.1
STALE = 10.0  # seconds after which a disk that was too slow to be used is measured again
WAIT = 0.002  # seconds that `wait` waits
RATE = 0.2  # share that the last one has in the mean seconds of a kind
FLUSH = 10.0  # seconds that closing may take


class SlotCopier(Protocol):
    object_bytes: int

    def read(self, slots: Slots) -> NDArray[np.uint8]:
        """slots [OBJECT_TOKENS] -> [object_bytes]"""

    def write(self, slots: Slots, data: NDArray[np.uint8]) -> None:
        """The object's last tokens into so many slots. data [object_bytes]"""


class HostStore(OrderedDict[Key, KVObject]):
    """Objects in host memory, used longest ago first, and evicted so. Not safe for threads: `KVTiers` has a lock around
    it."""

    def __init__(self, capacity_bytes: int, object_bytes: int) -> None:
        super().__init__()
        self.most = capacity_bytes // object_bytes
        self.evicted = 0

    def use(self, key: Key) -> KVObject | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def put(self, kv: KVObject) -> list[KVObject]:
        self[kv.key] = kv
        self.move_to_end(kv.key)
        evicted = [self.popitem(last=False)[1] for _ in range(len(self) - self.most)]
        self.evicted += len(evicted)
        return evicted


@dataclass(eq=False)
class Transfer:
    load: KVLoad
    began: float
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    came_from: dict[int, str] = field(default_factory=dict)  # objects that are in their slots
    failed: int = 1 << 31  # the first that is not to be had
    ended: bool = False

    @property
    def settled(self) -> bool:
        return self.contiguous >= min(self.failed, len(self.load.keys))

    @property
    def contiguous(self) -> int:
        return next((place for place in range(len(self.load.keys)) if place not in self.came_from), len(self.load.keys))


@dataclass(eq=False)
class Saving:
    key: Key
    tokens: Ints  # [OBJECT_TOKENS]
    slots: Slots  # [OBJECT_TOKENS]


class KVTiers:
    """Public methods are for the scheduler's thread; others name theirs."""

    def __init__(
        self,
        copier: SlotCopier,
        num_slots: int,
        shape: bytes,
        host: HostStore,  # without room where there is no such tier
        disk: DiskStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shape` is a digest of all that shapes KV: objects of another are not found. Closes `disk`."""
        self.counts = TierCounts()
        self._copier, self._shape, self._host, self.disk, self._clock = copier, shape, host, disk, clock
        self._lock = threading.Lock()  # around the next four; never held while anything is copied
        self._saving: dict[Key, Saving] = {}
        self._saved_slots = np.zeros(num_slots, np.int32)  # how many of them each slot is in
        self._unwritten: dict[Key, KVObject] = {}  # for the disk
        self._most_saving = MAX_SAVING
        self._most_unwritten = max(1, MAX_UNWRITTEN // copier.object_bytes)
        self._closes_at: float | None = None  # None: it is open
        self._transfers: dict[KVLoad, Transfer] = {}
        self._copying = Lane("KV copying", clock)
        self._io = Lane("KV on disk", clock)
        self._event = threading.Event()  # a load may have ended
        self._token = RecentMean(RATE)  # seconds of a token's KV, computed
        self._copy, self._read = RecentMean(RATE), RecentMean(RATE)  # of an object, into slots and from disk
        self._read_at = -math.inf  # when one was last read from disk, or to be read to measure that
        if disk is not None and (known := disk.newest) is not None:
            self._io.put(IDLE, partial(self._try_read, disk, known))

    # -- what is there

    def root(self, salt: str | None) -> Key:
        return root_key(self._shape, salt)

    def computed(self, tokens: int, seconds: float) -> None:
        self._token.add(seconds / tokens)

    def worth_loading(self, keys: Sequence[Key], skipped: int) -> int:
        gain, best, count, there = -skipped * self._token.value, 0.0, 0, 0
        for place, key in enumerate(keys, 1):
            if (seconds := self._load_seconds(key)) is None:
                break
            there = place
            gain += OBJECT_TOKENS * self._token.value - seconds if self._token.value else 1.0
            if gain > best:
                best, count = gain, place
        self.counts.recomputed += there - count
        if count < there:
            self._measure_again(keys[count])
        return count

    def _measure_again(self, key: Key) -> None:
        if self.disk is not None and self._on_disk(key) and self._clock() - self._read_at > STALE:
            self._read_at = self._clock()
            self._io.put(IDLE, partial(self._try_read, self.disk, key))

    def _try_read(self, disk: DiskStore, key: Key) -> None:
        """On the disk's thread."""
        began = self._clock()
        disk.try_read(key)
        self._has_read(began)

    def _has_read(self, began: float) -> None:
        self._read_at = self._clock()
        self._read.add(self._read_at - began)

    def _load_seconds(self, key: Key) -> float | None:
        with self._lock:
            if key in self._unwritten or key in self._host:
                return self._copy.value
        return self._copy.value + self._read.value if self._on_disk(key) else None

    def _on_disk(self, key: Key) -> bool:
        return self.disk is not None and self.disk.contains(key) and not self._io.stuck(STUCK)

    # -- loading

    def load(self, load: KVLoad) -> None:
        began, token = self._clock(), self._token.value
        patience = PATIENCE * token * len(load.slots) if token else STUCK
        transfer = self._transfers[load] = Transfer(load, began, began + max(patience, LEAST))
        with self._lock:  # the first is used last, and evicted last
            held = [self._host.use(key) or self._unwritten.get(key) for key in reversed(load.keys)]
        for place, kv in enumerate(reversed(held)):
            if kv is not None:
                self._copying.put(URGENT, partial(self._write_slots, transfer, place, kv, HOST))
            else:
                self._io.put(URGENT, partial(self._read_file, transfer, place))

    def poll(self) -> None:
        self._event.clear()
        for transfer in list(self._transfers.values()):
            late = self._clock() > transfer.deadline
            if late or transfer.settled:
                self.counts.late += late and not transfer.settled
                self.cancel(transfer.load)

    def cancel(self, load: KVLoad) -> None:
        transfer = self._transfers.pop(load)
        transfer.ended = True  # before the lock is had: no other object comes first
        with transfer.lock:
            load.arrived([transfer.came_from[place] for place in range(transfer.contiguous)])
        for tier, tokens in load.count_by_tier().items():
            self.counts.loaded_tokens[tier] += tokens
            self.counts.moved_bytes[tier] += tokens * self._copier.object_bytes // OBJECT_TOKENS
        self.counts.loading_seconds += self._clock() - transfer.began
        self.counts.computing_seconds += self._token.value * (load.count or 0)

    def wait(self) -> None:
        self._event.wait(WAIT)

    def _read_file(self, transfer: Transfer, place: int) -> None:
        """On the disk's thread."""
        if transfer.ended or self.disk is None:
            return
        began = self._clock()
        kv = self.disk.get(transfer.load.keys[place], self._tokens(transfer, place))
        self._has_read(began)
        if kv is None:
            self._fail(transfer, place)
            return
        with self._lock:
            self._keep(kv)
        self._copying.put(URGENT, partial(self._write_slots, transfer, place, kv, DISK))

    def _write_slots(self, transfer: Transfer, place: int, kv: KVObject, tier: str) -> None:
        """On the copying thread."""
        if transfer.ended:
            return
        began = self._clock()
        if not kv.intact(self._tokens(transfer, place)):
            self._forget(kv)
            self._fail(transfer, place)
            return
        with transfer.lock:
            if not transfer.ended:
                self._copier.write(transfer.load.object_slots(place), kv.data)
                transfer.came_from[place] = tier
        self._copy.add(self._clock() - began)
        self._tell(transfer)

    @staticmethod
    def _tokens(transfer: Transfer, place: int) -> Ints:
        return transfer.load.tokens[place * OBJECT_TOKENS : (place + 1) * OBJECT_TOKENS]

    def _fail(self, transfer: Transfer, place: int) -> None:
        with transfer.lock:
            transfer.failed = min(transfer.failed, place)
        self._tell(transfer)

    def _tell(self, transfer: Transfer) -> None:
        if transfer.settled:
            self._event.set()

    def _forget(self, kv: KVObject) -> None:
        with self._lock:
            self.counts.damaged += 1
            self._host.pop(kv.key, None)

    # -- saving

    def save(self, key: Key, tokens: Ints, slots: Slots) -> None:
        if self._load_seconds(key) is not None:
            return
        with self._lock:
            if key in self._saving:
                return
            if len(self._saving) >= self._most_saving:
                self.counts.given_up += 1
                return
            saving = self._saving[key] = Saving(key, tokens, slots)
            self._saved_slots[slots] += 1
        self._copying.put(IDLE, partial(self._read_slots, saving))

    def dropped(self, slots: Slots) -> None:
        """Other tokens may be written to these slots from now on."""
        if not self._saved_slots[slots].any():
            return
        with self._lock:
            for saving in [s for s in self._saving.values() if np.isin(s.slots, slots).any()]:
                self._end(saving)
                self.counts.lost += 1

    def _read_slots(self, saving: Saving) -> None:
        """On the copying thread."""
        while self._closes_at is not None and len(self._unwritten) >= self._most_unwritten:
            time.sleep(WAIT)  # nobody waits for this thread but `close`
        if self._saving.get(saving.key) is not saving:
            return
        kv, began = None, self._clock()
        try:
            kv = KVObject.of(saving.key, saving.tokens, self._copier.read(saving.slots))
            self._copy.add(self._clock() - began)  # about as long as back
        finally:  # memory may be short
            with self._lock:
                if self._saving.get(saving.key) is saving:  # or its slots may have changed while they were read
                    self._end(saving)
                    if kv is not None:
                        self.counts.saved += 1
                        self._keep(kv)

    def _end(self, saving: Saving) -> None:
        del self._saving[saving.key]
        self._saved_slots[saving.slots] -= 1

    def _keep(self, kv: KVObject) -> None:
        for evicted in self._host.put(kv):
            self._put_on_disk(evicted)

    def _put_on_disk(self, kv: KVObject) -> None:
        if self.disk is None or self.disk.contains(kv.key) or kv.key in self._unwritten:
            return
        if len(self._unwritten) >= self._most_unwritten:
            self.counts.given_up += 1
            return
        self._unwritten[kv.key] = kv
        self._io.put(IDLE, partial(self._write_file, kv))

    def _write_file(self, kv: KVObject) -> None:
        """On the disk's thread."""
        try:
            if self.disk is not None:
                self.disk.put(kv)
                if not self._read.value:
                    self._try_read(self.disk, kv.key)
        finally:
            with self._lock:
                del self._unwritten[kv.key]

    def use(self) -> list[TierUse]:
        tiers, size, counts, host = list[TierUse](), self._copier.object_bytes, self.counts, self._host
        if host.most:
            damaged = {str(Damage.CHECKSUM): counts.damaged}
            used, evicted = len(host) * size, host.evicted * OBJECT_TOKENS
            tiers.append(TierUse(HOST, used, host.most * size, counts.saved * size, evicted, damaged))
        if (disk := self.disk) is not None:
            damaged = {str(reason): count for reason, count in disk.counts.damaged.items()}
            damaged[Damage.CHECKSUM] += 0 if host.most else counts.damaged  # before it was written
            saved, evicted = disk.counts.writes * size, disk.counts.evictions * OBJECT_TOKENS
            tiers.append(TierUse(DISK, disk.bytes_used, disk.capacity, saved, evicted, damaged, disk.counts.failed))
        return tiers

    # -- the end

    def closing(self) -> None:
        """From now on no save is given up for being too much: `close` follows."""
        self._most_saving, self._closes_at = 1 << 62, self._clock() + FLUSH

    def close(self) -> bool:
        """Finish work under way and write memory to disk, until FLUSH seconds after `closing`; whether all is done."""
        end = self._closes_at or self._clock()
        done = self._copying.close(end - self._clock())
        with self._lock:
            self._most_unwritten = 1 << 62  # these are in memory already
            for kv in reversed(self._host.values()):
                self._put_on_disk(kv)
            self._host.clear()
        done &= self._io.close(end - self._clock())
        if self.disk is not None:
            self.disk.close()
        return done
