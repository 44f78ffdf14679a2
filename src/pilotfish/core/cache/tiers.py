"""KV beyond the pool's slots: a scheduler's interface to the tiers below it (`kv/tiers.py`).

pool    [ live ... | idle: used longest ago ─ ... ]        one slot a token
                          │ save, before it is evicted
tiers                     ▼                  objects of 64 tokens, named by the key of the prefix that they end
                [ host memory ] ─► [ disk ]
                          │ load, when a request is admitted that begins with them
pool                      ▼
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pilotfish.core.cache.prefix_cache import CachedRun, PrefixCache
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, prefix_keys
from pilotfish.core.cache.slots import Slots
from pilotfish.core.trees.tree import Ints

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass
class TierCounts:
    """Of all tiers below the pool, since the start; in objects unless noted."""

    saved: int = 0
    lost: int = 0  # overwritten before they were saved
    given_up: int = 0  # too many waited to be saved, or for the disk
    loaded_tokens: dict[str, int] = field(default_factory=lambda: {HOST: 0, DISK: 0})
    moved_bytes: dict[str, int] = field(default_factory=lambda: {HOST: 0, DISK: 0})  # into slots
    recomputed: int = 0  # they were there, but to compute them was quicker
    damaged: int = 0  # in host memory
    late: int = 0  # loads that took too long
    loading_seconds: float = 0.0  # from a load's beginning to its end
    computing_seconds: float = 0.0  # that computing the same tokens would have taken, as measured lately


@dataclass(frozen=True)
class TierUse:
    name: str  # DEVICE, HOST or DISK
    used: int  # bytes
    capacity: int  # bytes
    saved_bytes: int = 0  # into it
    evicted: int = 0  # tokens
    damaged: dict[str, int] = field(default_factory=dict)  # objects, by kind of damage
    failed: int = 0  # reads, writes and removals that the system refused


@dataclass(eq=False)
class KVLoad:
    """KV on its way into slots that a request owns.

    position   0 ..........................
               [ it has   ][ these slots ]
    objects        [ keys 0 ][ keys 1 ]        of the first one only a part may be missing
    """

    keys: Sequence[Key]
    tokens: Ints  # [len(keys) * OBJECT_TOKENS], of the objects
    slots: Slots  # [n], up to the end of the last object
    count: int | None = None  # of `slots`, how many first ones have their KV; None: it is on its way
    tiers: list[str] = field(default_factory=list)  # [objects that came], where each was

    def object_slots(self, place: int) -> Slots:
        skipped = len(self.keys) * OBJECT_TOKENS - len(self.slots)
        return self.slots[max(place * OBJECT_TOKENS - skipped, 0) : (place + 1) * OBJECT_TOKENS - skipped]

    def arrived(self, tiers: Sequence[str]) -> None:
        self.tiers = list(tiers)
        skipped = len(self.keys) * OBJECT_TOKENS - len(self.slots)
        self.count = max(len(tiers) * OBJECT_TOKENS - skipped, 0)

    def count_by_tier(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for place, tier in enumerate(self.tiers):
            counts[tier] = counts.get(tier, 0) + len(self.object_slots(place))
        return counts


class Tiers(Protocol):
    """Called from the scheduler's thread. Failures below do not raise: they are misses."""

    def root(self, salt: str | None) -> Key:
        """The key before a tenant's first tokens."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward took `seconds` and computed KV of `tokens` tokens, mostly of prompts."""

    def worth_loading(self, keys: Sequence[Key], skipped: int) -> int:
        """First objects that are there and quicker to load than to compute, less `skipped` tokens of the first."""

    def load(self, load: KVLoad) -> None:
        """Begin to fill its slots."""

    def poll(self) -> None:
        """Loads that have ended, or take too long, get their `count`; their slots are written no more."""

    def cancel(self, load: KVLoad) -> None:
        """The load has its `count` when this returns."""

    def save(self, key: Key, tokens: Ints, slots: Slots) -> None:
        """Copy an object unless it is there; given up if its slots are dropped. tokens, slots [OBJECT_TOKENS]"""

    def wait(self) -> None:
        """Returns when a load may have ended; after a few milliseconds at most."""

    def closing(self) -> None:
        """All that is worth it is saved from now on, then nothing."""


def save_coldest(cache: PrefixCache, tiers: Tiers, count: int) -> None:
    """Save the KV that `count` slots would evict first, but for runs offered since their last use."""
    for run in cache.coldest(count):
        if not run.offered:
            run.offered = True
            save_run(cache, tiers, run)


def save_run(cache: PrefixCache, tiers: Tiers, run: CachedRun) -> None:
    """The objects that end in a run, last first: tiers evict what was saved first, prefixes lose their end first."""
    tokens, slots = cache.path_to(run)
    keys = prefix_keys(tiers.root(run.salt), tokens)
    for place in reversed(range((len(tokens) - len(run.tokens)) // OBJECT_TOKENS, len(keys))):
        span = slice(place * OBJECT_TOKENS, (place + 1) * OBJECT_TOKENS)
        tiers.save(keys[place], tokens[span], slots[span])
