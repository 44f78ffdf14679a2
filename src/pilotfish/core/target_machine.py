"""The target's half of the draft protocol: which pool drafts for which request, and what each is told, when.

    OPENING ── asked for a tree, a pool is ready: Open ──► GROWING ◄─── asked for a tree ─── RESTING
       ▲                                                      │ └──── Commit is sent ───────────► │
       │  pool lost, refusal, breach of the protocol          │                                   │
       ├──────────────────────────────────────────────────────┴───────────────────────────────────┤
       └──── LOST ◄─────────────────── Resync, or a Tree is missing ──────────────────────────────┘
               └── asked for a tree: Open again, one generation up ──► GROWING

Commits of a growing session are sent at once. A resting one's are collected: its draft follows, but spends little. A
pool that wants features gets those of both, as soon as they are computed (core/feature_sending.py).
Pools come and go at any moment; a session whose pool goes is OPENING again, and one whose pool drains is so after its
next commit. The machine has no socket, clock or lock: `engine/remote_drafts.py` owns those, sends `outbox` and logs the
pools' notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pilotfish.core.feature_sending import FeaturePiece, due_pieces
from pilotfish.core.messages import (
    CONNECTION,
    MAX_NODES,
    Close,
    Commit,
    FeatureRows,
    Hello,
    Load,
    Open,
    Outgoing,
    Peer,
    Refuse,
    Resync,
    Skip,
    ToDraft,
    ToTarget,
    Tree,
    salt_digest,
)
from pilotfish.core.pools import DraftPool
from pilotfish.core.request import Request
from pilotfish.core.tree import OTHER, Guesses
from pilotfish.core.tree_copy import TreeCopy

#: Seconds without a draft double up to this many times.
MAX_DOUBLINGS = 6
#: Arrivals kept for an observer; the oldest give way.
MAX_ARRIVALS = 256
#: Nodes wanted of a resting session: enough to see, at any time, whether its trees would pay.
RESTING_NODES = 64
#: Seconds between two Commits of a resting session.
RESTING_PERIOD = 0.02


@dataclass(frozen=True)
class RemoteOptions:
    """How the target deals with its pools."""

    wanted: int = 2048  # nodes below the root after which a draft is to stop
    #: Seconds without a draft for a session whose pool broke the protocol, or fails it again soon after it was opened;
    #: twice that the next time, and so on.
    quarantine: float = 1.0
    salt_key: bytes = b""  # for the digests of salts
    first_pool: int = 0  # which of equal pools gets the first session: targets that begin together begin elsewhere


class SessionState(Enum):
    OPENING = auto()  # no pool has it; the next request for a tree opens it, from `not_before` on
    GROWING = auto()  # a tree was asked for since the last Commit
    RESTING = auto()  # none was
    LOST = auto()  # its pool cannot follow it; the next request for a tree opens it there anew


@dataclass
class RemoteSession:
    """A request as a pool knows it."""

    number: int
    request: Request
    copy: TreeCopy
    state: SessionState = SessionState.OPENING
    pool: DraftPool | None = None  # None while OPENING
    unsent: int = 0  # newest tokens of the request that the pool does not know
    last_commit: float = 0.0  # when one was sent
    generation: int = 0
    pushes: int = 0  # received of this generation
    opened: float = 0.0
    setbacks: int = 0  # one after the other, each soon after it was opened
    not_before: float = 0.0  # when it may be opened again
    refused_by: set[Peer] = field(default_factory=set)
    features_sent: int = 0  # positions before this one: the pool was sent their features, or needs none

    @property
    def can_follow(self) -> bool:
        """Whether its pool can take a Commit now."""
        return self.pool is not None and self.pool.ready and self.state is not SessionState.LOST

    @property
    def origin(self) -> str:
        """Of its nodes."""
        return OTHER if self.pool is None else self.pool.name


@dataclass
class RemoteCounts:
    """Sums over all sessions."""

    hits: int = 0  # commits that were in the tree
    misses: int = 0
    trees: int = 0  # frames attached
    opened: int = 0  # sessions, opened anew included
    moved: int = 0  # sessions whose pool was lost, or is to leave


@dataclass(frozen=True)
class Arrival:
    """A push that was attached."""

    at: float  # seconds, on the target's clock
    nodes: int


class TargetMachine:
    """Every method takes the present time; messages for pools are appended to `outbox`."""

    def __init__(self, hello: Hello, pools: Sequence[DraftPool], options: RemoteOptions) -> None:
        self.pools = tuple(pools)  # a new tuple at each change: other threads read it
        self.outbox: list[Outgoing] = []
        self.counts = RemoteCounts()
        self.arrivals: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)
        self._hello = hello
        self._options = options
        self.sessions: dict[int, RemoteSession] = {}  # by number
        self._by_request: dict[int, RemoteSession] = {}  # by its id
        self._next_number = 1

    def session(self, request: Request) -> RemoteSession | None:
        return self._by_request.get(request.id)

    # -- the step loop

    def propose(self, requests: Sequence[Request], count: int, now: float) -> list[Guesses]:
        """The `count` best nodes of each request's tree."""
        sessions = [self._asked(request, now) for request in requests]
        return [session.copy.best(count, session.origin) for session in sessions]

    def expect(self, requests: Sequence[Request], now: float) -> None:
        """Have pools read the tokens of requests whose trees will be asked for."""
        for request in requests:
            self._asked(request, now)

    def commit(self, request: Request, tokens: Sequence[int], now: float) -> bool:
        """`tokens` were just added to `request`; whether all were in its tree."""
        session = self.session(request)
        if session is None:
            return False
        hit = session.copy.commit(tokens)
        self.counts.hits += hit
        self.counts.misses += not hit
        session.unsent += len(tokens)
        if session.pool is not None and session.pool.draining and self._others_take(session.pool):
            self._leave_pool(session)
            self.counts.moved += 1
        elif session.can_follow and (
            session.state is SessionState.GROWING or now - session.last_commit >= RESTING_PERIOD
        ):
            self._send_commit(session, now)
        return hit

    def close(self, request: Request) -> None:
        session = self._by_request.pop(request.id, None)
        if session is not None:
            del self.sessions[session.number]
            self._remember_told(session)
            self._leave_pool(session)

    def _remember_told(self, session: RemoteSession) -> None:
        """The pool of a session that ends was told of it, but for its newest tokens."""
        request, pool = session.request, session.pool
        if pool is not None and pool.knows_keys and session.can_follow:
            told = request.tokens[: len(request.tokens) - session.unsent]
            pool.told.tell(salt_digest(request.cache_salt, self._options.salt_key), told)

    def _asked(self, request: Request, now: float) -> RemoteSession:
        """The session of a request whose tree is asked for: growing where a pool can be had."""
        session = self.session(request) or self._new_session(request)
        if session.pool is not None and not self._keeps_sessions(session.pool, now):
            self._abandon(session.pool)
        if session.state in (SessionState.OPENING, SessionState.LOST):
            if now >= session.not_before:
                self._open(session, now)
            return session
        session.state = SessionState.GROWING
        if session.unsent and session.can_follow:  # it rested, or its pool was silent
            self._send_commit(session, now)
            session.state = SessionState.GROWING
        return session

    def _new_session(self, request: Request) -> RemoteSession:
        session = RemoteSession(self._next_number, request, self._empty_copy(request))
        self._next_number += 1
        self._by_request[request.id] = self.sessions[session.number] = session
        return session

    def _empty_copy(self, request: Request) -> TreeCopy:
        return TreeCopy(len(request.tokens), self._hello.vocab_size, self._options.wanted + MAX_NODES)

    def _open(self, session: RemoteSession, now: float) -> None:
        pool = session.pool or self._best_pool(session)
        if pool is None or not pool.ready:
            return
        session.state, session.pool, session.opened = SessionState.GROWING, pool, now
        session.generation, session.pushes, session.unsent = session.generation + 1, 0, 0
        session.features_sent = 0
        session.copy = self._empty_copy(session.request)
        pool.sessions.add(session.number)
        self.counts.opened += 1
        wanted, salt_key = self._options.wanted, self._options.salt_key
        message = Open.of(session.request, session.number, session.generation, wanted, salt_key)
        self._send(pool, pool.told.shorten(message) if pool.knows_keys else message)

    def _send_commit(self, session: RemoteSession, now: float) -> None:
        """Send all tokens that the pool does not know."""
        assert session.pool is not None
        growing = session.state is SessionState.GROWING
        wanted = self._options.wanted if growing else min(self._options.wanted, RESTING_NODES)
        tokens = session.request.tokens
        base_len = len(tokens) - session.unsent
        self._send(session.pool, Commit(session.number, session.generation, base_len, tokens[base_len:], wanted))
        session.state, session.unsent, session.last_commit = SessionState.RESTING, 0, now

    def due_features(self, row_bytes: int, now: float) -> list[FeaturePiece]:
        """What `send_features` is to be given, after the commits of a step: features of `row_bytes` each."""
        if not any(pool.wants_features for pool in self.pools):
            return []
        following = (session for session in self.sessions.values() if session.can_follow)
        return due_pieces([s for s in following if s.pool and s.pool.wants_features], row_bytes, now)

    def send_features(self, pieces: Sequence[FeaturePiece], frames: Sequence[FeatureRows], now: float) -> None:
        """What a step has committed goes before its Commit, which is in the outbox; the rest comes after them."""
        before = list[Outgoing]()
        for piece, frame in zip(pieces, frames, strict=True):
            session = self.sessions.get(piece.session)
            if session is None or session.generation != piece.generation or not session.can_follow:
                continue  # its pool was lost meanwhile
            assert session.pool is not None
            outgoing = Outgoing(session.pool.peer, session.pool.features.send(frame, now, fresh=piece.fresh))
            (before if piece.fresh else self.outbox).append(outgoing)
            session.features_sent = max(session.features_sent, piece.end)
        self.outbox[:0] = before

    def _best_pool(self, session: RemoteSession) -> DraftPool | None:
        """The one with the fewest sessions; one that refused this session only where there is no other."""
        wanted = session.request.draft
        taking = [pool for pool in self.pools if pool.takes_sessions and wanted in ("", pool.revision)]
        first = self._options.first_pool % max(len(taking), 1)
        in_turn = [*taking[first:], *taking[:first]]
        return min(in_turn, key=lambda pool: (pool.peer in session.refused_by, pool.expected_load), default=None)

    def _set_back(self, session: RemoteSession, now: float, *, breach: bool = False) -> None:
        """It is opened anew at the next step. Where that has just not helped, or its pool broke the protocol, it is
        without a draft for a while: a pool must not have a target send whole sequences step after step."""
        quarantine = self._options.quarantine
        session.setbacks = session.setbacks + 1 if now - session.opened <= quarantine else 0
        paused = breach or session.setbacks > 1
        doublings = min(max(session.setbacks - 1, 0), MAX_DOUBLINGS)
        session.not_before = now + quarantine * 2.0**doublings if paused else now
        if paused or session.pool is None or not session.pool.takes_sessions:
            self._leave_pool(session)
        else:
            session.state, session.copy = SessionState.LOST, self._empty_copy(session.request)

    def _leave_pool(self, session: RemoteSession) -> None:
        if session.pool is not None:
            self._send(session.pool, Close(session.number, session.generation))
            session.pool.sessions.discard(session.number)
        session.state, session.pool, session.copy = SessionState.OPENING, None, self._empty_copy(session.request)

    def _send(self, pool: DraftPool, message: ToDraft) -> None:
        self.outbox.append(Outgoing(pool.peer, message))

    # -- the pools

    def join(self, pool: DraftPool) -> None:
        self.pools = (*self.pools, pool)

    def drain(self, pool: DraftPool, draining: bool) -> None:
        """It is to leave; or it is not, after all."""
        pool.draining = draining
        lost = (self.sessions[number] for number in pool.sessions) if draining else ()
        for session in [session for session in lost if session.state is SessionState.LOST]:
            self._leave_pool(session)

    def leave(self, pool: DraftPool) -> None:
        """Nothing of it counts from now on."""
        self.pools = tuple(other for other in self.pools if other is not pool)
        self._abandon(pool)

    def tick(self, now: float) -> None:
        """Greet the pools now and then; called often."""
        for pool in self.pools:
            pool.tick(now)
            if not self._keeps_sessions(pool, now):
                self._abandon(pool)
            if pool.hello_due(now):
                self._send(pool, self._hello)

    def _keeps_sessions(self, pool: DraftPool, now: float) -> bool:
        return pool.keeps_sessions(now, alone=not self._others_take(pool))

    def _others_take(self, pool: DraftPool) -> bool:
        """Whether there is a pool to which its sessions can go."""
        return any(other.takes_sessions for other in self.pools if other is not pool)

    def _abandon(self, pool: DraftPool) -> None:
        """Its sessions are opened elsewhere, or there once it is back: it may have forgotten them."""
        if pool.sessions:
            pool.give_up()
        for number in list(pool.sessions):
            self._leave_pool(self.sessions[number])
            self.counts.moved += 1

    def pool_at(self, peer: Peer) -> DraftPool | None:
        return next((pool for pool in self.pools if pool.peer == peer), None)

    def receive(self, pool: DraftPool, message: ToTarget, now: float) -> None:
        if isinstance(message, Load):
            pool.heard_load(message, now)
        elif isinstance(message, Refuse) and message.session == CONNECTION:
            pool.refused(message.reason, now)
        else:
            pool.heard_of_session(now)
            session = self.sessions.get(message.session)
            if session is None or not self._is_current(session, pool, message.generation):
                pool.drops.add("stale_frames", 1, now)
            elif isinstance(message, Tree):
                self._attach(session, pool, message, now)
            elif isinstance(message, Skip):
                session.features_sent = max(session.features_sent, message.first)
            else:
                self._given_back(session, pool, message, now)

    def _is_current(self, session: RemoteSession, pool: DraftPool, generation: int) -> bool:
        return session.pool is pool and session.state is not SessionState.LOST and session.generation == generation

    def _given_back(self, session: RemoteSession, pool: DraftPool, message: Resync | Refuse, now: float) -> None:
        """The pool cannot follow the session, or does not take it."""
        if isinstance(message, Resync):
            pool.drops.add("resyncs", 1, now, message.reason)
            pool.told.clear()  # it lacks something; the next Opens have all tokens
            self._set_back(session, now)
        else:
            pool.drops.add("refusals", 1, now, message.reason)
            session.refused_by.add(pool.peer)
            self._leave_pool(session)
            others = {other.peer for other in self.pools if not other.draining}
            self._set_back(session, now, breach=others <= session.refused_by)

    def _attach(self, session: RemoteSession, pool: DraftPool, pushed: Tree, now: float) -> None:
        if pushed.sequence < session.pushes:
            pool.drops.add("stale_frames", 1, now)  # it came twice
            return
        if pushed.sequence > session.pushes:
            pool.drops.add("gaps", 1, now)
            self._set_back(session, now)
            return
        session.pushes += 1
        copy = session.copy
        dropped, late, repeated = copy.dropped, copy.late, copy.repeated
        copy.attach(pushed)
        self.counts.trees += 1
        self.arrivals.append(Arrival(now, len(pushed.ids)))
        pool.drops.add("late_nodes", copy.late - late, now)
        pool.drops.add("repeated_nodes", copy.repeated - repeated, now)
        pool.drops.add("dropped_nodes", copy.dropped - dropped, now, copy.breach)
        if copy.dropped > dropped:
            self._set_back(session, now, breach=True)
