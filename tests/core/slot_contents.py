"""What a device would have in the slots of a draft, for tests that run none."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.drafting.draft_sessions import DraftSession, LevelPart, SessionTable


class SlotContents:
    """The KV in each slot: by the salt of its session, which says who may share it, and what was read up to its
    own."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.rows = 0

    def run(self, level: Sequence[LevelPart]) -> None:
        """The forward over a level that has its slots."""
        for part in level:
            session, self.rows = part.session, self.rows + part.rows
            for length in range(len(session.slots) - part.pending + 1, len(session.slots) + 1):
                self.written[int(session.slots[length - 1])] = session.cache_salt, tuple(session.inputs[:length])
            for leaf in part.leaves if not part.pending else ():
                whole = *session.inputs, *path_inputs(session, leaf)
                self.written[session.tree.path(leaf)[-1]] = session.cache_salt, whole

    def check(self) -> None:
        """Every slot holds what its session takes it to hold."""
        self.table.check()
        for session in self.table:
            for length, slot in enumerate(session.slots.tolist(), 1):
                assert self.written[slot] == (session.cache_salt, tuple(session.inputs[:length]))
            for node in session.tree.expanded:
                whole = (*session.inputs, *path_inputs(session, node))
                for length, slot in enumerate(session.tree.path(node), len(session.inputs) + 1):
                    assert self.written[slot] == (session.cache_salt, whole[:length])


def path_inputs(session: DraftSession, node: int) -> list[int]:
    """What is read of the nodes from below the root down to this one."""
    tokens = session.tree.path_tokens(node)
    return tokens if session.text is None else [session.text.map.counterpart(token) for token in tokens]
