"""Several drafters, one tree: free guesses beside a model's."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.drafter import Drafter, DraftLimits
from pilotfish.core.request import Request
from pilotfish.core.tree import TokenTree, TreeBuilder


def drafters_of(drafter: Drafter) -> Sequence[Drafter]:
    """Those of a combination, or the one itself."""
    return drafter.drafters if isinstance(drafter, CombinedDrafter) else [drafter]


class CombinedDrafter:
    """Merges the drafters' trees and keeps the best nodes. Where paths meet the first drafter's score and name hold."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = drafters

    @property
    def levels(self) -> int:
        return max(drafter.levels for drafter in self.drafters)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        proposals = zip(*(drafter.propose(requests, limits) for drafter in self.drafters), strict=True)
        return [_merged(trees, limits.nodes) for trees in proposals]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        hits = [drafter.commit(request, tokens) for drafter in self.drafters]  # each must hear of it
        return any(hits)

    def close(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.close(request)


def _merged(trees: Sequence[TokenTree], most: int) -> TokenTree:
    merged = TreeBuilder()
    for tree in trees:
        merged.merge(tree)
    tree = merged.tree()
    return tree if len(tree) <= most else tree.take(tree.best(most))
