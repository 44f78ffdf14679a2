"""Several drafters, one tree: free guesses beside a model's."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.drafter import Drafter
from pilotfish.core.request import Request
from pilotfish.core.tree import TokenTree


class CombinedDrafter:
    """Merges the drafters' trees and keeps the best `max_nodes`. Where paths meet the first drafter's score holds."""

    def __init__(self, drafters: Sequence[Drafter], max_nodes: int) -> None:
        self.drafters = drafters
        self.max_nodes = max_nodes

    def propose(self, requests: Sequence[Request]) -> list[TokenTree]:
        first, *others = [drafter.propose(requests) for drafter in self.drafters]
        for trees in others:
            for tree, other in zip(first, trees, strict=True):
                tree.merge(other)
        return [tree.best(self.max_nodes) for tree in first]

    def commit(self, request: Request, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.commit(request, tokens)

    def close(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.close(request)
