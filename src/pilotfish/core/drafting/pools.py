"""A target's view of its draft pools, and of its requests' sessions with them.

    ready ──── silent for SILENCE ────► silent ──── silent for longer than its patience ────► lost
      ▲                                    │                                                   │
      └───────────── any message ──────────┴──────────────── Load, its answer to Hello ────────┘

A silent pool keeps its sessions, as closing them would waste its work on a long prompt; it gets no new ones, and hears
later commits when it speaks again. It is not silent while it said it would be busy. A draining pool gets no new
sessions, and its own move at their next commit if another pool takes them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from pilotfish.core.drafting.messages import MAX_FEATURE_BYTES, Load, TreeFeedback
from pilotfish.core.features import feature_frames
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import DialedPool, EchoClock, ErrorReports
from pilotfish.core.scheduling.calibration import Calibration
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import OTHER, ROOT, Guesses
from pilotfish.core.trees.tree_copy import PushedNode, TreeCopy

#: Seconds of silence after which its sessions go to another pool that answers, and after which they are closed where
#: there is none; twice as many each time that it was given up, up to 2 ** MAX_DOUBLINGS times.
PATIENCE, PATIENCE_ALONE = 1.0, 30.0
MAX_DOUBLINGS = 5
TRUSTED = 60.0  # seconds of answers after which it is trusted again
#: Malformed frames after which a pool is left alone, and for how long.
MAX_FAULTS, PAUSE = 32, 5.0
MAX_BUSY = 30.0  # the longest time, in seconds, that a pool may say it is busy
#: How often a session is opened with a pool in so many seconds: each time costs all of its tokens.
MOST_OPENED, PERIOD = 5, 60.0

#: Reasons to drop a pool's messages. Healthy drafts have late and repeated nodes, and stale frames.
DRAFT_REASONS = {
    "late_nodes": "nodes whose parents were gone",
    "repeated_nodes": "nodes that were there already",
    "dropped_nodes": "nodes against the protocol",
    "stale_frames": "frames of ended sessions, older generations or earlier pushes",
    "malformed_frames": "frames that are no message",
    "unknown_messages": "messages of types that are not known here",
    "gaps": "Trees that did not follow the one before",
    "resyncs": "sessions that it could not follow",
    "refusals": "sessions that it refused",
    "pauses": "sessions that it had no room for",
    "errors": "frames of this target that it could not use",
}


@dataclass
class PoolScore:
    trees: int = 0  # frames that were attached
    nodes: int = 0  # in them
    verified: int = 0
    accepted: int = 0
    calibration: Calibration = field(default_factory=Calibration)
    _verified: list[float] = field(default_factory=list)  # scores in the last step
    _accepted: list[float] = field(default_factory=list)

    def observe(self, verified: Sequence[float], accepted: Sequence[float]) -> None:
        self.verified += len(verified)
        self.accepted += len(accepted)
        self._verified += verified
        self._accepted += accepted

    def end_step(self) -> None:
        if self._verified:
            self.calibration.observe(np.array(self._verified), np.array(self._accepted))
            self._verified, self._accepted = [], []

    def calibrated(self, scores: Sequence[float]) -> list[float]:
        """Log of the measured chance that its nodes of these scores are accepted."""
        return list(map(float, np.log(self.calibration.chances(np.array(scores)))))


@dataclass
class DraftPool(DialedPool):
    REASONS = DRAFT_REASONS
    FAULTS = frozenset({"dropped_nodes", "malformed_frames", "refusals", "errors"})
    WITHOUT = "its sequences go on without it"

    silent: bool = False  # it says nothing, but is connected
    load: Load | None = None
    sessions: set[int] = field(default_factory=set)  # numbers of this target's sessions
    features: feature_frames.FeatureLine = field(default_factory=feature_frames.FeatureLine)
    target_digest: str = ""  # of this target's embedding, where a draft may ask for its features
    echo: EchoClock = field(default_factory=EchoClock)
    reports: ErrorReports = field(default_factory=ErrorReports)
    score: PoolScore = field(default_factory=PoolScore)
    _busy_until: float = 0.0
    _given_up: int = 0  # times, one after the other
    _faults: int = 0
    _compared: str = ""  # the first digest that it told of

    @property
    def expected_load(self) -> float:
        """Sessions that it will have: others' as last reported, and ours. Equal pools take turns."""
        others = 0 if self.load is None else max(self.load.sessions - self.load.own_sessions, 0)
        return others + len(self.sessions)

    @property
    def takes_sessions(self) -> bool:
        return self.ready and not self.draining

    @property
    def revision(self) -> str:
        return "" if self.load is None else self.load.revision

    def can(self, capability: str) -> bool:
        return self.load is not None and capability in self.load.capabilities

    def is_busy(self, now: float) -> bool:
        return now < self._busy_until

    def quiet(self, now: float) -> float:
        """Seconds without a word, beyond the announced busy time."""
        return now - max(self._last_heard, self._busy_until)

    @property
    def feature_drops(self) -> dict[str, int]:
        told = {} if self.load is None else self.load.own_feature_drops
        return {reason: told[reason] for reason in feature_frames.FEATURE_DROPS if reason in told}

    def keeps_sessions(self, now: float, *, alone: bool) -> bool:
        """`alone`: no other pool answers."""
        patience = (PATIENCE_ALONE if alone else PATIENCE) * 2.0 ** min(self._given_up, MAX_DOUBLINGS)
        return self.ready or (self.silent and self.quiet(now) <= patience)

    def give_up(self) -> None:
        self._given_up += self.silent
        self.silent = False

    def heard_load(self, load: Load, now: float) -> None:
        self.load, self._faults, self._last_heard = load, 0, now
        self._busy_until = now + min(load.busy_ms / 1000, MAX_BUSY) if load.busy_ms else 0.0
        self.echo.hear(load.echo, now)
        self.features.came(load.own_features)
        self._compare(load.target_digest)
        if now >= self._left_alone_until:
            self._answers(now)

    def _compare(self, digest: str) -> None:
        """The first digest of another target gives a notice. Its features are no errors, and may be good enough."""
        if self._compared or not (digest and self.target_digest):
            return
        self._compared = digest
        if digest != self.target_digest:
            which = f"({digest[:12]}, not {self.target_digest[:12]})"
            other = f"{self.name}: it expects features of a target with other embeddings {which}"
            self.warn(f"{other}: its guesses may seldom be right; its --target should be this target's model")

    def heard_of_session(self, now: float) -> None:
        self._last_heard = now
        if self.silent:
            self._answers(now)

    def _answers(self, now: float) -> None:
        if not self.ready:
            self._ready_since = now
            self.told.clear()
        self.ready, self.silent, self.refusal = True, False, None

    def refused(self, reason: str, now: float) -> None:
        self.drops.counts["refusals"] += 1
        self.report_refusal(reason, now)
        self.refusal, self.ready, self.silent, self._last_heard = reason, False, False, now

    def malformed(self, reason: str, now: float) -> None:
        self.drops.add("malformed_frames", 1, now, reason)
        self._faults += now >= self._left_alone_until
        if self._faults >= MAX_FAULTS:
            self._faults, self.ready, self.silent, self._left_alone_until = 0, False, False, now + PAUSE
            self.warn(f"{self.name} is left alone for {PAUSE:g} s: it sent {MAX_FAULTS} frames that are no message")

    def tick(self, now: float) -> None:
        if reason := self.fell_silent(now):
            self.lose(reason)
            self.silent = True
        if self.ready and now - self._ready_since >= TRUSTED:
            self._given_up = 0
        super().tick(now)

    @property
    def answered(self) -> bool:
        return super().answered or self.silent


class SessionState(Enum):
    OPENING = auto()  # the next request for a tree opens it, from `not_before` on: anew where its pool cannot follow it
    GROWING = auto()  # a tree was asked for since the last Commit
    RESTING = auto()  # none was
    PAUSED = auto()  # its pool was told so: the request waits without KV


class _Opened(NamedTuple):
    peer: Peer
    at: float


@dataclass
class RemoteSession:
    number: int
    request: Request
    copy: TreeCopy
    state: SessionState = SessionState.OPENING
    pool: DraftPool | None = None  # None: any may open it
    unsent: int = 0  # newest tokens of the request that the pool does not know
    last_commit: float = 0.0  # when one was sent
    generation: int = 0
    pushes: int = 0  # received of this generation
    opened: float = 0.0
    setbacks: int = 0  # one after the other, each soon after it was opened
    not_before: float = 0.0  # when it may be opened again
    refused_by: set[Peer] = field(default_factory=set)  # or they had no room for it
    features_sent: int = 0  # positions before this one: the pool was sent their features, or needs none
    parked: float | None = None  # since when the pool has no room for it
    verified: list[PushedNode] = field(default_factory=list)  # in the last step
    _opened: deque[_Opened] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def growing(self) -> bool:
        return self.state is SessionState.GROWING

    @property
    def can_follow(self) -> bool:
        lives = self.pool is not None and self.pool.ready
        return lives and self.state is not SessionState.OPENING and self.parked is None

    @property
    def origin(self) -> str:
        return OTHER if self.pool is None else self.pool.name

    def may_open(self, pool: DraftPool, now: float) -> bool:
        lately = sum(one.peer == pool.peer and now - one.at < PERIOD for one in self._opened)
        return lately < MOST_OPENED

    def open_with(self, pool: DraftPool, now: float) -> None:
        """The next generation begins. Its copy is still to be made."""
        self.state, self.pool, self.opened = SessionState.GROWING, pool, now
        self.generation, self.pushes, self.unsent = self.generation + 1, 0, 0
        self.features_sent, self.parked = 0, None
        self._opened.append(_Opened(pool.peer, now))

    def feedback(self, tokens: Sequence[int]) -> TreeFeedback | None:
        """The fate of its nodes in the step that commits `tokens`, or None. Ask before its copy commits them."""
        verified, self.verified = self.verified, []
        path = set(self.copy.ids_along(tokens)) if verified else ()
        accepted = [node for node in verified if node.id in path]
        if self.pool is not None:
            self.pool.score.observe([node.score for node in verified], [node.score for node in accepted])
        late = self.copy.take_late()
        if not verified and not late:
            return None
        ids = [node.id for node in verified], [node.id for node in accepted], late
        return TreeFeedback(self.number, self.generation, len(self.request.tokens) - len(tokens), *ids)


def due_pieces(sessions: Iterable[RemoteSession], row_bytes: int, now: float) -> list[feature_frames.FeaturePiece]:
    most, left = max(feature_frames.SESSION_BYTES // row_bytes, 1), max(feature_frames.STEP_BYTES // row_bytes, 1)
    pieces = []
    for session in sessions:
        request, pool = session.request, session.pool
        first = max(session.features_sent, request.num_gone)
        count = request.num_computed - first
        fresh = count <= min(feature_frames.FRESH, MAX_FEATURE_BYTES // row_bytes)
        if not fresh:
            count = min(count, most, left) if pool is not None and pool.features.has_room(now) else 0
            left -= count
        if count > 0:
            slots = request.slots[first : first + count]
            pieces.append(feature_frames.FeaturePiece(session.number, session.generation, first, slots, fresh))
    return pieces


def merged(sessions: Sequence[RemoteSession], count: int) -> Guesses:
    """The `count` best nodes of the trees that several pools grow for one request.

            pool a    the ─┬─ cat  0.5       pool b    the ─── cat  0.7       merged    the ─┬─ cat  0.7   a, b
                           └─ dog  0.2                                                       └─ dog  0.2   a

    Each pool's scores are calibrated by its own nodes first. Where paths meet the best score holds and names the node;
    each pool is told of it, and counts it as its own.
    """
    if len(sessions) == 1:
        return sessions[0].copy.best(count, sessions[0].origin)
    union = Guesses()
    for session in sessions:
        tree = session.copy.best(count, session.origin)
        if len(tree) and session.pool is not None:
            _add(union, tree, session.pool.score.calibrated(tree.scores), session.origin)
    return union.best(count)


def _add(union: Guesses, tree: Guesses, scores: Sequence[float], origin: str) -> None:
    number, cut = {ROOT: ROOT}, {ROOT: 0.0}
    for node, (parent, token, score) in enumerate(zip(tree.parents, tree.tokens, scores, strict=True)):
        cut[node] = min(score, cut[parent])  # a path's chance does not rise along it
        number[node] = place = union.add(number[parent], token, cut[node], origin)
        if cut[node] > union.scores[place]:
            union.scores[place], union.origins[place] = cut[node], origin
