"""The draft's loop: receive, re-root, pick the best leaves of all sessions, one forward, push."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.core.calibration import SecondsBySize
from pilotfish.draft.growth import Grower, Grown, Growth
from pilotfish.draft.sessions import MAX_SESSIONS, Key, Session, SessionTable, session_of
from pilotfish.errors import InputError, WireError
from pilotfish.observe.records import LevelRecord, ObserveLevel
from pilotfish.wire.channel import Channel, Peer, Received
from pilotfish.wire.messages import (
    CONNECTION,
    PROTOCOL_VERSION,
    Close,
    Commit,
    Hello,
    Load,
    Open,
    Refuse,
    Resync,
    ToTarget,
    decode_to_draft,
    encode,
)

logger = logging.getLogger(__name__)

#: Seconds between reports of the load to each target.
REPORT = 0.2
#: Seconds of silence after which a target is gone.
SILENCE = 10.0


@dataclass(frozen=True)
class Identity:
    """What this draft is."""

    model: str
    tokenizer: str  # digest of the vocabulary
    vocab_size: int


@dataclass
class Target:
    """A target that said Hello."""

    heard: float
    rows: int = 0  # grown for it


@dataclass
class DraftCounts:
    """What the worker did since its start."""

    levels: int = 0
    rows: int = 0
    nodes: int = 0  # added to trees
    used: int = 0  # of them, committed
    hits: int = 0  # commits that were in the tree
    misses: int = 0
    malformed: int = 0  # frames
    resyncs: int = 0


@dataclass(frozen=True)
class Fate:
    """What became of nodes, in total."""

    used: int = 0
    wasted: int = 0


class DraftWorker:
    """Grows trees for the sequences of all targets that connect."""

    def __init__(
        self, grower: Grower, channel: Channel, identity: Identity, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.grower = grower
        self.table: SessionTable = grower.table
        self.channel = channel
        self.identity = identity
        self.counts = DraftCounts()
        self.observe: ObserveLevel = _ignore
        self._told = Fate()
        self._targets: dict[Peer, Target] = {}
        self._clock = clock
        self._level_seconds = SecondsBySize(0.0)
        self._queue_seconds = SecondsBySize(0.0)
        self._reported = -REPORT

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until `stopped`."""
        idle = False
        while not stopped():
            for received in self.channel.receive(REPORT if idle else 0.0):
                self._take(received)
            self._report()
            level = self.grower.next_level(self._clock())
            idle = not level
            for grown in self._grow(level):
                self._send(grown.session.key.target, grown.message)

    def _grow(self, level: list[Growth]) -> list[Grown]:
        if not level:
            return []
        began = self._clock()
        for growth in level:
            if growth.pending:
                self._queue_seconds.observe(1, began - growth.session.touched)
        grown = self.grower.grow(level)
        self._level_seconds.observe(1, self._clock() - began)
        self.counts.levels += 1
        for growth in level:
            self.counts.rows += growth.rows
            self._targets[growth.session.key.target].rows += growth.rows
        self.counts.nodes += sum(len(g.message.ids) for g in grown)
        self._record(level, grown, began)
        return grown

    def _record(self, level: Sequence[Growth], grown: Sequence[Grown], began: float) -> None:
        """Tell what the level was, and what became of the nodes of earlier ones since the one before."""
        alive = sum(len(session.tree) for session in self.table)
        used, wasted = self.counts.used, self.counts.nodes - self.counts.used - alive
        self.observe(
            LevelRecord(
                began,
                self._clock(),
                sessions=len(level),
                leaves=sum(len(growth.leaves) for growth in level),
                prompt_rows=sum(growth.pending for growth in level),
                nodes=sum(len(g.message.ids) for g in grown),
                used=used - self._told.used,
                wasted=wasted - self._told.wasted,
            )
        )
        self._told = Fate(used, wasted)

    # -- what comes in

    def _take(self, received: Received) -> None:
        """A frame that is no message costs its sender one, and nobody else anything."""
        try:
            message = decode_to_draft(received.frame)
        except WireError as error:
            self.counts.malformed += 1
            logger.warning("dropped a frame of %s: %s", received.peer.hex(), error)
            return
        if isinstance(message, Hello):
            self._greet(received.peer, message)
        elif received.peer not in self._targets:
            self._send(received.peer, Refuse(CONNECTION, 0, "no Hello came before"))
        elif isinstance(message, Open):
            self._open(received, message)
        else:
            self._follow(received.peer, message)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        reason = self._why_not(hello)
        if reason is not None:
            self._send(peer, Refuse(CONNECTION, 0, reason))
            return
        known = self._targets.get(peer)
        if known is None:
            self._targets[peer] = Target(self._clock())
            self._send(peer, self._load(peer))
        else:
            known.heard = self._clock()

    def _why_not(self, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}; this draft speaks {PROTOCOL_VERSION}"
        if hello.tokenizer != self.identity.tokenizer:
            return f"its tokenizer {hello.tokenizer[:12]} is not that of the draft {self.identity.model}"
        if hello.vocab_size < self.identity.vocab_size:
            return f"its vocabulary of {hello.vocab_size} is smaller than the tokenizer's, {self.identity.vocab_size}"
        return None

    def _open(self, received: Received, message: Open) -> None:
        key = Key(received.peer, message.session)
        before = self.table.get(key)
        if before is not None and before.generation >= message.generation:
            return
        try:
            session = session_of(key, message, received.tenant or received.peer.hex(), received.weight, self._clock())
            self._check_size(message)
        except InputError as error:
            self._send(received.peer, Refuse(message.session, message.generation, str(error)[:1024]))
            return
        self.table.open(session)

    def _check_size(self, message: Open) -> None:
        """InputError where the session cannot be served."""
        if len(self.table) >= MAX_SESSIONS:
            raise InputError(f"sessions: there are {MAX_SESSIONS} already")
        if len(message.tokens) >= self.grower.runner.model.shape.context:
            raise InputError(f"tokens: {len(message.tokens)} do not fit into the draft's context")
        if max(message.tokens, default=0) >= self.grower.runner.model.shape.vocab_size or not message.tokens:
            raise InputError("tokens: they are none, or not all in the draft's vocabulary")

    def _follow(self, peer: Peer, message: Commit | Close) -> None:
        session = self.table.get(Key(peer, message.session))
        if isinstance(message, Close):
            if session is not None and session.generation <= message.generation:
                self.table.close(session)
        elif session is None:
            self._ask_again(peer, message, "there is no such session")
        elif message.generation == session.generation:
            self._commit(session, message)

    def _commit(self, session: Session, message: Commit) -> None:
        """One that was seen already changes nothing."""
        length = len(session.tokens)
        if message.base_len + len(message.tokens) <= length:
            return
        if message.base_len != length:
            self._ask_again(session.key.target, message, f"base_len {message.base_len} does not follow {length}")
        elif max(message.tokens) >= self.grower.runner.model.shape.vocab_size:
            self._ask_again(session.key.target, message, "a token is not in the draft's vocabulary")
        else:
            rerooted = self.table.commit(session, message, self._clock())
            self.counts.used += rerooted.accepted
            self.counts.hits += rerooted.hit
            self.counts.misses += not rerooted.hit

    def _ask_again(self, peer: Peer, message: Commit, reason: str) -> None:
        self.counts.resyncs += 1
        session = self.table.get(Key(peer, message.session))
        if session is not None:
            self.table.close(session)
        self._send(peer, Resync(message.session, message.generation, reason))

    # -- what goes out

    def _send(self, peer: Peer, message: ToTarget) -> None:
        self.channel.send(peer, encode(message))  # one that is lost shows as a gap

    def _report(self) -> None:
        """Tell every target the load, now and then; forget those that are silent."""
        now = self._clock()
        if now - self._reported < REPORT:
            return
        self._reported = now
        self.table.forget_idle(now)
        for peer in [peer for peer, target in self._targets.items() if now - target.heard > SILENCE]:
            for session in self.table.of(peer):
                self.table.close(session)
            del self._targets[peer]
        for peer in self._targets:
            self._send(peer, self._load(peer))

    def _load(self, peer: Peer) -> Load:
        own = len(self.table.of(peer))
        free = self.table.pool.num_free
        level_ms, queue_ms = 1000 * self._level_seconds.at(1), 1000 * self._queue_seconds.at(1)
        return Load(self.identity.model, len(self.table), own, self._targets[peer].rows, free, level_ms, queue_ms)


def _ignore(record: LevelRecord) -> None:
    """Nobody observes."""
