"""Slots as places in sequences: whatever is grown, dropped and written again, a row comes after its own path."""

from collections.abc import Iterable

from backend_rig import Traffic
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.model.backends.runs import PathRow, PathRun, Runs, path_rows


class Engine:
    """Knows sequences of tokens, so many at most, and nothing of slots."""

    def __init__(self, most: int, cells: int = 10**9) -> None:
        self.sequences: dict[int, list[object]] = {}
        self.runs = Runs(most, self.copy, self.remove)
        self.most, self.cells = most, cells
        self.tokens: dict[int, int] = {}  # by slot
        self.queue: list[tuple[PathRow, PathRun, list[int]]] = []
        self.computed = 0

    def copy(self, source: int, copy: int, length: int) -> None:
        assert copy not in self.sequences and len(self.sequences[source]) >= length
        self.sequences[copy] = self.sequences[source][:length]

    def remove(self, number: int) -> None:
        self.sequences.pop(number, None)

    def run(self, rows: Iterable[PathRow]) -> None:
        for row in rows:
            self.tokens[row.slot] = row.token
            for lost in self.runs.lacking(row):
                self._compute(lost)
            self._compute(row)
        self._decode()
        self.runs.end_forward()
        assert len(self.sequences) == len(self.runs) <= self.most

    def _compute(self, row: PathRow) -> None:
        path = [self.tokens[row.slot_at(position)] for position in range(row.position + 1)]
        assert path[-1] == row.token
        if self.runs.must_wait(row):
            self._decode()
        self.queue.append((row, self.runs.place(row), path))

    def _decode(self) -> None:
        while self._cells() + len(self.queue) > self.cells and self.runs.give_up_one():
            pass
        for row, run, path in self.queue:
            sequence = self.sequences.setdefault(run.number, [])
            assert [token for token, _ in sequence] == path[:-1]  # type: ignore[misc]  # it sees its path, all of it
            sequence.append((row.token, object()))
            self.computed += 1
        self.queue.clear()
        self.runs.decoded()

    def _cells(self) -> int:
        return len({id(cell) for sequence in self.sequences.values() for cell in sequence})


def tokens_along(runs: Runs, slot: int) -> list[int] | None:
    """Of the run of a slot, up to the slot, as far as slots tell; None where it is lost."""
    above = runs._run_of.get(slot)
    if above is None:
        return None
    by_position: dict[int, int] = {}
    length = above.slots[slot] + 1
    while above is not None:
        for other, position in above.slots.items():
            if position < length:
                by_position.setdefault(position, runs._tokens[other])
        length, above = min(length, above.shared), above.origin
    return [by_position[position] for position in sorted(by_position)]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([6, 12, 256]), st.sampled_from([320, 10**9]))
def test_a_row_sees_its_path(seed: int, most: int, cells: int) -> None:
    engine, traffic = Engine(most, cells), Traffic(seed, 256, vocab=5)
    for forward in traffic.forwards(60):
        engine.run(path_rows(forward))
    for sequence in traffic.sequences:
        for slot, token in zip(sequence.slots, sequence.tokens, strict=False):
            along = tokens_along(engine.runs, slot)
            assert along is None or along[-1] == token


def test_nothing_is_computed_twice_where_there_is_room() -> None:
    engine, rows = Engine(256), 0
    for forward in Traffic(1, 256, vocab=5).forwards(300):
        engine.run(path_rows(forward))
        rows += sum(sequence.num_rows for sequence in forward)
    assert engine.computed == rows > 300


def test_what_was_given_up_is_found_with_an_heir() -> None:
    """A run of three numbers at most: the oldest has only slots that its heir has too."""
    engine = Engine(3)
    slots = [10, 11, 12]
    engine.run([PathRow(5 + n, n, slots) for n in range(3)])
    engine.run([PathRow(8, 2, slots[:2], [20])])  # run 1, an heir for two tokens
    engine.run([PathRow(9, 3, slots[:2], [20, 21])])
    assert engine.runs.give_up_one()
    assert tokens_along(engine.runs, 11) == [5, 6] and tokens_along(engine.runs, 12) is None
    before = engine.computed
    engine.run([PathRow(3, 3, slots, [30])])  # after what was lost
    assert engine.computed == before + 2
