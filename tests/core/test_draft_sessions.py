"""A draft's sessions: the KV in a session's slots is that of its tokens, under its tenant and salt; none is lost."""

from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from sizes import sized
from slot_contents import CHILDREN, SHAPE, SessionRules, SlotContents, make_table

from pilotfish.core.drafting.draft_sessions import DraftModel, DraftSession, LevelPart, SessionKey, add_children
from pilotfish.core.drafting.level_choice import LevelChoice, LevelShape
from pilotfish.core.drafting.messages import Open, RequestSampling
from pilotfish.core.drafting.vocabulary_map import Unshared
from pilotfish.core.features.features import FeatureLog, Features
from pilotfish.core.peers.fields import salt_digest
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.trees.child_calibration import TENANTS as MOST_TENANTS
from pilotfish.core.trees.child_calibration import TenantCalibrations

CAPACITY = 40
TENANTS, SALTS = ("a", "b"), (None, "x", "y")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


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


def run(contents: SlotContents, level: list[LevelPart]) -> None:
    """A level of children that do not depend on anything."""
    table = contents.table
    table.allocate(level)
    contents.run(level)
    for part in level:
        end, log = len(part.session.slots), part.session.features
        if part.pending and log is not None:
            first = max(end - part.pending, 1)  # the first token has none
            assert (log.of_rows(first, end - first) == features_of(part.session, first - 1, end - 1)).all()
    table.computed(level)
    leaves = sum(len(part.leaves) for part in level)
    tokens, chances = np.tile(np.arange(CHILDREN), (leaves, 1)), np.full((leaves, CHILDREN), -0.7)
    add_children(level, tokens, chances, table.calibrations)


class Rig:
    """Sessions over few slots."""

    def __init__(self, *sessions: DraftSession) -> None:
        """With these, read to their ends."""
        self.table = make_table(CAPACITY)
        self.contents, self.choice = SlotContents(self.table), LevelChoice(self.table, SHAPE)
        for session in sessions:
            self.table.open(session)
            self.read(session)

    def run(self, *parts: LevelPart) -> None:
        run(self.contents, list(parts))

    def level(self, now: float = 0.0) -> list[LevelPart]:
        level = self.choice.next_level(now)
        self.run(*level)
        return level

    def read(self, session: DraftSession) -> int:
        """Compute all that it lacks: rows."""
        before = self.contents.rows
        if session.num_pending:
            self.run(LevelPart.of_pending(session, session.num_pending))
        return self.contents.rows - before

    def check(self) -> None:
        self.contents.check()


class SessionsMachine(SessionRules):
    """Sessions of several tenants and salts over few slots: opened, again, grown, committed to, evicted, closed. Those
    of a trained head are told features in between."""

    @initialize(cached=st.booleans(), width=st.integers(0, 1))
    def begin(self, cached: bool, width: int) -> None:
        self.width = width
        self.begin_with(make_table(CAPACITY, cached))

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
            run(self.contents, level)

    @precondition(lambda self: self.width and len(self.table))
    @rule(data=st.data(), count=st.integers(1, 12))
    def tell(self, data: st.DataObject, count: int) -> None:
        tell(self.some(data), count)

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), hits=st.integers(0, 3), bonus=st.integers(0, 1))
    def commit(self, data: st.DataObject, hits: int, bonus: int) -> None:
        session = self.some(data)
        tokens = [*self.guessed(session, hits), bonus]
        if len(session.tokens) + len(tokens) < session.max_length:
            self.table.commit(session, tokens)
            session.touched = self.now
            if session.evicted:
                self.table.wake(session)

    @rule(count=st.integers(0, CAPACITY), tenants=st.sets(st.sampled_from(TENANTS)))
    def make_room(self, count: int, tenants: set[str]) -> None:
        before, rested = self.table.pool.num_available, [session.evicted for session in self.table]
        self.table.make_room(count, (), tenants, self.now)
        assert before < count or rested == [session.evicted for session in self.table]
        if tenants == set(TENANTS):
            assert self.table.pool.num_available >= min(count, CAPACITY - sum(len(s.tree.slots) for s in self.table))


TestSessions = SessionsMachine.TestCase
TestSessions.settings = settings(max_examples=sized(20, 200), stateful_step_count=40, deadline=None)


def test_the_next_turn_begins_with_the_last() -> None:
    """Prompt and output, whatever the sampling, the target or the generation."""
    first = make_session(1, [0, 1] * 5)
    rig = Rig(first)
    assert rig.contents.rows == 10
    node = first.tree.likeliest(1)[0]
    rig.run(LevelPart(first, 0, [node]))
    rig.table.commit(first, [*first.tree.path_tokens(node), 1])  # the second has no KV yet
    rig.table.close(first)
    second = make_session(7, [*[0, 1] * 5, *[first.tokens[10], 1], 0, 0], generation=3)
    second.key = SessionKey(b"another target", 7)
    assert rig.table.open(second) == 11 and rig.read(second) == 3
    rig.check()


def test_what_is_being_read_is_found_once_it_is_computed() -> None:
    rig, first, second = Rig(), make_session(1, [0] * 10), make_session(2, [*[0] * 9, 1])
    rig.table.open(first)
    rig.run(LevelPart.of_pending(first, 6))
    assert rig.table.open(make_session(3, [*[0] * 9, 1])) == 0
    rig.run(LevelPart.of_pending(first, 4))
    assert rig.table.open(second) == 9 and set(second.slots.tolist()) == set(first.slots[:9].tolist())
    rig.table.close(first)
    rig.check()
    assert rig.read(second) == 1


def test_while_idle_kv_can_go_nobody_is_held_to_its_share() -> None:
    old, live = make_session(1, [0] * 12), make_session(2, [1] * 24)
    rig = Rig(old, live)
    rig.table.close(old)
    rig.table.open(make_session(3, [1, 0, 1, 0]))
    rig.table.open(make_session(1, [0, 1, 0], "b"))
    assert rig.table.above_share() == {"a"} and rig.table.pool.num_free == 4
    assert {part.session.tenant for part in rig.choice.next_level(0.0)} == {"a", "b"}


def test_who_is_at_work_does_not_give_way_for_another_tenant() -> None:
    sessions = make_session(1, [0] * 20), make_session(2, [1] * 15, "b")
    Rig(*sessions).table.make_room(CAPACITY, (), {"b"}, 0.0)
    assert [session.evicted for session in sessions] == [False, True]


def test_shared_slots_count_once_for_their_tenant() -> None:
    rig = Rig(*(make_session(number, [0] * 8) for number in range(1, 5)))
    rig.table.open(make_session(1, [1] * 5, "b"))
    assert rig.table.above_share() == set()


def test_a_session_that_gave_way_gets_no_rows_of_the_level_it_was_in() -> None:
    """Its part was of tokens that it has lost."""
    rig, first, second = Rig(), make_session(1, [0] * 25), make_session(2, [1] * 25)
    for session in (first, second):
        rig.table.open(session)
        rig.run(LevelPart.of_pending(session, 18))
    assert [part.session for part in rig.level()] == [first] and second.evicted
    rig.check()


def test_a_sessions_grammar_follows_its_output() -> None:
    told, table = Mock(problem=None), make_table(CAPACITY)
    opened = Open(1, 1, [1, 2, 3, 4], 3, 20, 0, RequestSampling(), 8, constraint=Constraint.regex("a"))
    model = DraftModel(20, lambda _: lambda: told)
    session = DraftSession(SessionKey(b"", 1), opened, "", 1.0, 0.0, model, Unshared())
    table.open(session)
    assert session.grammar_state() is told and told.extend.call_args_list == [call(4)]
    table.commit(session, [5, 6])
    assert session.grammar_state() is told and told.extend.call_args_list == [call(4), call(5), call(6)]


def test_what_a_tenant_commits_makes_no_trees_of_another_worse() -> None:
    """Not even if its tokens are never those that were guessed."""
    rig, wrong, right = Rig(), make_session(1, [0, 1], "a"), make_session(1, [0, 1], "b")
    for session in (wrong, right):
        rig.table.open(session)
    for _ in range(20):
        rig.read(wrong)
        rig.table.commit(wrong, [CHILDREN])
    rig.run(*(LevelPart.of_pending(session, session.num_pending) for session in (wrong, right)))
    scores = [[session.tree.score(node) for node in session.tree.likeliest(CHILDREN)] for session in (wrong, right)]
    assert max(scores[0]) < -1.0 and np.allclose(scores[1], -0.7)
    rig.check()


def test_counts_of_tenants_are_bounded() -> None:
    calibrations = TenantCalibrations()
    kept = calibrations.of("0")
    for number in range(1, MOST_TENANTS + 5):
        calibrations.of(str(number))
        assert calibrations.of("0") is kept
    assert calibrations.of("1") is not calibrations.of("2") and len(calibrations) == MOST_TENANTS


def head_session(tokens: list[int], features: int = CAPACITY, number: int = 1) -> tuple[Rig, DraftSession]:
    """A trained head's, of whose features so many have come."""
    rig, session = Rig(), make_session(number, tokens, width=1)
    rig.table.open(session)
    tell(session, features)
    return rig, session


def test_a_head_reads_what_features_came_for() -> None:
    """Its tree begins once all but the last token's are there, and begins anew after each commit."""
    rig, session = head_session([0, 1, 0, 1, 1], features=0)
    assert session.waits and not rig.level()
    tell(session, 2)
    assert (session.num_missing, session.num_pending) == (5, 3)
    rig.level()
    assert session.waits and not len(session.tree)
    tell(session)
    for _ in range(2):
        rig.level()
    assert session.num_missing == 0 and len(session.tree) > CHILDREN
    rig.table.commit(session, [0, 1])
    assert session.waits and not len(session.tree) and len(session.slots) == 5
    tell(session)
    assert session.num_pending == 2
    rig.level()
    assert len(session.tree) == CHILDREN
    rig.check()


@pytest.mark.parametrize("wanted", [0, 8, 30])
def test_what_a_head_guessed_stays_until_it_is_guessed_again(wanted: int) -> None:
    """In its slots; where it is most of what is wanted of a tree, that begins anew. Accepted tokens are read again."""
    rig, session = head_session([0, 1, 0, 1, 1])
    for _ in range(3):
        rig.level()
    guessed, slots = len(session.tree), set(session.tree.slots)
    session.wanted = wanted
    rig.table.commit(session, [0])
    left, kept = len(session.tree), set(session.tree.slots)
    assert (session.num_missing, len(session.slots)) == (1, 5) and kept < slots
    assert (left > 0) == (wanted == 30) and 2 * left <= wanted and left < guessed
    tell(session)
    rig.check()
    if wanted:
        rig.level()
        assert session.num_missing == 0 and len(session.tree) == max(left, CHILDREN)
        again = session.tree.leaves(CHILDREN)
        assert session.tree.lacking(again) == (0 if left else CHILDREN)
        rig.level()
        assert set(session.tree.slots) > kept and all(session.tree.leaves(9).count(leaf) == 0 for leaf in again)
        rig.check()


def test_a_first_token_alone_gives_a_head_nothing_to_guess_from() -> None:
    rig, session = head_session([1])
    assert session.waits
    rig.table.commit(session, [0])
    tell(session)
    assert rig.read(session) == 2 and len(session.tree) == CHILDREN
    rig.check()


def test_a_head_that_lost_its_kv_waits_for_features_again() -> None:
    """From before the first token that it did not find."""
    rig, session = head_session([0, 1, 0, 1, 1, 0])
    assert rig.read(session) == 6
    rig.table.drop_tree(session)
    assert (session.num_missing, session.waits) == (1, True)
    tell(session, 1)
    assert session.num_pending == 1 and rig.read(session) == 1
    rig.table.evict(session)
    assert session.waits and rig.table.wake(session) == 5
    tell(session)
    assert rig.read(session) == 1
    rig.check()


def test_kv_that_was_computed_without_features_is_for_its_session_alone() -> None:
    """Others find what comes before the gap."""
    tokens = [0, 1, 0, 1, 1, 0, 1, 0]
    rig, session = head_session(tokens, features=3)
    table, choice = rig.table, LevelChoice(rig.table, LevelShape(1, CHILDREN))
    assert session.features is not None
    session.features.put(5, features_of(session, 5, 7))
    while session.num_pending:
        level = choice.next_level(0.0)
        table.allocate(level)
        table.computed(level)
    assert len(session.slots) == 8 and session.features.num_whole(8) == 4
    table.close(session)
    assert table.open(make_session(2, tokens, width=1)) == 4
    table.check()


# -- features on their way to the rows of a trained head


LENGTH, WIDTH = 24, 2


def told(first: int, count: int) -> Features:
    """The feature of position p is p, p + 0.5."""
    return (np.arange(first, first + count)[:, None] + [0.0, 0.5]).astype(np.float32)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, LENGTH), st.integers(0, 6)),
            st.tuples(st.just("forget"), st.integers(0, LENGTH), st.just(0)),
        )
    )
)
def test_what_was_told_is_found_until_it_is_forgotten(events: list[tuple[str, int, int]]) -> None:
    log, known, forgotten = FeatureLog(WIDTH), set[int](), 0
    for what, at, count in events:
        if what == "put":
            log.put(at, told(at, count))
            known |= {p for p in range(at, at + count) if p >= forgotten}
        else:
            log.forget(at)
            forgotten = max(forgotten, at - 1)
            known = {p for p in known if p >= forgotten}
        rows = log.of_rows(0, LENGTH + 8)
        found = {row - 1 for row in range(LENGTH + 8) if not np.isnan(rows[row]).any()}
        assert found == known and all((rows[p + 1] == told(p, 1)[0]).all() for p in known)
        assert log.reach == max({p + 1 for p in known} | {forgotten})


def test_a_row_is_kept_without_those_that_came_with_it() -> None:
    """Or whoever sends the same rows again and again, one further each time, fills the memory."""
    log, frame = FeatureLog(2), np.zeros((100, 2), np.float32)
    log.put(0, frame)
    assert not np.shares_memory(log._rows[99], frame) and log._rows[99].base is None
