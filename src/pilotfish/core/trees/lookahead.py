"""Trees that grow while the target verifies: wide, long-lived, re-rooted on every commit.

        tokens committed: def            then: def add            "add" was in the tree: a hit

    root ─┬─ add ─┬─ (     ─── a              root ─┬─ (  ─── a
          │       └─ _     ─── b      ──►           └─ _  ─── b
          └─ sub ─── (                                              sub and below are gone

The target holds a copy of the nodes that were pushed (`core/trees/tree_copy.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.trees.child_calibration import ChildOutcome
from pilotfish.core.trees.tree import ROOT, Guesses

SPARE = 64  # nodes are cleaned up when there are twice as many as were left the last time, and so many more


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
        """Nodes from `first` on, some with new scores of their own; each comes after its parent."""
        for node in range(first, len(self._tokens)):
            if self._parents[node] != ROOT:
                self._scores[node] = self._scores[self._parents[node]] + self._own[node]

    def _below_root(self) -> list[int]:
        found = [self.root]
        for node in found:
            found.extend(self._children.get(node, {}).values())
        return found[1:]

    def _renumber(self, kept: Sequence[int]) -> dict[int, int]:
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


NO_SLOT = -1  # of a node that was not expanded: it has no KV


@dataclass(frozen=True)
class RerootResult:
    hit: bool  # every committed token was in it
    accepted: int  # nodes that the committed tokens are
    path_slots: list[int]  # KV of the committed tokens that were expanded, from the first on without a gap
    freed: list[int]  # slots of nodes that are gone


@dataclass(frozen=True)
class NewNodes:
    ids: list[int] = field(default_factory=list)  # [n], rising
    parents: list[int] = field(default_factory=list)  # [n], ids; 0: the root
    tokens: list[int] = field(default_factory=list)  # [n]
    chances: list[float] = field(default_factory=list)  # [n], log of each one's, given its parent

    def __len__(self) -> int:
        return len(self.ids)


class Lookahead(LivingTree):
    """The draft's tree of one sequence. The root is expanded first, a node once; but after a commit a trained head
    expands the root again, from the target's own features, then its nodes in their slots, and keeps the nodes below."""

    #: Log-chance below which a node is not kept: one path in ten thousand.
    FLOOR = -9.2

    def __init__(self) -> None:
        super().__init__()
        self._ids, self._next_id = [0], 1  # of each node; the root's is always 0
        self._slots = [NO_SLOT]  # of each node
        self._paths: dict[int, list[int]] = {}  # of a node with KV: slots from below the root that it was given it at
        self.open: list[tuple[float, int]] = []  # (-score down to it, node) of those to expand next, likeliest first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def expanded(self) -> list[int]:
        return list(self._paths)

    @property
    def slots(self) -> list[int]:
        return [self._slots[node] for node in self._paths]

    @property
    def root_score(self) -> float:
        """Part of the scores in `open` from above the root."""
        return self._scores[self.root]

    def leaves(self, count: int) -> list[int]:
        return [node for _, node in self.open[:count]]

    def lacking(self, leaves: Sequence[int]) -> int:
        """How many of these nodes have no KV yet; the others are expanded again."""
        return sum(self._slots[leaf] == NO_SLOT for leaf in leaves)

    def expand(self, leaves: Sequence[int], slots: Sequence[int]) -> None:
        """These nodes have KV now; those that had none have it in these slots, in order."""
        new = [leaf for leaf in leaves if self._slots[leaf] == NO_SLOT]
        for leaf, slot in zip(new, slots, strict=True):
            self._slots[leaf] = slot
            self._paths[leaf] = [*self.path(self._parents[leaf]), slot]
            self._children[leaf] = {}
        if self.leaves(len(leaves)) == list(leaves):
            del self.open[: len(leaves)]
        else:
            expanded = set(leaves)
            self.open = [entry for entry in self.open if entry[1] not in expanded]

    def path(self, node: int) -> list[int]:
        return [] if node == self.root else self._paths[node][-self.depth(node) :]

    def add(
        self, parents: Sequence[int], counts: Sequence[int], tokens: list[int], chances: list[float], max_depth: int
    ) -> NewNodes:
        """`counts` children of each parent. Those at `max_depth` are never expanded. A known child gets its new
        log-chance and id, keeps what is below it, and is expanded again."""
        first, last, nodes, names = len(self._tokens), 0, list[int](), list[int]()
        for parent, count in zip(parents, counts, strict=True):
            own = slice(last, last := last + count)
            hang = self._hang_again if self._children.get(parent) else self._hang
            nodes += hang(parent, tokens[own], chances[own])
            names += [0 if parent == self.root else self._ids[parent]] * count
        new = len(self._tokens) - first
        if new < last:
            again = {node for node in nodes if node < first}
            self._rescore(min(again))
            self.open = [(-self._scores[node], node) for _, node in self.open if node not in again]
        ids = list(range(self._next_id, self._next_id + last))
        self._next_id, self._size = self._next_id + last, self._size + new
        self._ids += [0] * new
        for node, number in zip(nodes, ids, strict=True):
            self._ids[node] = number
        self._offer(nodes, self._depths[self.root] + max_depth)
        return NewNodes(ids, names, tokens, chances)

    def _offer(self, nodes: Sequence[int], deepest: int) -> None:
        scores, depths = self._scores, self._depths
        self.open += [(-scores[node], node) for node in nodes if depths[node] < deepest]
        self.open.sort()  # two runs: merged in about as many steps as there are nodes

    def _hang(self, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> Sequence[int]:
        place, count, score = len(self._tokens), len(tokens), self._scores[parent]
        added = range(place, place + count)
        self._parents += [parent] * count
        self._tokens += tokens
        self._depths += [self._depths[parent] + 1] * count
        self._own += chances
        self._scores += [score + chance for chance in chances]
        self._slots += [NO_SLOT] * count
        self._children.setdefault(parent, {}).update(zip(tokens, added, strict=True))
        return added

    def _hang_again(self, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> Sequence[int]:
        below, given = self._children[parent], dict(zip(tokens, chances, strict=True))
        for token in below.keys() & given.keys():
            self._own[below[token]] = given[token]
        new = [token for token in tokens if token not in below]
        self._hang(parent, new, [given[token] for token in new])
        return [below[token] for token in tokens]

    def outcomes(self, tokens: Sequence[int]) -> list[ChildOutcome]:
        found, path = list[ChildOutcome](), [self.root, *self.follow(tokens)]
        for depth, (node, token) in enumerate(zip(path, tokens, strict=False), 1):
            if below := self._children.get(node):
                chances = [self._scores[child] - self._scores[node] for child in below.values()]
                found.append(ChildOutcome(depth, chances, list(below).index(token) if token in below else -1))
        return found

    def commit(self, tokens: Sequence[int]) -> RerootResult:
        path = self.follow(tokens)
        hit = len(path) == len(tokens)
        path_slots = [self._slots[node] for node in path if node in self._paths]  # only the last may lack one
        if hit and len(path_slots) == len(path):
            freed = self._cut(path)
            if len(self._tokens) > 2 * self._left + SPARE:
                self._clean_up()
        else:
            freed = [slot for slot in self.drop() if slot not in path_slots]
        return RerootResult(hit, len(path), path_slots, freed)

    def _cut(self, path: Sequence[int]) -> list[int]:
        """Move the root to the end of `path`; slots of the dead nodes, but not of the path."""
        freed, dead, kept = list[int](), [self.root, *path[:-1]], set(path)
        for node in dead:
            self._paths.pop(node, None)
            below = self._children.pop(node)
            self._size -= len(below)
            expanded = [child for child in below.values() if child in self._paths and child not in kept]
            freed += [self._slots[child] for child in expanded]
            dead += expanded
        self.root = path[-1]
        del self._paths[self.root]
        self.open = [entry for entry in self.open if self._parents[entry[1]] in self._children]
        return freed

    def _clean_up(self) -> None:
        kept = sorted((self.root, *self._below_root()))
        place = self._renumber(kept)
        self._ids, self._slots = ([x[node] for node in kept] for x in (self._ids, self._slots))
        self._paths = {place[node]: path for node, path in self._paths.items()}
        self.open = [(cost, place[node]) for cost, node in self.open]

    def drop(self) -> list[int]:
        slots, next_id = self.slots, self._next_id
        Lookahead.__init__(self)
        self._next_id = next_id
        return slots


def path_table(paths: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """[paths, longest], 0 beyond."""
    longest = max(map(len, paths), default=0)
    return np.array([[*path, *[0] * (longest - len(path))] for path in paths], np.int32).reshape(len(paths), longest)
