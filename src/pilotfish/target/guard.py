"""A draft can only help: whatever a drafter does wrong costs speed, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.drafter import Drafter, DraftLimits, NoDrafter
from pilotfish.core.request import Request
from pilotfish.core.tree import ROOT, Forest, TokenTree

T = TypeVar("T")
logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Passes on what a drafter proposes for the requests that want speculation, without trees that cannot be verified:
    with tokens outside the target's vocabulary, or scores that are no log-probabilities. A drafter that raises, or
    answers for another number of requests, is not asked again."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size

    @property
    def levels(self) -> int:
        return self._try(lambda: self.drafter.levels, 0)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> Forest:
        """A tree for each request, empty for those that want none."""
        asked = [request for request in requests if request.max_nodes != 0] if limits.nodes else []
        trees = iter(self._propose(asked, limits) if asked else [])
        wants = (limits.nodes and request.max_nodes != 0 for request in requests)
        proposed = [next(trees) if wanted else TokenTree.empty() for wanted in wants]
        try:
            return self._verifiable(proposed)
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")
            return Forest.of([TokenTree.empty()] * len(requests))

    def _propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        empty = NoDrafter().propose(requests, limits)
        trees = self._try(lambda: self.drafter.propose(requests, limits), empty)
        if len(trees) != len(requests):
            self._drop(f"{len(trees)} trees for {len(requests)} requests")
            return empty
        return trees

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        return bool(self._try(lambda: self.drafter.commit(request, tokens), False))

    def close(self, request: Request) -> None:
        self._try(lambda: self.drafter.close(request), None)

    def _verifiable(self, trees: Sequence[TokenTree]) -> Forest:
        """The trees, an empty one in place of each that breaks a rule."""
        forest = Forest.of(trees)
        if not len(forest):
            return forest
        lawful = _lawful(forest, self._vocab_size)
        if lawful.all():
            return forest
        broken = set(forest.owners[~lawful].tolist())
        return Forest.of([TokenTree.empty() if index in broken else tree for index, tree in enumerate(trees)])

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")
            return otherwise

    def _drop(self, reason: str) -> None:
        logger.error("the drafter failed and is not asked again: %s", reason, exc_info=True)
        self.drafter = NoDrafter()


def _lawful(forest: Forest, vocab_size: int) -> NDArray[np.bool_]:
    """Which nodes come after their parents, are one deeper and no likelier, and carry a token of the vocabulary. A
    score that is NaN is not."""
    nodes, places = forest.nodes, np.arange(len(forest))
    below_root = nodes.parents == ROOT
    parents = np.where((nodes.parents >= forest.starts[forest.owners]) & (nodes.parents < places), nodes.parents, 0)
    depths = np.where(below_root, 1, nodes.depths[parents] + 1)
    scores = np.where(below_root, 0.0, nodes.scores[parents])
    known = (nodes.tokens >= 0) & (nodes.tokens < vocab_size)
    lawful: NDArray[np.bool_] = (
        known & (below_root | (parents == nodes.parents)) & (nodes.depths == depths) & (nodes.scores <= scores)
    )
    return lawful
