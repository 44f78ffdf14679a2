"""Names what a prefix cache holds, for servers: keys of the prefixes that end in its runs.

    run      The cat sat on the │ mat .                 keys lie where 64 tokens are full, so a run has those of
    keys            key 0       │       key 1           all that end in it, however few of their tokens are its own

A prefix is held where a request would find all of it: while its slots are cached, or, with a window, those that the
next row sees.
"""

from collections.abc import Iterator

from pilotfish.core.cache.prefix_cache import CachedRun, PrefixCache, RunWatcher, ancestry
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, prefix_keys, root_key
from pilotfish.core.routing.held_prefixes import ROUTING_KEY_BYTES, HeldPrefixes


class HeldRuns(RunWatcher):
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
