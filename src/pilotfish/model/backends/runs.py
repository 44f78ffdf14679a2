"""Slots as places in sequences that share their beginning, for an engine that has sequences but no slots.

A *run* is one path from the first token on; a slot is a place in a run. The row after a slot goes on with its run, if
the slot is the run's end, or with a new run that begins alike:

    run 0    the ─── cat ─── sat             run 1 begins as run 0 does, for two tokens: it is an heir of run 0
    run 1    the ─── cat ─── ran

Where numbers or room run out, the least recently used of the cheap runs is given up. Its slots that an heir also has
become places of the heir; the others are computed again when a row needs them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from pilotfish.core.scheduling.executor import SequenceRows

NOWHERE = -1
#: Tokens that are soon computed again.
CHEAP = 16


class PathRow(Struct, frozen=True):
    token: int
    position: int
    prefix: Sequence[int]  # slots of its sequence's first tokens, as far as `below` does not begin, or further
    below: Sequence[int] = ()  # slots from there to its own
    kept: int = NOWHERE  # which of the logits that are wanted

    @property
    def slot(self) -> int:
        return self.slot_at(self.position)

    @property
    def parent(self) -> int:
        """Undefined at position 0."""
        return self.slot_at(self.position - 1)

    def slot_at(self, position: int) -> int:
        first = self.position + 1 - len(self.below)
        return self.prefix[position] if position < first else self.below[position - first]

    def ancestor(self, position: int, token: int) -> "PathRow":
        below = self.below[: max(len(self.below) - (self.position - position), 0)]
        return PathRow(token, position, self.prefix, below)


def path_rows(rows: Sequence[SequenceRows]) -> Iterator[PathRow]:
    kept = 0
    for sequence in rows:
        prefix, nodes = sequence.prefix_slots.tolist(), sequence.nodes
        wanted = {offset: kept + place for place, offset in enumerate(sequence.kept)}
        kept += len(wanted)
        for offset, token in enumerate(sequence.tokens):
            yield PathRow(int(token), sequence.start + offset, prefix, kept=wanted.get(offset, NOWHERE))
        for place, (token, depth) in enumerate(zip(nodes.tokens.tolist(), nodes.depths.tolist(), strict=True)):
            below = nodes.paths[place, :depth].tolist()
            yield PathRow(token, len(prefix) - 1 + depth, prefix, below, kept + place)
        kept += len(nodes)


@dataclass(eq=False)
class PathRun:
    number: int
    end: int
    decoded: int
    used: int
    slots: dict[int, int] = field(default_factory=dict)  # positions of those that are places here
    heirs: "list[PathRun]" = field(default_factory=list)  # those whose `origin` it is
    origin: "PathRun | None" = None  # of which it is an heir
    shared: int = 0  # first tokens that are those of `origin`


class Runs:
    def __init__(self, most: int, copy: Callable[[int, int, int], None], remove: Callable[[int], None]) -> None:
        """`copy` has the engine begin a run (its second number) as another one, for so many tokens."""
        self._copy, self._remove = copy, remove
        self._free = list(range(most - 1, -1, -1))
        self._run_of: dict[int, PathRun] = {}  # of a slot
        self._tokens: dict[int, int] = {}  # of a slot
        self._runs: dict[int, PathRun] = {}  # by number
        self._queued: set[PathRun] = set()  # they end in rows that are not decoded yet
        self._now = 0

    def __len__(self) -> int:
        return len(self._runs)

    def lacking(self, row: PathRow) -> list[PathRow]:
        """Rows of lost ancestors, in order: they must be computed first."""
        first = row.position
        while first > 0 and row.slot_at(first - 1) not in self._run_of:
            first -= 1
        return [row.ancestor(n, self._tokens[row.slot_at(n)]) for n in range(first, row.position)]

    def must_wait(self, row: PathRow) -> bool:
        """Whether queued rows must be decoded first: the run that it begins like lacks KV, or no number is free."""
        if row.position == 0:
            return not self._free and len(self._queued) == len(self._runs)
        parent = self._run_of[row.parent]
        place = parent.slots[row.parent] + 1
        if place == parent.end:
            return False
        return parent.decoded < place or (not self._free and len(self._queued | {parent}) == len(self._runs))

    def place(self, row: PathRow) -> PathRun:
        run = self._new(0) if row.position == 0 else self._after(row)
        self._leave(row.slot)
        run.slots[row.slot] = row.position
        run.end, run.used = row.position + 1, self._now
        self._run_of[row.slot], self._tokens[row.slot] = run, row.token
        self._queued.add(run)
        return run

    def _after(self, row: PathRow) -> PathRun:
        parent = self._run_of[row.parent]
        place = parent.slots[row.parent] + 1
        parent.used = self._now
        if place == parent.end:
            return parent
        self._queued.add(parent)  # it is not given up for its heir
        run = self._new(place)
        self._queued.discard(parent)
        if parent.end > parent.decoded:
            self._queued.add(parent)
        _inherit(run, parent, place)
        self._copy(parent.number, run.number, place)
        return run

    def _new(self, length: int) -> PathRun:
        if not self._free:
            self.give_up_one()
        run = PathRun(self._free.pop(), length, length, self._now)
        self._runs[run.number] = run
        return run

    def _leave(self, slot: int) -> None:
        run = self._run_of.pop(slot, None)
        if run is not None:
            del run.slots[slot]

    def decoded(self) -> None:
        for run in self._queued:
            run.decoded = run.end
        self._queued.clear()

    def end_forward(self) -> None:
        self._now += 1
        for run in [run for run in self._runs.values() if not run.slots]:
            self._forget(run)

    def give_up_one(self) -> bool:
        """Gives up a run that no queued row ends in; False if there is none."""
        idle = [run for run in self._runs.values() if run not in self._queued]
        if not idle:
            return False
        alone = {run: run.end - max([run.shared, *(heir.shared for heir in run.heirs)]) for run in idle}
        run = min(idle, key=lambda run: (alone[run] > CHEAP, run.used))
        if run.heirs:
            self._bequeath(run, max(run.heirs, key=lambda heir: heir.shared))
        for slot in run.slots:
            del self._run_of[slot]
        run.slots.clear()
        self._forget(run)
        return True

    def _bequeath(self, run: PathRun, best: PathRun) -> None:
        for slot, position in [item for item in run.slots.items() if item[1] < best.shared]:
            del run.slots[slot]
            best.slots[slot] = position
            self._run_of[slot] = best
        for heir in run.heirs:
            if heir is not best:
                _inherit(heir, best, heir.shared)
        _inherit(best, run.origin, min(run.shared, best.shared))
        run.heirs = []

    def _forget(self, run: PathRun) -> None:
        for heir in run.heirs:
            _inherit(heir, run.origin, min(heir.shared, run.shared))
        if run.origin is not None:
            run.origin.heirs.remove(run)
        del self._runs[run.number]
        self._free.append(run.number)
        self._remove(run.number)


def _inherit(heir: PathRun, origin: PathRun | None, shared: int) -> None:
    heir.origin, heir.shared = origin, shared
    if origin is not None:
        origin.heirs.append(heir)
