"""A draft model in the target's process, which grows trees when the target asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.core.calibration import SecondsBySize
from pilotfish.core.draft_sessions import (
    NO_LEAF,
    ROOT_LEAF,
    DraftSession,
    LevelPart,
    SessionKey,
    SessionTable,
    Unshared,
)
from pilotfish.core.drafter import DraftLimits
from pilotfish.core.executor import Executor
from pilotfish.core.messages import Open
from pilotfish.core.request import Request
from pilotfish.core.slots import SlotPool
from pilotfish.core.tree import Floats, TokenTree
from pilotfish.draft.worker import Grower

if TYPE_CHECKING:  # imports transformers
    from pilotfish.model.pacer import Pacer

#: Rows of a prompt that one forward takes.
CHUNK = 256


class LMDrafter:
    """Trees of a target in the same process. They are re-rooted when it commits, and grow when it asks: what survives
    keeps its KV.

    Slots run out gracefully: kept trees give way first, then a request that gets none proposes an empty tree.
    """

    def __init__(
        self,
        executor: Executor,
        width: int,
        children: int = 4,
        clock: Callable[[], float] = time.perf_counter,
        unshared: frozenset[int] = frozenset(),
        pacer: Pacer | None = None,
    ) -> None:
        """Each level is a forward over the best `width` leaves of a request, each of which gets `children`. `unshared`
        are ids of tokens that the target lacks; `pacer` holds back each level."""
        self.executor = executor
        self.table = SessionTable(SlotPool(executor.num_slots))
        self.levels = 0
        self.pacer = pacer
        self._grower = Grower(executor, self.table, children, pacer)
        self._unshared = Unshared(np.array(sorted(unshared), np.int64))
        self._level_seconds = SecondsBySize(0.0)  # by sequences
        self.width, self._clock = width, clock

    # -- the protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        self.levels = 0
        if limits.levels == 0:
            return [TokenTree.empty()] * len(requests)
        sessions = [self._session(request) for request in requests]
        served = self._affordable(sessions, limits.levels)
        for session in served:
            self._catch_up(session)
        self._grow(served, limits)
        trees = [session.tree.nodes for session in sessions]
        return [tree.take(tree.best(limits.nodes)) for tree in trees]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Never a hit: those are counted of trees that grow while the target verifies."""
        session = self.table.get(_key(request))
        if session is not None:
            self.table.commit(session, tokens)
        return False

    def close(self, request: Request) -> None:
        session = self.table.get(_key(request))
        if session is not None:
            self.table.close(session)

    def _session(self, request: Request) -> DraftSession:
        session = self.table.get(_key(request))
        if session is None:
            opened = Open.of(request, number=1, generation=1, wanted=0)
            session = DraftSession.of(_key(request), opened, "", 1.0, self.executor.context, self._unshared, now=0.0)
            self.table.open(session)
        return session

    # -- KV of committed tokens

    def _affordable(self, sessions: Sequence[DraftSession], levels: int) -> list[DraftSession]:
        """The sessions, in order, whose missing tokens and whose new nodes fit into the free slots and the context."""
        growing = [session for session in sessions if session.max_depth > 0]
        if sum(self._need(session, levels) for session in growing) > self.table.pool.num_free:
            for session in self.table:
                self.table.drop_tree(session)
        served, left = [], self.table.pool.num_free
        for session in growing:
            need = self._need(session, levels)
            if need <= left:
                left -= need
                served.append(session)
        return served

    def _need(self, session: DraftSession, levels: int) -> int:
        return session.num_pending + levels * self.width

    def _catch_up(self, session: DraftSession) -> None:
        """Compute KV of committed tokens up to the last chunk, which the first level takes for its logits."""
        while session.num_pending > CHUNK:
            self._grower.grow([LevelPart(session, CHUNK, NO_LEAF)])

    # -- growth

    def _grow(self, sessions: Sequence[DraftSession], limits: DraftLimits) -> None:
        """Levels, until the next one promises less than its time is worth. Roots are always expanded."""
        for _ in range(limits.levels):
            level = self._level(sessions, limits)
            pending = any(part.pending for part in level)
            price = limits.price * self._level_seconds.at(len(sessions))
            if not level or (not pending and _expected_tokens(level) < price):
                return
            began = self._clock()
            self._grower.grow(level)
            self.levels += 1
            if not pending:
                self._level_seconds.observe(len(sessions), self._clock() - began)

    def _level(self, sessions: Sequence[DraftSession], limits: DraftLimits) -> list[LevelPart]:
        scores = [session.tree.nodes.scores for session in sessions]
        floor = _nth_largest(np.concatenate(scores), limits.total) if scores else 0.0
        parts = [self._part(session, limits.nodes, floor) for session in sessions]
        return [part for part in parts if part.rows]

    def _part(self, session: DraftSession, max_nodes: int, floor: float) -> LevelPart:
        """Pending tokens, or the best nodes to expand next: good enough that a child (no likelier) could be
        among the proposed and verified."""
        if session.num_pending:
            return LevelPart(session, session.num_pending, ROOT_LEAF)
        scores = session.tree.nodes.scores
        leaves = session.tree.leaves(self.width, session.max_depth)
        return LevelPart(session, 0, leaves[scores[leaves] > max(floor, _nth_largest(scores, max_nodes))])


def _key(request: Request) -> SessionKey:
    return SessionKey(b"", request.id)


def _expected_tokens(level: Sequence[LevelPart]) -> float:
    """Tokens that a level would bring if each of its leaves had the right child."""
    return sum(float(np.exp(part.session.tree.nodes.scores[part.leaves]).sum()) for part in level)


def _nth_largest(values: Floats, n: int) -> float:
    """-infinity where there are fewer."""
    return float(np.partition(values, -n)[-n]) if len(values) >= n else -np.inf
