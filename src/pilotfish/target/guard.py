"""A draft can only help: whatever a drafter does wrong costs speed, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from pilotfish.core.drafter import Drafter, DraftLimits, NoDrafter
from pilotfish.core.request import Request
from pilotfish.core.tree import TokenTree

T = TypeVar("T")
logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Passes on what a drafter proposes for the requests that want speculation, without trees that cannot be verified:
    with tokens outside the target's vocabulary, or scores that are no log-probabilities. A drafter that raises, or
    answers for another number of requests, is not asked again."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self._vocab = range(vocab_size)

    @property
    def levels(self) -> int:
        return self._try(lambda: self.drafter.levels, 0)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        asked = [request for request in requests if request.max_nodes != 0] if limits.nodes else []
        trees = iter(self._propose(asked, limits) if asked else [])
        return [next(trees) if limits.nodes and request.max_nodes != 0 else TokenTree() for request in requests]

    def _propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        empty = NoDrafter().propose(requests, limits)
        trees = self._try(lambda: self.drafter.propose(requests, limits), empty)
        if len(trees) != len(requests):
            self._drop(f"{len(trees)} trees for {len(requests)} requests")
            return empty
        return [tree if self._verifiable(tree) else TokenTree() for tree in trees]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        return bool(self._try(lambda: self.drafter.commit(request, tokens), False))

    def close(self, request: Request) -> None:
        self._try(lambda: self.drafter.close(request), None)

    def _verifiable(self, tree: TokenTree) -> bool:
        known = all(token in self._vocab for token in tree.tokens[1:])
        return known and all(score <= 0.0 for score in tree.scores)  # which NaN is not

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")
            return otherwise

    def _drop(self, reason: str) -> None:
        logger.error("the drafter failed and is not asked again: %s", reason, exc_info=True)
        self.drafter = NoDrafter()
