"""What a device would have in the slots of a draft, for tests that run none."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.draft_sessions import LevelPart, SessionTable


class SlotContents:
    """The KV in each slot: by the root of its session, which says who may share it, and the tokens up to its own."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.rows = 0

    def run(self, level: Sequence[LevelPart]) -> None:
        """The forward over a level that has its slots."""
        for part in level:
            session, self.rows = part.session, self.rows + part.rows
            for length in range(len(session.slots) - part.pending + 1, len(session.slots) + 1):
                self.written[int(session.slots[length - 1])] = session.root, tuple(session.tokens[:length])
            for leaf in part.leaves if not part.pending else ():
                whole = *session.tokens, *session.tree.path_tokens(leaf)
                self.written[session.tree.path(leaf)[-1]] = session.root, whole

    def check(self) -> None:
        """Every slot holds what its session takes it to hold."""
        self.table.check()
        for session in self.table:
            for length, slot in enumerate(session.slots.tolist(), 1):
                assert self.written[slot] == (session.root, tuple(session.tokens[:length]))
            for node in session.tree.expanded:
                whole = (*session.tokens, *session.tree.path_tokens(node))
                for length, slot in enumerate(session.tree.path(node), len(session.tokens) + 1):
                    assert self.written[slot] == (session.root, whole[:length])
