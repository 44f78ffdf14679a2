"""Sessions whose target has another vocabulary: KV is that of what the draft reads, which is the target's text."""

import zlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sizes import sized
from slot_contents import CHILDREN, SHAPE, SessionRules, make_table, path_inputs
from vocabularies import read, said, sayings, table, tables

from pilotfish.core.drafting import messages, vocabulary_map
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import DraftModel, DraftSession, SessionKey, add_children
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary, TokenTable, Unshared, VocabularyMap

CAPACITY = 80


@pytest.fixture(autouse=True, scope="module")
def _short_window():  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_map, "WINDOW", 6)
        yield


class MappedMachine(SessionRules):
    """A draft's sessions, some of whose targets have another vocabulary: opened, grown, committed to, evicted."""

    @initialize(theirs=tables(), ours=tables())
    def begin(self, theirs: TokenTable, ours: TokenTable) -> None:
        self.target, self.draft = theirs, ours
        self.vocabulary = MappedVocabulary(VocabularyMap(theirs, ours), {})
        self.begin_with(make_table(CAPACITY))
        self.told = dict[int, list[int]]()

    @rule(number=st.integers(1, 3), data=st.data())
    def open(self, number: int, data: st.DataObject) -> None:
        mapped = number < 3
        tokens = data.draw(sayings(self.target if mapped else self.draft))
        opened = messages.Open(number, 1, tokens, len(tokens), 60, 0, messages.RequestSampling(), 30)
        vocabulary = self.vocabulary if mapped else None
        key, model = SessionKey(b"", number), DraftModel(CAPACITY)
        session = DraftSession(key, opened, "", 1.0, self.now, model, Unshared(), vocabulary)
        if len(session.inputs) < CAPACITY:
            assert self.table.open(session) < len(session.inputs)
            self.told[number] = list(tokens)

    @rule()
    def level(self) -> None:
        level = self.choice.next_level(self.now)
        if level:
            self.table.allocate(level)
            self.contents.run(level)
            self.table.computed(level)
            leaves = [(part.session, leaf) for part in level for leaf in part.leaves]
            tokens = np.array([self.guesses(*leaf) for leaf in leaves], np.int64).reshape(len(leaves), CHILDREN)
            add_children(level, tokens, np.full((len(leaves), CHILDREN), -0.7), self.table.calibrations)

    def guesses(self, session: DraftSession, leaf: int) -> list[int]:
        """Tokens that may be guessed, by what was read down to the leaf."""
        known = self.vocabulary.map.shared.ids.tolist() if session.text is not None else [*self.draft.plain]
        drawn = zlib.crc32(str([*session.inputs, *path_inputs(session, leaf)]).encode())
        return [known[(drawn + place) % len(known)] for place in range(CHILDREN)]

    @precondition(lambda self: len(self.table))
    @rule(data=st.data(), hits=st.integers(0, 4), bonus=st.booleans())
    def commit(self, data: st.DataObject, hits: int, bonus: bool) -> None:
        session = self.some(data)
        more = data.draw(sayings(self.target if session.text is not None else self.draft))[:2] if bonus else []
        tokens = [*self.guessed(session, hits), *more]
        if tokens and len(session.tokens) + len(tokens) < session.max_length:
            self.table.commit(session, tokens)
            self.told[session.key.number] += tokens
            session.touched = self.now
            if len(session.inputs) > session.longest:
                self.table.close(session)
            elif session.evicted:
                self.table.wake(session)

    @invariant()
    def kv_is_of_what_is_read(self) -> None:
        for session in self.table:
            assert session.tokens == self.told[session.key.number]
            if session.text is not None:
                mapped, target = self.vocabulary.map, self.target
                assert read(mapped, self.draft, session.inputs, session.tokens) == said(target, session.tokens)
            assert session.evicted or session.num_missing or len(session.tree)  # none stands still


TestMappedSessions = MappedMachine.TestCase
TestMappedSessions.settings = settings(max_examples=sized(18, 200), stateful_step_count=40, deadline=None)


# -- the protocol

TARGET = table([b"a", b"b", b"ab", b" "], ["<s>"])
DRAFT = table([b" ", b"b", b"a", b"bb", b"ba"], ["<s>", "</s>"], lead=1)
HELLO = messages.Hello(messages.PROTOCOL_VERSION, "theirs", 5, "target", {4: "<s>"})


def machine(added: dict[int, str] | None = None) -> DraftMachine:
    """That serves the tokenizer `theirs`, with these added tokens."""
    mapped = MappedVocabulary(VocabularyMap(TARGET, DRAFT), {4: "<s>"} if added is None else added)
    identity = DraftIdentity("draft", "ours", {5: "<s>", 6: "</s>"}, mapped={"theirs": mapped})
    return DraftMachine(identity, make_table(40), SHAPE, 30)


def heard(draft: DraftMachine, kind: type) -> list:  # type: ignore[type-arg]
    return [out.message for out in draft.outbox if isinstance(out.message, kind)]


def opened(tokens: list[int], longest: int = 60) -> messages.Open:
    return messages.Open(1, 1, tokens, len(tokens), longest, 7, messages.RequestSampling(temperature=0.0), 20)


def grow(draft: DraftMachine, tokens: list[int]) -> None:
    """A level whose leaves all get these children."""
    level = draft.next_level(0.0)
    draft.table.allocate(level)
    draft.table.computed(level)
    leaves = sum(len(part.leaves) for part in level)
    children = np.tile(np.array(tokens), (leaves, 1))
    chances = np.full(children.shape, -0.7)
    draft.level_done(level, add_children(level, children, chances, draft.table.calibrations), 0.0, 0.0)


def serving(
    tokens: list[int], hello: messages.Hello = HELLO, added: dict[int, str] | None = None
) -> tuple[DraftMachine, DraftSession]:
    """A draft with a session."""
    draft = machine(added)
    draft.receive(b"t", hello, 0.0)
    draft.receive(b"t", opened(tokens), 0.0)
    (session,) = draft.table
    return draft, session


def test_a_target_with_a_known_tokenizer_is_served_through_its_map() -> None:
    """On the wire are its own tokens alone, and its own lengths."""
    draft, session = serving([2, 3, 2])  # "ab ab"
    assert messages.MAPPED in heard(draft, messages.Load)[0].capabilities
    assert session.inputs == [5, 2, 1, 0, 2, 1] and session.tokens == [2, 3, 2]
    grow(draft, [0, 1])
    grow(draft, [3, 0])
    first, second = heard(draft, messages.Tree)
    assert (first.base_len, first.tokens, first.parents) == (3, [0, 1], [0, 0])
    assert second.base_len == 3 and set(second.tokens) == {0, 3}
    draft.receive(b"t", messages.Commit(1, 1, 3, [0, 3], 20), 0.0)
    assert session.inputs == [5, 2, 1, 0, 2, 1, 2, 0] and draft.used == 2
    assert session.length_at(session.tree.root) == 5


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            messages.Hello(messages.PROTOCOL_VERSION, "another", 5, "target"),
            "the draft draft, nor one that its operator",
        ),
        (messages.Hello(messages.PROTOCOL_VERSION, "theirs", 5, "target", {4: "<other>"}), "token '<other>' has id 4"),
        (messages.Hello(9, "theirs", 5, "target", oldest=8), "version"),
    ],
)
def test_others_are_refused(hello: messages.Hello, reason: str) -> None:
    draft = machine()
    draft.receive(b"t", hello, 0.0)
    (refusal,) = heard(draft, messages.Refuse)
    assert refusal.session == messages.CONNECTION and reason in refusal.reason


def test_a_target_with_the_drafts_own_tokenizer_needs_no_map() -> None:
    draft, session = serving(
        [0, 3], messages.Hello(messages.PROTOCOL_VERSION, "ours", 7, "target", {5: "<s>", 6: "</s>"})
    )
    assert messages.MAPPED not in heard(draft, messages.Load)[0].capabilities and session.inputs is session.tokens


def test_what_the_draft_cannot_hold_is_refused() -> None:
    """By what it reads, however few tokens the target has."""
    draft = machine()
    draft.receive(b"t", HELLO, 0.0)
    draft.receive(b"t", opened([2, 3] * 10), 0.0)  # a lead and 30
    assert "31 do not fit into the 30" in heard(draft, messages.Refuse)[0].reason and not len(draft.table)
    draft.receive(b"t", opened([0] * 120), 0.0)  # not read at all
    assert "120 do not fit into the 120" in heard(draft, messages.Refuse)[1].reason
    draft.receive(b"t", messages.Open(2, 1, [2, 3] * 5, 10, 60, 7, messages.RequestSampling(), 20), 0.0)
    draft.receive(b"t", messages.Commit(2, 1, 10, [2, 3] * 5, 20), 0.0)
    assert "31 are more than the 30" in heard(draft, messages.Refuse)[2].reason and not len(draft.table)


def test_tokens_that_the_target_itself_lacks_are_not_guessed() -> None:
    """Its tokenizer's directory has an added token more than it tells of."""
    draft, _ = serving([0], added={4: "<s>", 5: "<more>"})
    grow(draft, [4, 5])
    assert heard(draft, messages.Tree)[0].tokens == [4]
