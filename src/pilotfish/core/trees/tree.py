"""Token trees: a draft proposes them, a target verifies them.

           node   0    1     2     3       A node's path is the tokens from below the root down to the node.
root ─┬─ def ─┬─ main        parents -1 -1 0 0   The root, the last committed token, is no node: parents know it as -1.
      │       └─ test        depths   1  1 2 2
      └─ class               scores   log of the chance that the node's path is accepted
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

ROOT = -1
#: Origins: who guessed a node. Of drafts elsewhere it is the pool's name.
LM, NGRAM, SUFFIX, GRAMMAR, OTHER = "lm", "ngram", "suffix", "grammar", "other"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Names = NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Guessed tokens below the last committed one, as arrays in order of arrival. Parents come before their
    children, siblings differ in their tokens, and scores never rise along a path: so the best n nodes by score form
    a connected subtree. Origins are for figures alone."""

    parents: Ints  # [n], index of a node before, or ROOT
    tokens: Ints  # [n]
    depths: Ints  # [n], from 1
    scores: Floats  # [n], at most 0
    origins: Names  # [n]

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, nodes: Ints) -> Self:
        """The subtree of `nodes`, ascending and closed under parents."""
        number = np.full(len(self) + 1, ROOT)
        number[nodes] = np.arange(len(nodes))
        chosen: dict[str, Any] = {name: values[nodes] for name, values in vars(self).items()}
        return type(self)(**{**chosen, "parents": number[chosen["parents"]]})

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`, both included; none for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        return [int(self.tokens[n]) for n in self.path(node)]

    def along_paths(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """`values` [n] of the nodes on the path to each node, from below the root. [n, deepest], 0 beyond."""
        paths = np.zeros((len(self), int(self.depths.max(initial=0))), np.int32)
        rows = current = np.arange(len(self))
        while len(rows):
            paths[rows, self.depths[current] - 1] = values[current]
            current = self.parents[current]
            rows, current = rows[current >= 0], current[current >= 0]
        return paths


_NO_INTS: Ints = np.zeros(0, np.int64)
EMPTY_TREE = TokenTree(_NO_INTS, _NO_INTS, _NO_INTS, np.zeros(0), np.zeros(0, object))


def best(scores: Floats, count: int) -> Ints:
    """Indices of the `count` highest scores, ties to the lower index, ascending."""
    if len(scores) <= count or count == 0:
        return np.arange(min(len(scores), count))
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    chosen = scores > least
    ties = np.flatnonzero(scores == least)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


class Guesses:
    def __init__(self) -> None:
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.origins: list[str] = []
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Sequence[float], origin: str) -> "Guesses":
        chain, node = cls(), ROOT
        for token, score in zip(tokens, scores, strict=True):
            node = chain.add(node, token, score, origin)
        return chain

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float, origin: str = OTHER) -> int:
        """Add, or find, a child; its index. Its score is cut to its parent's. A known child keeps its score: a
        higher one could lift it over nodes that were chosen before."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            below_root = parent == ROOT
            self.parents.append(parent)
            self.tokens.append(token)
            self.depths.append(1 if below_root else self.depths[parent] + 1)
            self.scores.append(min(score, 0.0 if below_root else self.scores[parent]))
            self.origins.append(origin)
        return node

    def merge(self, other: "Guesses") -> None:
        """Add every node of `other`; a known path keeps its scores and origins."""
        number = {ROOT: ROOT}
        nodes = zip(other.parents, other.tokens, other.scores, other.origins, strict=True)
        for node, (parent, token, score, origin) in enumerate(nodes):
            number[node] = self.add(number[parent], token, score, origin)

    def best(self, count: int) -> "Guesses":
        if len(self) <= count:
            return self
        number, best = {ROOT: ROOT}, Guesses()
        for node in sorted(nlargest(count, range(len(self)), self.scores.__getitem__)):
            parent = number[self.parents[node]]
            number[node] = best.add(parent, self.tokens[node], self.scores[node], self.origins[node])
        return best

    def tree(self) -> TokenTree:
        return _joined([self])


@dataclass(frozen=True, eq=False)
class Forest:
    nodes: TokenTree  # of all trees, one tree after the other; parents are indices here
    owners: Ints  # [n], each node's tree
    starts: Ints  # [trees + 1], index of each tree's first node, and the number of all

    @classmethod
    def of(cls, trees: Sequence[Guesses]) -> "Forest":
        sizes = [len(tree) for tree in trees]
        if not any(sizes):
            return cls(EMPTY_TREE, _NO_INTS, np.zeros(len(trees) + 1, np.int64))
        starts, owners = np.array([0, *accumulate(sizes)]), np.repeat(np.arange(len(trees)), sizes)
        return cls(_joined(trees), owners, starts)

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_trees(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Ints:
        """Nodes of each tree. [trees]"""
        return self.starts[1:] - self.starts[:-1]

    def take(self, nodes: Ints) -> "Forest":
        if len(nodes) == len(self):
            return self
        owners = self.owners[nodes]
        return Forest(self.nodes.take(nodes), owners, _starts(owners, self.num_trees))

    def among(self, has_tree: Sequence[bool]) -> "Forest":
        """The same trees, and empty ones where `has_tree`, in order, is false."""
        if all(has_tree):
            return self
        owners = np.flatnonzero(has_tree)[self.owners]
        return Forest(self.nodes, owners, _starts(owners, len(has_tree)))


def _starts(owners: Ints, num_trees: int) -> Ints:
    return np.searchsorted(owners, np.arange(num_trees + 1))


def _joined(trees: Sequence[Guesses]) -> TokenTree:
    parents, firsts = list[int](), accumulate(map(len, trees), initial=0)
    for tree, first in zip(trees, firsts, strict=False):
        parents += [ROOT if parent == ROOT else parent + first for parent in tree.parents]
    return TokenTree(
        np.array(parents, np.int64),
        np.array([token for tree in trees for token in tree.tokens], np.int64),
        np.array([depth for tree in trees for depth in tree.depths], np.int64),
        np.array([score for tree in trees for score in tree.scores], np.float64),
        np.array([origin for tree in trees for origin in tree.origins], object),
    )


NO_TOKEN = -1  # sampled after a row whose logits are not finite: there is nothing to sample from


class Verdict(Struct, frozen=True):
    path: list[int]  # accepted nodes, from below the root on; indices in the forest
    tokens: list[int]  # theirs, then the bonus token, unless none can be sampled at the path's end
    samples: list[int]  # [tokens], which of the step's samples each token is
    nodes: int  # of the tree
    deepest: int  # of their depths


NO_VERDICT = Verdict([], [], [], 0, 0)


def walk(forest: Forest, sampled: Ints) -> list[Verdict]:
    """`sampled` [trees + nodes] is the target's own token, or NO_TOKEN, after a tree's root, its nodes, the next
    tree's root. A node is accepted if its parent is and the target's token there is the node's: nothing of the draft
    enters, so any trees give what the target alone would have produced."""
    given, parents, tokens = sampled.tolist(), forest.nodes.parents.tolist(), forest.nodes.tokens.tolist()
    depths, verdicts = forest.nodes.depths.tolist(), []
    for tree, (first, end) in enumerate(pairwise(forest.starts.tolist())):
        path, last, samples = list[int](), ROOT, [first + tree]
        for node in range(first, end):  # parents come first: one pass finds the path
            if parents[node] == last and tokens[node] == given[samples[-1]]:
                path.append(node)
                samples.append(node + tree + 1)
                last = node
        if given[samples[-1]] == NO_TOKEN:
            samples.pop()
        accepted = [given[sample] for sample in samples]
        verdicts.append(Verdict(path, accepted, samples, end - first, max(depths[first:end], default=0)))
    return verdicts
