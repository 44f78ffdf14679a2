"""Trees that grow while the target verifies: wide, long-lived, re-rooted on every commit.

        tokens committed: def            then: def add            "add" was in the tree: a hit

    root ─┬─ add ─┬─ (     ─── a              root ─┬─ (  ─── a
          │       └─ _     ─── b      ──►           └─ _  ─── b
          └─ sub ─── (                                              sub and below are gone

Both sides hold one of each sequence: the draft the one it grows (`Lookahead`), the target a copy of what was pushed
(core/tree_copy.py). A sequence has thousands of nodes, so they are in arrays, in order of arrival: parents come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.tree import OTHER, TokenTree

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Of a node that was not expanded: it has no KV.
NO_SLOT = -1


@dataclass(frozen=True)
class Nodes:
    """Nodes without the root, which parents know as -1. Scores never rise along a path."""

    ids: Ints  # rising
    parents: Ints  # index of a node before, or -1
    tokens: Ints
    depths: Ints  # from 1
    scores: Floats  # log of the chance that the path from the root is the target's
    slots: Ints  # of the draft's KV, or NO_SLOT

    @classmethod
    def none(cls) -> Nodes:
        ids, parents, tokens, depths, slots = (np.zeros(0, np.int64) for _ in range(5))
        return cls(ids, parents, tokens, depths, np.zeros(0), slots)

    def __len__(self) -> int:
        return len(self.ids)

    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (self.ids, self.parents, self.tokens, self.depths, self.scores, self.slots)

    def with_more(self, more: Nodes) -> Nodes:
        """These, then those."""
        return Nodes(*map(np.concatenate, zip(self.arrays(), more.arrays(), strict=True)))  # type: ignore[arg-type]

    def child(self, parent: int, token: int) -> int | None:
        """Index of the child of `parent` that carries `token`."""
        found = np.flatnonzero((self.parents == parent) & (self.tokens == token))
        return int(found[0]) if len(found) else None

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Indices along `tokens` from the root, as far as the tree goes."""
        path: list[int] = []
        for token in tokens:
            child = self.child(path[-1] if path else -1, token)
            if child is None:
                break
            path.append(child)
        return path

    def below(self, root: int) -> NDArray[np.bool_]:
        """Which nodes have `root` among their ancestors. Doubles the distance looked back each time."""
        if not len(self):
            return np.zeros(0, np.bool_)
        jumps = np.append(self.parents, -1)  # what is above the root is the root itself, at index -1
        found = jumps == root
        while (jumps >= 0).any():
            found |= found[jumps]
            jumps = jumps[jumps]
        return np.asarray(found[:-1])

    def rerooted(self, root: int) -> Nodes:
        """What hangs below `root`, as seen from there."""
        kept = np.flatnonzero(self.below(root))
        number = np.full(len(self) + 1, -1)
        number[kept] = np.arange(len(kept))
        parents = number[self.parents[kept]]
        depths, scores = self.depths[kept] - self.depths[root], self.scores[kept] - self.scores[root]
        return Nodes(self.ids[kept], parents, self.tokens[kept], depths, np.minimum(scores, 0.0), self.slots[kept])

    def best(self, count: int) -> Ints:
        """Indices of the `count` nodes of highest score, ties to the older, ascending: a connected subtree."""
        if len(self) <= count or count == 0:
            return np.arange(min(len(self), count))
        least = np.partition(self.scores, len(self) - count)[len(self) - count]
        chosen = self.scores > least
        ties = np.flatnonzero(self.scores == least)
        chosen[ties[: count - np.count_nonzero(chosen)]] = True
        return np.flatnonzero(chosen)

    def tree(self, count: int, origin: str = OTHER) -> TokenTree:
        """The `count` best nodes, all of one origin."""
        tree, number = TokenTree(), {-1: 0}
        chosen = self.best(count)
        fields = (chosen, self.parents[chosen], self.tokens[chosen], self.scores[chosen])
        for index, parent, token, score in zip(*(field.tolist() for field in fields), strict=True):
            number[index] = tree.add(number[parent], token, score, origin)
        return tree


@dataclass(frozen=True)
class RerootResult:
    """What a commit did to a tree."""

    hit: bool  # every committed token was in it
    accepted: int  # nodes that the committed tokens are
    path_slots: list[int]  # KV of the committed tokens that were expanded, from the first on without a gap
    freed: list[int]  # slots of what is gone


class Lookahead:
    """The draft's tree of one sequence. Its root is expanded before anything else; a node once."""

    #: Log-chance below which a node is not kept: one path in ten thousand.
    FLOOR = -9.2

    def __init__(self) -> None:
        self.nodes = Nodes.none()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self.nodes)

    def leaves(self, count: int, max_depth: int) -> Ints:
        """The `count` likeliest nodes to expand next, likeliest first: none twice, none as deep as `max_depth`."""
        nodes = self.nodes
        open_nodes = np.flatnonzero((nodes.slots == NO_SLOT) & (nodes.depths < max_depth))
        if len(open_nodes) > count:
            best = np.argpartition(-nodes.scores[open_nodes], count - 1)[:count]
            open_nodes = np.sort(open_nodes[best])
        return open_nodes[np.argsort(-nodes.scores[open_nodes], kind="stable")]

    def expand(self, leaves: Ints, slots: NDArray[np.integer]) -> None:
        """The nodes at these indices have KV in these slots now. [n] each"""
        self.nodes.slots[leaves] = slots

    def paths(self, leaves: Ints) -> NDArray[np.int32]:
        """Slots from below the root down to each leaf, all of them expanded. [leaves, deepest]"""
        nodes, depths = self.nodes, self.nodes.depths[leaves]
        paths = np.zeros((len(leaves), int(depths.max(initial=0))), np.int32)
        rows, current = np.arange(len(leaves)), leaves
        while len(rows):
            paths[rows, nodes.depths[current] - 1] = nodes.slots[current]
            current = nodes.parents[current]
            rows, current = rows[current >= 0], current[current >= 0]
        return paths

    def path_tokens(self, leaf: int) -> list[int]:
        """Tokens from below the root down to the node at index `leaf`; none for the root, -1."""
        path: list[int] = []
        while leaf >= 0:
            path.append(int(self.nodes.tokens[leaf]))
            leaf = int(self.nodes.parents[leaf])
        return path[::-1]

    def add(self, parents: Ints, tokens: Ints, log_chances: Floats) -> Nodes:
        """Children [n] of the nodes at `parents` (-1: the root), each with its chance given the parent; those kept."""
        above = np.append(self.nodes.scores, 0.0)[parents]
        scores = above + np.minimum(log_chances, 0.0)
        kept = scores > self.FLOOR
        depths = np.append(self.nodes.depths, 0)[parents][kept] + 1
        ids = self._next_id + np.arange(len(depths))
        added = Nodes(ids, parents[kept], tokens[kept], depths, scores[kept], np.full(len(depths), NO_SLOT))
        self._next_id += len(depths)
        self.nodes = self.nodes.with_more(added)
        return added

    def commit(self, tokens: Sequence[int]) -> RerootResult:
        """Re-root at the last of `tokens`, or at nothing known."""
        path = self.nodes.follow(tokens)
        path_slots = [int(slot) for slot in self.nodes.slots[path]]
        if NO_SLOT in path_slots:
            path_slots = path_slots[: path_slots.index(NO_SLOT)]
        hit = len(path) == len(tokens)
        gone = self.nodes.slots != NO_SLOT
        gone[path[: len(path_slots)]] = False
        if hit:
            gone &= ~self.nodes.below(path[-1])
        freed = self.nodes.slots[gone].tolist()
        self.nodes = self.nodes.rerooted(path[-1]) if hit else Nodes.none()
        return RerootResult(hit, len(path), path_slots, freed)

    def drop(self) -> list[int]:
        """Forget every node; the slots that are free now."""
        slots = self.nodes.slots[self.nodes.slots != NO_SLOT]
        self.nodes = Nodes.none()
        return [int(slot) for slot in slots]
