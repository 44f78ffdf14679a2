"""Servers' knowledge of which prefixes targets have KV of: routing keys, one for every 64 tokens.

target                                                       server
  prefix cache ─► HeldPrefixes ──── Held(added, removed) ───► HeldCopies ─► Router
                                    numbered; after a gap the server asks for all
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_cache import CachedRun, PrefixCache, RunWatcher, ancestry
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, prefix_keys, root_key
from pilotfish.core.peers.fields import Index

#: A replica's name; all servers must know it by the same one.
Replica: TypeAlias = str
RoutingKey: TypeAlias = bytes
#: Bytes of a routing key: two of a million are equal once in 37 million times, and cost no more than a poor choice.
ROUTING_KEY_BYTES = 8


def routing_keys(salt: str | None, tokens: Sequence[int] | NDArray[np.integer]) -> list[RoutingKey]:
    """A key for every `OBJECT_TOKENS` tokens of a tenant's sequence; tenants have different keys."""
    return [key[:ROUTING_KEY_BYTES] for key in prefix_keys(root_key(b"", salt), tokens)]


class Held(Struct, tag="held", frozen=True):
    sequence: Index  # rises by one; a whole one has that of the changes before it
    added: list[RoutingKey] = []
    removed: list[RoutingKey] = []
    whole: bool = False  # `added` is all that there is


class HeldPrefixes:
    def __init__(self) -> None:
        self._keys: set[RoutingKey] = set()
        self._untold: set[RoutingKey] = set()  # that are held now and were not when it was told last, or the reverse
        self._sequence = 0  # of the last Held with changes

    def add(self, keys: Iterable[RoutingKey]) -> None:
        new = set(keys) - self._keys
        self._keys |= new
        self._untold ^= new

    def remove(self, keys: Iterable[RoutingKey]) -> None:
        gone = self._keys.intersection(keys)
        self._keys -= gone
        self._untold ^= gone

    def changes(self) -> Held | None:
        if not self._untold:
            return None
        self._sequence += 1
        untold, self._untold = self._untold, set()
        return Held(self._sequence, list(untold & self._keys), list(untold - self._keys))

    def whole(self) -> Held:
        """For a server that begins to follow: all that was told so far."""
        return Held(self._sequence, list(self._keys ^ self._untold), whole=True)


class HeldCopies:
    """All replicas' keys. After a gap a replica holds nothing until it has told all."""

    def __init__(self) -> None:
        self._keys: dict[Replica, set[RoutingKey]] = {}  # of each replica
        self._expected: dict[Replica, int] = {}  # each replica's next sequence; none after a gap
        self._places: dict[Replica, int] = {}  # each replica's bit in `_holders`
        self._holders: dict[RoutingKey, int] = {}  # a bit for each replica that holds the prefix

    def expected(self, replica: Replica) -> int:
        """For `Attend.heard`; 0: the replica is to tell all."""
        return self._expected.get(replica, 0)

    def apply(self, replica: Replica, held: Held) -> None:
        if held.whole:
            self.forget(replica)
        elif held.sequence != self._expected.get(replica):
            self.forget(replica)
            return
        self._expected[replica] = held.sequence + 1
        self._remove(replica, held.removed)
        self._add(replica, held.added)

    def forget(self, replica: Replica) -> None:
        self._remove(replica, list(self._keys.get(replica, ())))
        for table in (self._keys, self._expected, self._places):
            table.pop(replica, None)

    def matched(self, keys: Sequence[RoutingKey]) -> dict[Replica, int]:
        """For each replica with any: how many first keys, up to the last that it holds."""
        replicas = {bit: replica for replica, bit in self._places.items()}
        found, seen = dict[Replica, int](), 0
        for pages in range(len(keys), 0, -1):
            new = self._holders.get(keys[pages - 1], 0) & ~seen
            seen |= new
            while new:
                place = new.bit_length() - 1
                found[replicas[place]] = pages
                new ^= 1 << place
        return found

    def _add(self, replica: Replica, keys: Iterable[RoutingKey]) -> None:
        own = self._keys.setdefault(replica, set())
        own.update(keys)
        taken = set(self._places.values())
        bit = 1 << self._places.setdefault(replica, next(place for place in count() if place not in taken))
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | bit

    def _remove(self, replica: Replica, keys: Iterable[RoutingKey]) -> None:
        for key in self._keys.get(replica, set()).intersection(keys):
            self._keys[replica].remove(key)
            self._holders[key] ^= 1 << self._places[replica]
            if not self._holders[key]:
                del self._holders[key]


class HeldRuns(RunWatcher):
    """Names what a prefix cache holds, for servers: keys of the prefixes that end in its runs.

        run      The cat sat on the │ mat .                 keys lie where 64 tokens are full, so a run has those of
        keys            key 0       │       key 1           all that end in it, however few of their tokens are its own

    A prefix is held where a request would find all of it: while its slots are cached, or, with a window, those that the
    next row sees."""

    def __init__(self, cache: PrefixCache) -> None:
        self.prefixes = HeldPrefixes()
        self._cache = cache
        self._keys: dict[CachedRun, list[Key]] = {}
        for run in cache.runs:
            self._tell(run)
        cache.watcher = self

    def changed(self, run: CachedRun) -> None:
        self._tell(run)
        for other in self._within_window_below(run) if self._cache.pool.window else ():
            self._tell(other)

    def split(self, upper: CachedRun, lower: CachedRun) -> None:
        count = _pages(upper)
        self._keys[upper], self._keys[lower] = self._keys[lower][:count], self._keys[lower][count:]

    def shortened(self, run: CachedRun) -> None:
        count = _pages(run)
        self.prefixes.remove(_short(self._keys[run][count:]))
        del self._keys[run][count:]

    def removed(self, run: CachedRun) -> None:
        self.prefixes.remove(_short(self._keys.pop(run)))

    def _tell(self, run: CachedRun) -> None:
        tokens, slots = self._cache.path_to(run)
        if run not in self._keys:
            whole = (len(tokens) - len(run.tokens)) // OBJECT_TOKENS * OBJECT_TOKENS
            self._keys[run] = prefix_keys(self._key_above(run), tokens[whole:])
        keys = _short(self._keys[run])
        if not self._cache.pool.window:
            self.prefixes.add(keys)
            return
        last = len(tokens) // OBJECT_TOKENS
        reusable = self._cache.reusable_lengths(slots)[OBJECT_TOKENS : last * OBJECT_TOKENS + 1 : OBJECT_TOKENS]
        held = [key for key, there in zip(keys, reusable[last - len(keys) :], strict=True) if there]
        self.prefixes.remove(set(keys).difference(held))
        self.prefixes.add(held)

    def _key_above(self, run: CachedRun) -> Key:
        above = run.above
        while above is not None and not self._keys.get(above):
            above = above.above
        return root_key(b"", run.salt) if above is None else self._keys[above][-1]

    def _within_window_below(self, run: CachedRun) -> Iterator[CachedRun]:
        """Runs with tokens whose rows see some of this one."""
        waiting = [(below, 0) for below in run.below.values()]
        while waiting:
            other, distance = waiting.pop()
            yield other
            if (distance := distance + len(other.tokens)) < self._cache.pool.window:
                waiting += [(below, distance) for below in other.below.values()]


def _pages(run: CachedRun) -> int:
    end = sum(len(one.tokens) for one in ancestry(run))
    return end // OBJECT_TOKENS - (end - len(run.tokens)) // OBJECT_TOKENS


def _short(keys: list[Key]) -> list[bytes]:
    return [key[:ROUTING_KEY_BYTES] for key in keys]
