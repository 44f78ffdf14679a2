"""A draft's sessions: the KV in a session's slots is that of its tokens, under its tenant and salt; none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sizes import sized
from slot_contents import SlotContents

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.draft_sessions import (
    IDLE,
    DraftModel,
    DraftSession,
    LevelPart,
    SessionKey,
    SessionTable,
    add_children,
)
from pilotfish.core.drafting.level_choice import LevelChoice, LevelShape
from pilotfish.core.drafting.messages import Open, RequestSampling
from pilotfish.core.drafting.vocabulary_map import Unshared
from pilotfish.core.features.features import Features
from pilotfish.core.peers.fields import salt_digest
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.trees.child_calibration import TENANTS as MOST_TENANTS
from pilotfish.core.trees.child_calibration import TenantCalibrations
from pilotfish.errors import EngineError

CAPACITY, CHILDREN = 40, 2
TENANTS, SALTS = ("a", "b"), (None, "x", "y")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SHAPE = LevelShape(4, CHILDREN)


def make_table(capacity: int = CAPACITY, cached: bool = True) -> SessionTable:
    pool = SlotPool(capacity)
    return SessionTable(pool, PrefixCache(pool) if cached else None)


def make_session(
    number: int,
    tokens: list[int],
    tenant: str = "a",
    salt: str | None = None,
    generation: int = 1,
    now: float = 0.0,
    width: int = 0,
) -> DraftSession:
    """`width` is that of a trained head's features."""
    key, digest = SessionKey(tenant.encode(), number), salt_digest(salt, b"key")
    opened = Open(number, generation, tokens, len(tokens), 60, 0, RequestSampling(), 30, digest)
    return DraftSession(key, opened, tenant, 1.0, now, DraftModel(CAPACITY, feature_width=width), Unshared())


def features_of(session: DraftSession, first: int, end: int) -> Features:
    """What a target would tell of positions [first, end): each depends on all tokens up to its own."""
    numbers = [hash(tuple(session.tokens[: place + 1])) % 2**20 for place in range(first, end)]
    return np.array(numbers, np.float32).reshape(-1, 1)


def tell(session: DraftSession, count: int = CAPACITY) -> None:
    """The next features, of those that the target has: not the last token's."""
    assert session.features is not None
    first = session.features.reach
    session.features.put(first, features_of(session, first, min(first + count, len(session.tokens) - 1)))


class Device:
    """Runs levels of children that do not depend on anything."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.contents = SlotContents(table)

    def run(self, level: list[LevelPart]) -> None:
        self.table.allocate(level)
        self.contents.run(level)
        for part in level:
            end, log = len(part.session.slots), part.session.features
            if part.pending and log is not None:
                first = max(end - part.pending, 1)  # the first token has none
                assert (log.of_rows(first, end - first) == features_of(part.session, first - 1, end - 1)).all()
        self.table.computed(level)
        leaves = sum(len(part.leaves) for part in level)
        tokens, chances = np.tile(np.arange(CHILDREN), (leaves, 1)), np.full((leaves, CHILDREN), -0.7)
        add_children(level, tokens, chances, self.table.calibrations)

    def check(self) -> None:
        self.contents.check()


def read(device: Device, session: DraftSession) -> int:
    """Compute all that it lacks: rows."""
    before = device.contents.rows
    if session.num_pending:
        device.run([LevelPart.of_pending(session, session.num_pending)])
    return device.contents.rows - before


class SessionsMachine(RuleBasedStateMachine):
    """Sessions of several tenants and salts over few slots: opened, again, grown, committed to, evicted, closed. Those
    of a trained head are told features in between."""

    @initialize(cached=st.booleans(), width=st.integers(0, 1))
    def begin(self, cached: bool, width: int) -> None:
        self.width = width
        self.table = make_table(cached=cached)
        self.device = Device(self.table)
        self.choice = LevelChoice(self.table, SHAPE)
        self.now = 0.0

    def some(self, data: st.DataObject) -> DraftSession:
        return data.draw(st.sampled_from(list(self.table)))

    @rule(number=st.integers(1, 3), tenant=st.sampled_from(TENANTS), salt=st.sampled_from(SALTS), tokens=TOKENS)
    def open(self, number: int, tenant: str, salt: str | None, tokens: list[int]) -> None:
        session = make_session(number, tokens, tenant, salt, now=self.now, width=self.width)
        found = self.table.open(session)
        assert found == len(session.slots) < len(tokens)
        assert self.table.cache.keeps or not found

    @rule()
    def level(self) -> None:
        level = self.choice.next_level(self.now)
        assert sum(part.rows for part in level) <= self.table.pool.num_available
        if level:
            self.device.run(level)

    @precondition(lambda self: self.width and len(self.table))
    @rule(data=st.data(), count=st.integers(1, 12))
    def tell(self, data: st.DataObject, count: int) -> None:
        tell(self.some(data), count)

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), hits=st.integers(0, 3), bonus=st.integers(0, 1))
    def commit(self, data: st.DataObject, hits: int, bonus: int) -> None:
        session = self.some(data)
        tree = session.tree
        node = next((node for node in tree.likeliest(30) if tree.depth(node) == hits), tree.root)
        tokens = [*tree.path_tokens(node), bonus]
        if len(session.tokens) + len(tokens) < session.max_length:
            self.table.commit(session, tokens)
            session.touched = self.now
            if session.evicted:
                self.table.wake(session)

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), end=st.sampled_from(["close", "evict", "drop_tree"]))
    def lose(self, data: st.DataObject, end: str) -> None:
        getattr(self.table, end)(self.some(data))

    @rule(count=st.integers(0, CAPACITY), tenants=st.sets(st.sampled_from(TENANTS)))
    def make_room(self, count: int, tenants: set[str]) -> None:
        before, rested = self.table.pool.num_available, [session.evicted for session in self.table]
        self.table.make_room(count, (), tenants, self.now)
        assert before < count or rested == [session.evicted for session in self.table]
        if tenants == set(TENANTS):
            assert self.table.pool.num_available >= min(count, CAPACITY - sum(len(s.tree.slots) for s in self.table))

    @rule()
    def wait(self) -> None:
        self.now += IDLE

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.device.check()


TestSessions = SessionsMachine.TestCase
TestSessions.settings = settings(max_examples=sized(45, 200), stateful_step_count=40, deadline=None)


def test_the_next_turn_begins_with_the_last() -> None:
    """Prompt and output, whatever the sampling, the target or the generation."""
    table = make_table()
    device, first = Device(table), make_session(1, [0, 1] * 5)
    table.open(first)
    assert read(device, first) == 10
    node = first.tree.likeliest(1)[0]
    device.run([LevelPart(first, 0, [node])])
    table.commit(first, [*first.tree.path_tokens(node), 1])  # the second has no KV yet
    table.close(first)
    second = make_session(7, [*[0, 1] * 5, *[first.tokens[10], 1], 0, 0], generation=3)
    second.key = SessionKey(b"another target", 7)
    assert table.open(second) == 11 and read(device, second) == 3
    device.check()


def test_what_is_being_read_is_found_once_it_is_computed() -> None:
    table = make_table()
    device, first, second = Device(table), make_session(1, [0] * 10), make_session(2, [*[0] * 9, 1])
    table.open(first)
    device.run([LevelPart.of_pending(first, 6)])
    assert table.open(make_session(3, [*[0] * 9, 1])) == 0
    device.run([LevelPart.of_pending(first, 4)])
    assert table.open(second) == 9 and set(second.slots.tolist()) == set(first.slots[:9].tolist())
    table.close(first)
    device.check()
    assert read(device, second) == 1


def test_the_last_token_is_computed_by_each_for_itself() -> None:
    table = make_table()
    device = Device(table)
    for number in range(1, 4):
        session = make_session(number, [0, 1, 1, 0])
        assert table.open(session) == (3 if number > 1 else 0)
        assert read(device, session) == (1 if number > 1 else 4)
        device.check()
    assert CAPACITY - table.pool.num_available == 4  # all have the first one's, the last token's too


def test_idle_kv_goes_before_that_of_sessions() -> None:
    """And one that was evicted finds what is left of its own."""
    table = make_table()
    device, choice = Device(table), LevelChoice(table, SHAPE)
    old, live = make_session(1, [0] * 20), make_session(2, [1] * 15)
    for session in (old, live):
        table.open(session)
        read(device, session)
    table.close(old)
    assert (table.pool.num_free, table.pool.num_idle) == (5, 20)
    new = make_session(3, [*[1, 0] * 6, 1], now=10.0)
    table.open(new)
    device.run(choice.next_level(10.0))
    assert not live.evicted and len(live.slots) == 15 and len(new.slots) > 5
    table.evict(live)
    assert live.evicted and table.wake(live) == 14
    device.check()


def test_while_idle_kv_can_go_nobody_is_held_to_its_share() -> None:
    table = make_table()
    device, choice = Device(table), LevelChoice(table, SHAPE)
    old, live = make_session(1, [0] * 12), make_session(2, [1] * 24)
    for session in (old, live):
        table.open(session)
        read(device, session)
    table.close(old)
    table.open(make_session(3, [1, 0, 1, 0]))
    table.open(make_session(1, [0, 1, 0], "b"))
    assert table.above_share() == {"a"} and table.pool.num_free == 4
    assert {part.session.tenant for part in choice.next_level(0.0)} == {"a", "b"}


def test_shared_slots_count_once_for_their_tenant() -> None:
    table = make_table()
    device = Device(table)
    for number in range(1, 5):
        session = make_session(number, [0] * 8)
        table.open(session)
        read(device, session)
    table.open(make_session(1, [1] * 5, "b"))
    assert table.above_share() == set()


def test_a_session_that_gave_way_gets_no_rows_of_the_level_it_was_in() -> None:
    """Its part was of tokens that it has lost."""
    table = make_table()
    device, choice = Device(table), LevelChoice(table, SHAPE)
    first, second = make_session(1, [0] * 25), make_session(2, [1] * 25)
    for session in (first, second):
        table.open(session)
        device.run([LevelPart.of_pending(session, 18)])
    level = choice.next_level(0.0)
    assert [part.session for part in level] == [first] and second.evicted
    device.run(level)
    device.check()


def test_kv_that_a_session_without_any_holds_is_found_out() -> None:
    table = make_table()
    session = make_session(1, [0, 1])
    table.open(session)
    read(Device(table), session)
    session.evicted = True
    with pytest.raises(EngineError, match="rests"):
        table.check()


class _Told:
    """A GrammarState that only listens."""

    problem = None

    def __init__(self) -> None:
        self.output = list[int]()

    def extend(self, token: int) -> None:
        self.output.append(token)


def test_a_sessions_grammar_follows_its_output() -> None:
    told, table = _Told(), SessionTable(SlotPool(32))
    opened = Open(1, 1, [1, 2, 3, 4], 3, 20, 0, RequestSampling(), 8, constraint=Constraint.regex("a"))
    model = DraftModel(20, lambda _: lambda: told)  # type: ignore[arg-type, return-value]
    session = DraftSession(SessionKey(b"", 1), opened, "", 1.0, 0.0, model, Unshared())
    table.open(session)
    assert session.grammar_state() is told and told.output == [4]
    table.commit(session, [5, 6])
    assert session.grammar_state() is told and told.output == [4, 5, 6]


def test_what_a_tenant_commits_makes_no_trees_of_another_worse() -> None:
    """Not even if its tokens are never those that were guessed."""
    table = make_table()
    device, wrong, right = Device(table), make_session(1, [0, 1], "a"), make_session(1, [0, 1], "b")
    for session in (wrong, right):
        table.open(session)
    for _ in range(20):
        read(device, wrong)
        table.commit(wrong, [CHILDREN])
    level = [LevelPart.of_pending(session, session.num_pending) for session in (wrong, right)]
    device.run(level)
    scores = [[session.tree.score(node) for node in session.tree.likeliest(CHILDREN)] for session in (wrong, right)]
    assert max(scores[0]) < -1.0 and np.allclose(scores[1], -0.7)
    device.check()


def test_counts_of_tenants_are_bounded() -> None:
    calibrations = TenantCalibrations()
    kept = calibrations.of("0")
    for number in range(1, MOST_TENANTS + 5):
        calibrations.of(str(number))
        assert calibrations.of("0") is kept
    assert calibrations.of("1") is not calibrations.of("2") and len(calibrations) == MOST_TENANTS


def test_a_head_reads_what_features_came_for() -> None:
    """Its tree begins once all but the last token's are there, and begins anew after each commit."""
    table = make_table()
    device, choice, session = Device(table), LevelChoice(table, SHAPE), make_session(1, [0, 1, 0, 1, 1], width=1)
    table.open(session)
    assert session.waits and not choice.next_level(0.0)
    tell(session, 2)
    assert (session.num_missing, session.num_pending) == (5, 3)
    device.run(choice.next_level(0.0))
    assert session.waits and not len(session.tree)
    tell(session)
    device.run(choice.next_level(0.0))
    device.run(choice.next_level(0.0))
    assert session.num_missing == 0 and len(session.tree) > CHILDREN
    table.commit(session, [0, 1])
    assert session.waits and not len(session.tree) and len(session.slots) == 5
    tell(session)
    assert session.num_pending == 2
    device.run(choice.next_level(0.0))
    assert len(session.tree) == CHILDREN
    device.check()


@pytest.mark.parametrize("wanted", [0, 8, 30])
def test_what_a_head_guessed_stays_until_it_is_guessed_again(wanted: int) -> None:
    """In its slots; where it is most of what is wanted of a tree, that begins anew. Accepted tokens are read again."""
    table = make_table()
    device, choice, session = Device(table), LevelChoice(table, SHAPE), make_session(1, [0, 1, 0, 1, 1], width=1)
    session.wanted = 30
    table.open(session)
    tell(session)
    for _ in range(3):
        device.run(choice.next_level(0.0))
    guessed, slots = len(session.tree), set(session.tree.slots)
    session.wanted = wanted
    table.commit(session, [0])
    left, kept = len(session.tree), set(session.tree.slots)
    assert (session.num_missing, len(session.slots)) == (1, 5) and kept < slots
    assert (left > 0) == (wanted == 30) and 2 * left <= wanted and left < guessed
    tell(session)
    device.check()
    if wanted:
        device.run(choice.next_level(0.0))
        assert session.num_missing == 0 and len(session.tree) == max(left, CHILDREN)
        again = session.tree.leaves(CHILDREN)
        assert session.tree.lacking(again) == (0 if left else CHILDREN)
        device.run(choice.next_level(0.0))
        assert set(session.tree.slots) > kept and all(session.tree.leaves(9).count(leaf) == 0 for leaf in again)
        device.check()


def test_a_first_token_alone_gives_a_head_nothing_to_guess_from() -> None:
    table = make_table()
    device, session = Device(table), make_session(1, [1], width=1)
    table.open(session)
    assert session.waits
    table.commit(session, [0])
    tell(session)
    assert session.num_pending == 2
    device.run([LevelPart.of_pending(session, 2)])
    assert len(session.tree) == CHILDREN
    device.check()


def test_a_head_that_lost_its_kv_waits_for_features_again() -> None:
    """From before the first token that it did not find."""
    table = make_table()
    device, session = Device(table), make_session(1, [0, 1, 0, 1, 1, 0], width=1)
    table.open(session)
    tell(session)
    assert read(device, session) == 6
    table.drop_tree(session)
    assert (session.num_missing, session.waits) == (1, True)
    tell(session, 1)
    assert session.num_pending == 1 and read(device, session) == 1
    table.evict(session)
    assert session.waits and table.wake(session) == 5
    tell(session)
    assert read(device, session) == 1
    device.check()


def test_kv_that_was_computed_without_features_is_for_its_session_alone() -> None:
    """Others find what comes before the gap."""
    table, tokens = make_table(), [0, 1, 0, 1, 1, 0, 1, 0]
    choice, session = LevelChoice(table, LevelShape(1, CHILDREN)), make_session(1, tokens, width=1)
    table.open(session)
    assert session.features is not None
    for first, end in ((0, 3), (5, 7)):
        session.features.put(first, features_of(session, first, end))
    while session.num_pending:
        level = choice.next_level(0.0)
        table.allocate(level)
        table.computed(level)
    assert len(session.slots) == 8 and session.features.num_whole(8) == 4
    table.close(session)
    assert table.open(make_session(2, tokens, width=1)) == 4
    table.check()
