"""The prefix cache of a simulated target: `prefix_cache.py` without tokens and slots, by the names of runs alone, and
therefore quick. Tests hold it to the real one.

    slots   [ requests' own ....... | in runs, owned ....... | in runs, idle ....... | free ]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from fleets.traffic import RunId, SimulatedRequest
from pilotfish.core.cache.prefix_cache import EVICTED_SHARE, EVICTED_TOGETHER, PROVEN_SHARE


class KnownRun:
    __slots__ = ("above", "begin", "below", "id", "owners", "proven", "tokens")

    def __init__(self, name: RunId, above: KnownRun | None, begin: int) -> None:
        self.id = name
        self.above = above
        self.begin = begin  # tokens before it
        self.tokens = 0  # that are known of it
        self.below = 0  # runs that hang on it
        self.owners = 0
        self.proven = False

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with what is known of it."""
        return self.begin + self.tokens


#: Told of a run of which more or less is known from now on, and of its end before.
Changed = Callable[[KnownRun, int], None]


class RunCache:
    def __init__(self, capacity: int, changed: Changed, proven_share: float = PROVEN_SHARE) -> None:
        self.capacity = capacity
        self.own = 0  # slots of requests that are in no run
        self.kept = 0  # slots in runs
        self.owned = 0  # of those, that a request owns
        self._changed = changed
        self._runs: dict[RunId, KnownRun] = {}
        self._fresh: OrderedDict[KnownRun, None] = OrderedDict()  # used longest ago first
        self._proven: OrderedDict[KnownRun, None] = OrderedDict()
        self._proven_slots = 0
        self._max_proven = int(proven_share * capacity)

    @property
    def live(self) -> int:
        return self.own + self.owned

    def known(self, request: SimulatedRequest) -> int:
        """Tokens of its prompt but for the last one that are known; does not count as use."""
        found = 0
        for run, end in zip(request.runs, request.ends, strict=True):
            known = self._runs.get(run)
            if known is None:
                break
            found = known.end
            if found < end:
                break
        return min(found, request.tokens - 1)

    def room(self, request: SimulatedRequest) -> bool:
        idle = sum(run.tokens for run in self._path(request) if not run.owners)
        return request.tokens - self.known(request) + request.output + idle <= self.capacity - self.live

    def admit(self, request: SimulatedRequest) -> tuple[int, list[KnownRun]]:
        """Tokens that it finds, and the runs that it owns from now on. It takes slots for all others at once."""
        found, path = self.known(request), self._path(request)
        for run in path:
            if not run.proven:
                self._move(run)
        self._use(path)
        self._limit_proven()
        self._own(path)
        count = request.tokens - found + request.output
        if (lacking := count - (self.capacity - self.own - self.kept)) > 0:
            self._evict(max(lacking, min(EVICTED_TOGETHER, int(EVICTED_SHARE * self.capacity))))
        self.own += count
        return found, path

    def computed(self, request: SimulatedRequest, found: int, path: list[KnownRun]) -> None:
        """The KV of its prompt is there; its slots are in runs from now on, but for what others brought meanwhile."""
        self.own -= request.tokens - found
        self._grow(path, request.runs, request.ends)

    def ended(self, request: SimulatedRequest, path: list[KnownRun]) -> None:
        self.own -= request.output
        self._grow(path, (*request.runs, request.output_run), (*request.ends, request.tokens + request.output))
        for run in path:
            run.owners -= 1
            self.owned -= 0 if run.owners else run.tokens

    def _path(self, request: SimulatedRequest) -> list[KnownRun]:
        path = []
        for run, end in zip(request.runs, request.ends, strict=True):
            known = self._runs.get(run)
            if known is None:
                break
            path.append(known)
            if known.end < end:
                break
        return path

    def _grow(self, path: list[KnownRun], runs: tuple[RunId, ...], ends: tuple[int, ...]) -> None:
        """Have `path` reach to the last of these ends; who owned its beginning owns all of it."""
        for place in range(max(len(path) - 1, 0), len(runs)):
            if place == len(path):
                above = path[-1] if path else None
                path.append(self._runs.get(runs[place]) or self._new(runs[place], above))
                self._own(path[-1:])
            self._lengthen(path[place], ends[place])
        self._use(path)
        self._limit_proven()

    def _new(self, name: RunId, above: KnownRun | None) -> KnownRun:
        run = self._runs[name] = KnownRun(name, above, above.end if above else 0)
        if above:
            above.below += 1
        self._fresh[run] = None
        return run

    def _lengthen(self, run: KnownRun, end: int) -> None:
        before, added = run.end, end - run.end
        if added > 0:
            run.tokens += added
            self.kept += added
            self.owned += added
            self._proven_slots += added if run.proven else 0
            self._changed(run, before)

    def _own(self, path: list[KnownRun]) -> None:
        for run in path:
            self.owned += 0 if run.owners else run.tokens
            run.owners += 1

    def _evict(self, count: int) -> None:
        for runs in (self._fresh, self._proven):
            count = self._evict_of(runs, count)

    def _evict_of(self, runs: OrderedDict[KnownRun, None], count: int) -> int:
        """How many of the slots are still to be evicted."""
        turns = len(runs)
        while count > 0 and turns > 0 and self.kept > self.owned:
            run, turns = next(iter(runs)), turns - 1
            idle = 0 if run.below or run.owners else min(run.tokens, count)
            self._cut(run, idle)
            count -= idle
            if count > 0 and run.tokens:  # owned, or one below it is: in use
                self._use(_ancestry(run))
        return count

    def _cut(self, run: KnownRun, count: int) -> None:
        before = run.end
        run.tokens -= count
        self.kept -= count
        self._proven_slots -= count if run.proven else 0
        if not run.tokens:
            del self._runs[run.id], self._listed(run)[run]
            if run.above:
                run.above.below -= 1
        if count:
            self._changed(run, before)

    def _use(self, path: list[KnownRun]) -> None:
        """From the end to the root: what is above is used later."""
        for run in reversed(path):
            self._listed(run).move_to_end(run)

    def _listed(self, run: KnownRun) -> OrderedDict[KnownRun, None]:
        return self._proven if run.proven else self._fresh

    def _move(self, run: KnownRun) -> None:
        del self._listed(run)[run]
        run.proven = not run.proven
        self._listed(run)[run] = None
        self._proven_slots += run.tokens if run.proven else -run.tokens

    def _limit_proven(self) -> None:
        while self._proven_slots > self._max_proven:
            self._move(next(iter(self._proven)))

    def check(self) -> None:
        runs = list(chain(self._fresh, self._proven))
        assert set(runs) == set(self._runs.values()) and len(runs) == len(self._runs)
        assert self.kept == sum(run.tokens for run in runs) and self.own >= 0
        assert self.owned == sum(run.tokens for run in runs if run.owners)
        assert self._proven_slots == sum(run.tokens for run in self._proven)
        assert self.own + self.kept <= self.capacity


def _ancestry(run: KnownRun | None) -> list[KnownRun]:
    path: list[KnownRun] = []
    while run is not None:
        path.append(run)
        run = run.above
    return path[::-1]
