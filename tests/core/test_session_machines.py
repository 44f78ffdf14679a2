"""Both halves of the draft protocol against each other, over lines that lose, repeat, reorder and damage frames, while
pools come and go.

Drafts guess by a script that is a pure function of the whole sequence. So a node of a target's copy that hangs in the
wrong place, below another prefix or of another session, carries a token that the script does not give there. Features
are such a function, too: what a row gets is that of the token before, or nothing.
"""

import zlib
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import POOLS, Event, Lines, flipped, histories, random_events
from sizes import sized
from slot_contents import SlotContents, make_table
from support import tree_of
from trees import check_tree

from pilotfish.core.cache import prefix_keys
from pilotfish.core.cache.prefix_keys import KnownPrefixes
from pilotfish.core.drafting import draft_sessions, messages
from pilotfish.core.drafting import pools as target_pools
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import REPORT, SILENCE, DraftMachine
from pilotfish.core.drafting.draft_sessions import DraftSession, LevelPart, SessionKey, SessionTable, add_children
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.pools import DraftPool, RemoteSession, SessionState
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.features import feature_frames
from pilotfish.core.features.feature_frames import FeatureNeed, frames_of, row_bytes
from pilotfish.core.features.features import Features, coded
from pilotfish.core.peers.fields import Peer, salt_digest
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.core.trees.tree import ROOT, Forest, Guesses
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.wire.channel import decode_to_draft, decode_to_target, encode

VOCAB, CHILDREN = 10, 3
WIDTH = 2
OFFER = messages.FeatureOffer("projection", WIDTH, "float32")
HELLO = messages.Hello(
    messages.PROTOCOL_VERSION, "digest", VOCAB, "target", {}, OFFER, capabilities=list(messages.TARGET_CAPABILITIES)
)
#: Too few for all.
MOST_KEYS = 60
CHANCES = np.log([0.6, 0.25, 0.1])


def script(sequence: tuple[int, ...]) -> list[int]:
    """The tokens that follow a sequence, likeliest first."""
    drawn = zlib.crc32(bytes(sequence))
    return [(drawn + place * (1 + drawn // VOCAB % 3)) % VOCAB for place in range(CHILDREN)]


def feature_of(sequence: Sequence[int]) -> list[int]:
    """Of its last token."""
    return [zlib.crc32(bytes(sequence)) % 2**24, len(sequence)]


def make_draft(number: int) -> DraftMachine:
    """The first is a trained head."""
    table = make_table(120)  # too few for all: some sessions are evicted
    need = None if number else FeatureNeed(("projection",), WIDTH)
    draft = DraftMachine(DraftIdentity("draft", "digest", {}), table, LevelShape(8, CHILDREN), 200, features=need)
    draft.known = KnownPrefixes(MOST_KEYS)
    draft.capabilities.append(messages.FEEDBACK)
    return draft


def make_target(pools_each: int) -> TargetMachine:
    pools = [DraftPool(f"pool {i}", str(i).encode()) for i in range(POOLS)]
    return TargetMachine(HELLO, pools, RemoteOptions(wanted=40, quarantine=0.01, pools_each=pools_each))


@pytest.fixture(autouse=True, scope="module")
def _small_keys() -> Iterator[None]:
    """Keys of few tokens; features in small pieces; sessions that are opened as often as there is reason to."""
    with pytest.MonkeyPatch.context() as patch:
        size = row_bytes(WIDTH, "float32")
        for name, rows in {"SESSION_BYTES": 4, "STEP_BYTES": 6}.items():
            patch.setattr(feature_frames, name, rows * size)
        patch.setattr(feature_frames, "WINDOW", 30 * size)
        patch.setattr(feature_frames, "FRESH", 3)
        patch.setattr(target_pools, "MOST_OPENED", 40)  # a line as bad as these has sessions opened all the time
        patch.setattr(prefix_keys, "OBJECT_TOKENS", 4)
        yield


class World(Lines):
    """With requests, and a clock. A frame is with the target that it is from, or for."""

    def __init__(self, pools_each: int = 1) -> None:
        super().__init__()
        self.now, self.pools_each = 0.0, pools_each
        self.drafts = [make_draft(number) for number in range(POOLS)]
        self.contents = [SlotContents(draft.table) for draft in self.drafts]
        self.changed = set[int]()  # drafts, since they were looked at
        self.target, self.incarnation = make_target(pools_each), 0
        self.requests: list[Request] = []
        self.numbers = iter(range(1, 10**6))
        self.trees = 0  # nodes that were proposed
        self.named = 0  # Opens that had a key
        self.cached = 0  # tokens that drafts found, which were started again since
        self.known = self.unknown = 0  # features that rows got, and did not
        self.accepted = 0  # nodes that drafts were told of
        self.computed = dict[int, tuple[int, ...]]()  # what the target has in a slot: the feature of such a sequence

    @property
    def peer(self) -> Peer:
        return b"target %d" % self.incarnation

    # -- events

    def add(self, choice: int) -> None:
        if len(self.requests) < 4:
            number = next(self.numbers)
            prompt = [(choice // 64 * 7 + i) % VOCAB for i in range(1 + choice % 32)]  # some begin alike
            params = SamplingParams(max_tokens=150, temperature=0.0)
            salt = (None, "a", "b")[choice % 3]
            self.requests.append(Request(number, prompt, params, number, frozenset(), 1000, cache_salt=salt))

    def step(self, choice: int) -> None:
        """Propose for most of the requests, and commit to all: mostly what the script says."""
        asked = [request for i, request in enumerate(self.requests) if choice >> i & 3]
        trees = self.target.propose(asked, 6, self.now)
        self.trees += sum(map(len, trees))
        self.target.verified(asked, Forest.of([self._cut(tree, choice) for tree in trees]))
        for request in list(self.requests):
            known = tuple(request.tokens)
            path = script(known)[: choice & 1]
            bonus = choice % VOCAB if choice % 8 == 0 else script((*known, *path))[choice % 16 // 15]
            self.target.commit(request, request.extend([*path, bonus]), self.now)
            self._check_moved(request)
            if request.finish_reason is not None:
                self.close(self.requests.index(request))
            else:
                self._compute(request, len(request.tokens) - 1)
        self.flush()

    @staticmethod
    def _cut(tree: Guesses, choice: int) -> Guesses:
        """Not all that was offered is verified, and a grammar may have added some."""
        verified = tree.best(choice % 7)
        verified.add(ROOT, choice % VOCAB, -3.0)
        return verified

    def pause(self, choice: int) -> None:
        """A request loses its KV, and waits."""
        for request in self.requests[choice % 4 : choice % 4 + 1]:
            self.target.pause(request)

    def strange(self, choice: int) -> None:
        """A message of a type that this version does not have."""
        self.line(choice).append((self.peer, msgspec.msgpack.encode({"type": "greeting", "session": choice})))

    def read(self, choice: int) -> None:
        """A step over a part of a prompt."""
        for request in self.requests[choice % 4 : choice % 4 + 1]:
            self.target.expect([request], self.now)
            self._compute(request, min(request.num_computed + 1 + choice // 4 % 8, len(request.tokens) - 1))
        self.flush()

    def _compute(self, request: Request, count: int) -> None:
        """Its first `count` tokens have KV and features now."""
        for position in range(request.num_computed, count):
            request.slots[position] = slot = 1000 * request.id + position
            self.computed[slot] = tuple(request.tokens[: position + 1])
        request.num_computed = max(request.num_computed, count)

    def flush(self) -> None:
        pieces = self.target.due_features(row_bytes(WIDTH, "float32"), self.now)
        slots = [slot for piece in pieces for slot in piece.slots.tolist()]
        rows = np.array([feature_of(self.computed[slot]) for slot in slots], np.float32).reshape(-1, WIDTH)
        self.target.send_features(pieces, frames_of(pieces, coded(rows, "float32"), "float32"), self.now)

    def _check_moved(self, request: Request) -> None:
        """After a commit nobody is with a pool that is to leave, if another one takes sessions."""
        sessions = [session for session in self.target.sessions.values() if session.request is request]
        for session in sessions:
            if session.pool is not None and session.pool.draining:
                taken = [other.pool for other in sessions]
                assert all(pool in taken for pool in self.target.pools if pool.takes_sessions)

    def close(self, choice: int) -> None:
        if self.requests:
            self.target.close(self.requests.pop(choice % len(self.requests)))

    def wait(self, choice: int) -> None:
        """A while: now and then one in which a side falls silent."""
        self.now += (1.2, SILENCE)[choice // 128] if choice % 16 == 0 else (0.001, 0.02, 0.1, 0.3)[choice % 4]

    def tick(self, choice: int = 0) -> None:  # noqa: ARG002
        self.target.tick(self.now)
        for number, draft in enumerate(self.drafts):
            draft.tick(self.now)
            self.changed.add(number)

    def level(self, choice: int) -> None:
        draft, contents = self.drafts[choice % POOLS], self.contents[choice % POOLS]
        level = draft.next_level(self.now)
        self.changed.add(choice % POOLS)
        draft.table.allocate(level)
        contents.run(level)
        for part in level:
            if part.session.features is not None and part.pending:
                self._check_features(part.session, part.pending)
        draft.table.computed(level)
        if level:
            draft.level_done(level, self._grown(draft.table, level), self.now, self.now)

    def _check_features(self, session: DraftSession, count: int) -> None:
        """Of the last `count` tokens that have slots: each is that of the token before, or not known."""
        assert session.features is not None
        start = len(session.slots) - count
        rows: Features = session.features.of_rows(start, count)
        for position, row in enumerate(rows, start):
            known = not np.isnan(row).any()
            assert not known or row.tolist() == feature_of(session.tokens[:position])
            self.known, self.unknown = self.known + known, self.unknown + (not known and position > 0)

    @staticmethod
    def _grown(table: SessionTable, level: Sequence[LevelPart]) -> list[NewNodes]:
        leaves = [(part.session, leaf) for part in level for leaf in part.leaves]
        paths = [(*session.tokens, *session.tree.path_tokens(leaf)) for session, leaf in leaves]
        tokens = np.array([script(path) for path in paths], np.int64).reshape(len(paths), CHILDREN)
        return add_children(level, tokens, np.tile(CHANCES, (len(paths), 1)), table.calibrations)

    def disconnect(self, choice: int) -> None:
        if (pool := self.pool_of(choice)) is not None:
            self.target.lost(pool, "it hung up")

    def join(self, choice: int) -> None:
        if self.pool_of(choice) is None:
            peer = next(self.peers)
            self.dialled[peer] = choice % POOLS
            self.target.join(DraftPool(f"pool {choice % POOLS}", peer))

    def leave(self, choice: int) -> None:
        """What was sent before may still arrive; nothing is heard any more."""
        if (pool := self.pool_of(choice)) is not None:
            self.target.leave(pool)
            self.post()
            del self.dialled[pool.peer]
            self.lines[POOLS + choice % POOLS].clear()

    def restart_draft(self, choice: int) -> None:
        self.cached += sum(target.cached for target in self.drafts[choice % POOLS]._targets.values())
        self.drafts[choice % POOLS] = draft = make_draft(choice % POOLS)
        self.contents[choice % POOLS] = SlotContents(draft.table)

    def forget_keys(self, choice: int) -> None:
        self.drafts[choice % POOLS].known = KnownPrefixes(MOST_KEYS)

    def restart_target(self, choice: int) -> None:  # noqa: ARG002
        self.target, self.incarnation, self.requests = make_target(self.pools_each), self.incarnation + 1, []
        self.dialled = {str(i).encode(): i for i in range(POOLS)}
        for line in self.lines[POOLS:]:
            line.clear()

    # -- lines

    def flip(self, choice: int) -> None:
        """Damage that still decodes is a lie, which no protocol of this kind can see: such a frame is lost, unless its
        digest tells."""
        if not self.line(choice):
            return
        peer, sent = self.line(choice).popleft()
        frame, line = flipped(sent, choice), choice % len(self.lines)
        try:
            seen = isinstance((decode_to_draft if line < POOLS else decode_to_target)(frame), messages.FeatureRows)
        except WireError:
            seen = True
        if seen:
            self.arrive(line, (peer, frame))

    def post(self) -> None:
        """What the machines have to say, put on the lines."""
        for outgoing in self.target.outbox:
            draft = self.dialled[outgoing.peer]
            if isinstance(outgoing.message, messages.Open):
                pool = self.pool_of(draft)
                assert pool is not None and not pool.draining
                self.named += outgoing.message.prefix_key is not None
            self.lines[draft].append((self.peer, encode(outgoing.message)))
        self.target.outbox.clear()
        for number, draft in enumerate(self.drafts):
            self.lines[POOLS + number] += [(o.peer, encode(o.message)) for o in draft.outbox if o.peer == self.peer]
            draft.outbox.clear()

    def arrive(self, line: int, frame: tuple[Peer, bytes]) -> None:
        peer, sent = frame
        if line < POOLS:
            self.changed.add(line)
            try:
                message = decode_to_draft(sent)
                if isinstance(message, messages.TreeFeedback):
                    self._check_feedback(message)
                self.drafts[line].receive(peer, message, self.now)
            except UnknownTypeError as error:
                self.drafts[line].unknown(peer, error.kind, self.now)
            except WireError as error:
                self.drafts[line].malformed(peer, str(error), self.now)
            return
        pool = self.pool_of(line - POOLS)
        if pool is None:
            return
        try:
            message = decode_to_target(sent)
        except UnknownTypeError as error:
            self.target.unknown(pool, error.kind, self.now)
        except WireError as error:
            self.target.malformed(pool, str(error), self.now)
        else:
            self.target.receive(pool, message, self.now)

    def _check_feedback(self, feedback: messages.TreeFeedback) -> None:
        accepted = feedback.accepted
        assert set(accepted) <= set(feedback.verified) and accepted == sorted(accepted)
        assert not set(feedback.late) & set(feedback.verified)
        self.accepted += len(accepted)

    # -- what holds

    def check(self) -> None:
        for number in self.changed:
            self.contents[number].check()
        self.changed.clear()
        sessions = self.target.sessions.values()
        assert len(sessions) <= self.pools_each * len(self.requests)
        for session in sessions:
            self._check_copy(session)
            self._check_sequence(session)
            assert session.pool is not None or session.state is SessionState.OPENING
            assert session.pool is None or session.pool in self.target.pools
            assert session.state is not SessionState.OPENING or not (session.pool and session.pool.draining)
        for request in self.requests:
            pools = [session.pool for session in sessions if session.request is request and session.pool is not None]
            assert len(pools) == len({pool.peer for pool in pools})  # none guesses twice for it
        for pool in self.target.pools:
            assert pool.score.accepted <= pool.score.verified
            assert pool.sessions == {session.number for session in sessions if session.pool is pool}
            assert 0 <= pool.features.under_way <= pool.features.size

    def _check_sequence(self, session: RemoteSession) -> None:
        """What a draft has of a generation is the sequence, as far as it was told of it, under its salt."""
        theirs, request = self._drafts_session(session), session.request
        if theirs is not None and theirs.generation == session.generation:
            assert theirs.tokens == request.tokens[: len(theirs.tokens)]
            assert theirs.salt == salt_digest(request.cache_salt, b"")

    @staticmethod
    def _check_copy(session: RemoteSession) -> None:
        """A tree below the last committed token, of guesses that were made for this very sequence."""
        nodes, known = tree_of(session.copy), tuple(session.request.tokens)
        check_tree(nodes)
        paths: list[tuple[int, ...]] = []
        for parent, token in zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True):
            above = paths[parent] if parent >= 0 else ()
            assert token in script((*known, *above))
            paths.append((*above, token))

    def heal(self) -> None:
        """The lines are good again, a pool is there to stay, and the target goes on: both sides come to have the same
        sequences, none of them where a pool is to leave."""
        if not self.requests:
            self.add(5)
        self.keep_one()
        for _ in range(400):
            self.now += REPORT
            self.tick()
            self._deliver_all()
            for number in range(POOLS):
                self.level(number)
            self.step(0b111111)
            self._deliver_all()
            self.check()
            if not self.requests:
                self.add(5)
            elif self._agree():
                return
        raise AssertionError([(s.state, s.pool, s.not_before - self.now) for s in self.target.sessions.values()])

    def _deliver_all(self) -> None:
        self.post()
        while any(self.lines):
            self.deliver_all()
            self.post()

    def _agree(self) -> bool:
        """Each request has as many pools as there are for it, and each of them has the same sequence."""
        staying = sum(not pool.draining for pool in self.target.pools)
        sessions = [session for session in self.target.sessions.values() if session.pool is not None]
        pairs = [(session, self._drafts_session(session)) for session in sessions]
        return len(pairs) == min(self.pools_each, staying) * len(self.requests) and all(
            theirs is not None
            and (theirs.tokens, theirs.generation) == (ours.request.tokens, ours.generation)
            and (theirs.features is None or theirs.features.reach == len(theirs.tokens) - 1)
            and not (ours.pool and ours.pool.draining)
            for ours, theirs in pairs
        )

    def _drafts_session(self, session: RemoteSession) -> DraftSession | None:
        if session.pool is None:
            return None
        return self.drafts[self.dialled[session.pool.peer]].table.get(SessionKey(self.peer, session.number))

    def end(self) -> None:
        """All requests end: nothing is left anywhere, once those whose Close was lost are forgotten."""
        agreed = [self._drafts_session(session) for session in self.target.sessions.values()]
        while self.requests:
            self.close(0)
        self._deliver_all()
        assert not any(session in draft.table for session in agreed for draft in self.drafts)
        until = self.now + max(draft_sessions.FORGOTTEN, SILENCE) + 2 * REPORT
        while self.now < until:
            self.now += REPORT
            self.tick()
            self._deliver_all()
        self.check()
        assert not self.target.sessions
        for draft in self.drafts:
            assert len(draft.table) == 0 and draft.table.pool.num_available == draft.table.pool.capacity


#: How often each event happens.
SELDOM = dict.fromkeys(("close", "join", "pause"), 1)
COMMON = {"deliver": 24, "step": 5, "read": 3, "level": 12, "tick": 8, "wait": 4, "add": 2} | SELDOM
FAULTS = {"strange": 1.0, "drop": 1.0, "repeat": 1.0, "reorder": 1.0, "flip": 1.0}
RARE = dict.fromkeys(("disconnect", "restart_draft", "restart_target", "forget_keys", "leave"), 0.2) | {"drain": 0.4}
WEIGHTS = COMMON | FAULTS | RARE


@settings(max_examples=sized(12, 100), deadline=None)
@given(histories(WEIGHTS, 150), st.sampled_from([1, 2]))
def test_whatever_a_line_does_both_sides_agree_again(events: list[Event], pools_each: int) -> None:
    world = World(pools_each)
    world.live(events)
    world.heal()
    world.end()


@pytest.mark.parametrize("seed", range(3))
def test_frames_that_come_twice_change_nothing(seed: int) -> None:
    """No session is opened again, no node is against the protocol."""
    world, rng = World(), Random(seed)
    weights = {"deliver": 8, "step": 3, "level": 4, "tick": 1, "add": 1, "close": 1, "repeat": 3}
    for draft in world.drafts:
        draft.known = KnownPrefixes()
    world.live(random_events(rng, weights, 600))
    for pool in world.target.pools:
        assert pool.drops.occurred.keys() <= {"late_nodes", "stale_frames"}


@pytest.mark.parametrize("seed", sized([2, 3], [*range(8)]))
def test_long_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough that sessions are served, lost and served again; little room, so that some are turned away."""
    monkeypatch.setattr(draft_sessions, "MAX_SESSIONS", 4)
    world, rng = World(1 + seed % 2), Random(seed)
    for _ in range(5):
        world.live(random_events(rng, WEIGHTS, sized(500, 1000)))
        world.heal()
    assert world.trees > sized(40, 60) and world.named > 10
    assert world.known > sized(400, 500) and world.accepted > sized(5, 10)
    assert world.cached + sum(one.cached for draft in world.drafts for one in draft._targets.values()) > 100
    world.end()
