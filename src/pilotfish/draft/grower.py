"""One level of a draft model: a forward over leaves of several trees, and their likeliest children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotfish.core.draft_sessions import LevelPart, SessionTable
from pilotfish.core.executor import NO_NODES, NO_SAMPLING, Executor, NodeRows, Outcome, Sampling, SequenceRows
from pilotfish.core.lookahead import GrownTree
from pilotfish.core.vocabulary import readable


class Grower:
    """Runs levels over the sessions of a table."""

    def __init__(self, executor: Executor, table: SessionTable, children: int) -> None:
        """Each leaf gets `children`."""
        self.executor = executor
        self.table = table
        self.children = children

    def grow(self, level: Sequence[LevelPart]) -> list[GrownTree]:
        """One forward; the nodes that it added to the tree of each part."""
        for part in level:
            self.table.allocate(part)
        rows = [self._rows(part) for part in level]
        return _added(level, self.executor.execute(rows, sampling_of(level, self.children)))

    def _rows(self, part: LevelPart) -> SequenceRows:
        session, slots = part.session, part.session.slots
        if part.pending:
            start = len(slots) - part.pending
            tokens = readable(session.tokens[start : len(slots)], self.executor.vocab_size)
            return SequenceRows(start, tokens, slots, NO_NODES, [part.pending - 1] if len(part.leaves) else [])
        nodes, leaves = session.tree.nodes, part.leaves
        rows = NodeRows(nodes.tokens[leaves], nodes.depths[leaves], session.tree.paths(leaves))
        return SequenceRows(len(slots), [], slots, rows, kept=())


def sampling_of(level: Sequence[LevelPart], children: int) -> Sampling:
    """The target's way to draw the tokens after the leaves of a level."""
    sessions = [part.session for part in level]
    sequences = np.repeat(np.arange(len(level)), [len(part.leaves) for part in level])
    if not len(sequences):
        return NO_SAMPLING
    positions = np.concatenate([part.session.lengths_at(part.leaves) for part in level])
    ruled = any(session.rules is not None for session in sessions)
    edits = [part.session.edits_at(leaf) for part in level for leaf in part.leaves.tolist()] if ruled else ()
    params, seeds = [session.params for session in sessions], [session.seed for session in sessions]
    return Sampling(np.arange(len(sequences)), params, seeds, sequences, positions, edits, children)


def _added(level: Sequence[LevelPart], outcome: Outcome) -> list[GrownTree]:
    added, row = [], 0
    for part in level:
        rows = slice(row, row + len(part.leaves))
        row = rows.stop
        if len(part.leaves) and outcome.log_chances is not None:
            children = part.session.add_children(part.leaves, outcome.tokens[rows], outcome.log_chances[rows])
        else:
            children = GrownTree.empty()
        added.append(children)
    return added
