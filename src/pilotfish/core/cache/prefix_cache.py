"""KV of earlier requests, found by its tokens: a radix tree over slots.

A run is tokens that always came one after the other, and their slots. Runs that begin alike share their common tokens.
Each tenant (its salt) has a root of its own:

    salt "a" ─── The cat ─┬─ sat          a request of "a" for `The cat ate` takes the slots of `The cat`
                          └─ ran away
    salt "b" ─── The cat sat              never those of "b"

When slots are needed the idle end of the run used longest ago goes first. Runs that a later request has found are
proven: those found last, up to a share of the pool, go after all others, so prompts that nobody repeats cannot drive
out what many begin with (segmented LRU).

    fresh     used longest ago ──► used last │ proven     found longest ago ──► found last
    evicted   first ─────────────────────────┼────────────────────────────────────────► last
              what is beyond the share returns here ◄── from here

A run is used, and found, whenever one below it is, so ends go before the runs they hang on.

In a pool with a window owners hold only the end of a path, and the slots of its beginning may be gone:

    tokens   The cat sat on the mat          window of 4: `The cat sat on the mat` is reusable, and so is
    slots    ─── gone ── sat on the mat      `The cat sat on the`, but not `The cat sat`

A prefix is reusable where the slots that the next row sees are there. Runs then lose slots from their beginning, which
keeps their whole length reusable for longest, and stay as tokens alone while a run with slots hangs on them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.slots import GONE, NO_SLOTS, SlotPool, Slots, present
from pilotfish.core.trees.tree import Ints
from pilotfish.errors import EngineError

#: Share of a pool's slots in which proven runs go last: served a recorded hour of conversations best at most
#: capacities, and nowhere worse than none (docs/benchmarks.md).
PROVEN_SHARE = 0.2
#: Slots that are dropped together where one is needed, so that not every step has to, and their largest share.
EVICTED_TOGETHER, EVICTED_SHARE = 64, 1 / 64


class CachedRun:
    def __init__(self, salt: str | None, above: "CachedRun | None", tokens: Ints, slots: Slots) -> None:
        self.salt = salt  # the tenant's
        self.above = above  # None: it is a root, without tokens
        self.tokens = tokens  # [n]
        self.slots = slots  # [n], some GONE in a pool with a window
        self.below: dict[int, CachedRun] = {}
        self.proven = False
        self.offered = False  # to tiers, since it was last used

    @property
    def num_slots(self) -> int:
        return len(present(self.slots))

    def common(self, tokens: Ints) -> int:
        count = min(len(self.tokens), len(tokens))
        differs: NDArray[np.bool_] = self.tokens[:count] != tokens[:count]
        first = int(differs.argmax()) if count else 0
        return first if count and differs[first] else count


class RunWatcher:
    """Is told of each change to runs; the base class ignores them."""

    def changed(self, run: CachedRun) -> None:
        """The run is new, or has other slots."""

    def split(self, upper: CachedRun, lower: CachedRun) -> None:
        """`lower` was cut in two; `upper` is new and has its first tokens."""

    def shortened(self, run: CachedRun) -> None:
        """It has lost its last tokens."""

    def removed(self, run: CachedRun) -> None:
        """It is gone, as are all below it."""


class PrefixCache:
    def __init__(
        self,
        pool: SlotPool,
        proven_share: float = PROVEN_SHARE,
        dropped: Callable[[Slots], None] | None = None,
        keeps: bool = True,
    ) -> None:
        """With a share of 0 the run used longest ago goes first. `dropped` gets slots that it no longer keeps."""
        self.pool = pool
        self.evicted = 0  # slots, so far
        self.watcher = RunWatcher()
        self.keeps = keeps
        self._dropped = dropped
        self._roots: dict[str | None, CachedRun] = {}  # by salt
        #: Runs but for roots, used longest ago first.
        self._fresh: OrderedDict[CachedRun, None] = OrderedDict()
        self._proven: OrderedDict[CachedRun, None] = OrderedDict()
        self._proven_slots = 0
        self._max_proven = int(proven_share * pool.capacity)

    def match(self, salt: str | None, tokens: Sequence[int]) -> Slots:
        """Slots of the longest known prefix; GONE where the next row does not look. Share them before any eviction."""
        path = self._path(salt, np.asarray(tokens, np.int64))
        slots = self._reusable(_slots_of(path))
        begins = np.cumsum([0, *(len(run.tokens) for run in path[:-1])])
        for run in path[: np.count_nonzero(begins < len(slots))]:  # found
            if not run.proven:
                self._move(run)
        self._use(path)
        self._limit_proven()
        return slots

    def _reusable(self, slots: Slots) -> Slots:
        if not self.pool.window:
            return slots
        length = int(np.flatnonzero(self.reusable_lengths(slots))[-1])
        slots = slots[:length].copy()
        slots[: self.pool.first_seen(length)] = GONE
        return slots

    def reusable_lengths(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each first part of a path, of 0 tokens to all, has the slots that its next row sees. [slots + 1]"""
        places = np.arange(len(slots) + 1)
        gone = np.concatenate(([-1], np.where(slots == GONE, places[:-1], -1)))
        last_gone = np.maximum.accumulate(gone)  # before each position
        seen = np.maximum(places - self.pool.window + 1, 0) if self.pool.window else 0
        return np.less(last_gone, seen)

    def num_known(self, salt: str | None, tokens: Sequence[int]) -> int:
        """Tokens of the longest known prefix; does not count as use."""
        along = self._along(salt, np.asarray(tokens, np.int64))
        return len(self._reusable(np.concatenate([NO_SLOTS, *(run.slots[:common] for run, common in along)])))

    def insert(self, salt: str | None, tokens: Sequence[int], slots: Slots) -> Slots:
        """The owner's slots from now on: the cache's for a known beginning, whose copies are released, else its own."""
        if not self.keeps:
            return slots
        wanted = np.asarray(tokens, np.int64)
        path = self._path(salt, wanted)
        known = self._filled(path, slots)
        own, rest = slots[: len(known)], slots[len(known) :]
        copies = (known != own) & (own != GONE)
        if copies.any():
            self.pool.share(known[copies])
            self.pool.release(own[copies])
        if len(present(rest)):
            above = path[-1] if path else self._roots.setdefault(salt, CachedRun(salt, None, wanted[:0], NO_SLOTS))
            run = CachedRun(salt, above, wanted[len(known) :].copy(), rest.copy())
            above.below[int(run.tokens[0])] = run
            self.pool.keep(present(run.slots))
            path.append(run)
            self.watcher.changed(run)
        self._use(path)
        self._limit_proven()
        return np.concatenate((np.where(own == GONE, own, known), rest))

    def _filled(self, path: Sequence[CachedRun], slots: Slots) -> Slots:
        at = 0
        for run in path if self.pool.window else ():
            own = slots[at : at + len(run.slots)]
            gaps = (run.slots == GONE) & (own != GONE)
            self.pool.keep(own[gaps])
            run.slots[gaps] = own[gaps]
            self._proven_slots += int(gaps.sum()) if run.proven else 0
            at += len(own)
            if gaps.any():
                self.watcher.changed(run)
        return _slots_of(path)

    def allocate(self, count: int) -> Slots:
        if (lacking := count - self.pool.num_free) > 0:
            self.evict(max(lacking, min(EVICTED_TOGETHER, int(EVICTED_SHARE * self.pool.capacity))))
        return self.pool.allocate(count)

    def evict(self, count: int) -> int:
        """Free up to `count` idle slots, fresh runs before proven ones, used longest ago first; how many were freed."""
        evicted, evict_of = 0, self._evict_beginnings_of if self.pool.window else self._evict_of
        for runs in (self._fresh, self._proven):
            evicted += evict_of(runs, count - evicted)
        self.evicted += evicted
        return evicted

    def _evict_of(self, runs: OrderedDict[CachedRun, None], count: int) -> int:
        left, turns = max(count, 0), len(runs)
        while left > 0 and turns > 0 and self.pool.num_idle > 0:
            run, turns = next(iter(runs)), turns - 1
            idle = 0 if run.below else len(run.slots) - self.pool.owned(run.slots)
            self._cut(run, min(idle, left))
            left -= min(idle, left)
            if run in runs and left > 0:  # owned, or one below it is: in use
                self._use(ancestry(run))
        return max(count, 0) - left

    def _evict_beginnings_of(self, runs: OrderedDict[CachedRun, None], count: int) -> int:
        left = max(count, 0)
        for run in list(runs):
            if left <= 0 or self.pool.num_idle <= 0:
                break
            there = np.flatnonzero(run.slots != GONE)
            idle = there[self.pool.unowned(run.slots[there])][:left]
            self._forget(run.slots[idle], run)
            run.slots[idle] = GONE
            left -= len(idle)
            if len(idle):
                self.watcher.changed(run)
            if run in runs:  # not removed with one that hung on it
                self._remove_empty(run)
        return max(count, 0) - left

    def coldest(self, count: int) -> Iterator[CachedRun]:
        for run in chain(self._fresh, self._proven):
            if count <= 0:
                return
            idle = len(run.slots) - self.pool.owned(run.slots)
            count -= idle
            if idle:
                yield run

    @staticmethod
    def path_to(run: CachedRun) -> tuple[Ints, Slots]:
        path = ancestry(run)
        return np.concatenate([above.tokens for above in path]), np.concatenate([above.slots for above in path])

    def _path(self, salt: str | None, tokens: Ints) -> list[CachedRun]:
        """Runs along `tokens` as far as known; the last is cut in two where `tokens` leave it."""
        along = self._along(salt, tokens)
        return [run if common == len(run.tokens) else self._split(run, common) for run, common in along]

    def _along(self, salt: str | None, tokens: Ints) -> list[tuple[CachedRun, int]]:
        """Runs along `tokens`, and how many of its tokens each has in common with them: all, but for the last."""
        found, run, at = list[tuple[CachedRun, int]](), self._roots.get(salt), 0
        while run is not None and at < len(tokens) and (below := run.below.get(int(tokens[at]))) is not None:
            common = below.common(tokens[at:])
            found.append((below, common))
            run, at = below if common == len(below.tokens) else None, at + common
        return found

    def _split(self, run: CachedRun, at: int) -> CachedRun:
        assert run.above is not None
        upper = CachedRun(run.salt, run.above, run.tokens[:at], run.slots[:at])
        run.above.below[int(upper.tokens[0])] = upper
        run.above, run.tokens, run.slots = upper, run.tokens[at:], run.slots[at:]
        upper.below[int(run.tokens[0])] = run
        upper.proven = run.proven
        self._listed(upper)[upper] = None
        self.watcher.split(upper, run)
        return upper

    def _listed(self, run: CachedRun) -> OrderedDict[CachedRun, None]:
        return self._proven if run.proven else self._fresh

    def _use(self, path: Sequence[CachedRun]) -> None:
        for run in reversed(path):
            runs = self._listed(run)
            runs[run] = None
            runs.move_to_end(run)
            run.offered = False

    def _limit_proven(self) -> None:
        while self._proven_slots > self._max_proven:
            self._move(next(iter(self._proven)))

    def _move(self, run: CachedRun) -> None:
        del self._listed(run)[run]
        run.proven = not run.proven
        self._listed(run)[run] = None
        self._proven_slots += run.num_slots if run.proven else -run.num_slots

    def _cut(self, run: CachedRun, count: int) -> None:
        if not count:
            return
        left = len(run.slots) - count
        self._forget(run.slots[left:], run)
        if not left:
            self._remove(run)
            return
        run.tokens, run.slots = run.tokens[:left], run.slots[:left]
        self.watcher.shortened(run)

    def _forget(self, slots: Slots, run: CachedRun) -> None:
        self.pool.drop(slots)
        if self._dropped is not None:
            self._dropped(slots)
        self._proven_slots -= len(slots) if run.proven else 0

    def _remove(self, run: CachedRun) -> None:
        assert run.above is not None
        self.watcher.removed(run)
        del run.above.below[int(run.tokens[0])], self._listed(run)[run]
        if run.above.above is None and not run.above.below:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not run.above}

    def _remove_empty(self, run: CachedRun | None) -> None:
        while run is not None and run.above is not None and not run.below and not run.num_slots:
            self._remove(run)
            run = run.above

    @property
    def runs(self) -> Iterator[CachedRun]:
        waiting = list(self._roots.values())
        while waiting:
            run = waiting.pop()
            for first, below in run.below.items():
                if below.above is not run or int(below.tokens[0]) != first:
                    raise EngineError("prefix cache: a run hangs in the wrong place")
                yield below
                waiting.append(below)

    @property
    def slots(self) -> list[int]:
        return [slot for run in chain(self._fresh, self._proven) for slot in present(run.slots).tolist()]

    def check(self) -> None:
        """EngineError unless each run is listed once, before its parent, and proven runs keep to their share."""
        found = list(self.runs)
        turn = {run: place for place, run in enumerate(chain(self._fresh, self._proven))}
        listed = len(self._fresh) + len(self._proven)
        if len(found) != listed or any(run not in self._listed(run) for run in found):
            raise EngineError(f"prefix cache: {len(found)} runs hang in the tree, {listed} are listed")
        if any(len(run.tokens) != len(run.slots) or not len(run.tokens) for run in found):
            raise EngineError("prefix cache: a run is empty, or has other slots than tokens")
        if not self.pool.window and any(GONE in run.slots for run in found):
            raise EngineError("prefix cache: a slot is gone where all are seen")
        if any(run.above in turn and turn[run.above] < turn[run] for run in found if run.above is not None):
            raise EngineError("prefix cache: a run would be evicted before one that hangs on it")
        proven = sum(run.num_slots for run in self._proven)
        if not proven == self._proven_slots <= self._max_proven:
            raise EngineError(f"prefix cache: {proven} slots of proven runs are counted as {self._proven_slots}")


def _slots_of(path: Sequence[CachedRun]) -> Slots:
    return np.concatenate([run.slots for run in path]) if path else NO_SLOTS


def ancestry(run: CachedRun) -> list[CachedRun]:
    path = [run]
    while (above := path[-1].above) is not None and above.above is not None:
        path.append(above)
    return path[::-1]
