"""The target's half of the draft protocol: which pool drafts for which request, and the messages to each.

    OPENING ── asked for a tree, a pool is ready: Open ──► GROWING ◄─── asked for a tree ─── RESTING
       ▲                                                      │ └──── Commit is sent ───────────► │
       │  pool lost, refusal, breach of the protocol;         │                                   │
       └─ with the same pool: Resync, or a Tree is missing ───┴───────────────────────────────────┘

Commits of a growing session are sent at once; those of a resting one, or one without room at its pool (Pause), are
collected. A session is OPENING again if its pool goes, and after its next commit if its pool drains.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from pilotfish.core.drafting import messages
from pilotfish.core.drafting.pools import DraftPool, RemoteSession, SessionState, due_pieces, merged
from pilotfish.core.features.feature_frames import FeaturePiece
from pilotfish.core.peers.fields import Error, Outgoing, salt_digest
from pilotfish.core.peers.peer import Dialer
from pilotfish.core.scheduling.calibration import SecondsBySize
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.core.trees.tree_copy import TreeCopy

MAX_DOUBLINGS = 6  # seconds without a draft double up to this many times
MAX_ARRIVALS = 256  # arrivals kept for an observer; the oldest give way
#: Nodes wanted of a resting session: enough to see, at any time, whether its trees would pay.
RESTING_NODES = 64
MAX_ERRORS = 1 << 16  # frames of which one Error tells, as counted: a pool may name any number
RESTING_PERIOD = 0.02  # seconds between two Commits of a resting session
#: Seconds that a session stays with a pool that has no room for it: where another takes it, and where none does.
PARKED, PARKED_ALONE = 1.0, 30.0
#: Seconds between two trees from which on they are of no loop of steps, and over which the deepest node is looked for.
LOOP, DEPTHS = 1.0, 1.0


@dataclass(frozen=True)
class RemoteOptions:
    wanted: int = 2048  # nodes below the root after which a draft is to stop
    #: Seconds without a draft for a session whose pool broke the protocol, or fails it again soon after it was opened;
    #: twice that the next time, and so on.
    quarantine: float = 1.0
    salt_key: bytes = b""  # for the digests of salts
    pools_each: int = 1  # how many pools guess for a request
    first_pool: int = 0  # which of equal pools gets the first session: targets that begin together begin elsewhere


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds, on the target's clock
    nodes: int


class StepFacts:
    def __init__(self) -> None:
        self._seconds = SecondsBySize(0.0)
        self._began: float | None = None
        self._depth = self._depth_before = 0  # of the deepest node, in this span of time and in the last one
        self._since = 0.0

    def begin(self, now: float) -> None:
        if self._began is not None and now - self._began < LOOP:
            self._seconds.observe(1, now - self._began)
        self._began = now

    def deepest(self, depth: int) -> None:
        self._depth = max(self._depth, depth)

    def told(self, hello: messages.Hello, now: float) -> messages.Hello:
        if now - self._since > DEPTHS:
            self._depth_before, self._depth, self._since = self._depth, 0, now
        depth = max(self._depth, self._depth_before)
        return msgspec.structs.replace(hello, step_ms=1000 * self._seconds.at(1), depth=depth)


class TargetMachine(Dialer[DraftPool]):
    def __init__(self, hello: messages.Hello, pools: Sequence[DraftPool], options: RemoteOptions) -> None:
        super().__init__(pools)
        self.arrivals: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)
        self._hello = hello
        self._options = options
        self.sessions: dict[int, RemoteSession] = {}  # by number
        self._by_request: dict[int, list[RemoteSession]] = {}  # by its id
        self._next_number = 1
        self._steps = StepFacts()

    def session(self, request: Request) -> RemoteSession | None:
        return next(iter(self._of(request)), None)

    def _of(self, request: Request) -> Sequence[RemoteSession]:
        return self._by_request.get(request.id, ())

    # -- the step loop

    def propose(self, requests: Sequence[Request], count: int, now: float) -> list[Guesses]:
        self._steps.begin(now)
        return [merged(self._asked(request, now), count) for request in requests]

    def expect(self, requests: Sequence[Request], now: float) -> None:
        for request in requests:
            self._asked(request, now)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        if len(trees):
            self._steps.deepest(int(trees.nodes.depths.max()))
        for pool in self.pools:
            pool.score.end_step()
        if self._options.pools_each > 1 or any(pool.can(messages.FEEDBACK) for pool in self.pools):
            for request, (first, end) in zip(requests, pairwise(trees.starts.tolist()), strict=True):
                for session in self._of(request) if end > first else ():
                    session.verified = session.copy.nodes_of(trees, first, end)

    def commit(self, request: Request, tokens: Sequence[int], now: float) -> bool:
        hits = [self._commit(session, tokens, now) for session in self._of(request)]  # each must hear of it
        return any(hits)

    def _commit(self, session: RemoteSession, tokens: Sequence[int], now: float) -> bool:
        self._feed_back(session, tokens)
        hit = session.copy.commit(tokens)
        session.unsent += len(tokens)
        if session.pool is not None and session.pool.draining and self._others_take(session.pool):
            self._leave_pool(session)
        elif session.can_follow and (session.growing or now - session.last_commit >= RESTING_PERIOD):
            self._send_commit(session, now)
        return hit

    def _feed_back(self, session: RemoteSession, tokens: Sequence[int]) -> None:
        pool = session.pool
        if pool is None or not (session.verified or pool.can(messages.FEEDBACK)):
            return
        feedback = session.feedback(tokens)
        if feedback is not None and session.can_follow and pool.can(messages.FEEDBACK):
            self._send(pool, feedback)

    def pause(self, request: Request) -> None:
        """It waits, without KV. Pools that understand that keep its sessions."""
        for session in self._of(request):
            if session.can_follow and session.pool is not None and session.pool.can(messages.PAUSES):
                session.state = SessionState.PAUSED
                self._send(session.pool, messages.Pause(session.number, session.generation))
            else:
                self._leave_pool(session)

    def close(self, request: Request) -> None:
        for session in self._by_request.pop(request.id, ()):
            del self.sessions[session.number]
            self._remember_told(session)
            self._leave_pool(session)

    def _remember_told(self, session: RemoteSession) -> None:
        request, pool = session.request, session.pool
        if pool is not None and pool.can(messages.PREFIX_KEYS) and session.can_follow:
            told = request.tokens[: len(request.tokens) - session.unsent]
            pool.told.tell(salt_digest(request.cache_salt, self._options.salt_key), told)

    def _asked(self, request: Request, now: float) -> Sequence[RemoteSession]:
        sessions = self._by_request.setdefault(request.id, [])
        wanted = min(self._options.pools_each, max(len(self.pools), 1))
        while len(sessions) < wanted:
            sessions.append(self._new_session(request))
        for session in sessions:
            self._ask(session, now)
        return sessions

    def _ask(self, session: RemoteSession, now: float) -> None:
        if session.pool is not None and not self._keeps_sessions(session.pool, now):
            self._abandon(session.pool)
        pool, parked = session.pool, session.parked
        if pool and parked is not None and now - parked > (PARKED if self._others_take(pool) else PARKED_ALONE):
            session.refused_by.add(pool.peer)
            self._leave_pool(session)
        if session.state is SessionState.OPENING:
            if now >= session.not_before:
                self._open(session, now)
            return
        if session.can_follow and (session.unsent or session.state is SessionState.PAUSED):
            self._go_on(session, now)  # it rested or waited, or its pool was silent
        elif session.state is not SessionState.PAUSED:
            session.state = SessionState.GROWING

    def _go_on(self, session: RemoteSession, now: float) -> None:
        session.state = SessionState.GROWING
        if session.unsent:
            self._send_commit(session, now)
            session.state = SessionState.GROWING
        elif session.pool is not None:
            self._send(session.pool, messages.Resume(session.number, session.generation))

    def _new_session(self, request: Request) -> RemoteSession:
        session = RemoteSession(self._next_number, request, self._empty_copy(request))
        self._next_number += 1
        self.sessions[session.number] = session
        return session

    def _empty_copy(self, request: Request) -> TreeCopy:
        return TreeCopy(len(request.tokens), self._hello.vocab_size, self._options.wanted + messages.MAX_NODES)

    def _open(self, session: RemoteSession, now: float) -> None:
        pool = session.pool or self._best_pool(session, now)
        if pool is None or not pool.ready or not session.may_open(pool, now):
            return
        session.open_with(pool, now)
        session.copy = self._empty_copy(session.request)
        pool.sessions.add(session.number)
        wanted, salt_key = self._options.wanted, self._options.salt_key
        message = messages.Open.of(session.request, session.number, session.generation, wanted, salt_key)
        if pool.can(messages.PREFIX_KEYS):
            key, rest = pool.told.shorten(message.salt, message.tokens)
            message = msgspec.structs.replace(message, prefix_key=key, tokens=rest)
        self._send(pool, message)

    def _send_commit(self, session: RemoteSession, now: float) -> None:
        assert session.pool is not None
        wanted = self._options.wanted if session.growing else min(self._options.wanted, RESTING_NODES)
        tokens = session.request.tokens
        base_len = len(tokens) - session.unsent
        self._send(
            session.pool, messages.Commit(session.number, session.generation, base_len, tokens[base_len:], wanted)
        )
        session.state, session.unsent, session.last_commit = SessionState.RESTING, 0, now

    def due_features(self, row_bytes: int, now: float) -> list[FeaturePiece]:
        if not any(pool.can(messages.FEATURES) for pool in self.pools):
            return []
        following = (session for session in self.sessions.values() if session.can_follow)
        return due_pieces([s for s in following if s.pool and s.pool.can(messages.FEATURES)], row_bytes, now)

    def send_features(self, pieces: Sequence[FeaturePiece], frames: Sequence[messages.FeatureRows], now: float) -> None:
        """Features of a step's commit go right before the Commit in the outbox, the rest after."""
        for piece, frame in zip(pieces, frames, strict=True):
            session = self.sessions.get(piece.session)
            if session is None or session.generation != piece.generation or not session.can_follow:
                continue  # its pool was lost meanwhile
            assert session.pool is not None
            outgoing = Outgoing(session.pool.peer, session.pool.features.send(frame, now, fresh=piece.fresh))
            self.outbox.insert(self._place_of_commit(piece.session) if piece.fresh else len(self.outbox), outgoing)
            session.features_sent = max(session.features_sent, piece.first + len(piece.slots))

    def _place_of_commit(self, session: int) -> int:
        told = (outgoing.message for outgoing in self.outbox)
        commits = (place for place, m in enumerate(told) if isinstance(m, messages.Commit) and m.session == session)
        return next(commits, len(self.outbox))

    def _best_pool(self, session: RemoteSession, now: float) -> DraftPool | None:
        """The one with the fewest sessions; one that refused this session, or is busy, only without others."""
        wanted, others = session.request.draft, [other.pool for other in self._of(session.request)]
        taking = [pool for pool in self.pools if pool.takes_sessions and wanted in ("", pool.revision)]
        able = [pool for pool in taking if pool not in others and session.may_open(pool, now)]
        first = self._options.first_pool % max(len(able), 1)

        def cost(pool: DraftPool) -> tuple[bool, bool, float]:
            return pool.peer in session.refused_by, pool.is_busy(now), pool.expected_load

        return min([*able[first:], *able[:first]], key=cost, default=None)

    def _set_back(self, session: RemoteSession, now: float, *, breach: bool = False) -> None:
        """If opening it anew has just not helped, or its pool broke the protocol, it is without a draft for a while:
        no pool may have a target send whole sequences step after step."""
        quarantine = self._options.quarantine
        session.setbacks = session.setbacks + 1 if now - session.opened <= quarantine else 0
        paused = breach or session.setbacks > 1
        doublings = min(max(session.setbacks - 1, 0), MAX_DOUBLINGS)
        session.not_before = now + quarantine * 2.0**doublings if paused else now
        if paused or session.pool is None or not session.pool.takes_sessions:
            self._leave_pool(session)
        else:
            session.state, session.copy = SessionState.OPENING, self._empty_copy(session.request)

    def _leave_pool(self, session: RemoteSession) -> None:
        if session.pool is not None:
            self._send(session.pool, messages.Close(session.number, session.generation))
            session.pool.sessions.discard(session.number)
        session.state, session.pool, session.copy = SessionState.OPENING, None, self._empty_copy(session.request)
        session.parked = None

    # -- the pools

    def drain(self, pool: DraftPool, draining: bool) -> None:
        super().drain(pool, draining)
        own = [self.sessions[number] for number in pool.sessions] if draining else []
        for session in own:
            if session.state is SessionState.OPENING:
                self._leave_pool(session)

    def leave(self, pool: DraftPool) -> None:
        self._remove(pool)
        self._abandon(pool)

    def lost(self, pool: DraftPool, reason: str) -> None:
        pool.silent = False
        if pool.ready:
            pool.lose(reason)

    def tick(self, now: float) -> None:
        for pool in self.pools:
            pool.tick(now)
            if not self._keeps_sessions(pool, now):
                self._abandon(pool)
            if pool.hello_due(now):
                self._send(pool, self._steps.told(msgspec.structs.replace(self._hello, echo=pool.echo.stamp(now)), now))

    def _keeps_sessions(self, pool: DraftPool, now: float) -> bool:
        return pool.keeps_sessions(now, alone=not self._others_take(pool))

    def _others_take(self, pool: DraftPool) -> bool:
        return any(other.takes_sessions for other in self.pools if other is not pool)

    def _abandon(self, pool: DraftPool) -> None:
        """Its sessions are opened elsewhere, or there again: it may have forgotten them."""
        if pool.sessions:
            pool.give_up()
        for number in list(pool.sessions):
            self._leave_pool(self.sessions[number])

    def malformed(self, pool: DraftPool, reason: str, now: float, about: str = "") -> None:
        pool.malformed(reason, now)
        self._report(pool, pool.reports.of("malformed", about, reason, now))

    def unknown(self, pool: DraftPool, kind: str, now: float) -> None:
        pool.drops.add("unknown_messages", 1, now, kind)
        self._report(pool, pool.reports.of("unknown_type", kind, f"messages of type {kind} are not known here", now))

    def _report(self, pool: DraftPool, error: Error | None) -> None:
        if error is not None and pool.can(messages.ERRORS):
            self._send(pool, error)

    def receive(self, pool: DraftPool, message: messages.ToTarget, now: float) -> None:
        if isinstance(message, messages.Load):
            self._hear_load(pool, message, now)
        elif isinstance(message, Error):
            pool.drops.add("errors", min(message.count, MAX_ERRORS), now, f"{message.code}: {message.reason}")
        elif isinstance(message, messages.Refuse) and message.session == messages.CONNECTION:
            pool.refused(message.reason, now)
        else:
            pool.heard_of_session(now)
            session = self.sessions.get(message.session)
            if session is None or not self._is_current(session, pool, message.generation):
                pool.drops.add("stale_frames", 1, now)
            elif isinstance(message, messages.Tree):
                self._attach(session, pool, message, now)
            elif isinstance(message, messages.Resync | messages.Refuse):
                self._given_back(session, pool, message, now)
            else:
                self._note(session, pool, message, now)

    def _hear_load(self, pool: DraftPool, load: messages.Load, now: float) -> None:
        if self._hello.oldest <= load.version <= self._hello.version:
            pool.heard_load(load, now)
        else:
            reason = f"version {load.version} is not {self._hello.oldest} to {self._hello.version}"
            pool.refused(reason, now)
            self._report(pool, pool.reports.of("version", "load", reason, now))

    def _note(
        self,
        session: RemoteSession,
        pool: DraftPool,
        message: messages.Skip | messages.Progress | messages.Pause | messages.Resume,
        now: float,
    ) -> None:
        if isinstance(message, messages.Skip):
            session.features_sent = max(session.features_sent, message.first)
        elif isinstance(message, messages.Resume):
            session.parked = None
        elif isinstance(message, messages.Pause) and session.parked is None:
            session.parked = now
            pool.drops.add("pauses", 1, now)

    def _is_current(self, session: RemoteSession, pool: DraftPool, generation: int) -> bool:
        return session.pool is pool and session.state is not SessionState.OPENING and session.generation == generation

    def _given_back(
        self, session: RemoteSession, pool: DraftPool, message: messages.Resync | messages.Refuse, now: float
    ) -> None:
        if isinstance(message, messages.Resync):
            pool.drops.add("resyncs", 1, now, message.reason)
            pool.told.clear()  # it lacks something; the next Opens have all tokens
            self._set_back(session, now)
        else:
            pool.drops.add("refusals", 1, now, message.reason)
            session.refused_by.add(pool.peer)
            self._leave_pool(session)
            others = {other.peer for other in self.pools if not other.draining}
            self._set_back(session, now, breach=others <= session.refused_by)

    def _attach(self, session: RemoteSession, pool: DraftPool, pushed: messages.Tree, now: float) -> None:
        if pushed.sequence < session.pushes:
            pool.drops.add("stale_frames", 1, now)  # it came twice
            return
        if pushed.sequence > session.pushes:
            reason = f"Tree {pushed.sequence} came, Tree {session.pushes} did not"
            self._break(session, pool, "gaps", "gap", reason, now)
            self._set_back(session, now)
            return
        session.pushes, session.parked = session.pushes + 1, None
        pool.score.trees += 1
        pool.score.nodes += len(pushed.ids)
        copy = session.copy
        dropped, late, repeated = copy.dropped, copy.late, copy.repeated
        copy.attach(pushed)
        self.arrivals.append(Arrival(now, len(pushed.ids)))
        pool.drops.add("late_nodes", copy.late - late, now)
        pool.drops.add("repeated_nodes", copy.repeated - repeated, now)
        if copy.dropped > dropped:
            self._break(session, pool, "dropped_nodes", copy.breach_code, copy.breach, now, copy.dropped - dropped)
            self._set_back(session, now, breach=True)

    def _break(
        self, session: RemoteSession, pool: DraftPool, kind: str, code: str, reason: str, now: float, count: int = 1
    ) -> None:
        pool.drops.add(kind, count, now, reason)
        at = session.number, session.generation
        self._report(pool, pool.reports.of(code, "tree", reason, now, *at))
