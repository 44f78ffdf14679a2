"""A draft model in the target's process, which grows trees when the target asks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import GONE, SlotPool
from pilotfish.core.drafting.draft_sessions import DraftModel, DraftSession, LevelPart, SessionKey, SessionTable
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.drafting.messages import Open
from pilotfish.core.drafting.vocabulary_map import Unshared
from pilotfish.core.sampling.constraint import GrammarSource, MaskMaker, masks_when_asked, no_grammars
from pilotfish.core.scheduling.calibration import SecondsBySize
from pilotfish.core.scheduling.executor import Executor
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import LM, Guesses
from pilotfish.workers.draft import Grower

if TYPE_CHECKING:  # imports transformers
    from pilotfish.model.pacer import Pacer

CHUNK = 256  # rows of a prompt that one forward takes


class LMDrafter(Drafter):
    """Trees are re-rooted on a commit, and what survives keeps its KV. Where slots run out kept trees give way
    first; then a request that lacks some proposes an empty tree, and its slots serve the others."""

    levels = 0
    computes = True

    def __init__(
        self,
        executor: Executor,
        width: int,
        children: int = 4,
        clock: Callable[[], float] = time.perf_counter,
        unshared: frozenset[int] = frozenset(),
        pacer: "Pacer | None" = None,
        prefix_cache: bool = True,
        grammars: GrammarSource = no_grammars,
        masks: MaskMaker = masks_when_asked,
        reads_target: bool = False,
    ) -> None:
        """A level is a forward over a request's best `width` leaves; each gets `children`. `unshared`: ids that the
        target lacks. `reads_target`: the draft is a trained head, which reads features in the target's slots."""
        self.executor = executor
        pool = SlotPool(executor.num_slots)
        self.table = SessionTable(pool, PrefixCache(pool) if prefix_cache else None)
        self.pacer = pacer
        self._grower = Grower(executor, self.table, children, pacer, masks)
        self.feature_width = 1 if reads_target else 0
        self._model = DraftModel(executor.context, grammars, self.feature_width)
        self._unshared = Unshared(np.array(sorted(unshared), np.int64))
        self._level_seconds = SecondsBySize(0.0)  # by sequences
        self.width, self._clock = width, clock

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        self.levels = 0
        if limits.levels == 0:
            return [Guesses() for _ in requests]
        sessions = [self._session(request) for request in requests]
        asked = {request.id: request for request in requests if self._can_guess(request)}
        served = self._affordable([session for session in sessions if session.key.number in asked], limits.levels)
        for session in served:
            self._catch_up(session, asked[session.key.number])
        self._grow(served, limits)
        return [session.tree.best(limits.nodes, LM) for session in sessions]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Never a hit: those are counted of trees that grow while the target verifies."""
        if (session := self.table.get(_key(request))) is not None:
            self.table.commit(session, tokens)
        return False

    def close(self, request: Request) -> None:
        if (session := self.table.get(_key(request))) is not None:
            self.table.close(session)

    def _session(self, request: Request) -> DraftSession:
        session = self.table.get(_key(request))
        if session is None:
            opened = Open.of(request, number=1, generation=1, wanted=0)
            session = DraftSession(_key(request), opened, "", 1.0, 0.0, self._model, self._unshared)
            self.table.open(session)
        elif session.evicted:
            self.table.wake(session)
        return session

    def _can_guess(self, request: Request) -> bool:
        """A trained head needs the features of all tokens before the last: in its first step a request has no tree."""
        return not self.feature_width or len(request.tokens) - 1 == request.num_computed > 0

    def _affordable(self, sessions: Sequence[DraftSession], levels: int) -> list[DraftSession]:
        """The sessions, in order, whose missing tokens and whose new nodes fit into the slots and the context."""
        growing = [session for session in sessions if session.max_depth > 0]
        if sum(self._need(session, levels) for session in growing) > self.table.pool.num_available:
            for session in self.table:
                self.table.drop_tree(session)
        served, taken = [], 0
        for session in growing:
            need = self._need(session, levels)
            if taken + need <= self.table.pool.num_available:
                taken += need
                served.append(session)
            else:
                self.table.evict(session)
        return served

    def _need(self, session: DraftSession, levels: int) -> int:
        return session.num_missing + levels * self.width

    def _catch_up(self, session: DraftSession, request: Request) -> None:
        """Compute KV of committed tokens up to the last chunk, which the first level takes for its logits."""
        if (log := session.features) is not None:
            slots = request.slots[log.reach : request.num_computed]
            log.put(log.reach, np.where(slots == GONE, np.nan, slots + 1.0).astype(np.float32)[:, None])
        while session.num_missing > CHUNK:
            self._grower.grow([LevelPart.of_pending(session, CHUNK)])

    def _grow(self, sessions: Sequence[DraftSession], limits: DraftLimits) -> None:
        """Levels, until the next one promises less than its time is worth. Roots are always expanded."""
        expected, gained = 0.0, inf
        for _ in range(limits.levels):
            best = BestNodes.of(sessions, limits)
            level = [part for part in map(self._part, sessions, best.floors) if part.rows]
            pending = any(part.pending for part in level)
            if not pending:
                gained, expected = best.expected - expected, best.expected
            price = limits.price * self._level_seconds.at(len(sessions))
            promised = sum(exp(part.session.tree.score(leaf)) for part in level for leaf in part.leaves)
            # a level rarely brings more than the one before it
            if not level or (not pending and min(gained, promised) < price):
                return
            began = self._clock()
            self._grower.grow(level)
            self.levels += 1
            if not pending:
                self._level_seconds.observe(len(sessions), self._clock() - began)

    def _part(self, session: DraftSession, floor: float) -> LevelPart:
        if session.num_missing:
            return LevelPart.of_pending(session, session.num_missing)
        tree = session.tree
        return LevelPart(session, 0, [leaf for leaf in tree.leaves(self.width) if tree.score(leaf) > floor])


def _key(request: Request) -> SessionKey:
    return SessionKey(b"", request.id)


@dataclass(frozen=True)
class BestNodes:
    """The nodes that would be proposed and verified if growth ended here."""

    expected: float  # tokens that they bring, by their scores
    floors: list[float]  # [sessions]: a node that is no better has no child among them

    @classmethod
    def of(cls, sessions: Sequence[DraftSession], limits: DraftLimits) -> "BestNodes":
        trees = [session.tree for session in sessions]
        scores = [[tree.score(node) for node in tree.likeliest(limits.nodes)] for tree in trees]
        best = sorted(chain.from_iterable(scores), reverse=True)[: limits.total]
        floor = _nth_largest(best, limits.total)
        return cls(sum(map(exp, best)), [max(floor, _nth_largest(own, limits.nodes)) for own in scores])


def _nth_largest(falling: Sequence[float], n: int) -> float:
    """-infinity where there are fewer."""
    return falling[n - 1] if len(falling) >= n else -inf
