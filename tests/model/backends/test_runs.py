"""Slots as places in sequences: whatever is grown, dropped and written again, a row comes after its own path."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.model.backends.runs import PathRow, PathRun, Runs


class Engine:
    """Knows sequences of tokens, so many at most, and nothing of slots."""

    def __init__(self, most: int, cells: int = 10**9) -> None:
        self.sequences: dict[int, list[object]] = {}
        self.runs = Runs(most, self.copy, self.remove)
        self.most, self.cells = most, cells
        self.queue: list[tuple[PathRow, PathRun, list[int]]] = []
        self.computed = 0

    def copy(self, source: int, copy: int, length: int) -> None:
        assert copy not in self.sequences and len(self.sequences[source]) >= length
        self.sequences[copy] = self.sequences[source][:length]

    def remove(self, number: int) -> None:
        self.sequences.pop(number, None)

    def run(self, rows: list[tuple[PathRow, list[int]]]) -> None:
        """`rows`, each with the tokens of its path."""
        for row, path in rows:
            for lost in self.runs.lacking(row):
                self._compute(lost, path[: lost.position + 1])
            self._compute(row, path)
        self._decode()
        self.runs.end_forward()
        assert len(self.sequences) == len(self.runs) <= self.most

    def _compute(self, row: PathRow, path: list[int]) -> None:
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


class World:
    """Sequences whose trees grow, are accepted in part, and end; their slots are used again."""

    def __init__(self, most: int, seed: int, slots: int = 120, cells: int = 10**9) -> None:
        self.engine, self.draw = Engine(most, cells), Random(seed)
        self.free = list(range(slots))
        self.draw.shuffle(self.free)
        self.sequences: list[Grown] = []

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def step(self) -> None:
        if len(self.sequences) < 4 and len(self.free) > 40:
            self.open()
        rows: list[tuple[PathRow, list[int]]] = []
        for sequence in self.sequences:
            rows += self.grow(sequence)
        self.draw.shuffle(self.sequences)
        self.engine.run(rows)
        for sequence in list(self.sequences):
            self.after(sequence)

    def open(self) -> None:
        """Anew, or with what another one has: KV is shared."""
        sequence = Grown()
        if self.sequences and self.draw.random() < 0.5:
            other = self.draw.choice(self.sequences)
            length = self.draw.randrange(len(other.slots) + 1)
            sequence.tokens, sequence.slots = other.tokens[:length], other.slots[:length]
        sequence.shared = len(sequence.slots)
        sequence.tokens = sequence.tokens + [self.draw.randrange(5) for _ in range(1 + self.draw.randrange(8))]
        self.sequences.append(sequence)

    def grow(self, sequence: Grown) -> list[tuple[PathRow, list[int]]]:
        rows = []
        missing = len(sequence.tokens) - len(sequence.slots)
        if missing:
            sequence.slots = sequence.slots + self.take(missing) if len(self.free) >= missing else sequence.slots
            if len(sequence.slots) < len(sequence.tokens):
                return []
            for position in range(len(sequence.tokens) - missing, len(sequence.tokens)):
                path = sequence.tokens[: position + 1]
                rows.append((PathRow(path[-1], position, sequence.slots), path))
            return rows
        leaves = [(), *sequence.nodes]
        for parent in self.draw.sample(leaves, min(3, len(leaves))):
            child = (*parent, self.draw.randrange(3))
            if child not in sequence.nodes and self.free:
                (sequence.nodes[child],) = self.take(1)
                below = [sequence.nodes[child[: n + 1]] for n in range(len(child))]
                position = len(sequence.tokens) - 1 + len(child)
                rows.append((PathRow(child[-1], position, list(sequence.slots), below), [*sequence.tokens, *child]))
        return rows

    def after(self, sequence: Grown) -> None:
        if sequence.nodes and self.draw.random() < 0.4:
            path = self.draw.choice(list(sequence.nodes))
            sequence.slots = sequence.slots + [sequence.nodes.pop(path[: n + 1]) for n in range(len(path))]
            sequence.tokens = [*sequence.tokens, *path, self.draw.randrange(5)]
            kept = {node[len(path) :]: slot for node, slot in sequence.nodes.items() if node[: len(path)] == path}
            bonus = sequence.tokens[-1]
            if (bonus,) in kept:
                sequence.slots = [*sequence.slots, kept.pop((bonus,))]
            below = {node[1:]: slot for node, slot in kept.items() if node[0] == bonus}
            dead = set(sequence.nodes.values()) - set(below.values()) - set(sequence.slots)
            sequence.nodes = below if len(sequence.slots) == len(sequence.tokens) else {}
            self.free += sorted(dead if sequence.nodes else dead | (set(below.values())))
        elif self.draw.random() < 0.06:
            self.sequences.remove(sequence)
            others = {slot for other in self.sequences for slot in other.slots}
            self.free += sorted({*sequence.slots, *sequence.nodes.values()} - others)


class Grown:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.slots: list[int] = []
        self.nodes: dict[tuple[int, ...], int] = {}
        self.shared = 0


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([6, 12, 256]), st.sampled_from([150, 10**9]))
def test_a_row_sees_its_path(seed: int, most: int, cells: int) -> None:
    world = World(most, seed, cells=cells)
    for _ in range(60):
        world.step()
    for sequence in world.sequences:
        for slot, token in zip(sequence.slots, sequence.tokens, strict=False):
            along = tokens_along(world.engine.runs, slot)
            assert along is None or along[-1] == token


def test_nothing_is_computed_twice_where_there_is_room() -> None:
    world, rows = World(256, 1), 0
    real = world.engine.run

    def counted(given: list[tuple[PathRow, list[int]]]) -> None:
        nonlocal rows
        rows += len(given)
        real(given)

    world.engine.run = counted  # type: ignore[method-assign]
    for _ in range(300):
        world.step()
    assert world.engine.computed == rows > 300


def test_what_was_given_up_is_found_with_an_heir() -> None:
    """A run of three numbers at most: the oldest has only slots that its heir has too."""
    engine = Engine(3)
    slots = [10, 11, 12]
    engine.run([(PathRow(5 + n, n, slots), [5, 6, 7][: n + 1]) for n in range(3)])
    engine.run([(PathRow(8, 2, slots[:2], [20]), [5, 6, 8])])  # run 1, an heir for two tokens
    engine.run([(PathRow(9, 3, slots[:2], [20, 21]), [5, 6, 8, 9])])
    assert engine.runs.give_up_one()
    assert tokens_along(engine.runs, 11) == [5, 6] and tokens_along(engine.runs, 12) is None
    before = engine.computed
    engine.run([(PathRow(3, 3, slots, [30]), [5, 6, 7, 3])])  # after what was lost
    assert engine.computed == before + 2


def test_more_leaves_than_numbers() -> None:
    engine = Engine(4)
    engine.run([(PathRow(1, 0, [0]), [1])])
    rows = [(PathRow(n, 1, [0], [100 + n]), [1, n]) for n in range(20)]
    engine.run(rows)
    deeper = [(PathRow(7, 2, [0], [100 + n, 200 + n]), [1, n, 7]) for n in range(20)]
    engine.run(deeper)
    assert engine.computed > 41  # some were computed again


@pytest.mark.parametrize("position", [0, 1])
def test_a_slot_that_is_written_again_leaves_its_place(position: int) -> None:
    engine = Engine(8)
    engine.run([(PathRow(1, 0, [0, 1]), [1]), (PathRow(2, 1, [0, 1]), [1, 2])])
    if position == 0:
        engine.run([(PathRow(9, 0, [0]), [9])])
        assert tokens_along(engine.runs, 0) == [9]
    else:
        engine.run([(PathRow(9, 1, [0], [1]), [1, 9])])
        assert tokens_along(engine.runs, 1) == [1, 9]
