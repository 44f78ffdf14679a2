"""What a device would have in the slots of a draft, for tests that run none, and what may happen to its sessions."""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.draft_sessions import IDLE, DraftSession, LevelPart, SessionTable
from pilotfish.core.drafting.level_choice import LevelChoice, LevelShape

Owner = tuple[str, bytes | None]


class SlotContents:
    """The KV in each slot: by the tenant and salt of its session, who may share it, and what was read up to its own."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.written: dict[int, tuple[Owner, tuple[int, ...]]] = {}
        self.rows = 0

    def run(self, level: Sequence[LevelPart]) -> None:
        """The forward over a level that has its slots."""
        for part in level:
            session, self.rows = part.session, self.rows + part.rows
            for length in range(len(session.slots) - part.pending + 1, len(session.slots) + 1):
                self.written[int(session.slots[length - 1])] = _owner(session), tuple(session.inputs[:length])
            for leaf in part.leaves if not part.pending else ():
                whole = *session.inputs, *path_inputs(session, leaf)
                self.written[session.tree.path(leaf)[-1]] = _owner(session), whole

    def check(self) -> None:
        """Every slot holds what its session takes it to hold."""
        self.table.check()
        for session in self.table:
            for length, slot in enumerate(session.slots.tolist(), 1):
                assert self.written[slot] == (_owner(session), tuple(session.inputs[:length]))
            for node in session.tree.expanded:
                whole = (*session.inputs, *path_inputs(session, node))
                for length, slot in enumerate(session.tree.path(node), len(session.inputs) + 1):
                    assert self.written[slot] == (_owner(session), whole[:length])


def _owner(session: DraftSession) -> Owner:
    return session.tenant, session.salt


def path_inputs(session: DraftSession, node: int) -> list[int]:
    """What is read of the nodes from below the root down to this one."""
    tokens = session.tree.path_tokens(node)
    return tokens if session.text is None else [session.text.map.counterpart(token) for token in tokens]


CHILDREN = 2
SHAPE = LevelShape(4, CHILDREN)


def make_table(capacity: int, cached: bool = True) -> SessionTable:
    pool = SlotPool(capacity)
    return SessionTable(pool, PrefixCache(pool) if cached else None)


class SessionRules(RuleBasedStateMachine):
    """Machines have a rule that begins, and others that open sessions, grow their trees and commit."""

    def begin_with(self, table: SessionTable) -> None:
        self.table, self.contents = table, SlotContents(table)
        self.choice, self.now = LevelChoice(table, SHAPE), 0.0

    def some(self, data: st.DataObject) -> DraftSession:
        return data.draw(st.sampled_from(list(self.table)))

    @staticmethod
    def guessed(session: DraftSession, count: int) -> list[int]:
        """So many tokens of its tree, or none."""
        tree = session.tree
        return tree.path_tokens(next((node for node in tree.likeliest(30) if tree.depth(node) == count), tree.root))

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), end=st.sampled_from(["close", "evict", "drop_tree"]))
    def lose(self, data: st.DataObject, end: str) -> None:
        getattr(self.table, end)(self.some(data))

    @rule()
    def wait(self) -> None:
        self.now += IDLE

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.contents.check()
