"""A request as one of a target's draft pools knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pilotfish.core.drafting.messages import Peer, TreeFeedback
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import OTHER
from pilotfish.core.trees.tree_copy import PushedNode, TreeCopy

#: How often a session is opened with a pool in so many seconds, whatever fails: each time costs all of its tokens.
MOST_OPENED, PERIOD = 5, 60.0


class SessionState(Enum):
    OPENING = auto()  # no pool has it; the next request for a tree opens it, from `not_before` on
    GROWING = auto()  # a tree was asked for since the last Commit
    RESTING = auto()  # none was
    LOST = auto()  # its pool cannot follow it; the next request for a tree opens it there anew


@dataclass(frozen=True)
class _Opened:
    peer: Peer
    at: float


@dataclass
class RemoteSession:
    """A request has one with each pool that guesses for it."""

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
    refused_by: set[Peer] = field(default_factory=set)  # or they had no room for it
    features_sent: int = 0  # positions before this one: the pool was sent their features, or needs none
    read: int = 0  # tokens that the pool says it has read
    paused: bool = False  # the pool was told so: the request waits without KV
    parked: float | None = None  # since when the pool has no room for it
    verified: list[PushedNode] = field(default_factory=list)  # in the last step
    _opened: deque[_Opened] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def can_follow(self) -> bool:
        lives = self.pool is not None and self.pool.ready
        return lives and self.state is not SessionState.LOST and self.parked is None

    @property
    def origin(self) -> str:
        return OTHER if self.pool is None else self.pool.name

    def may_open(self, pool: DraftPool, now: float) -> bool:
        lately = sum(one.peer == pool.peer and now - one.at < PERIOD for one in self._opened)
        return lately < MOST_OPENED

    def open_with(self, pool: DraftPool, now: float) -> None:
        self.state, self.pool, self.opened = SessionState.GROWING, pool, now
        self.generation, self.pushes, self.unsent = self.generation + 1, 0, 0
        self.features_sent = self.read = 0
        self.paused, self.parked = False, None
        self._opened.append(_Opened(pool.peer, now))

    def feedback(self, tokens: Sequence[int]) -> TreeFeedback | None:
        """What became of its nodes in the step that commits `tokens`, which counts for its pool; None: there is nothing
        to tell. To be asked before its copy commits them."""
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
