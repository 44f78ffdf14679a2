"""Rows of a forward one after the other, and which columns each sees, for engines without slots.

columns    [ earlier: slots with KV that some row sees ][ rows of this forward ]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.slots import Slots
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.core.trees.tree import Ints


@dataclass(frozen=True)
class FlatRows:
    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    slots: Slots  # [rows], where their KV is to be
    kept: Ints  # [kept], rows whose logits are wanted
    earlier: Slots  # [earlier], ascending, of tokens that were computed before and are seen now
    sees: NDArray[np.bool_]  # [rows, earlier + rows]

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows], num_slots: int) -> FlatRows:
        tokens = np.concatenate([np.concatenate((np.array(s.tokens, np.int64), s.nodes.tokens)) for s in sequences])
        positions = np.concatenate([_positions(s) for s in sequences])
        slots = np.concatenate([np.concatenate((s.prefix_slots[s.start :], s.nodes.slots)) for s in sequences])
        row_of = np.full(num_slots, -1, np.int64)
        row_of[slots] = np.arange(len(slots))
        earlier = _earlier(sequences, row_of)
        column = np.full(num_slots, -1, np.int64)
        column[earlier] = np.arange(len(earlier))
        column[slots] = len(earlier) + np.arange(len(slots))
        sees = np.zeros((len(slots), len(earlier) + len(slots)), np.bool_)
        first = 0
        for sequence in sequences:
            _see(sees[first : first + sequence.num_rows], sequence, column)
            first += sequence.num_rows
        return cls(tokens, positions, slots.astype(np.int32), _kept(sequences), earlier, sees)

    def __len__(self) -> int:
        return len(self.tokens)


def _positions(sequence: SequenceRows) -> Ints:
    prefix = len(sequence.prefix_slots)
    return np.concatenate((np.arange(sequence.start, prefix), prefix - 1 + sequence.nodes.depths))


def _kept(sequences: Sequence[SequenceRows]) -> Ints:
    kept, first = list[int](), 0
    for sequence in sequences:
        kept += [first + offset for offset in sequence.kept]
        kept += range(first + len(sequence.tokens), first + sequence.num_rows)
        first += sequence.num_rows
    return np.array(kept, np.int64)


def _earlier(sequences: Sequence[SequenceRows], row_of: Ints) -> Slots:
    seen = [s.prefix_slots[: s.start] for s in sequences]
    for sequence in sequences:
        nodes = sequence.nodes
        ancestors = np.arange(nodes.deepest)[None, :] < nodes.depths[:, None] - 1
        seen.append(nodes.paths[ancestors])
    slots = np.unique(np.concatenate(seen)).astype(np.int32)
    return slots[row_of[slots] < 0]


def _see(sees: NDArray[np.bool_], sequence: SequenceRows, column: Ints) -> None:
    count, prefix = len(sequence.tokens), column[sequence.prefix_slots]
    for place in range(count):
        sees[place, prefix[: sequence.start + place + 1]] = True
    sees[count:, prefix] = True
    nodes = sequence.nodes
    rows, depths = np.nonzero(np.arange(nodes.deepest)[None, :] < nodes.depths[:, None])
    sees[count + rows, column[nodes.paths[rows, depths]]] = True


# -- forwards of a bounded size


def forwards(sequences: Sequence[SequenceRows], num_slots: int, most_rows: int) -> Iterator[FlatRows]:
    count = sum(sequence.num_rows for sequence in sequences)
    if count <= most_rows:
        yield FlatRows.of(sequences, num_slots)
        return
    for half in _halves(sequences, (count + 1) // 2):
        yield from forwards(half, num_slots, most_rows)


def _halves(sequences: Sequence[SequenceRows], first: int) -> tuple[list[SequenceRows], list[SequenceRows]]:
    head, tail = list[SequenceRows](), list[SequenceRows]()
    for sequence in sequences:
        if sequence.num_rows <= first:
            head.append(sequence)
        elif first <= 0:
            tail.append(sequence)
        else:
            for side, part in zip((head, tail), _cut(sequence, first), strict=True):
                side.append(part)
        first -= sequence.num_rows
    return head, tail


def _cut(rows: SequenceRows, first: int) -> tuple[SequenceRows, SequenceRows]:
    count, end = len(rows.tokens), len(rows.prefix_slots)
    if first > count:
        nodes = rows.nodes.span(0, first - count), rows.nodes.span(first - count, len(rows.nodes))
        head = SequenceRows(rows.start, rows.tokens, rows.prefix_slots, nodes[0], rows.kept)
        return head, SequenceRows(end, [], rows.prefix_slots, nodes[1], [])
    middle = rows.start + first
    kept = [n for n in rows.kept if n < first], [n - first for n in rows.kept if n >= first]
    head = SequenceRows(rows.start, rows.tokens[:first], rows.prefix_slots[:middle], NO_NODES, kept[0])
    return head, SequenceRows(middle, rows.tokens[first:], rows.prefix_slots, rows.nodes, kept[1])
