"""Trees that grow while the target verifies: wide, long-lived, re-rooted on every commit.

        tokens committed: def            then: def add            "add" was in the tree: a hit

    root ─┬─ add ─┬─ (     ─── a              root ─┬─ (  ─── a
          │       └─ _     ─── b      ──►           └─ _  ─── b
          └─ sub ─── (                                              sub and below are gone

Both sides hold one of each sequence: the draft the one it grows (`Lookahead`), the target a copy of the nodes that were
pushed (`core/tree_copy.py`). A sequence has thousands of nodes, so they are in arrays here, in order of arrival, with
parents first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.tree import LM, ROOT, Floats, Ints, TokenTree

#: Of a node that was not expanded: it has no KV.
NO_SLOT = -1
#: Up to so many open nodes are sorted whole, and paths walked one by one: array operations over all would take longer.
FEW_LEAVES, FEW_PATHS = 64, 16


@dataclass(frozen=True, eq=False)
class GrownTree(TokenTree):
    """A tree that a draft grows, or a target's copy of it."""

    ids: Ints  # [n], rising
    slots: Ints  # [n], of the draft's KV, or NO_SLOT

    @classmethod
    def empty(cls) -> GrownTree:
        return _EMPTY


_EMPTY = GrownTree(**vars(TokenTree.empty()), ids=np.zeros(0, np.int64), slots=np.zeros(0, np.int64))


@dataclass(frozen=True)
class RerootResult:
    """The effect of a commit on a tree."""

    hit: bool  # every committed token was in it
    accepted: int  # nodes that the committed tokens are
    path_slots: list[int]  # KV of the committed tokens that were expanded, from the first on without a gap
    freed: list[int]  # slots of nodes that are gone


class Lookahead:
    """The draft's tree of one sequence. Its root is expanded before anything else; a node once."""

    #: Log-chance below which a node is not kept: one path in ten thousand.
    FLOOR = -9.2

    def __init__(self) -> None:
        self.nodes = GrownTree.empty()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self.nodes)

    def leaves(self, count: int, max_depth: int) -> Ints:
        """The `count` likeliest nodes to expand next, likeliest first: none twice, none as deep as `max_depth`."""
        nodes = self.nodes
        open_nodes = np.flatnonzero((nodes.slots == NO_SLOT) & (nodes.depths < max_depth))
        costs = -nodes.scores[open_nodes]
        if len(open_nodes) > max(count, FEW_LEAVES):
            chosen = np.sort(np.argpartition(costs, count - 1)[:count])
            open_nodes, costs = open_nodes[chosen], costs[chosen]
        return open_nodes[costs.argsort(kind="stable")[:count]]

    def expand(self, leaves: Ints, slots: NDArray[np.integer]) -> None:
        """The nodes at these indices have KV in these slots now. [n] each"""
        self.nodes.slots[leaves] = slots

    def paths(self, leaves: Ints) -> NDArray[np.int32]:
        """Slots from below the root down to each leaf, all of them expanded. [leaves, deepest], 0 beyond"""
        nodes = self.nodes
        if len(leaves) > FEW_PATHS:
            return nodes.along_paths(nodes.slots.astype(np.int32), leaves)
        paths = np.zeros((len(leaves), int(nodes.depths[leaves].max(initial=0))), np.int32)
        for row, leaf in enumerate(leaves.tolist()):
            path = nodes.path(leaf)
            paths[row, : len(path)] = nodes.slots[path]
        return paths

    def add(self, parents: Ints, tokens: Ints, log_chances: Floats) -> GrownTree:
        """Children [n] of the root and of nodes, each with its chance given the parent; those kept."""
        scores = np.minimum(log_chances, 0.0)
        depths = np.ones(len(parents), np.int64)
        if len(self.nodes):
            below_nodes = parents != ROOT
            scores += np.where(below_nodes, self.nodes.scores[parents], 0.0)
            depths += np.where(below_nodes, self.nodes.depths[parents], 0)
        kept = np.flatnonzero(scores > self.FLOOR)
        count = len(kept)
        ids = np.arange(self._next_id, self._next_id + count)
        names, slots = np.full(count, LM, object), np.full(count, NO_SLOT)
        added = GrownTree(parents[kept], tokens[kept], depths[kept], scores[kept], names, ids, slots)
        self._next_id += count
        self.nodes = self.nodes.extended(added) if len(self.nodes) else added
        return added

    def commit(self, tokens: Sequence[int]) -> RerootResult:
        """Re-root at the last of `tokens`, or at nothing known."""
        nodes = self.nodes
        path = nodes.follow(tokens)
        hit = len(path) == len(tokens)
        expanded = nodes.slots != NO_SLOT
        path_slots: list[int] = nodes.slots[path][expanded[path]].tolist()  # only the last may lack one
        expanded[path] = False
        if hit and len(path_slots) == len(path):
            below = nodes.below(path[-1])
            self.nodes, freed = nodes.rerooted(path[-1], below), nodes.slots[expanded & ~below]
        else:
            self.nodes, freed = GrownTree.empty(), nodes.slots[expanded]
        return RerootResult(hit, len(path), path_slots, freed.tolist())

    def drop(self) -> list[int]:
        """Forget every node; the slots that are free now."""
        slots: list[int] = self.nodes.slots[self.nodes.slots != NO_SLOT].tolist()
        self.nodes = GrownTree.empty()
        return slots
