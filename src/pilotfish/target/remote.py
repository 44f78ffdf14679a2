"""Drafts that run elsewhere: the target's side of the wire. The target waits for nothing here.

step loop     propose: the best nodes of each local copy        commit: re-root the copy, post the tokens
───────────────────────────── one lock, held for microseconds ─────────────────────────────────────────
courier       Tree: attach to the copy       Load: the pool lives       Resync: open anew at the next step
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.core.drafter import DraftLimits
from pilotfish.core.messages import (
    CONNECTION,
    MAX_NODES,
    Close,
    Commit,
    Hello,
    Load,
    Open,
    Peer,
    Refuse,
    Resync,
    ToDraft,
    Tree,
)
from pilotfish.core.request import Request
from pilotfish.core.tree import TokenTree
from pilotfish.core.tree_copy import Push, TreeCopy
from pilotfish.errors import WireError
from pilotfish.target.pools import MAX_FAULTS, PAUSE, Pool
from pilotfish.target.remote_session import Arrival, RemoteCounts, RemoteSession, push_of, sampling_of
from pilotfish.wire.channel import Received
from pilotfish.wire.codec import decode_to_target, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteOptions:
    """How the target deals with its pools."""

    wanted: int = 2048  # nodes below the root after which a draft is to stop
    #: Seconds without a draft for a session whose pool broke the protocol, or fails it again soon after it was opened;
    #: twice that the next time, and so on.
    quarantine: float = 1.0


MAX_ARRIVALS = 256
#: Of the seconds without a draft.
MAX_DOUBLINGS = 6
#: Nodes wanted of a sequence while its trees are not asked for: enough to see, at any time, whether they would pay.
RESTING = 64
#: Seconds between two commits that a draft is told of meanwhile.
RESTING_PERIOD = 0.02


class RemoteDrafter:
    """Implements `Drafter` over the trees that pools push. Levels cost the target nothing."""

    levels = 0

    def __init__(
        self,
        hello: Hello,
        pools: Sequence[Pool],
        post: Callable[[Peer, bytes], None],
        options: RemoteOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` sends a frame; from any thread, without waiting."""
        self.pools = pools
        self.counts = RemoteCounts()
        self.arrivals: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)  # for whoever watches; the oldest make way
        self._hello = hello
        self._post = post
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._by_request: dict[int, RemoteSession] = {}
        self._by_number: dict[int, RemoteSession] = {}
        self._next_number = 1

    # -- the step loop's side: the Drafter protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        with self._lock:
            sessions = [self._session(request) for request in requests]
            for session in sessions:
                session.asked = True
                if session.untold and session.followed_by is not None:
                    self._tell_commit(session, session.followed_by)  # it rested, or was silent
                    session.asked = True
            return [session.tree(limits.nodes) for session in sessions]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        with self._lock:
            session = self._by_request.get(request.id)
            if session is None:
                return False
            hit = session.copy.commit(tokens)
            self.counts.hits += hit
            self.counts.misses += not hit
            session.untold += len(tokens)
            if session.followed_by is not None:
                self._tell_commit(session, session.followed_by)
            return hit

    def _tell_commit(self, session: RemoteSession, pool: Pool) -> None:
        """At once where its trees are verified; otherwise now and then, and all tokens since."""
        now, wanted = self._clock(), self._options.wanted
        if not session.asked:
            if now - session.told < RESTING_PERIOD:
                return
            wanted = min(wanted, RESTING)
        tokens = session.request.tokens
        base_len = len(tokens) - session.untold
        self._tell(pool, Commit(session.number, session.generation, base_len, tokens[base_len:], wanted))
        session.asked, session.untold, session.told = False, 0, now

    def close(self, request: Request) -> None:
        with self._lock:
            session = self._by_request.pop(request.id, None)
            if session is not None:
                del self._by_number[session.number]
                self._leave_pool(session)

    def pool_of(self, request: Request) -> Pool | None:
        """Which pool drafts for it now."""
        with self._lock:
            session = self._by_request.get(request.id)
            return None if session is None else session.pool

    def _session(self, request: Request) -> RemoteSession:
        """The request's session, open with a pool where one can be had."""
        session = self._by_request.get(request.id)
        if session is None:
            session = RemoteSession(self._next_number, request, self._empty_copy(request))
            self._next_number += 1
            self._by_request[request.id] = self._by_number[session.number] = session
        if session.pool is not None and not self._keeps_sessions(session.pool):
            self._abandon(session.pool)
        if (session.pool is None or session.lost) and self._clock() >= session.not_before:
            self._open(session)
        return session

    def _empty_copy(self, request: Request) -> TreeCopy:
        return TreeCopy(len(request.tokens), self._hello.vocab_size, self._options.wanted + MAX_NODES)

    def _open(self, session: RemoteSession) -> None:
        pool = session.pool or self._best_pool(session)
        if pool is None or not pool.ready:
            return
        request = session.request
        session.pool, session.lost, session.opened = pool, False, self._clock()
        session.generation, session.pushes, session.untold = session.generation + 1, 0, 0
        session.copy = self._empty_copy(request)
        pool.sessions.add(session.number)
        self.counts.opened += 1
        message = Open(
            session.number,
            session.generation,
            list(request.tokens),
            request.num_prompt_tokens,
            request.max_length,
            request.seed,
            sampling_of(request),
            self._options.wanted,
        )
        self._tell(pool, message)

    def _best_pool(self, session: RemoteSession) -> Pool | None:
        """The one with the fewest sessions; one that refused this session only where there is no other."""
        ready = (pool for pool in self.pools if pool.ready)
        return min(ready, key=lambda pool: (pool.peer in session.refused_by, pool.expected_load), default=None)

    def _set_back(self, session: RemoteSession, *, breach: bool = False) -> None:
        """It is opened anew at the next step. Where that has just not helped, or its pool broke the protocol, it is
        without a draft for a while: a pool must not have a target send whole sequences step after step."""
        now, quarantine = self._clock(), self._options.quarantine
        session.setbacks = session.setbacks + 1 if now - session.opened <= quarantine else 0
        paused = breach or session.setbacks > 1
        doublings = min(max(session.setbacks - 1, 0), MAX_DOUBLINGS)
        session.not_before = now + quarantine * 2.0**doublings if paused else now
        if paused or session.pool is None or not session.pool.ready:
            self._leave_pool(session)
        else:
            session.lost, session.copy = True, self._empty_copy(session.request)

    def _leave_pool(self, session: RemoteSession) -> None:
        if session.pool is not None:
            self._tell(session.pool, Close(session.number, session.generation))
            session.pool.sessions.discard(session.number)
        session.pool, session.lost, session.copy = None, False, self._empty_copy(session.request)

    def _tell(self, pool: Pool, message: ToDraft) -> None:
        self._post(pool.peer, encode(message))

    # -- the courier's side

    def tick(self) -> None:
        """Greet the pools now and then; called often."""
        now = self._clock()
        with self._lock:
            for pool in self.pools:
                pool.tick(now)
                if not self._keeps_sessions(pool):
                    self._abandon(pool)
                if pool.hello_due(now):
                    self._tell(pool, self._hello)

    def hung_up(self, pool: Pool, reason: str) -> None:
        """Nobody is connected there: no need to wait for silence."""
        with self._lock:
            pool.lost(reason)

    def _keeps_sessions(self, pool: Pool) -> bool:
        alone = not any(other.ready for other in self.pools if other is not pool)
        return pool.keeps_sessions(self._clock(), alone=alone)

    def _abandon(self, pool: Pool) -> None:
        """Its sessions are to be opened elsewhere, or there once it is back: it may have forgotten them."""
        if pool.sessions:
            pool.give_up()
        for number in list(pool.sessions):
            self._leave_pool(self._by_number[number])
            self.counts.moved += 1

    def receive(self, received: Received) -> None:
        """A frame from a pool."""
        pool = next((pool for pool in self.pools if pool.peer == received.peer), None)
        if pool is None:
            return
        try:
            message = decode_to_target(received.frame)
        except WireError as error:
            with self._lock:
                self._blame(pool, str(error))
            return
        push = push_of(message) if isinstance(message, Tree) else None
        with self._lock:
            self._handle(pool, message, push)

    def _handle(self, pool: Pool, message: Tree | Resync | Refuse | Load, push: Push | None) -> None:
        now = self._clock()
        if isinstance(message, Load):
            pool.heard(message, now)
        elif isinstance(message, Refuse) and message.session == CONNECTION:
            pool.refused(message.reason, now)
        else:
            pool.spoke(now)
            session = self._by_number.get(message.session)
            current = session is not None and session.pool is pool and not session.lost
            if session is None or not current or session.generation != message.generation:
                pool.drops.add("stale_frames", 1, now)
            elif isinstance(message, Tree):
                assert push is not None  # made of it
                self._attach(pool, session, message.sequence, push)
            else:
                self._give_back(pool, session, message)

    def _give_back(self, pool: Pool, session: RemoteSession, message: Resync | Refuse) -> None:
        """The pool cannot follow the session, or will not have it."""
        if isinstance(message, Resync):
            pool.drops.add("resyncs", 1, self._clock(), message.reason)
            self._set_back(session)
        else:
            pool.drops.add("refusals", 1, self._clock(), message.reason)
            session.refused_by.add(pool.peer)
            self._leave_pool(session)
            self._set_back(session, breach=len(session.refused_by) == len(self.pools))

    def _attach(self, pool: Pool, session: RemoteSession, sequence: int, push: Push) -> None:
        if sequence < session.pushes:
            pool.drops.add("stale_frames", 1, self._clock())  # it came twice
            return
        if sequence > session.pushes:
            pool.drops.add("gaps", 1, self._clock())
            self._set_back(session)
            return
        session.pushes += 1
        copy = session.copy
        dropped, late, repeated = copy.dropped, copy.late, copy.repeated
        copy.attach(push)
        now = self._clock()
        self.counts.trees += 1
        self.counts.nodes += len(push)
        self.arrivals.append(Arrival(now, len(push)))
        pool.drops.add("late_nodes", copy.late - late, now)
        pool.drops.add("repeated_nodes", copy.repeated - repeated, now)
        pool.drops.add("dropped_nodes", copy.dropped - dropped, now, copy.breach)
        if copy.dropped > dropped:
            self._set_back(session, breach=True)

    def _blame(self, pool: Pool, reason: str) -> None:
        now = self._clock()
        pool.drops.add("malformed_frames", 1, now, reason)
        if pool.fault(now):
            reason = "%s is left alone for %g s: it sent %d frames that are no message"
            logger.warning(reason, pool.name, PAUSE, MAX_FAULTS)
