"""KV of earlier requests, found by the tokens that it is of: a radix tree over slots.

A run is tokens that always came one after the other, and their slots. Runs that begin alike share what they have in
common, to the token; each tenant (its salt) has a root of its own, so nothing is ever found below another's:

    salt "a" ─── The cat ─┬─ sat          a request of "a" for `The cat ate` takes the slots of `The cat`
                          └─ ran away
    salt "b" ─── The cat sat              never those of "b"

Slots in the tree are live while requests own them, and idle afterwards (`core/slots.py`). When slots are needed the end
of the run that was used longest ago goes first. Runs that a later request has found are proven: those found last, up to
a share of the pool, go after all others, so that prompts which nobody repeats cannot drive out what many begin with
(segmented LRU).

    fresh     used longest ago ──► used last │ proven     found longest ago ──► found last
    evicted   first ─────────────────────────┼────────────────────────────────────────► last
              what is beyond the share returns here ◄── from here

A run is used, and found, whenever one below it is, so ends go before what they hang on. Owners hold a path from its
root on: what is idle in a run is its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.slots import NO_SLOTS, SlotPool, Slots
from pilotfish.core.tree import Ints
from pilotfish.errors import EngineError

#: Of a pool's slots, those in which proven runs go last: what served a recorded hour of conversations best at most
#: capacities, and nowhere worse than none (docs/benchmarks.md).
PROVEN_SHARE = 0.2
#: Slots that are dropped together where one is needed, so that not every step has to, and the most of a pool.
EVICTED_TOGETHER, EVICTED_SHARE = 64, 1 / 64


class CachedRun:
    """Tokens, the slots that hold their KV, and the runs that follow it, by their first tokens."""

    def __init__(self, salt: str | None, above: CachedRun | None, tokens: Ints, slots: Slots) -> None:
        self.salt = salt  # the tenant's
        self.above = above  # None: it is a root, without tokens
        self.tokens = tokens  # [n]
        self.slots = slots  # [n]
        self.below: dict[int, CachedRun] = {}
        self.proven = False
        self.offered = False  # to tiers, since it was last used

    def common(self, tokens: Ints) -> int:
        """How many first tokens it has in common with `tokens`."""
        count = min(len(self.tokens), len(tokens))
        differs: NDArray[np.bool_] = self.tokens[:count] != tokens[:count]
        first = int(differs.argmax()) if count else 0
        return first if count and differs[first] else count


class PrefixCache:
    """What it holds of a pool's slots it keeps there; nobody else may keep any."""

    def __init__(
        self, pool: SlotPool, proven_share: float = PROVEN_SHARE, dropped: Callable[[Slots], None] | None = None
    ) -> None:
        """With a share of 0 the run used longest ago goes first, whatever was found. `dropped` is called with slots
        that it keeps no longer."""
        self.pool = pool
        self.evicted = 0  # slots, so far
        self._dropped = dropped
        self._roots: dict[str | None, CachedRun] = {}  # by salt
        #: Runs but for roots, used longest ago first.
        self._fresh: OrderedDict[CachedRun, None] = OrderedDict()
        self._proven: OrderedDict[CachedRun, None] = OrderedDict()
        self._proven_slots = 0
        self._max_proven = int(proven_share * pool.capacity)

    def match(self, salt: str | None, tokens: Sequence[int]) -> Slots:
        """Slots of the longest prefix of `tokens` that is known under this salt. They may be evicted until their caller
        shares them (`SlotPool.share`)."""
        path = self._path(salt, np.asarray(tokens, np.int64))
        self._prove(path)
        return np.concatenate([run.slots for run in path]) if path else NO_SLOTS

    def num_known(self, salt: str | None, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix that is known; does not count as use."""
        wanted, run, known = np.asarray(tokens, np.int64), self._roots.get(salt), 0
        while run is not None and known < len(wanted) and (below := run.below.get(int(wanted[known]))) is not None:
            common = below.common(wanted[known:])
            known += common
            run = below if common == len(below.tokens) else None
        return known

    def insert(self, salt: str | None, tokens: Sequence[int], slots: Slots) -> Slots:
        """Know `tokens`, whose KV is in these live slots; the slots that the owner has from now on. Where a beginning
        is known already those are the cache's, and its own copies are released: an owner of a run owns all above."""
        wanted = np.asarray(tokens, np.int64)
        path = self._path(salt, wanted)
        known = np.concatenate([run.slots for run in path]) if path else NO_SLOTS
        copies = known != slots[: len(known)]
        if copies.any():
            self.pool.share(known[copies])
            self.pool.release(slots[: len(known)][copies])
        if len(known) < len(wanted):
            above = path[-1] if path else self._roots.setdefault(salt, CachedRun(salt, None, wanted[:0], NO_SLOTS))
            run = CachedRun(salt, above, wanted[len(known) :].copy(), slots[len(known) :].copy())
            above.below[int(run.tokens[0])] = run
            self.pool.keep(run.slots)
            path.append(run)
        self._use(path)
        return np.concatenate((known, slots[len(known) :]))

    def allocate(self, count: int) -> Slots:
        """Take slots of the pool, where it has too few free ones after others were dropped."""
        if (lacking := count - self.pool.num_free) > 0:
            self.evict(max(lacking, min(EVICTED_TOGETHER, int(EVICTED_SHARE * self.pool.capacity))))
        return self.pool.allocate(count)

    def evict(self, count: int) -> int:
        """Have idle slots become free, of fresh runs before proven ones, those used longest ago first; how many,
        `count` at most."""
        evicted = 0
        for runs in (self._fresh, self._proven):
            evicted += self._evict_of(runs, count - evicted)
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
                self._use(_ancestry(run))
        return max(count, 0) - left

    def coldest(self, count: int) -> Iterator[CachedRun]:
        """The runs that would be evicted, in whole or in part, first of all, for `count` slots."""
        for run in chain(self._fresh, self._proven):
            if count <= 0:
                return
            idle = len(run.slots) - self.pool.owned(run.slots)
            count -= idle
            if idle:
                yield run

    @staticmethod
    def path_to(run: CachedRun) -> tuple[Ints, Slots]:
        """All tokens of a prefix up to the end of a run, and their slots."""
        path = _ancestry(run)
        return np.concatenate([above.tokens for above in path]), np.concatenate([above.slots for above in path])

    def _path(self, salt: str | None, tokens: Ints) -> list[CachedRun]:
        """Runs along `tokens` as far as they are known; the last is cut in two where `tokens` leave it."""
        path: list[CachedRun] = []
        run, at = self._roots.get(salt), 0
        while run is not None and at < len(tokens) and (below := run.below.get(int(tokens[at]))) is not None:
            common = below.common(tokens[at:])
            run = below if common == len(below.tokens) else self._split(below, common)
            path.append(run)
            at += common
        return path

    def _split(self, run: CachedRun, at: int) -> CachedRun:
        """A run of its first `at` tokens, above what is left of it."""
        assert run.above is not None
        upper = CachedRun(run.salt, run.above, run.tokens[:at], run.slots[:at])
        run.above.below[int(upper.tokens[0])] = upper
        run.above, run.tokens, run.slots = upper, run.tokens[at:], run.slots[at:]
        upper.below[int(run.tokens[0])] = run
        upper.proven = run.proven
        self._listed(upper)[upper] = None
        return upper

    def _listed(self, run: CachedRun) -> OrderedDict[CachedRun, None]:
        """Where it has its turn."""
        return self._proven if run.proven else self._fresh

    def _use(self, path: Sequence[CachedRun]) -> None:
        """From the end to the root: what is above is used later."""
        for run in reversed(path):
            runs = self._listed(run)
            runs[run] = None
            runs.move_to_end(run)
            run.offered = False

    def _prove(self, path: Sequence[CachedRun]) -> None:
        """A request has found these runs. Those found longest ago are fresh again where the share is exceeded."""
        for run in path:
            if not run.proven:
                self._move(run)
        self._use(path)
        while self._proven_slots > self._max_proven:
            self._move(next(iter(self._proven)))

    def _move(self, run: CachedRun) -> None:
        """To the end of the other list."""
        del self._listed(run)[run]
        run.proven = not run.proven
        self._listed(run)[run] = None
        self._proven_slots += len(run.slots) if run.proven else -len(run.slots)

    def _cut(self, run: CachedRun, count: int) -> None:
        """Drop its last `count` tokens."""
        if not count:
            return
        left = len(run.slots) - count
        self.pool.drop(run.slots[left:])
        if self._dropped is not None:
            self._dropped(run.slots[left:])
        self._proven_slots -= count if run.proven else 0
        if left:
            run.tokens, run.slots = run.tokens[:left], run.slots[:left]
            return
        assert run.above is not None
        del run.above.below[int(run.tokens[0])], self._listed(run)[run]
        if run.above.above is None and not run.above.below:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not run.above}

    @property
    def slots(self) -> list[int]:
        """All that it keeps."""
        return [slot for run in chain(self._fresh, self._proven) for slot in run.slots.tolist()]

    def check(self) -> None:
        """EngineError unless the tree is one: every run hangs where its first token says, is listed once, and before
        what it hangs on; and unless proven runs are within their share."""
        found = [run for root in self._roots.values() for run in _descendants(root)]
        turn = {run: place for place, run in enumerate(chain(self._fresh, self._proven))}
        listed = len(self._fresh) + len(self._proven)
        if len(found) != listed or any(run not in self._listed(run) for run in found):
            raise EngineError(f"prefix cache: {len(found)} runs hang in the tree, {listed} are listed")
        if any(len(run.tokens) != len(run.slots) or not len(run.tokens) for run in found):
            raise EngineError("prefix cache: a run is empty, or has other slots than tokens")
        if any(run.above in turn and turn[run.above] < turn[run] for run in found if run.above is not None):
            raise EngineError("prefix cache: a run would be evicted before one that hangs on it")
        proven = sum(len(run.slots) for run in self._proven)
        if not proven == self._proven_slots <= self._max_proven:
            raise EngineError(f"prefix cache: {proven} slots of proven runs are counted as {self._proven_slots}")


def _ancestry(run: CachedRun) -> list[CachedRun]:
    """From below the root down to `run`."""
    path = [run]
    while (above := path[-1].above) is not None and above.above is not None:
        path.append(above)
    return path[::-1]


def _descendants(root: CachedRun) -> Iterator[CachedRun]:
    waiting = [root]
    while waiting:
        run = waiting.pop()
        for first, below in run.below.items():
            if below.above is not run or int(below.tokens[0]) != first:
                raise EngineError("prefix cache: a run hangs in the wrong place")
            yield below
            waiting.append(below)
