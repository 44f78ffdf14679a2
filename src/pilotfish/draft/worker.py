"""The draft's loop: receive, re-root, pick the best leaves of all sessions, one forward, push."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.core.calibration import SecondsBySize
from pilotfish.core.messages import (
    CONNECTION,
    PROTOCOL_VERSION,
    Close,
    Commit,
    Hello,
    Load,
    Open,
    Peer,
    Refuse,
    Resync,
    ToTarget,
)
from pilotfish.core.vocabulary import Unshared, clash
from pilotfish.draft.growth import Grower, Grown, Growth
from pilotfish.draft.sessions import MAX_SESSIONS, Key, Session, SessionTable, session_of
from pilotfish.errors import InputError, WireError
from pilotfish.observe.records import LevelRecord, ObserveLevel
from pilotfish.wire.channel import Channel, Received
from pilotfish.wire.codec import decode_to_draft, encode

logger = logging.getLogger(__name__)

#: Seconds between reports of the load to each target.
REPORT = 0.2
#: Seconds of silence after which a target is gone.
SILENCE = 10.0
#: Seconds after which frames that are left wait for the next level.
HANDLING = 0.01
#: Targets of one tenant, and of all without keys.
MAX_TARGETS = 256
#: Bytes of a frame beside the tokens of a sequence as long as the draft's context, 5 each at most.
FRAME_BASE = 1 << 20


@dataclass(frozen=True)
class DraftIdentity:
    """What this draft is."""

    model: str
    tokenizer: str  # digest of the base vocabulary
    added_tokens: Mapping[int, str]  # by their ids


@dataclass
class Target:
    """A target that said Hello."""

    tenant: str
    heard: float
    unshared: Unshared
    rows: int = 0  # grown for it
    malformed: int = 0  # frames


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
        self, grower: Grower, channel: Channel, identity: DraftIdentity, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.grower = grower
        self.table: SessionTable = grower.table
        self.channel = channel
        self.identity = identity
        self.counts = DraftCounts()
        self.observe: ObserveLevel = _ignore
        self._told = Fate()
        self._targets: dict[Peer, Target] = {}
        self._inbox: deque[Received] = deque()
        self._context = grower.runner.model.shape.context
        self._longest = min(self._context, self.table.pool.capacity)
        self._clock = clock
        self._level_seconds = SecondsBySize(0.0)
        self._queue_seconds = SecondsBySize(0.0)
        self._reported = -REPORT

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until `stopped`."""
        busy = True
        while not stopped():
            busy = self.turn(0.0 if busy else REPORT)

    def turn(self, timeout: float) -> bool:
        """Take what has come, waiting for it up to `timeout` seconds, and grow a level; whether anything was done."""
        self._take_all(timeout)
        self._report()
        level = self.grower.next_level(self._clock())
        for grown in self._grow(level):
            self._send(grown.session.key.target, grown.message)
        return bool(level or self._inbox)

    def _grow(self, level: list[Growth]) -> list[Grown]:
        if not level:
            return []
        began = self._clock()
        for growth in level:
            if growth.pending:
                self._queue_seconds.observe(1, began - growth.session.touched)
        grown = self.grower.grow(level)
        ended = self._clock()
        self._level_seconds.observe(1, ended - began)
        self.counts.levels += 1
        for growth in level:
            growth.session.read = ended if growth.pending else growth.session.read
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

    def _take_all(self, timeout: float) -> None:
        """In order, for a while: targets that send much delay nobody's trees."""
        if not self._inbox:
            self._inbox.extend(self.channel.receive(timeout))
        until = self._clock() + HANDLING
        while self._inbox:
            self._take(self._inbox.popleft())
            if self._clock() > until:
                return

    def _take(self, received: Received) -> None:
        """A frame that is no message costs its sender one, and nobody else anything."""
        try:
            if len(received.frame) > FRAME_BASE + 5 * self._context:
                raise WireError(f"frame: {len(received.frame)} bytes; a context of {self._context} needs fewer")
            message = decode_to_draft(received.frame)
        except WireError as error:
            self._drop(received.peer, error)
            return
        if isinstance(message, Hello):
            self._greet(received, message)
        elif received.peer not in self._targets:
            self._send(received.peer, Refuse(CONNECTION, 0, "no Hello came before"))
        elif isinstance(message, Open):
            self._open(received, message)
        else:
            self._follow(received.peer, message)

    def _drop(self, peer: Peer, error: WireError) -> None:
        """Count a frame that is no message; a target's first is told of."""
        self.counts.malformed += 1
        target = self._targets.get(peer)
        if target is not None:
            target.malformed += 1
            if target.malformed == 1:
                logger.warning("dropped a frame of %s: %s", peer.hex(), error)

    def _greet(self, received: Received, hello: Hello) -> None:
        peer, known = received.peer, self._targets.get(received.peer)
        if known is not None:
            known.heard = self._clock()
            return
        reason = self._why_not(hello) or self._why_no_more(received.tenant)
        if reason is not None:
            self._send(peer, Refuse(CONNECTION, 0, reason))
        else:
            self._targets[peer] = Target(received.tenant, self._clock(), self._unshared(hello))
            self._send(peer, self._load(peer, self._own_sessions()))

    def _why_no_more(self, tenant: str) -> str | None:
        count = sum(target.tenant == tenant for target in self._targets.values())
        return f"there are {count} targets of {tenant or 'everyone'} already" if count >= MAX_TARGETS else None

    def _why_not(self, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}; this draft speaks {PROTOCOL_VERSION}"
        if hello.tokenizer != self.identity.tokenizer:
            return f"its tokenizer {hello.tokenizer[:12]} is not that of the draft {self.identity.model}"
        return clash(hello.added_tokens, self.identity.added_tokens)

    def _unshared(self, hello: Hello) -> Unshared:
        lacking = self.identity.added_tokens.keys() - hello.added_tokens.keys()
        return Unshared(np.array(sorted(lacking), np.int64), hello.vocab_size)

    def _open(self, received: Received, message: Open) -> None:
        key = Key(received.peer, message.session)
        before = self.table.get(key)
        if before is not None and before.generation >= message.generation:
            return
        tenant = received.tenant or received.peer.hex()
        try:
            self._check_tokens(message, self._targets[received.peer])
            session = session_of(key, message, tenant, received.weight, self._longest, self._clock())
            session.unshared = self._targets[received.peer].unshared
            if before is None and not self.table.admit(tenant):
                raise InputError(f"sessions: there are {MAX_SESSIONS} already")
        except InputError as error:
            if before is not None:
                self.table.close(before)
            self._send(received.peer, Refuse(message.session, message.generation, str(error)[:1024]))
            return
        self.table.open(session)

    def _check_tokens(self, message: Open, target: Target) -> None:
        """InputError where the sequence cannot be served."""
        if len(message.tokens) >= self._longest:
            raise InputError(f"tokens: {len(message.tokens)} do not fit into the {self._longest} that the draft has")
        if max(message.tokens, default=0) >= target.unshared.first or not message.tokens:
            raise InputError("tokens: they are none, or not all in the vocabulary that Hello told of")

    def _follow(self, peer: Peer, message: Commit | Close) -> None:
        session = self.table.get(Key(peer, message.session))
        if session is None:
            if isinstance(message, Commit):
                self._ask_again(peer, message, "there is no such session")
        elif message.generation < session.generation:
            return
        elif isinstance(message, Close):
            self.table.close(session)
        elif message.generation > session.generation:
            self._ask_again(peer, message, "it was not opened")
        else:
            self._commit(session, message)

    def _commit(self, session: Session, message: Commit) -> None:
        """One that was seen already changes nothing."""
        length = len(session.tokens)
        after = message.base_len + len(message.tokens)
        if after <= length:
            return
        if after > session.max_length:
            reason = f"tokens: {after} are more than the {session.max_length} that it can have here"
            self.table.close(session)
            self._send(session.key.target, Refuse(message.session, message.generation, reason))
        elif message.base_len != length:
            self._ask_again(session.key.target, message, f"base_len {message.base_len} does not follow {length}")
        elif max(message.tokens) >= session.unshared.first:
            self._ask_again(session.key.target, message, "a token is not in the vocabulary that Hello told of")
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
        own = self._own_sessions()
        for peer in self._targets:
            self._send(peer, self._load(peer, own))

    def _own_sessions(self) -> Counter[Peer]:
        return Counter(session.key.target for session in self.table)

    def _load(self, peer: Peer, own: Counter[Peer]) -> Load:
        free = self.table.pool.num_free
        level_ms, queue_ms = 1000 * self._level_seconds.at(1), 1000 * self._queue_seconds.at(1)
        return Load(self.identity.model, len(self.table), own[peer], self._targets[peer].rows, free, level_ms, queue_ms)


def _ignore(record: LevelRecord) -> None:
    """Nobody observes."""
