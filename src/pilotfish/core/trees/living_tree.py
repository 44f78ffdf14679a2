"""Trees that grow at their leaves while commits move their root: the draft's own, and a target's copy of it.

Both are used between two forwards, a few nodes at a time. So nodes are numbers, in order of arrival, and what is known
of them is in plain lists; children are found by their token; a commit moves the root, and dead nodes are forgotten
now and then. An array operation over all nodes would cost more than what is done here with each new one.

    committed: the cat sat     the ─── cat ─┬─ sat ─┬─ on      below the root, "sat": `on`, `in`
                                            └─ ran  └─ in      dead: `the`, `cat`, `ran`
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from pilotfish.core.trees.tree import ROOT, Guesses

#: Nodes are cleaned up when there are twice as many as were left the last time, and so many more.
SPARE = 64


class LivingTree:
    """A tree of guesses below the last committed token, its root, which is a node too."""

    def __init__(self) -> None:
        # of each node: its parent, its token, its depth below the first root, its own score, the sum down to it
        self._parents, self._tokens, self._depths, self._own, self._scores = [ROOT], [0], [0], [0.0], [0.0]
        self._children: dict[int, dict[int, int]] = {}  # of a node: by token
        self._left = 1  # nodes after the last clean-up
        self.root = 0

    def depth(self, node: int) -> int:
        return self._depths[node] - self._depths[self.root]

    def score(self, node: int) -> float:
        """Log of the chance of the path from the root."""
        return min(self._scores[node] - self._scores[self.root], 0.0)

    def token(self, node: int) -> int:
        return self._tokens[node]

    def path_tokens(self, node: int) -> list[int]:
        path = []
        while node != self.root:
            path.append(self._tokens[node])
            node = self._parents[node]
        return path[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along `tokens` from the root, as far as the tree goes."""
        path, node = [], self.root
        for token in tokens:
            child = self._children.get(node, {}).get(token)
            if child is None:
                break
            path.append(node := child)
        return path

    def likeliest(self, count: int) -> list[int]:
        """The `count` nodes of highest score, likeliest first, ties to the older: each comes after its parent."""
        scores, children = self._scores, self._children
        found: list[int] = []
        reached = [(-scores[node], node) for node in children.get(self.root, {}).values()]
        heapify(reached)
        while reached and len(found) < count:
            _, node = heappop(reached)
            found.append(node)
            for child in children.get(node, {}).values():
                heappush(reached, (-scores[child], child))
        return found

    def best(self, count: int, origin: str) -> Guesses:
        number, best, score = {self.root: ROOT}, Guesses(), self._scores[self.root]
        for node in self.likeliest(count):
            parent = number[self._parents[node]]
            number[node] = best.add(parent, self._tokens[node], self._scores[node] - score, origin)
        return best

    def _rescore(self, first: int) -> None:
        """Nodes from `first` on, some of which have another score of their own; each comes after its parent."""
        for node in range(first, len(self._tokens)):
            if self._parents[node] != ROOT:
                self._scores[node] = self._scores[self._parents[node]] + self._own[node]

    def _below_root(self) -> list[int]:
        found = [self.root]
        for node in found:
            found.extend(self._children.get(node, {}).values())
        return found[1:]

    def _renumber(self, kept: Sequence[int]) -> dict[int, int]:
        """Forget all nodes but `kept`, ascending; the new number of each."""
        place = {node: index for index, node in enumerate(kept)}
        self._parents = [place.get(self._parents[node], ROOT) for node in kept]
        self._tokens, self._depths = ([x[node] for node in kept] for x in (self._tokens, self._depths))
        self._own, self._scores = ([x[node] for node in kept] for x in (self._own, self._scores))
        self._children = {
            place[node]: {token: place[child] for token, child in below.items() if child in place}
            for node, below in self._children.items()
            if node in place
        }
        self.root, self._left = place[self.root], len(kept)
        return place
